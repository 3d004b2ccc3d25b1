"""What autograd keeps for backward, weighed: every tensor, every storage once, byte by byte.

`measure_saved` weighs one forward; `LiveLedger` follows whole steps, and sees a tensor go when
backward lets go of it. Both work under fake tensors, so models that do not fit can be weighed too.
Notebook 01_memory.
"""

import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from course_lib.core.records import Ledger


@dataclass(frozen=True, kw_only=True)
class Saved:
    """One storage that autograd keeps: the first tensor that was saved of it, and its size."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    num_bytes: int

    def __str__(self) -> str:
        return f"{list(self.shape)} {str(self.dtype).removeprefix('torch.')}"


def measure_saved(fn: Callable[[], Any], *, given: Iterable[Tensor] = ()) -> list[Saved]:
    """Call `fn` and return what autograd kept for a backward pass, each storage once.

    given   tensors that would be there anyway (parameters, buffers, the batch): not counted

    `sum(one.num_bytes for one in measure_saved(...))` is what the formulas of `memory` predict.
    """
    there = {_storage(tensor) for tensor in given}
    kept: dict[int, Saved] = {}
    alive = []  # a freed storage's address could be taken by the next one

    def pack(tensor: Tensor) -> Tensor:
        key = _storage(tensor)
        if key not in there and key not in kept:
            kept[key] = _weigh(tensor)
            alive.append(tensor)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        alive.append(fn())
    return list(kept.values())


def tensors_of(*modules: nn.Module) -> list[Tensor]:
    """The parameters and buffers of modules: what is there before a step begins."""
    return [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]


@contextmanager
def fake_tensors(dtype: torch.dtype = torch.float32) -> Iterator[FakeTensorMode]:
    """Tensors made in here have shapes and dtypes and no numbers: a 70B model takes seconds."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with FakeTensorMode() as mode:
            yield mode
    finally:
        torch.set_default_dtype(before)


class LiveLedger:
    """Follow a model's steps: with LiveLedger(model, optimizer) as live: train(); live.ledger.

    A moment is noted when the model begins a forward pass, when a block ends its forward or is
    reached by backward, when backward lets go of its first tensor, and around the optimizer's step.
    `activations` are the bytes autograd holds at that moment, each storage once; the tensors in
    `given` (the batch) are not counted.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        given: Iterable[Tensor] = (),
    ) -> None:
        self.model, self.optimizer = model, optimizer
        self.ledger = Ledger()
        self._saved = _SavedStorages((*tensors_of(model), *given), self._grew, self._shrinks)
        self._stack = ExitStack()
        self._growing = False

    def note(self, *_: Any) -> None:
        """Write down what is held now."""
        params = list(self.model.parameters())
        self.ledger.add(
            time.perf_counter() - self._start_s,
            params=sum(map(_num_bytes, params)),
            grads=sum(_num_bytes(param.grad) for param in params if param.grad is not None),
            optim_state=sum(
                _num_bytes(value)
                for state in self.optimizer.state.values()
                for value in state.values()
                if isinstance(value, Tensor)
            ),
            activations=self._saved.num_bytes,
        )

    def __enter__(self) -> "LiveLedger":
        self._start_s = time.perf_counter()
        self._stack.enter_context(self._saved.hooks())
        blocks = list(self.model.get_submodule("blocks").children())
        for handle in (
            self.model.register_forward_pre_hook(self.note),
            blocks[0].register_forward_pre_hook(self._block_begins),
            *(block.register_forward_hook(self._block_ends) for block in blocks),
            self.optimizer.register_step_pre_hook(self.note),
            self.optimizer.register_step_post_hook(self.note),
        ):
            self._stack.callback(handle.remove)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        self.note()

    def _block_begins(self, _block: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if inputs[0].requires_grad:
            inputs[0].register_hook(lambda _grad: self.note())

    def _block_ends(self, _block: nn.Module, _inputs: Any, output: Tensor) -> None:
        self.note()
        self._block_begins(_block, (output,))

    def _grew(self) -> None:
        self._growing = True

    def _shrinks(self) -> None:
        if self._growing:  # the most there was since forward, or a recomputed block, began
            self._growing = False
            self.note()


def activation_ledger(fn: Callable[[], Any], *, given: Iterable[Tensor] = ()) -> Ledger:
    """Call `fn` (forward and backward, say); return the bytes that autograd held, all along.

    given   tensors that are there anyway, such as parameters and the batch: not counted

    `ledger.peak_bytes()` is what activations need; `memory(ledger, title)` draws it.
    """
    ledger, start_s = Ledger(), time.perf_counter()

    def note() -> None:
        ledger.add(time.perf_counter() - start_s, activations=saved.num_bytes)

    saved = _SavedStorages(given, grew=note, shrank=note)
    note()
    with saved.hooks():
        fn()
    note()
    return ledger


class _SavedStorages:
    """The storages that autograd holds, each once: how often it is saved, and their bytes.

    grew, shrinks, shrank   called after a storage came, before a tensor goes, after a storage went
    """

    def __init__(
        self,
        given: Iterable[Tensor],
        grew: Callable[[], None],
        shrinks: Callable[[], None] = lambda: None,
        shrank: Callable[[], None] = lambda: None,
    ) -> None:
        self.num_bytes = 0
        self._given = {_storage(tensor) for tensor in given}
        self._times_saved: dict[int, int] = {}
        self._grew, self._shrinks, self._shrank = grew, shrinks, shrank

    def hooks(self) -> saved_tensors_hooks:
        """The context in which autograd saves its tensors here."""
        return saved_tensors_hooks(self._pack, lambda held: held.tensor)

    def _pack(self, tensor: Tensor) -> "_Held":
        held, key, num_bytes = _Held(tensor), _storage(tensor), _num_bytes(tensor)
        if key not in self._given:
            self._times_saved[key] = self._times_saved.get(key, 0) + 1
            if self._times_saved[key] == 1:
                self.num_bytes += num_bytes
                self._grew()
            weakref.finalize(held, self._release, key, num_bytes)
        return held

    def _release(self, key: int, num_bytes: int) -> None:
        self._shrinks()
        self._times_saved[key] -= 1
        if not self._times_saved[key]:
            del self._times_saved[key]
            self.num_bytes -= num_bytes
            self._shrank()


class _Held:
    """What autograd holds in place of a tensor, so that its end can be seen."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def _weigh(tensor: Tensor) -> Saved:
    return Saved(shape=tuple(tensor.shape), dtype=tensor.dtype, num_bytes=_num_bytes(tensor))


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _num_bytes(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()
