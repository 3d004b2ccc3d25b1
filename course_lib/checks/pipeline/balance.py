"""Exercise 4 of 08_pipeline: the number of layers of each stage."""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from numbers import Integral
from typing import Any

from course_lib.checks.cases import Case, Cases
from course_lib.checks.edits import Edit, Own
from course_lib.checks.exercise import Cause, Exercise
from course_lib.pipeline.balance import balance_stages, stage_times

Times = Sequence[float]
LAYERS: tuple[tuple[list[float], int], ...] = (
    ([1.0, 2.0, 2.0, 2.0, 2.0, 5.0], 3),
    ([3.0, 1.0, 1.0, 1.0, 1.0, 1.0, 4.0], 4),
    ([1.0, 2.0, 3.0], 3),
    ([1.0, 2.0, 3.0], 1),
    ([6.0, 1.0, 5.0, 1.0, 4.0, 2.0, 3.0, 3.0], 2),
    ([0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 2.5], 3),
    ([1.0, 6.0, 2.0, 1.0, 3.0], 3),
    ([9.0, 1.0, 1.0, 1.0], 3),
    ([0.0, 1.0, 1.5, 1.0, 0.7, 0.7, 0.7, 1.0, 1.9], 5),
)


def _cases() -> list[Case]:
    return [
        (
            f"layers of {', '.join(f'{time_s:g}' for time_s in layer_times)} s on {p} stages",
            ([*layer_times], p),
        )
        for layer_times, p in LAYERS
    ]


def _cut(counts: Any, layer_times: Times, p: int) -> Any:
    """Return `a slowest stage of 6 s, as in [5, 1]`; for any best cut, the course's best one.

    What is no cut at all is returned as it is.
    """
    whole = isinstance(counts, list | tuple) and all(isinstance(n, Integral) for n in counts)
    if not whole or len(counts) != p or sum(counts) != len(layer_times) or min(counts) < 1:
        return counts
    best = balance_stages(layer_times, p)
    best_s, slowest_s = (max(stage_times(layer_times, cut)) for cut in (best, counts))
    shown, shown_s = (best, best_s) if slowest_s < best_s + 1e-9 else (list(counts), slowest_s)
    return f"a slowest stage of {shown_s:g} s, as in {shown}"


# --- wrong answers that are no edit of the right one


def _equal_counts(layer_times: Times, p: int) -> list[int]:
    fewest, over = divmod(len(layer_times), p)
    return [fewest + (stage < over) for stage in range(p)]


def _greedy(layer_times: Times, p: int) -> list[int]:
    """Fill each stage until it has its share of the time."""
    share, counts, filled = sum(layer_times) / p, [0], 0.0
    for number, time_s in enumerate(layer_times):
        left = len(layer_times) - number
        full = counts[-1] > 0 and filled + time_s > share and len(counts) < p
        if full or (counts[-1] > 0 and left == p - len(counts)):
            counts.append(0)
            filled = 0.0
        counts[-1] += 1
        filled += time_s
    return counts


def _nearest_shares(layer_times: Times, p: int) -> list[int]:
    """Cut where the time so far comes nearest to 1/p, 2/p and so on of the whole."""
    until_s, cut = [0.0, *accumulate(layer_times)], [0]
    for stage in range(1, p):
        share_s, still_free = until_s[-1] * stage / p, range(cut[-1] + 1, len(layer_times))
        cut.append(min(still_free, key=lambda at: abs(until_s[at] - share_s)))
    return [end - start for start, end in pairwise((*cut, len(layer_times)))]


BEST = "best = min(cuts, key=lambda cut: max(sum(layer_times[i:j]) for i, j in cut))"
SUMS = "sum(layer_times[i:j]) for i, j in cut"
RETURNS = "[j - i for i, j in best]"
COUNTS = "n = len(layer_times)"
CALLERS = Cause("The list of times is the caller's: sort or cut a copy, if at all.")

BALANCE = Exercise(
    key="pipeline-4",
    title="cut the layers into stages",
    check=Cases(
        cases=_cases,
        show=_cut,
        unchanged=CALLERS,
        look=(
            "Need p whole numbers of 1 or more that add up to all layers. Compare the cut with "
            "all others, by the time of the slowest stage."
        ),
        success="The slowest stage is as fast as it can be, in all nine cases.",
    ),
    wrong=(
        Own(
            _equal_counts,
            Cause("That is the same number of layers per stage: what counts is their time."),
        ),
        Own(
            _greedy,
            Cause(
                "Each stage is filled up to an equal share from the left, and the last gets the "
                "rest. Compare all cuts by their slowest stage."
            ),
        ),
        Own(
            _nearest_shares,
            Cause(
                "Each cut is where the time so far is nearest to an equal share, but a stage can "
                "still be too slow. Compare all cuts."
            ),
        ),
        Edit(
            BEST,
            f"best = max(cuts, key=lambda cut: min({SUMS}))",
            Cause("That makes the fastest stage as slow as possible: minimize the slowest one."),
        ),
        Edit(
            f"max({SUMS})",
            f"max(times := [{SUMS}]) - min(times)",
            Cause("That makes all stages as equal as possible, but only the slowest one counts."),
        ),
        Edit(
            BEST,
            "best = cuts[0]",
            Cause(
                "That is the first of all cuts, whatever the times: is the key of min the slowest "
                "stage?"
            ),
        ),
        Edit(
            RETURNS,
            "[j for _, j in best][:-1]",
            Cause(
                "These are the places to cut: add 0 and n, and count the layers between two places."
            ),
        ),
        Edit(
            RETURNS,
            "[j for _, j in best]",
            Cause("These are the places where stages end: how many layers has each?"),
        ),
        Edit(COUNTS, f"{COUNTS} - 1", Cause("A layer is missing: the last one?")),
        Edit(
            RETURNS,
            "[sum(layer_times[i:j]) for i, j in best]",
            Cause("These are the stages' times: how many layers has each?"),
        ),
        Edit(
            "range(1, n)",
            "range(n)",
            Cause("A stage has no layers: a cut at place 0 is none. No stage may be empty."),
        ),
        Edit(
            COUNTS,
            f"{COUNTS}\nlayer_times.sort()",
            CALLERS,
        ),
    ),
)
