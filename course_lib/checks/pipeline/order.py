"""Exercise 1 of 08_pipeline: the order of 1F1B."""

from typing import Any

from course_lib.checks.cases import Case, Cases
from course_lib.checks.edits import Edit
from course_lib.checks.exercise import Cause, Exercise
from course_lib.checks.pipeline.parts import ACTIONS, STAGE, demand_own_stages, read_schedule

SIZES = [(p, m) for p in (2, 3, 4, 1, 6) for m in (3, 4, 8, 1, 2, 7)]
SIZES += [(4, 8), (9, 12), (17, 20)]  # one for the second time; more ranks than one counts on
KINDS = ("forward", "backward")

OLDEST_FIRST = Cause(
    "Backwards follow the order of the forwards, oldest micro-batch first: its gradient arrives "
    "first, and its activations have waited longest."
)


def _cases() -> list[Case]:
    return [(f"p = {p}, m = {m}", (p, m)) for p, m in SIZES]


def _by_rank(schedule: Any, _p: int, _m: int) -> dict[str, str]:
    """Return the actions of each rank as text: `F0 F1 B0 B1`."""
    ranks = read_schedule(schedule, KINDS)
    demand_own_stages(ranks)
    return {
        f"rank {rank}": " ".join(action.label for action in actions)
        for rank, actions in enumerate(ranks)
    }


WARMUP = "min(p - 1 - rank, m)"
STEADY = '["forward", "backward"] * (m - warmup)'
COOLDOWN = 'kinds += ["backward"] * warmup'
COUNTERS = 'next_of = {"forward": count(), "backward": count()}'
NUMBER = "next(next_of[kind])"
EACH = "for kind in kinds]"


def _warmup(length: str, cause: str) -> Edit:
    """Return the right answer with a warm-up of another length."""
    return Edit(WARMUP, length, Cause(cause))


ORDER = Exercise(
    key="pipeline-1",
    title="the order of 1F1B",
    library=("course_lib.pipeline.schedules:one_f_one_b",),
    check=Cases(
        cases=_cases,
        show=_by_rank,
        look=(
            "Each rank: min(p - 1 - rank, m) forwards first, then forward and backward in turn, "
            "then the backwards that are left; both in the order of the micro-batches."
        ),
        success="Warm-up, steady phase and cool-down of 1 to 17 ranks; m < p works, too.",
    ),
    wrong=(
        _warmup("m", "That is GPipe: in 1F1B, forward and backward alternate after the warm-up."),
        _warmup(
            "min(max(p - 2 - rank, 0), m)",
            "One forward too few in the warm-up: a rank then waits for a backward that is not "
            "there yet. How many ranks are behind it?",
        ),
        _warmup(
            "min(p - rank, m)",
            "One forward too many in the warm-up: the last rank needs none. The steady phase "
            "begins with a forward, too.",
        ),
        _warmup(
            "min(p - 1, m)",
            "All ranks warm up alike; but the last one can go backward after its first forward.",
        ),
        _warmup(
            "min(rank, m)",
            "The warm-up is the other way round: rank 0 runs ahead the most, the last rank not "
            "at all.",
        ),
        _warmup(
            "p - 1 - rank",
            "Right for m >= p. With few micro-batches there are not enough for a whole warm-up.",
        ),
        Edit(
            STEADY,
            '["backward", "forward"] * (m - warmup)',
            Cause(
                "In the steady phase the forward comes first: the last rank has no micro-batch yet "
                "for a backward."
            ),
        ),
        Edit(
            COOLDOWN,
            "pass",
            Cause(
                "The backwards of the warm-up's micro-batches are missing: they are the cool-down."
            ),
        ),
        Edit(
            NUMBER,
            f'{NUMBER} - warmup * (kind == "forward" and at >= warmup)',
            Cause(
                "The warm-up has already run the first micro-batches: the steady phase continues "
                "with the next one."
            ),
            also=((EACH, "for at, kind in enumerate(kinds)]"),),
        ),
        Edit(
            COUNTERS,
            "numbers, waiting = count(), []",
            OLDEST_FIRST,
            also=(
                (
                    f"[Action(kind, rank, {NUMBER}) {EACH}",
                    "[\n"
                    '    Action(kind, rank, waiting.pop()) if kind == "backward" else\n'
                    "    waiting.append(next(numbers)) or Action(kind, rank, waiting[-1])\n"
                    f"    {EACH}",
                ),
            ),
        ),
        Edit("Action(kind, rank,", "Action(kind, 0,", STAGE),
        Edit(
            "[Action(kind, rank, next(next_of[kind]))",
            "[(kind, rank, next(next_of[kind]))",
            ACTIONS,
        ),
        Edit(NUMBER, f"{NUMBER} + 1", Cause("Micro-batches are counted from 0.")),
        Edit("schedule = []", "p, schedule = 4, []", Cause("That is right for 4 ranks only.")),
    ),
)
