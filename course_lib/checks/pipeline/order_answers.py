"""The right answer to exercise 1 of 08_pipeline, and wrong ones that its check must name."""

from collections.abc import Callable, Iterable
from typing import Any

from course_lib.pipeline import schedules
from course_lib.pipeline.actions import Action, Schedule


def one_f_one_b(p: int, m: int) -> Schedule:
    """Return warm-up, one forward and one backward in turn, then cool-down: the right answer."""
    return _with_warmup(p, m, lambda rank: min(p - 1 - rank, m))


def _with_warmup(p: int, m: int, warmup_of: Callable[[int], int]) -> Schedule:
    schedule = []
    for rank in range(p):
        warmup = warmup_of(rank)
        letters = "F" * warmup + "FB" * (m - warmup) + "B" * warmup
        schedule.append(_actions(rank, letters))
    return schedule


def _actions(rank: int, letters: Iterable[str]) -> list[Action]:
    """Return the actions of `FFBB`: F0 F1 B0 B1."""
    kinds, done = {"F": "forward", "B": "backward"}, {"F": 0, "B": 0}
    actions = []
    for letter in letters:
        actions.append(Action(kinds[letter], rank, done[letter]))
        done[letter] += 1
    return actions


def _warmup_too_short(p: int, m: int) -> Schedule:
    return _with_warmup(p, m, lambda rank: min(max(p - 2 - rank, 0), m))


def _warmup_too_long(p: int, m: int) -> Schedule:
    return _with_warmup(p, m, lambda rank: min(p - rank, m))


def _same_on_all(p: int, m: int) -> Schedule:
    return _with_warmup(p, m, lambda rank: min(p - 1, m))


def _other_way_round(p: int, m: int) -> Schedule:
    return _with_warmup(p, m, lambda rank: min(rank, m))


def _no_min(p: int, m: int) -> Schedule:
    return _with_warmup(p, m, lambda rank: p - 1 - rank)


def _no_warmup(p: int, m: int) -> Schedule:
    return [_actions(rank, "FB" * m) for rank in range(p)]


def _backward_first(p: int, m: int) -> Schedule:
    made = []
    for rank in range(p):
        warmup = min(p - 1 - rank, m)
        made.append(_actions(rank, "F" * warmup + "BF" * (m - warmup) + "B" * warmup))
    return made


def _no_cooldown(p: int, m: int) -> Schedule:
    return [
        _actions(rank, "F" * min(p - 1 - rank, m) + "FB" * (m - min(p - 1 - rank, m)))
        for rank in range(p)
    ]


def _steady_from_0(p: int, m: int) -> Schedule:
    """Number the forwards of the steady phase from 0."""
    made = []
    for rank, actions in enumerate(one_f_one_b(p, m)):
        warmup, order = min(p - 1 - rank, m), list[Action]()
        for at, action in enumerate(actions):
            steady = action.kind == "forward" and at >= warmup
            number = action.micro_batch - warmup * steady
            order.append(action._replace(micro_batch=number))
        made.append(order)
    return made


def _cooldown_from_0(p: int, m: int) -> Schedule:
    """Number the last backwards from 0."""
    made = []
    for rank, actions in enumerate(one_f_one_b(p, m)):
        warmup = min(p - 1 - rank, m)
        steady = actions[: 2 * m - warmup]
        made.append([*steady, *(Action("backward", rank, i) for i in range(warmup))])
    return made


def _no_forwards_left(p: int, m: int) -> Schedule:
    """Run ahead as far as allowed, without regard to the end of the batch."""
    made = []
    for rank in range(p):
        order, forwards, backwards = list[Action](), 0, 0
        while backwards < m:
            if forwards - backwards < p - rank:
                order.append(Action("forward", rank, forwards))
                forwards += 1
            else:
                order.append(Action("backward", rank, backwards))
                backwards += 1
        made.append(order)
    return made


def _newest_first(p: int, m: int) -> Schedule:
    made = []
    for actions in one_f_one_b(p, m):
        waiting, order = list[int](), list[Action]()
        for action in actions:
            if action.kind == "forward":
                waiting.append(action.micro_batch)
                order.append(action)
            else:
                order.append(action._replace(micro_batch=waiting.pop()))
        made.append(order)
    return made


def _stage_0(p: int, m: int) -> Schedule:
    return [[action._replace(stage=0) for action in actions] for actions in one_f_one_b(p, m)]


def _from_1(p: int, m: int) -> Schedule:
    return [
        [action._replace(micro_batch=action.micro_batch + 1) for action in actions]
        for actions in one_f_one_b(p, m)
    ]


def _for_four(_p: int, m: int) -> Schedule:
    return one_f_one_b(4, m)


Answer = Callable[[int, int], Any]
WRONG: tuple[tuple[str, Answer, str], ...] = (
    (
        "GPipe",
        schedules.gpipe,
        "That is GPipe: as soon as a backward can run, it comes in turn with the forwards.",
    ),
    (
        "warm-up one too short",
        _warmup_too_short,
        "One forward too few in the warm-up: a rank then waits for a backward that is not there "
        "yet. How many ranks are behind it?",
    ),
    (
        "warm-up one too long",
        _warmup_too_long,
        "One forward too many in the warm-up: the last rank needs none. The steady phase begins "
        "with a forward, too.",
    ),
    (
        "the same warm-up on all",
        _same_on_all,
        "All ranks warm up alike; but the last one can go backward after its first forward.",
    ),
    (
        "the other way round",
        _other_way_round,
        "The warm-up is the other way round: rank 0 runs ahead the most, the last rank not at all.",
    ),
    (
        "m < p forgotten",
        _no_min,
        "Right for m >= p. With few micro-batches there are not enough for a whole warm-up.",
    ),
    (
        "no warm-up",
        _no_warmup,
        "Without a warm-up only one micro-batch is on its way: one rank works, the others wait.",
    ),
    (
        "a backward before its forward",
        _backward_first,
        "In the steady phase the forward comes first: on the last rank, nothing is there to go "
        "backward with.",
    ),
    (
        "no cool-down",
        _no_cooldown,
        "The backwards of the warm-up's micro-batches are missing: they are the cool-down.",
    ),
    (
        "the steady phase from 0",
        _steady_from_0,
        "The warm-up has forwarded the first micro-batches already: the steady phase goes on "
        "with the next one.",
    ),
    (
        "the cool-down from 0",
        _cooldown_from_0,
        "The cool-down begins with micro-batch 0 again: it goes on where the steady phase ended.",
    ),
    (
        "more forwards than there are",
        _no_forwards_left,
        "There are m forwards on each rank and no more: then only backwards are left.",
    ),
    (
        "the newest first",
        _newest_first,
        "Backwards go in the order of the forwards, the oldest micro-batch first: its gradient "
        "comes first, and its activations wait the longest.",
    ),
    ("all on stage 0", _stage_0, "Rank r runs stage r: Action(kind, rank, micro_batch)."),
    ("counted from 1", _from_1, "Micro-batches are counted from 0."),
    ("for four ranks only", _for_four, "That is right for 4 ranks only: use p."),
)
