"""What autograd holds at every moment of a step: the peak, and when it is.

A tensor counts from the moment it is saved for backward until backward lets go of it, and each
storage once, however many operations saved it. Notebooks 02_accumulation and 03_recompute.
"""

import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from course_lib.core.records import Ledger


def held_over_time(fn: Callable[[], Any], *, given: Iterable[Tensor] = ()) -> Ledger:
    """Call `fn` (forward and backward, say); return the bytes that autograd held, all along.

    given   tensors that are there anyway, such as parameters and the batch: not counted

    `ledger.peak_bytes()` is what activations need; `memory(ledger, title)` draws it.
    """
    book = _Book(given)
    with saved_tensors_hooks(book.pack, lambda held: held.tensor):
        fn()
    book.note()
    return book.ledger


class _Held:
    """What autograd holds in place of a tensor, so that its end can be seen."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class _Book:
    """Who is held, how often, and a moment in the ledger for each change."""

    def __init__(self, given: Iterable[Tensor]) -> None:
        self.ledger, self.start_s = Ledger(), time.perf_counter()
        self.given = {_storage(tensor) for tensor in given}
        self.times_held: dict[int, int] = {}
        self.num_bytes = 0
        self.note()

    def note(self) -> None:
        self.ledger.add(time.perf_counter() - self.start_s, activations=self.num_bytes)

    def pack(self, tensor: Tensor) -> _Held:
        held, key = _Held(tensor), _storage(tensor)
        if key not in self.given:
            self.times_held[key] = self.times_held.get(key, 0) + 1
            size = tensor.untyped_storage().nbytes()
            if self.times_held[key] == 1:
                self.num_bytes += size
                self.note()
            weakref.finalize(held, self.release, key, size)
        return held

    def release(self, key: int, size: int) -> None:
        self.times_held[key] -= 1
        if not self.times_held[key]:
            del self.times_held[key]
            self.num_bytes -= size
            self.note()


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
