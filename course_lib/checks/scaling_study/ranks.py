"""Exercise 1 of 13_scaling_study: the totals of all ranks of a run."""

from collections.abc import Mapping, Sequence
from math import isclose
from numbers import Real
from typing import Any

from course_lib.checks.cases import TOO_NARROW, Case
from course_lib.checks.edits import Edit
from course_lib.checks.exercise import Cause, Exercise, failed
from course_lib.checks.scaling_study.parts import CHANGED, Part, Parts
from course_lib.core import RunRecord

STEP_S = (1.27, 1.77, 1.0, 1.5, 1.1, 1.3, 1.2, 1.6)  # rank 1 is the slowest,
HELD = (10, 40, 20, 30, 15, 25, 35, 5)  # and holds most
LOADING_S = 20  # what the last rank needs for its first step besides
PAUSE_S = 0.3  # between two steps


def _run(
    *tokens: int, steps: int = 6, more: int = 0, unit: int = 1, clock_s: int = 0, scale: float = 1
) -> list[RunRecord]:
    """Return a record of each rank, which counts so many tokens in every other step.

    The first two steps are slow, and hold less; one of the later ones is slow on this rank only.
    The last rank has `more` steps than the others. Bytes are multiples of `unit`; the clocks begin
    at about `clock_s`, and each step takes `scale` times as long.
    """
    records = []
    for rank, count in enumerate(tokens):
        lines, now_s = list[dict[str, Any]](), clock_s + 0.5 * rank
        for number in range(steps + more * (rank == len(tokens) - 1)):
            slow = 4 if number == 0 else 2 if number == 1 else 1
            takes_s = STEP_S[rank] * slow + (number == 2 + rank % 4)
            takes_s += LOADING_S * (number == 0 and rank == len(tokens) - 1)
            takes_s *= scale
            lines.append(
                {
                    "step": number,
                    "start_s": now_s,
                    "end_s": now_s + takes_s,
                    "num_tokens": count * (1 + number % 2),
                    "memory_bytes": unit * HELD[rank] * (2 + min(number, 3)),
                }
            )
            now_s += takes_s + PAUSE_S
        run = {"steps": len(lines), "memory": {"peak": unit * 7 * HELD[rank]}}
        records.append(RunRecord(rank=rank, world_size=len(tokens), run=run, steps=lines))
    return records


def _cases() -> list[Case]:
    """Return every way to split: records, tp, pp, warm-up."""
    return [
        ("1 rank", (_run(1000), 1, 1, 2)),
        ("1 rank, 1 step", (_run(1000, steps=1), 1, 1, 0)),
        ("DP on 3 ranks", (_run(1, 10, 100), 1, 1, 2)),
        ("DP on 2 ranks, 4 of 9 steps are warm-up", (_run(7, 20, steps=9), 1, 1, 4)),
        ("PP on 2 ranks", (_run(50, 50), 1, 2, 2)),
        ("PP on 2 ranks, where the first stage counts nothing", (_run(0, 50), 1, 2, 1)),
        ("TP on 2 ranks", (_run(70, 70), 2, 1, 2)),
        ("TP on 2 ranks, where rank 1 counts nothing", (_run(70, 0), 2, 1, 2)),
        ("TP on 2 ranks, where rank 0 counts nothing, and no warm-up", (_run(0, 70), 2, 1, 0)),
        ("TP on 3 ranks, where rank 1 counts most", (_run(30, 70, 20), 3, 1, 2)),
        ("PP on 2 ranks, where the first stage counts more", (_run(80, 50), 1, 2, 2)),
        ("PP on 3 ranks, where the second stage counts most", (_run(80, 90, 50), 1, 3, 2)),
        ("TP 3 x PP 2, where one of each three counts", (_run(90, 0, 0, 0, 60, 0), 3, 2, 1)),
        ("DP 2 x PP 2", (_run(3, 5, 30, 50), 1, 2, 2)),
        ("DP 2 x TP 2", (_run(5, 5, 50, 50), 2, 1, 1)),
        ("TP 2 x PP 2", (_run(0, 0, 90, 90), 2, 2, 2)),
        ("DP 2 x TP 2 x PP 2", (_run(8, 0, 0, 7, 9, 0, 60, 0), 2, 2, 2)),
        ("DP on 2 ranks, with a step more on rank 1", (_run(5, 60, more=1), 1, 1, 2)),
        ("TP on 2 ranks, with a step more on rank 1", (_run(70, 70, more=1), 2, 1, 2)),
        ("DP on 3 ranks, steps of about a millisecond", (_run(1, 2, 3, scale=1e-3 / 3), 1, 1, 2)),
        (
            "DP on 2 ranks, which hold GiB, a day after they were started",
            (_run(2**20, 2**20 + 1, unit=2**29 + 1, clock_s=86_400), 1, 1, 2),
        ),
    ]


def _nearly(got: Sequence[Any], need: Sequence[Any]) -> bool:
    """Return whether the times of all cases are off by little."""
    return all(
        isinstance(one, dict) and isclose(one["time_s"], right["time_s"], abs_tol=0.06)
        for one, right in zip(got, need, strict=True)
    )


DIGITS_LOST = Cause(
    "Nearly right. Was something rounded, or kept in float32, which keeps 7 of "
    "them (of a clock at 86,400 s, hundredths)? Return all digits, and round where you print."
)
PARTS = {
    "time_s": Part(
        unit=" s",
        symptoms=((_nearly, DIGITS_LOST),),
        look="For each rank, add up end_s - start_s of the steps after the warm-up. Which rank's "
        "sum counts?",
    ),
    "num_tokens": Part(
        unit=" tokens",
        look="Cut the ranks into copies of tp * pp neighbours. Of each copy, look at the last tp "
        "ranks only, and there take the largest number; then add up the copies.",
    ),
    "mean_bytes": Part(
        unit=" bytes",
        look="For each rank, the mean of memory_bytes over the steps after the warm-up; then the "
        "mean of these over the ranks.",
    ),
    "sum_bytes": Part(
        unit=" bytes",
        look="For each rank, the mean of memory_bytes over the steps after the warm-up; then the "
        "sum of these over the ranks.",
    ),
    "peak_bytes": Part(
        unit=" bytes", look='The largest run["memory"]["peak"] of all records, and nothing else.'
    ),
}
NUMBERS = Cause("Return a dictionary with these five names, each for one number.")


def _five_numbers(result: Any, *_case: Any) -> dict[str, Any]:
    if not isinstance(result, Mapping) or not set(PARTS) <= set(result):
        raise failed(f"need a dictionary with {', '.join(PARTS)}; got {result!r}", NUMBERS)
    for name in PARTS:
        if isinstance(result[name], bool) or not isinstance(result[name], Real):
            raise failed(f"need a number as {name}; got {result[name]!r}", NUMBERS)
    numbers = {name: result[name] for name in PARTS}
    return {name: n.item() if hasattr(n, "item") else n for name, n in numbers.items()}  # NumPy's


AT = "The slowest rank decides when a step is over: take the longest time"
SHARED = Cause(
    "Ranks that share a copy of the model (TP, PP) see the same tokens: count a copy once."
)
SOME_COUNT = Cause(
    "Divided as if all ranks of a copy counted alike: some count nothing. Take the largest number "
    "of the last tp ranks of each copy."
)
SLOWEST, TIMES = '"time_s": max(times)', '["start_s"] for step in mine) for mine in steps'
TOKENS = "sum(max(tokens[end - tp : end]) for end in ends)"
COUNTS, EACH = '["num_tokens"] for step in mine) for mine in steps', "/ len(mine) for mine in steps"
MEAN, SUM, PEAK = "sum(means) / len(means)", '"sum_bytes": sum(means)', "max(peaks)"
ALL = "(record.steps for record in records)"


def _time(value: str, says: str) -> Edit:
    return Edit(SLOWEST, f'"time_s": {value}', Cause(says))


def _tokens(value: str, cause: Cause | str) -> Edit:
    return Edit(TOKENS, value, Cause(cause) if isinstance(cause, str) else cause)


RANKS = Exercise(
    key="scaling_study-1",
    title="from ranks to a run",
    library=(
        "course_lib.scaling_study.aggregate:aggregate",
        "course_lib.scaling_study.aggregate:rank_totals",
    ),
    check=Parts(
        cases=_cases,
        show=_five_numbers,
        keeps=lambda records, *_: records,
        parts=PARTS,
        success="Time, tokens and bytes of DP, TP, PP and combinations of them.",
    ),
    wrong=(
        _time("sum(times) / len(times)", f"{AT}, not the mean of the ranks."),
        _time(
            "sum(times)",
            "Ranks work at the same time: their times do not add up. Take the longest.",
        ),
        _time(
            "times[0]", "That is rank 0's time, and another rank may be slower: take the longest."
        ),
        _time("min(times)", "The fastest rank waits for the others: take the longest time."),
        _time(
            'max(m[-1]["end_s"] for m in steps) - min(m[0]["start_s"] for m in steps)',
            "Each rank has a clock of its own: add up its steps first, then take the longest.",
        ),
        _time(
            'max(m[-1]["end_s"] - m[0]["start_s"] for m in steps)',
            "What lies between two steps is no step: add up end_s - start_s of each.",
        ),
        _time(
            "max(zip([sum(s['end_s'] - s['start_s'] for s in r.steps) for r in records], times))"
            "[1]",
            "The rank that is slowest with its warm-up need not be so afterwards: leave out the "
            "warm-up first.",
        ),
        _time(
            'sum(max(s["end_s"] - s["start_s"] for s in ranks) for ranks in zip(*steps))',
            "Another rank may be the slowest in each step: total each rank, then take the longest.",
        ),
        Edit(
            TIMES,
            TIMES.replace("steps", ALL),
            Cause(
                "The warm-up is still in it: the first steps are slow, leave `warmup` of them out."
            ),
        ),
        Edit(
            TIMES,
            TIMES.replace("steps", "(record.steps[warmup + 1 :] for record in records)"),
            Cause("One step too many is left out: with warmup = 2, the third step counts."),
        ),
        Edit(SLOWEST, '"time_s": round(max(times), 3)', DIGITS_LOST),
        Edit(
            'step["end_s"] - step["start_s"]',
            'float32(step["end_s"]) - float32(step["start_s"])',
            DIGITS_LOST,
            also=(("steps =", "from numpy import float32\nsteps ="),),
        ),
        _tokens("sum(tokens)", SHARED),
        _tokens("sum(sum(tokens[end - tp : end]) for end in ends)", SHARED),
        _tokens("sum(tokens) / (tp * pp)", SOME_COUNT),
        _tokens("sum(sum(tokens[end - tp : end]) / tp for end in ends)", SOME_COUNT),
        _tokens(
            "max(tokens)",
            "Copies of the model see tokens of their own, under DP and ZeRO: sum over the copies.",
        ),
        Edit(
            TOKENS,
            "sum(max(mine[number]['num_tokens'] for mine in steps[end - tp : end])"
            " for end in ends for number in range(min(map(len, steps))))",
            Cause("Total each rank before you compare: one may have a step more than another."),
        ),
        _tokens(
            "sum(max(tokens[end - tp * pp :][:tp]) for end in ends)",
            "Those are the first stages' tokens: only what has reached the last one is computed.",
        ),
        _tokens(
            "sum(max(tokens[end - tp * pp : end]) for end in ends)",
            "An earlier stage may count more than has reached the last: look at the last tp ranks.",
        ),
        _tokens(
            "sum(tokens[end - tp] for end in ends)",
            "The first of the ranks that share the last stage may count nothing: take the most.",
        ),
        _tokens(
            "sum(tokens[end - 1] for end in ends)",
            "Under TP not every rank may count: take the most of those that share a stage.",
        ),
        _tokens(
            "sum(next((n for n in tokens[end - tp : end] if n), 0) for end in ends)",
            "That is the first of the tp ranks that counts anything: take the largest number.",
        ),
        _tokens(
            "sum(max(tokens[copy :: len(ends)][-tp:]) for copy in range(len(ends)))",
            "The ranks of a copy are neighbours: ranks 0 to tp * pp - 1 are the first one.",
        ),
        Edit(
            COUNTS,
            COUNTS.replace("steps", ALL),
            Cause(
                "The warm-up's tokens are in it, but not its time: leave out the same steps of "
                "both."
            ),
        ),
        Edit(
            'sum(step["num_tokens"] for step in mine)',
            'len(mine) * mine[-1]["num_tokens"]',
            Cause("Not every step has as many tokens as the last one: add up all of them."),
        ),
        Edit(
            MEAN,
            "sum(means)",
            Cause("That is what all ranks hold together: mean_bytes is the mean over the ranks."),
        ),
        Edit(
            MEAN,
            'sum(step["memory_bytes"] for mine in steps for step in mine) / sum(map(len, steps))',
            Cause(
                "A rank with more steps counts more in a mean over all steps: take each rank's "
                "mean first, then the mean of these."
            ),
        ),
        Edit(
            EACH,
            EACH.replace("steps", ALL),
            Cause(
                "The bytes of the warm-up are in the mean: it begins with less. Leave it out here, "
                "too."
            ),
        ),
        Edit('step["memory_bytes"]', '(step["memory_bytes"] + 2**31) % 2**32 - 2**31', TOO_NARROW),
        Edit(
            MEAN,
            "torch.tensor(means).mean().item()",
            TOO_NARROW,
            also=(("steps =", "import torch\nsteps ="),),
        ),
        Edit(EACH, f"/{EACH}", Cause("A mean has decimals: // rounds it down, / does not.")),
        Edit(
            SUM,
            '"sum_bytes": sum(peaks)',
            Cause(
                "Ranks do not peak at the same moment: sum_bytes adds up the means, not the peaks."
            ),
        ),
        Edit(
            SUM,
            '"sum_bytes": sum(means) / len(means)',
            Cause("That is the mean over the ranks: sum_bytes adds up what they hold."),
        ),
        Edit(PEAK, "(max(peaks) + 2**31) % 2**32 - 2**31", TOO_NARROW),
        Edit(
            PEAK,
            "max(map(float32, peaks))",
            TOO_NARROW,
            also=(("steps =", "from numpy import float32\nsteps ="),),
        ),
        Edit(
            PEAK,
            "sum(peaks)",
            Cause(
                "No device holds a sum of peaks: one that runs out ends the run, so take the "
                "largest."
            ),
        ),
        Edit(
            PEAK,
            "sum(peaks) / len(peaks)",
            Cause("A mean of peaks fits where the fullest rank does not: take the largest."),
        ),
        Edit(
            PEAK,
            "max(means)",
            Cause('A mean over steps is no peak: each record has its own, run["memory"]["peak"].'),
        ),
        Edit(
            PEAK,
            'max(step["memory_bytes"] for record in records for step in record.steps)',
            Cause(
                'memory_bytes is read after a step, the peak lies within: run["memory"]["peak"].'
            ),
        ),
        Edit(
            "steps = [record.steps[warmup:]",
            "for record in records:\n    del record.steps[:warmup]\nsteps = [record.steps",
            CHANGED,
        ),
        Edit('"peak_bytes"', '"max_bytes"', NUMBERS),
        Edit(PEAK, "peaks", NUMBERS),
    ),
)
