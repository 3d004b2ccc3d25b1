"""Exercise 3 of 10_fsdp: what a rank does in a step, in order; and the planted mistakes.

Needs no ranks.
"""

from collections.abc import Callable, Sequence
from typing import Any

from course_lib.checks.exercise import CheckFailed, Exercise, Mistake

Move = tuple[str, int]
CASES = [
    (num_units, reshard, prefetch)
    for num_units in (3, 1, 2, 4)
    for prefetch in (True, False)
    for reshard in (True, False)
]


def order_of(num_units: int, reshard_after_forward: bool, prefetch: bool) -> list[Move]:
    """The right answer: who is not there is gathered, the next one before this one computes."""
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
) -> list[Move]:
    """The right answer, and by its options the wrong ones."""
    moves: list[Move] = []
    there: set[int] = set()

    def gather(units: Sequence[int]) -> None:
        for unit in units:
            if 0 <= unit < num_units and (blind or unit not in there):
                there.add(unit)
                moves.append(("gather", unit))

    def use(kind: str, unit: int, step: int, looks_ahead: bool) -> None:
        following = [unit + step * n for n in range(1, ahead + 1)] if looks_ahead else []
        gather([unit])
        if not late:
            gather(following)
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


def _with(**options: Any) -> Callable[..., list[Move]]:
    def wrong(num_units: int, reshard_after_forward: bool, prefetch: bool) -> list[Move]:
        return _played(num_units, reshard_after_forward, prefetch, **options)

    return wrong


def _never_freed(num_units: int, reshard_after_forward: bool, prefetch: bool) -> list[Move]:
    kept = _played(num_units, False, prefetch)
    return [move for move in kept if move[0] != "free"]


def _always_prefetch(num_units: int, reshard_after_forward: bool, prefetch: bool) -> list[Move]:
    return _played(num_units, reshard_after_forward, True)


def _always_reshard(num_units: int, reshard_after_forward: bool, prefetch: bool) -> list[Move]:
    return _played(num_units, True, prefetch)


def _not_again(num_units: int, reshard_after_forward: bool, prefetch: bool) -> list[Move]:
    moves = _played(num_units, reshard_after_forward, prefetch)
    middle = moves.index(("forward", num_units - 1))
    return [move for n, move in enumerate(moves) if n < middle or move[0] != "gather"]


WRONG: tuple[tuple[str, Callable[..., list[Move]], str], ...] = (
    (
        "after it has computed",
        _with(late=True),
        "A prefetch leaves before this unit computes, or nothing travels meanwhile.",
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
    ("always prefetch", _always_prefetch, "Without prefetch a unit leaves when it is needed."),
    ("always reshard", _always_reshard, "Without resharding units stay, and backward needs none."),
    (
        "backward without a gather",
        _not_again,
        "Backward without its weights: what was freed has to be gathered again.",
    ),
)


def check_order(answer: Callable[..., Any]) -> str:
    """1 to 4 units, both options: the moves one by one."""
    got = [_read(answer(*case), case) for case in CASES]
    for case, is_now in zip(CASES, got, strict=True):
        wanted = order_of(*case)
        if is_now != wanted:
            raise CheckFailed(f"{_named(case)}: {_first(is_now, wanted)} {_why(got)}")
    return "Every unit gathered before it computes, the next one on its way, none kept too long."


def _named(case: tuple[int, bool, bool]) -> str:
    num_units, reshard, prefetch = case
    units = f"{num_units} unit{'s' * (num_units > 1)}"
    return f"{units}, reshard_after_forward={reshard}, prefetch={prefetch}"


def _read(moves: Any, case: tuple[int, bool, bool]) -> list[Move]:
    try:
        return [(str(kind), int(unit)) for kind, unit in moves]
    except (TypeError, ValueError):
        raise CheckFailed(
            f"{_named(case)}: need a list of (kind, unit); got {moves!r}. "
            "Does your function return it?"
        ) from None


def _first(got: Sequence[Move], wanted: Sequence[Move]) -> str:
    """The first move that differs."""
    same = 0
    while same < min(len(got), len(wanted)) and got[same] == wanted[same]:
        same += 1
    words = [
        f"{moves[same][0]} {moves[same][1]}" if same < len(moves) else "the end"
        for moves in (wanted, got)
    ]
    return f"need {words[0]} as move {same + 1}; got {words[1]}."


def _why(got: Sequence[Sequence[Move]]) -> str:
    """The cause that fits every case."""
    for _, wrong, says in WRONG:
        if got == [wrong(*case) for case in CASES]:
            return says
    return "Play it by hand: who is there, who is needed now, who next?"


ORDER = Exercise(
    key="fsdp-3",
    title="who leaves when",
    check=check_order,
    reference=order_of,
    mistakes=tuple(Mistake(name, wrong, says) for name, wrong, says in WRONG),
)
