"""Rules of schedules, and `check_schedule`, which names the first rule that is broken.

Each action occurs once; a backward comes after its forward; no deadlock; no more micro-batches in
flight than allowed. With sends that block until they are received, a schedule that is valid
otherwise can still deadlock. Notebook 08_pipeline.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

from course_lib.pipeline.actions import (
    LETTERS,
    Action,
    Schedule,
    ScheduleError,
    in_flight,
    num_model_chunks_of,
    placement_of,
    source_of,
    target_of,
)


def check_schedule(
    schedule: Schedule,
    *,
    num_micro_batches: int | None = None,
    max_in_flight: int | Sequence[int] | None = None,
    blocking_sends: bool = False,
) -> None:
    """Check a schedule against the rules; return silently if it keeps them all.

    max_in_flight    largest number of micro-batches in flight: for all ranks, or one for each
    blocking_sends   also check that it runs to its end if every send waits for its receive

    Raises: ScheduleError that names the ranks and the actions
    """
    _check_stages(schedule)
    _check_each_once_in_order(schedule, num_micro_batches)
    _check_no_circle(schedule)
    if max_in_flight is not None:
        _check_in_flight(schedule, max_in_flight)
    if blocking_sends:
        _check_blocking_sends(schedule)


def _check_stages(schedule: Schedule) -> None:
    """Check that in each model chunk every rank runs one stage, a different one on each rank."""
    rank_of: dict[tuple[int, int], int] = {}
    stage_of: dict[tuple[int, int], int] = {}
    for rank, actions in enumerate(schedule):
        for action in actions:
            kind, stage, micro_batch, chunk = action
            if kind not in LETTERS or not 0 <= stage < len(schedule):
                raise ScheduleError(
                    f"rank {rank}: need actions of stages 0 to {len(schedule) - 1}, of the kinds "
                    f"{', '.join(LETTERS)}; got {kind!r} of stage {stage}."
                )
            if micro_batch < 0 or chunk < 0:
                raise ScheduleError(
                    f"rank {rank}: need micro-batches and model chunks from 0 on; got {action}."
                )
            if stage_of.setdefault((rank, chunk), stage) != stage:
                raise ScheduleError(
                    f"rank {rank}: need actions of one stage in model chunk {chunk}; got stages "
                    f"{stage_of[rank, chunk]} and {stage}, with {action.label}."
                )
            if (other := rank_of.setdefault((stage, chunk), rank)) != rank:
                raise ScheduleError(
                    f"ranks {other} and {rank}: need a stage of its own for each in model chunk "
                    f"{chunk}; got stage {stage} for both, with {action.label}."
                )


def _check_each_once_in_order(schedule: Schedule, num_micro_batches: int | None) -> None:
    """Check that each micro-batch has one forward, then one whole or one split backward."""
    highest = max((action.micro_batch for actions in schedule for action in actions), default=-1)
    num_micro_batches = highest + 1 if num_micro_batches is None else num_micro_batches
    expected = set(product(range(num_model_chunks_of(schedule)), range(num_micro_batches)))
    for rank, actions in enumerate(schedule):
        found: dict[tuple[int, int], str] = defaultdict(str)
        for action in actions:
            found[action.model_chunk, action.micro_batch] += LETTERS[action.kind]
        for part in sorted(expected | set(found)):
            if found[part] not in ("FB", "FIW") or part not in expected:
                raise ScheduleError(_not_once(rank, part, found[part], num_micro_batches))


def _not_once(rank: int, part: tuple[int, int], letters: str, num_micro_batches: int) -> str:
    chunk, micro_batch = part
    rest = Action("forward", rank, micro_batch, chunk).label[1:]
    got = ", ".join(letter + rest for letter in letters) or "none of them"
    if micro_batch >= num_micro_batches:
        return f"rank {rank}: need micro-batches 0 to {num_micro_batches - 1}; got {got}."
    return f"rank {rank}: need F{rest}, then B{rest} or I{rest} and W{rest}, each once; got {got}."


def _check_in_flight(schedule: Schedule, max_in_flight: int | Sequence[int]) -> None:
    for rank, actions in enumerate(schedule):
        bound = max_in_flight if isinstance(max_in_flight, int) else max_in_flight[rank]
        for action, count in zip(actions, in_flight(actions), strict=True):
            if count > bound:
                raise ScheduleError(
                    f"rank {rank}: need at most {bound} micro-batches in flight; got {count} with "
                    f"{action.label}. Try a backward before it."
                )


# --- who waits for whom


class _Step(NamedTuple):
    """Send or receive of a rank, for the action it belongs to."""

    rank: int
    sends: bool
    peer: int
    action: Action
    message: tuple[bool, int, int]  # forward?, depth of the receiver, micro-batch

    def __str__(self) -> str:
        label = self.action.label
        if self.sends:
            return f"sends the output of {label} to rank {self.peer}"
        return f"waits at {label} for rank {self.peer}"


def _program(schedule: Schedule, rank: int) -> Iterator[_Step]:
    """Yield the receives and sends of a rank, in order."""
    num_stages, placement = len(schedule), placement_of(schedule)
    for action in schedule[rank]:
        forward, depth = action.kind == "forward", action.depth(num_stages)
        source = source_of(action, num_stages, placement)
        if source is not None:
            yield _Step(rank, False, source, action, (forward, depth, action.micro_batch))
        target = target_of(action, num_stages, placement)
        if target is not None:
            after = depth + 1 if forward else depth - 1
            yield _Step(rank, True, target, action, (forward, after, action.micro_batch))


def _stuck_at(schedule: Schedule, blocking_sends: bool) -> dict[int, _Step]:
    """Return the step at which each rank waits forever; empty if all ranks reach their end."""
    programs = [_program(schedule, rank) for rank in range(len(schedule))]
    at = {rank: step for rank, program in enumerate(programs) if (step := next(program, None))}
    sent: set[tuple[bool, int, int]] = set()

    def advance(rank: int) -> None:
        step = next(programs[rank], None)
        at.pop(rank)
        if step:
            at[rank] = step

    can_proceed = _is_met if blocking_sends else _has_arrived
    runnable = list(at)
    while runnable:
        rank = runnable.pop()
        while rank in at and can_proceed(at[rank], at, sent):
            step = at[rank]
            if step.sends:
                sent.add(step.message)
            if blocking_sends and step.peer != rank:
                advance(step.peer)
            advance(rank)
            runnable.append(step.peer)
    return at


def _has_arrived(step: _Step, at: dict[int, _Step], sent: set[tuple[bool, int, int]]) -> bool:
    """Return whether a step can proceed when sends do not block."""
    return step.sends or step.message in sent


def _is_met(step: _Step, at: dict[int, _Step], sent: set[tuple[bool, int, int]]) -> bool:
    """Return whether a step can proceed when sends block: the peer is at its other end."""
    if step.peer == step.rank:  # from one of its chunks to the next: nothing is sent
        return _has_arrived(step, at, sent)
    other = at.get(step.peer)
    return other is not None and other.message == step.message and other.sends != step.sends


def _circle(at: dict[int, _Step]) -> list[int]:
    """Return ranks of which each waits for the next, and the last for the first."""
    rank, path = min(at), []
    while rank not in path:
        path.append(rank)
        rank = at[rank].peer
    return path[path.index(rank) :]


def _check_no_circle(schedule: Schedule) -> None:
    if at := _stuck_at(schedule, blocking_sends=False):
        told = ", ".join(f"rank {rank} {at[rank]}" for rank in _circle(at))
        raise ScheduleError(
            f"schedule: need an order in which all inputs can come; got a circle: {told}. "
            "Try to run earlier what the other rank waits for."
        )


def _check_blocking_sends(schedule: Schedule) -> None:
    if at := _stuck_at(schedule, blocking_sends=True):
        told = ", ".join(f"rank {rank} {at[rank]}" for rank in _circle(at))
        raise ScheduleError(
            f"schedule: need a receive for every send that blocks; got a circle: {told}. "
            "Try sends that do not block, or a send and a receive in one batch."
        )
