"""Exercise 3 of 10_fsdp: the right order, and the wrong ones that its check must name."""

from collections.abc import Callable, Sequence
from typing import Any

_Move = tuple[str, int]
LATE = "What is needed now, and with prefetch the next one, leaves before this unit computes."
BEYOND = "There are units 0 to num_units - 1: the last one has no next, and in backward unit 0."


def order_of(num_units: int, reshard_after_forward: bool, prefetch: bool) -> list[_Move]:
    """Gather units that are missing, the next one before this one computes: the right answer."""
    return _played(num_units, reshard_after_forward, prefetch)


def _played(
    num_units: int,
    reshard: bool,
    prefetch: bool,
    *,
    ahead: int = 1,
    late: bool = False,
    blind: bool = False,
    free_last: bool = True,
    back_first: bool = False,
    back_ahead: bool = True,
    free_late: bool = False,
    next_first: bool = False,
    bounded: bool = True,
) -> list[_Move]:
    """Return the right answer and, depending on the options, the wrong ones."""
    moves: list[_Move] = []
    there: set[int] = set()

    def gather(units: Sequence[int]) -> None:
        for unit in units:
            if (unit in range(num_units) or not bounded) and (blind or unit not in there):
                there.add(unit)
                moves.append(("gather", unit))

    def use(kind: str, unit: int, step: int, looks_ahead: bool) -> None:
        following = [unit + step * n for n in range(1, ahead + 1)] if looks_ahead else []
        now = [unit] if late else [unit, *following]
        gather(now[::-1] if next_first else now)
        moves.append((kind, unit))
        if late:
            gather(following)

    def free(unit: int) -> None:
        there.discard(unit)
        moves.append(("free", unit))

    for unit in range(num_units):
        use("forward", unit, 1, prefetch)
        if reshard and (free_last or unit < num_units - 1):
            free(unit)
    for unit in range(num_units) if back_first else reversed(range(num_units)):
        use("backward", unit, 1 if back_first else -1, prefetch and back_ahead)
        if not free_late:
            free(unit)
    for unit in reversed(range(num_units)) if free_late else ():
        free(unit)
    return moves


def _with(**options: Any) -> Callable[..., list[_Move]]:
    def wrong(num_units: int, reshard_after_forward: bool, prefetch: bool) -> list[_Move]:
        return _played(num_units, reshard_after_forward, prefetch, **options)

    return wrong


def _never_freed(num_units: int, reshard_after_forward: bool, prefetch: bool) -> list[_Move]:
    kept = _played(num_units, False, prefetch)
    return [move for move in kept if move[0] != "free"]


def _back_kept(num_units: int, reshard_after_forward: bool, prefetch: bool) -> list[_Move]:
    moves = _played(num_units, reshard_after_forward, prefetch)
    middle = moves.index(("backward", num_units - 1))
    return [move for n, move in enumerate(moves) if n < middle or move[0] != "free"]


def _freed_if_resharded(num_units: int, reshard_after_forward: bool, prefetch: bool) -> list[_Move]:
    moves = _played(num_units, reshard_after_forward, prefetch)
    return [move for move in moves if reshard_after_forward or move[0] != "free"]


def _round(num_units: int, reshard_after_forward: bool, prefetch: bool) -> list[_Move]:
    moves = _played(num_units, reshard_after_forward, prefetch, bounded=False)
    there: set[int] = set()
    found = []
    for kind, unit in moves:
        unit %= num_units
        if kind != "gather" or unit not in there:
            found.append((kind, unit))
        (there.discard if kind == "free" else there.add)(unit)
    return found


def _always_prefetch(num_units: int, reshard_after_forward: bool, prefetch: bool) -> list[_Move]:
    return _played(num_units, reshard_after_forward, True)


def _always_reshard(num_units: int, reshard_after_forward: bool, prefetch: bool) -> list[_Move]:
    return _played(num_units, True, prefetch)


def _not_again(num_units: int, reshard_after_forward: bool, prefetch: bool) -> list[_Move]:
    moves = _played(num_units, reshard_after_forward, prefetch)
    middle = moves.index(("forward", num_units - 1))
    return [move for n, move in enumerate(moves) if n < middle or move[0] != "gather"]


WRONG: tuple[tuple[str, Callable[..., list[_Move]], str], ...] = (
    (
        "after it has computed",
        _with(late=True),
        LATE,
    ),
    ("two ahead", _with(ahead=2), "One unit ahead, not two: each costs memory."),
    (
        "all at once",
        _with(ahead=9),
        "All units are gathered before the first one computes: fast, and whole in memory.",
    ),
    (
        "gathered twice",
        _with(blind=True),
        "What is there, or on its way, is not gathered again: remember what has left.",
    ),
    (
        "the last unit kept",
        _with(free_last=False),
        "With reshard_after_forward every unit is freed after its forward, the last one, too.",
    ),
    (
        "backward in forward order",
        _with(back_first=True),
        "Backward begins with the last unit.",
    ),
    (
        "no prefetch in backward",
        _with(back_ahead=False),
        "In backward, too, the next unit leaves ahead: the one before this one.",
    ),
    (
        "freed at the end",
        _with(free_late=True),
        "Each unit is freed as soon as its backward has ended.",
    ),
    ("never freed", _never_freed, "Never freed: after backward every unit goes."),
    ("kept after backward", _back_kept, "Each unit is freed after its backward, too."),
    (
        "freed if resharded",
        _freed_if_resharded,
        "After backward every unit goes, resharded after forward or not.",
    ),
    (
        "the next one first",
        _with(next_first=True),
        "What is needed now leaves first: the wire takes messages one after the other.",
    ),
    ("beyond the ends", _with(bounded=False), BEYOND),
    ("round the corner", _round, "Behind the last unit comes no first one: after it, backward."),
    ("always prefetch", _always_prefetch, "Without prefetch a unit leaves when it is needed."),
    ("always reshard", _always_reshard, "Without resharding units stay, and backward needs none."),
    (
        "backward without a gather",
        _not_again,
        "Backward without its weights: what was freed has to be gathered again.",
    ),
)


def mistakes(make: Callable[..., Any]) -> tuple[Any, ...]:
    """Return all wrong answers, as `make(name, answer, says)`."""
    return tuple(make(name, answer, says) for name, answer, says in WRONG)
