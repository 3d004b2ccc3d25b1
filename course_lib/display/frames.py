"""Frames of a collective: the shards that every rank holds before each step, and the messages.

Frames are computed from a list of messages and nothing else, so a hand-written algorithm, a
simulation and a recorded run can all be shown. A cell records which ranks' contributions are in it,
so a rank that is counted twice or left out is visible.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from course_lib.collectives.messages import Message
from course_lib.core.errors import CourseError

Holdings = tuple[tuple[tuple[int, ...], ...], ...]  # [rank][shard] -> the ranks in this cell


@dataclass(frozen=True)
class Cell:
    """One shard on one rank: the ranks whose values are in it, and whether it just changed."""

    ranks: tuple[int, ...]
    highlighted: bool = False

    @property
    def label(self) -> str:
        """Text of the cell; empty when the cell is.

        `(0, 1) -> '0+1'`, `(0, 1, 2, 3) -> '0...3'`, `(0, 0, 1) -> '2x0+1'`
        """
        return "+".join(_runs(self.ranks))


@dataclass(frozen=True)
class Frame:
    """Cells of every rank before a step, the messages of that step, and both in words."""

    cells: tuple[tuple[Cell, ...], ...]
    messages: tuple[Message, ...]
    text: str


def own_everything(world_size: int, num_shards: int | None = None) -> Holdings:
    """Return the start of an all_reduce or reduce_scatter: all shards on all ranks."""
    shards = world_size if num_shards is None else num_shards
    return tuple(((rank,),) * shards for rank in range(world_size))


def own_one(world_size: int) -> Holdings:
    """Return the start of an all_gather or gather: rank r holds shard r and nothing else."""
    ranks = range(world_size)
    return tuple(tuple((rank,) if rank == shard else () for shard in ranks) for rank in ranks)


def root_everything(world_size: int, num_shards: int = 1, root: int = 0) -> Holdings:
    """Return the start of a broadcast or scatter: the root holds all shards, the others nothing."""
    return tuple(((rank,) if rank == root else (),) * num_shards for rank in range(world_size))


def frames_from_messages(messages: Iterable[Message], start: Holdings) -> list[Frame]:
    """Return one frame per step, with the cells before it, and one for the end.

    All messages of a step leave before any of them arrives. Steps without messages are left out.

    Raises: CourseError for a rank or shard that is not in `start`
    """
    by_step: dict[int, list[Message]] = {}
    for message in messages:
        _check(message, start)
        by_step.setdefault(message.step, []).append(message)
    held, changed = [list(row) for row in start], set[tuple[int, int]]()
    frames = []
    for number, step in enumerate(sorted(by_step), start=1):
        moves = tuple(by_step[step])
        text = f"step {number} of {len(by_step)}: {_moves_in_words(moves)}"
        frames.append(Frame(_cells(held, changed), moves, text))
        held, changed = _deliver(held, moves)
    steps = "1 step" if len(by_step) == 1 else f"{len(by_step)} steps"
    text = f"after {steps}: {_holdings_in_words(held)}"
    return [*frames, Frame(_cells(held, changed), (), text)]


def _check(message: Message, start: Holdings) -> None:
    ranks, shards = len(start), len(start[0])
    there = (
        0 <= message.sender < ranks
        and 0 <= message.receiver < ranks
        and 0 <= message.shard < shards
        and 0 <= message.target_shard < shards
    )
    if not there:
        raise CourseError(
            f"frames_from_messages: need ranks below {ranks} and shards below {shards}; "
            f"got {message}. Try a start that has them."
        )


def _deliver(
    held: list[list[tuple[int, ...]]], moves: Sequence[Message]
) -> tuple[list[list[tuple[int, ...]]], set[tuple[int, int]]]:
    """Return the cells after the messages arrived, and which of them changed."""
    after = [list(row) for row in held]
    for move in moves:
        arrives = held[move.sender][move.shard]
        kept = after[move.receiver][move.target_shard] if move.adds else ()
        after[move.receiver][move.target_shard] = tuple(sorted(kept + arrives))
    return after, {(move.receiver, move.target_shard) for move in moves}


def _cells(
    held: Sequence[Sequence[tuple[int, ...]]], changed: set[tuple[int, int]]
) -> tuple[tuple[Cell, ...], ...]:
    return tuple(
        tuple(Cell(ranks, (rank, shard) in changed) for shard, ranks in enumerate(row))
        for rank, row in enumerate(held)
    )


def _runs(ranks: Sequence[int]) -> list[str]:
    """Abbreviate ranks: three or more consecutive ones that occur once become a range."""
    counts = Counter(ranks)
    parts: list[str] = []
    run: list[int] = []
    for rank in [*sorted(counts), None]:
        if rank is not None and counts[rank] == 1 and (not run or rank == run[-1] + 1):
            run.append(rank)
            continue
        parts += [f"{run[0]}\u2026{run[-1]}"] if len(run) > 2 else map(str, run)
        run = [] if rank is None or counts[rank] > 1 else [rank]
        if rank is not None and counts[rank] > 1:
            parts.append(f"{counts[rank]}\u00d7{rank}")
    return parts


def _moves_in_words(moves: Sequence[Message]) -> str:
    return "; ".join(
        f"rank {move.sender} sends shard {move.shard} to rank {move.receiver}"
        + (f", into place {move.target_shard}" if move.target_shard != move.shard else "")
        + (", which adds it" if move.adds else "")
        for move in moves
    )


def _holdings_in_words(held: Sequence[Sequence[tuple[int, ...]]]) -> str:
    """Return `rank 0 holds 0+1 | 0+1; ...`, or one phrase if all ranks hold the same."""
    rows = [" | ".join("+".join(map(str, ranks)) or "nothing" for ranks in row) for row in held]
    if len(rows) > 1 and len(set(rows)) == 1:
        return f"every rank holds {rows[0]}"
    return "; ".join(f"rank {rank} holds {row}" for rank, row in enumerate(rows))
