"""Measurement of the tensors that autograd saves for backward: each storage once, to the byte.

`measure_saved` measures one forward pass; `activation_ledger` and `LiveLedger` follow memory over
time and see when backward frees a tensor. All work under `fake_tensors`, so models that do not fit
into memory can be measured too. Notebook 01_memory.
"""

import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from course_lib.core.records import Ledger
from course_lib.core.specs import ModelSpec
from course_lib.models.gpt import GPT
from course_lib.models.storages import storage_bytes, storage_key


@dataclass(frozen=True, kw_only=True)
class Saved:
    """Saved storage: shape and dtype of the first tensor that was saved of it, and its bytes."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    num_bytes: int

    def __str__(self) -> str:
        return f"{list(self.shape)} {str(self.dtype).removeprefix('torch.')}"


def measure_saved(fn: Callable[[], Any], *, given: Iterable[Tensor] = ()) -> list[Saved]:
    """Call `fn` and return what autograd saved for backward, each storage once.

    given   tensors that exist anyway (parameters, buffers, the batch): not counted

    `sum(one.num_bytes for one in measure_saved(...))` is what `memory.activations` predicts.
    """
    excluded = {storage_key(tensor) for tensor in given}
    kept: dict[int, Saved] = {}
    alive = []  # the key of a freed storage could be reused by the next one

    def pack(tensor: Tensor) -> Tensor:
        key = storage_key(tensor)
        if key not in excluded and key not in kept:
            kept[key] = _saved(tensor)
            alive.append(tensor)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        alive.append(fn())
    return list(kept.values())


def tensors_of(*modules: nn.Module) -> list[Tensor]:
    """Return the parameters and buffers of modules: the tensors that exist before a step."""
    return [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]


@contextmanager
def fake_tensors(dtype: torch.dtype = torch.float32) -> Iterator[FakeTensorMode]:
    """Create only fake tensors in this context: shapes and dtypes without data.

    dtype   default dtype inside
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with FakeTensorMode() as mode:
            yield mode
    finally:
        torch.set_default_dtype(before)


def measure_layer(
    spec: ModelSpec,
    batch: int,
    seq: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    flash: bool = True,
    dropout: bool = False,
) -> int:
    """Return the bytes that autograd saves for one layer of a GPT, on fake tensors.

    It is what a model of two layers saves more than one of one layer.
    """
    saved = []
    for num_layers in (1, 2):
        with fake_tensors(dtype):
            one = replace(spec, num_layers=num_layers, max_seq=seq)
            model = GPT(one, flash=flash, dropout=0.1 if dropout else 0.0)
            tokens = torch.zeros(batch, seq, dtype=torch.long)
            given = [*tensors_of(model), tokens]
            kept = measure_saved(partial(model, tokens), given=given)
        saved.append(sum(storage.num_bytes for storage in kept))
    return saved[1] - saved[0]


class LiveLedger:
    """Memory of a model's steps over time: with LiveLedger(model, optimizer) as live: train().

    `live.ledger` gets an entry when the model's forward starts, when a block's forward ends or its
    backward starts, when backward frees its first tensor, and around the optimizer's step. Its
    `activations` are the bytes that autograd holds, each storage once; the tensors in `given` (the
    batch) are not counted.
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
        self._saved = SavedStorages((*tensors_of(model), *given), self._grew, self._shrinks)
        self._stack = ExitStack()
        self._growing = False

    def note(self, *_: Any) -> None:
        """Add an entry with the bytes that are held now."""
        params = list(self.model.parameters())
        state = self.optimizer.state.values()
        self.ledger.add(
            time.perf_counter() - self._start_s,
            params=storage_bytes(params),
            grads=storage_bytes(param.grad for param in params),
            optim_state=storage_bytes(value for values in state for value in values.values()),
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
        if self._growing:  # the peak since the forward, or a recomputed block, started
            self._growing = False
            self.note()


def activation_ledger(fn: Callable[[], Any], *, given: Iterable[Tensor] = ()) -> Ledger:
    """Call `fn` (forward and backward, say); return the bytes of saved activations over time.

    given   tensors that exist anyway, such as parameters and the batch: not counted

    `ledger.peak_bytes()` is the peak of the activations; `memory(ledger, title)` draws them.
    """
    ledger, start_s = Ledger(), time.perf_counter()

    def note() -> None:
        ledger.add(time.perf_counter() - start_s, activations=saved.num_bytes)

    saved = SavedStorages(given, grew=note, shrank=note)
    note()
    with saved.hooks():
        fn()
    note()
    return ledger


class SavedStorages:
    """Storages that autograd holds, with reference counts; `num_bytes` counts each storage once.

    given          tensors that exist anyway, such as parameters: not counted
    grew, shrank   called after a storage was added, after one was removed
    shrinks        called before a saved tensor is freed
    without        tensors of this dtype are not counted
    """

    def __init__(
        self,
        given: Iterable[Tensor],
        grew: Callable[[], None],
        shrinks: Callable[[], None] = lambda: None,
        shrank: Callable[[], None] = lambda: None,
        *,
        without: torch.dtype | None = None,
    ) -> None:
        self.num_bytes, self._without = 0, without
        self._given = {storage_key(tensor) for tensor in given}
        self._times_saved: dict[int, int] = {}
        self._grew, self._shrinks, self._shrank = grew, shrinks, shrank

    def hooks(self) -> saved_tensors_hooks:
        """Return the context in which the tensors that autograd saves are counted here."""
        return saved_tensors_hooks(self._pack, lambda holder: holder.tensor)

    def _pack(self, tensor: Tensor) -> "_Holder":
        holder, key, num_bytes = _Holder(tensor), storage_key(tensor), storage_bytes([tensor])
        if key not in self._given and tensor.dtype != self._without:
            self._times_saved[key] = self._times_saved.get(key, 0) + 1
            if self._times_saved[key] == 1:
                self.num_bytes += num_bytes
                self._grew()
            weakref.finalize(holder, self._release, key, num_bytes)
        return holder

    def _release(self, key: int, num_bytes: int) -> None:
        self._shrinks()
        self._times_saved[key] -= 1
        if not self._times_saved[key]:
            del self._times_saved[key]
            self.num_bytes -= num_bytes
            self._shrank()


class _Holder:
    """Object that autograd saves in place of a tensor: its finalizer tells when it is freed."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def _saved(tensor: Tensor) -> Saved:
    return Saved(shape=tuple(tensor.shape), dtype=tensor.dtype, num_bytes=storage_bytes([tensor]))
