"""Record what a run computes: activations, gradients and parameters, by name, step and rank.

Hooks on the modules see activations and their gradients; hooks on the optimizer see parameters and
their gradients. It works on any module and any training loop.
"""

import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from course_lib.checkpoint.model_state import model_shards, param_shards, whole_shard
from course_lib.core.errors import CourseError
from course_lib.core.shards import Box, Shard
from course_lib.debugging.kept_values import OfStep, keep_values, kept_path
from course_lib.debugging.sketches import added, bit_hash, sketch
from course_lib.debugging.value_records import Axes, Value, forget_values, values_path, write_head

ROOT = "model"  # the name of the model's own output


class ValueRecording:
    """The record of this rank's values, while the run goes on.

    module      whose submodules are recorded by name
    model       says which shards of the whole model this rank has: the module itself, its wrapper,
                or a `ModelPart`
    first_step  the number of the first step; a run that resumes there has a file of its own
    values_of   steps whose values are kept, too
    restarted   the same run was started again: what it repeats is recorded anew

    Raises: CourseError for a folder that has the record of another run
    """

    def __init__(
        self,
        module: nn.Module,
        folder: str | PathLike[str],
        *,
        model: Any = None,
        axes: Axes | None = None,
        first_step: int = 0,
        values_of: Collection[int] = (),
        restarted: bool = False,
    ) -> None:
        is_alone = not (dist.is_available() and dist.is_initialized())
        rank, world_size = (0, 1) if is_alone else (dist.get_rank(), dist.get_world_size())
        self.model, self.step, self._calls = model or module, first_step, Counter[Any]()
        self._folder, self._rank = Path(folder), rank
        self._values_of, self._kept = values_of, dict[OfStep, list[Tensor]]()
        path = values_path(self._folder, rank, first_step)
        path.parent.mkdir(parents=True, exist_ok=True)
        if restarted:
            forget_values(self._folder, rank, first_step)
        if path.exists():
            raise CourseError(
                f"{path}: need a folder without recorded values; this file is there. "
                "Try another folder, or delete it."
            )
        self._file = path.open("w")
        write_head(self._file, rank, world_size, axes or {})
        self._hooks = [module.register_forward_pre_hook(self._on_input)]
        for name, one in module.named_modules():
            self._hooks.append(one.register_forward_hook(partial(self._on_output, name or ROOT)))
        self._shards("start", model_shards(self.model))

    def watch(self, optimizer: Optimizer) -> None:
        """Record at each step of the optimizer: gradients before it, parameters after it."""
        self._hooks += [
            optimizer.register_step_pre_hook(lambda *_: self.gradients()),
            optimizer.register_step_post_hook(lambda *_: self.step_done()),
        ]

    def gradients(self, found: Mapping[str, Shard] | None = None, *, local: bool = False) -> None:
        """Record the gradients, by default those in `param.grad`.

        local   before they are reduced over ranks, where the loop can tell
        """
        if found is None:
            found = {
                one.names[0]: one.shard_of(one.local.grad)
                for one in param_shards(self.model)
                if one.local.grad is not None
            }
        self._shards("local gradient" if local else "gradient", found)

    def step_done(self) -> None:
        """Record the parameters, and begin the next step."""
        self._shards("parameter", model_shards(self.model))
        self._file.flush()
        if self._kept:
            keep_values(kept_path(self._folder, self._rank, self.step), self._kept)
            self._kept.clear()
        self.step += 1
        self._calls.clear()

    def close(self) -> None:
        """Take the hooks off, and close the file."""
        for hook in self._hooks:
            hook.remove()
        self._file.close()

    def _on_input(self, _module: nn.Module, given: tuple[Any, ...]) -> None:
        for tensor in _tensors(given if torch.is_grad_enabled() else ()):
            self._write("input", ROOT, whole_shard(tensor))

    def _on_output(self, name: str, _module: nn.Module, _given: Any, output: Any) -> None:
        if not torch.is_grad_enabled():  # validation, or a forward that is done again later
            return
        for tensor in _tensors(output):
            self._write("forward", name, whole_shard(tensor))
            if tensor.requires_grad:
                tensor.register_hook(partial(self._on_gradient, name))

    def _on_gradient(self, name: str, grad: Tensor) -> None:
        if not self._file.closed:
            self._write("backward", name, whole_shard(grad))

    def _shards(self, phase: str, shards: Mapping[str, Shard]) -> None:
        written = set[int]()
        for name, shard in shards.items():
            if id(shard) not in written:  # tied names have one shard
                written.add(id(shard))
                self._write(phase, name, shard)

    def _write(self, phase: str, name: str, shard: Shard) -> None:
        if not shard.pieces:
            return
        boxes, parts = zip(*shard.pieces, strict=True)
        call = self._calls[phase, name]
        self._calls[phase, name] += 1
        if self.step in self._values_of:
            self._kept[phase, name, call] = [part.detach().cpu().clone() for part in parts]
        flat = parts[0] if len(parts) == 1 else torch.cat([part.reshape(-1) for part in parts])
        value = Value(
            step=self.step,
            phase=phase,
            name=name,
            call=call,
            shape=shard.shape,
            boxes=() if boxes == (Box.whole(shard.shape),) else boxes,
            bits=bit_hash(flat),
            sketch=added([sketch(part, box, shard.shape) for box, part in shard.pieces]),
            norm=float(flat.detach().double().norm()),
            dtype=str(flat.dtype).removeprefix("torch."),
        )
        self._file.write(json.dumps(value.line()) + "\n")


@contextmanager
def record_run(
    module: nn.Module,
    folder: str | PathLike[str],
    optimizer: Optimizer | None = None,
    *,
    model: Any = None,
    axes: Axes | None = None,
    first_step: int = 0,
    values_of: Collection[int] = (),
) -> Iterator[ValueRecording]:
    """Record the values of a training loop in the folder, one file per rank.

    with record_run(model, "runs/a", optimizer):
        for inputs, targets in batches:
            ...                               # forward, backward, optimizer.step()

    Without an optimizer, the loop calls `gradients()` before its update and `step_done()` after it.
    Record a second run in another folder, and see `compare_runs`.

    axes       this rank's index and the size of each axis of the mesh: {"dp": (1, 2)}
    values_of  steps whose values are kept, too: those in which the fingerprints differ. Then
               `compare_runs` says where in a tensor they do

    Cost:    a hash and a sketch of every activation, gradient and parameter, on the CPU: for small
             models; no communication
    Raises:  CourseError for a folder that has the record of another run
    """
    recording = ValueRecording(
        module, folder, model=model, axes=axes, first_step=first_step, values_of=values_of
    )
    if optimizer is not None:
        recording.watch(optimizer)
    try:
        yield recording
    finally:
        recording.close()


def _tensors(found: Any) -> Iterator[Tensor]:
    """Yield the tensors in what a module takes or returns."""
    if isinstance(found, Tensor):
        yield found
    elif isinstance(found, Mapping):
        yield from _tensors(tuple(found.values()))
    elif isinstance(found, tuple | list):
        for one in found:
            yield from _tensors(one)
