"""Exercise 4 of 08_pipeline, with its planted mistakes: the number of layers of each stage."""

from collections.abc import Callable, Sequence
from itertools import accumulate, combinations, pairwise
from numbers import Integral
from typing import Any

from course_lib.checks.exercise import CheckFailed, Exercise, Mistake
from course_lib.pipeline.balance import balance_stages, stage_times

Times = Sequence[float]
Answer = Callable[[list[float], int], Any]


def cut_layers(layer_times: Times, p: int) -> list[int]:
    """Return the cut whose slowest stage is the fastest: the right answer."""
    return min(_cuts(len(layer_times), p), key=lambda cut: max(stage_times(layer_times, cut)))


def _cuts(num_layers: int, p: int) -> list[list[int]]:
    """Yield all ways to give each of p stages at least one layer."""
    return [
        [end - start for start, end in pairwise((0, *cut, num_layers))]
        for cut in combinations(range(1, num_layers), p - 1)
    ]


# --- planted mistakes, which are also what the check compares a wrong answer with


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


def _slowest_first(layer_times: Times, p: int) -> list[int]:
    """Deal the layers out, the slowest first: the stages are then not consecutive."""
    loads, counts = [0.0] * p, [0] * p
    for time_s in sorted(layer_times, reverse=True):
        stage = loads.index(min(loads))
        loads[stage] += time_s
        counts[stage] += 1
    return counts


def _fastest_slowest(layer_times: Times, p: int) -> list[int]:
    """Maximize the smallest stage: no rank is idle for long, but one is too slow."""
    return max(_cuts(len(layer_times), p), key=lambda cut: min(stage_times(layer_times, cut)))


def _slowest_slowest(layer_times: Times, p: int) -> list[int]:
    return max(_cuts(len(layer_times), p), key=lambda cut: max(stage_times(layer_times, cut)))


def _most_alike(layer_times: Times, p: int) -> list[int]:
    """Minimize the difference between the slowest stage and the fastest."""

    def spread(cut: list[int]) -> float:
        times_s = stage_times(layer_times, cut)
        return max(times_s) - min(times_s)

    return min(_cuts(len(layer_times), p), key=spread)


def _nearest_shares(layer_times: Times, p: int) -> list[int]:
    """Cut where the time so far comes nearest to 1/p, 2/p and so on of the whole."""
    until_s, cut = [0.0, *accumulate(layer_times)], [0]
    for stage in range(1, p):
        share_s, still_free = until_s[-1] * stage / p, range(cut[-1] + 1, len(layer_times))
        cut.append(min(still_free, key=lambda at: abs(until_s[at] - share_s)))
    return [end - start for start, end in pairwise((*cut, len(layer_times)))]


def _first_cut(layer_times: Times, p: int) -> list[int]:
    return _cuts(len(layer_times), p)[0]


def _places(layer_times: Times, p: int) -> list[int]:
    return _ends(layer_times, p)[:-1]


def _ends(layer_times: Times, p: int) -> list[int]:
    """Return the indices where stages end, not their numbers of layers."""
    counts = cut_layers(layer_times, p)
    return [sum(counts[: stage + 1]) for stage in range(p)]


def _without_the_ends(layer_times: Times, p: int) -> list[int]:
    """Count only the layers between embedding and head."""
    if len(layer_times) - 2 < p:
        return cut_layers(layer_times, p)
    counts = cut_layers(layer_times[1:-1], p)
    return [counts[0] + 1 + (p == 1), *counts[1:-1], *([counts[-1] + 1] if p > 1 else [])]


def _last_layer_left_out(layer_times: Times, p: int) -> list[int]:
    return cut_layers(layer_times[:-1], p) if len(layer_times) > p else [1] * p


def _sums(layer_times: Times, p: int) -> list[float]:
    return stage_times(layer_times, cut_layers(layer_times, p))


def _for_four(layer_times: Times, _p: int) -> list[int]:
    return cut_layers(layer_times, min(4, len(layer_times)))


WRONG: tuple[tuple[str, Callable[..., Any], str], ...] = (
    (
        "equally many layers",
        _equal_counts,
        "That is equally many layers a stage: what counts is their time.",
    ),
    (
        "filled one by one",
        _greedy,
        "Filled up to an equal share from the left, the last stage gets what is left over. "
        "Compare all cuts by their slowest stage.",
    ),
    (
        "not consecutive",
        _slowest_first,
        "The layers were dealt out one by one: a stage is a run of consecutive layers.",
    ),
    (
        "the fastest stage counts",
        _fastest_slowest,
        "That makes the fastest stage as slow as can be: look at the slowest one.",
    ),
    ("max for min", _slowest_slowest, "That is the worst of all cuts: take the least maximum."),
    (
        "the most alike",
        _most_alike,
        "That makes all stages as alike as can be; but only the slowest one counts.",
    ),
    (
        "cut near equal shares",
        _nearest_shares,
        "Cut where the time so far is nearest to an equal share, a stage can still be too slow. "
        "Compare all cuts.",
    ),
    (
        "the first cut",
        _first_cut,
        "That is the first of all cuts, whatever the times: is the key of min the slowest stage?",
    ),
    (
        "the places to cut",
        _places,
        "These are the places to cut: add 0 and n, and count the layers between two places.",
    ),
    ("where they end", _ends, "These are the places where stages end: how many layers has each?"),
    (
        "the ends left out",
        _without_the_ends,
        "The first and the last layer are not weighed: embedding and head take time, too.",
    ),
    ("the last layer missing", _last_layer_left_out, "A layer is missing: the last one?"),
    ("times for numbers", _sums, "These are the stages' times: how many layers has each?"),
    ("for four stages only", _for_four, "Right for 4 stages only: use p."),
)


# --- the check

CASES: tuple[tuple[list[float], int], ...] = (
    ([1.0, 2.0, 2.0, 2.0, 2.0, 5.0], 3),
    ([3.0, 1.0, 1.0, 1.0, 1.0, 1.0, 4.0], 4),
    ([1.0, 2.0, 3.0], 3),
    ([1.0, 2.0, 3.0], 1),
    ([6.0, 1.0, 5.0, 1.0, 4.0, 2.0, 3.0, 3.0], 2),
    ([0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 2.5], 3),
    ([1.0, 6.0, 2.0, 1.0, 3.0], 3),
)


def check_balance(answer: Answer) -> str:
    """Check slow heads, slow embeddings, as many stages as layers, one stage."""
    got = [answer(list(layer_times), p) for layer_times, p in CASES]
    for (layer_times, p), counts in zip(CASES, got, strict=True):
        problem = _problem(counts, layer_times, p)
        if problem:
            layers = ", ".join(f"{time_s:g}" for time_s in layer_times)
            raise CheckFailed(f"layers of {layers} s on {p} stages: {problem} {_why(got)}".rstrip())
    return "The slowest stage is as fast as it can be, whichever layers are slow."


def _problem(counts: Any, layer_times: Times, p: int) -> str:
    """Return what is wrong with an answer, in one sentence; any best cut is right."""
    whole = isinstance(counts, list | tuple) and all(isinstance(n, Integral) for n in counts)
    if not whole or len(counts) != p or sum(counts) != len(layer_times) or min(counts) < 1:
        return (
            f"need {p} whole numbers of 1 or more that make {len(layer_times)} layers; "
            f"got {counts}."
        )
    best, is_now = (
        max(stage_times(layer_times, cut)) for cut in (balance_stages(layer_times, p), list(counts))
    )
    if is_now > best + 1e-9:
        return f"need a slowest stage of {best:g} s; got {list(counts)}, {is_now:g} s."
    return ""


def _why(got: Sequence[Any]) -> str:
    """Return the cause that fits every case."""
    if any(counts is None for counts in got):
        return "Does your function return its result?"
    for _, wrong, says in WRONG:
        if all(list(counts) == wrong(*case) for counts, case in zip(got, CASES, strict=True)):
            return says
    return "Compare your cut with all others, by the time of the slowest stage."


BALANCE = Exercise(
    key="pipeline-4",
    title="cut the layers into stages",
    check=check_balance,
    reference=cut_layers,
    mistakes=tuple(Mistake(name, wrong, says[:40]) for name, wrong, says in WRONG),
)
