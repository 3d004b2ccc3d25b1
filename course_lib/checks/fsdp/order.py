"""Exercise 3 of 10_fsdp: the actions of a rank in a step, in order.

Needs no ranks. The planted mistakes are in `order_answers.py`.
"""

from collections.abc import Callable, Sequence
from typing import Any

from course_lib.checks.exercise import CheckFailed, Exercise, Mistake
from course_lib.checks.fsdp import order_answers as planted
from course_lib.checks.fsdp.order_answers import BEYOND, LATE, _Move

CASES = [
    (num_units, reshard, prefetch)
    for num_units in (3, 1, 2, 4)
    for prefetch in (True, False)
    for reshard in (True, False)
]


def check_order(answer: Callable[..., Any]) -> str:
    """Check 1 to 4 units with both options, action by action."""
    got = [_read(answer(*case), case) for case in CASES]
    for case, is_now in zip(CASES, got, strict=True):
        wanted = planted.order_of(*case)
        if is_now != wanted:
            says = _why(got) or _by_hand(is_now, wanted, case[0])
            raise CheckFailed(f"{_named(case)}: {_first(is_now, wanted)} {says}")
    return "Every unit gathered before it computes, the next one on its way, none kept too long."


def _named(case: tuple[int, bool, bool]) -> str:
    num_units, reshard, prefetch = case
    units = f"{num_units} unit{'s' * (num_units > 1)}"
    return f"{units}, reshard_after_forward={reshard}, prefetch={prefetch}"


def _read(moves: Any, case: tuple[int, bool, bool]) -> list[_Move]:
    try:
        return [(str(kind), int(unit)) for kind, unit in moves]
    except (TypeError, ValueError):
        raise CheckFailed(
            f'{_named(case)}: need a list of pairs like ("gather", 0); got {moves!r}. '
            "Does your function return it?"
        ) from None


def _differ(got: Sequence[_Move], wanted: Sequence[_Move]) -> int:
    """Return how many actions are the same from the beginning."""
    same = 0
    while same < min(len(got), len(wanted)) and got[same] == wanted[same]:
        same += 1
    return same


def _first(got: Sequence[_Move], wanted: Sequence[_Move]) -> str:
    """Return the first action that differs."""
    same = _differ(got, wanted)
    words = [
        f"{moves[same][0]} {moves[same][1]}" if same < len(moves) else "the end"
        for moves in (wanted, got)
    ]
    return f"need {words[0]} as move {same + 1}; got {words[1]}."


def _why(got: Sequence[Sequence[_Move]]) -> str:
    """Return the cause that fits every case, if one does."""
    fits = (says for _, wrong, says in planted.WRONG if got == [wrong(*case) for case in CASES])
    return next(fits, "")


def _by_hand(got: Sequence[_Move], wanted: Sequence[_Move], num_units: int) -> str:
    """Return what to look at, from the first action that differs."""
    same = _differ(got, wanted)
    needed, found = (dict(enumerate(moves)).get(same, ("the end", 0)) for moves in (wanted, got))
    if found[1] not in range(num_units):
        return BEYOND
    if needed[0] == "gather" and found[0] in ("forward", "backward", "free"):
        return LATE
    if needed[0] == "free":
        return "What is not needed any more goes at once."
    return "Play it by hand: who is there, who is needed now, who next?"


ORDER = Exercise(
    key="fsdp-3",
    title="who leaves when",
    check=check_order,
    reference=planted.order_of,
    mistakes=planted.mistakes(Mistake),
)
