"""Run fsdp-3 on a rank: drive an answer through steps, and note every move in its order.

A move is (kind, unit): allocate, launch, wait, forward, backward, free. Units have different sizes,
so that the bytes of a call say whose it is.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.checks.zero.parts import BESIDE, alive_bytes, only_new, telling
from course_lib.ranks.work_handle import TrackedWork

PrefetchMove = tuple[str, int]
STEPS = 2
OTHER_SIZE = 50  # units of the second object are larger than all of the first one's


class _Unit:
    """The unit that the answer is given: a shard always, memory for the whole while allocated."""

    def __init__(self, number: int, moves: list[PrefetchMove], size: int) -> None:
        self.number, self._moves = number, moves
        self._numel, self._whole = dist.get_world_size() * size, torch.empty(0)
        self.shard = torch.zeros(size)

    def allocate(self) -> Tensor:
        """Return memory for the whole unit."""
        self._moves.append(("allocate", self.number))
        self._whole = torch.full((self._numel,), torch.nan)
        return self._whole

    def free(self) -> None:
        """Give the memory back."""
        self._moves.append(("free", self.number))
        self._whole = torch.empty(0)

    def used(self) -> Tensor:
        """Return a copy of the whole unit."""
        return self._whole.clone()

    @property
    def memory(self) -> tuple[Tensor, Tensor]:
        """The tensors that a unit needs: all others are the answer's."""
        return self.shard, self._whole


@dataclass
class PrefetchStep:
    """Moves of a step on one rank, and the numbers that each unit computed with, in order.

    `more_bytes`: the most that was alive beside the units while one computed, in the last step.
    """

    moves: list[PrefetchMove]
    used: list[Tensor]
    more_bytes: int


def steps_of(
    rank: int, answer: Callable[..., Any], num_units: int, reshard: bool, beside: bool = False
) -> dict[str, PrefetchStep]:
    """Drive the answer through its steps; another object may take a step in between."""
    moves, found = list[PrefetchMove](), dict[str, PrefetchStep]()
    units = [_Unit(number, moves, 2 + number) for number in range(num_units)]
    by_bytes = {unit.shard.nbytes * dist.get_world_size(): unit.number for unit in units}
    where = BESIDE if beside else f"{num_units} units"
    with telling(where), _noted_calls(moves, by_bytes), only_new():
        engine = answer(units, reshard)
        others = [_Unit(number, [], OTHER_SIZE + number) for number in range(num_units + 1)]
        other = answer(others, reshard) if beside else None
        for step in range(STEPS):
            moves.clear()
            for unit in units:
                unit.shard.fill_(shard_value(unit.number, step, rank))
            earlier = [tensor for one in found.values() for tensor in one.used]
            is_last = step == STEPS - 1  # where the numbers of all steps are judged already
            used, more_bytes = _step(
                engine, units, moves, other, others, earlier if is_last else None
            )
            found[f"step {step + 1}"] = PrefetchStep(list(moves), used, more_bytes)
    return found


def shard_value(unit: int, step: int, rank: int) -> float:
    """Return the number that a shard is full of."""
    return 1.0 + unit + 10 * rank + 1000 * step


def _step(
    engine: Any,
    units: list[_Unit],
    moves: list[PrefetchMove],
    other: Any,
    others: list[_Unit],
    earlier: Sequence[Tensor] | None = None,
) -> tuple[list[Tensor], int]:
    """Take a step; return what each unit computed with, and the most bytes alive then.

    The units' own and the `earlier` ones do not count; without those, none do.
    """
    used, more_bytes = list[Tensor](), 0

    def compute(kind: str, unit: _Unit) -> None:
        nonlocal more_bytes
        moves.append((kind, unit.number))
        used.append(unit.used())
        if earlier is not None:
            of_units = [tensor for one in (*units, *others) for tensor in one.memory]
            more_bytes = max(more_bytes, alive_bytes(*of_units, *used, *earlier, enough=0))

    for unit in units:
        engine.before_forward(unit.number)
        compute("forward", unit)
        engine.after_forward(unit.number)
        if other is not None and unit.number == 0:
            _step(other, others, [], None, [])
    for unit in reversed(units):
        engine.before_backward(unit.number)
        compute("backward", unit)
        engine.after_backward(unit.number)
    return used, more_bytes


@contextlib.contextmanager
def _noted_calls(moves: list[PrefetchMove], by_bytes: dict[int, int]) -> Iterator[None]:
    """Note every launch and every wait; what is no all_gather of a unit is a launch of -1."""
    begin = TrackedWork.__init__

    def number_of(work: TrackedWork) -> int | None:
        if work.post.num_bytes >= 4 * OTHER_SIZE * dist.get_world_size():
            return None
        return by_bytes.get(work.post.num_bytes, -1) if work.post.kind == "all_gather" else -1

    def note(kind: str, work: TrackedWork) -> None:
        if (number := number_of(work)) is not None:
            moves.append((kind, number))

    def note_begin(work: TrackedWork, *args: Any, **kwargs: Any) -> None:
        begin(work, *args, **kwargs)
        note("launch", work)

    def noting(ends: Callable[..., Any]) -> Callable[..., Any]:
        def note_end(work: TrackedWork, *args: Any) -> Any:
            note("wait", work)
            return ends(work, *args)

        return note_end

    with (
        patch.object(TrackedWork, "__init__", note_begin),
        patch.object(TrackedWork, "wait", noting(TrackedWork.wait)),
        patch.object(TrackedWork, "get_future", noting(TrackedWork.get_future)),
    ):
        yield
