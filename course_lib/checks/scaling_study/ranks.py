"""Exercise 1 of 13_scaling_study: the totals of all ranks of a run."""

from collections.abc import Mapping
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
            line = {"step": number, "start_s": now_s, "end_s": now_s + takes_s}
            held = unit * HELD[rank] * (2 + min(number, 3))
            lines.append(line | {"num_tokens": count * (1 + number % 2), "memory_bytes": held})
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


OF_EACH = "For each rank, the mean of memory_bytes over the steps after the warm-up; then the "
PARTS = {
    "time_s": Part("The seconds of each rank's steps after the warm-up: whose sum counts?", " s"),
    "num_tokens": Part("Of each tp * pp ranks, the most of the last tp; add these up.", " tokens"),
    "mean_bytes": Part(f"{OF_EACH}mean of these over the ranks.", " bytes"),
    "sum_bytes": Part(f"{OF_EACH}sum of these over the ranks.", " bytes"),
    "peak_bytes": Part('The largest run["memory"]["peak"] of all, and nothing else.', " bytes"),
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


AT_ONCE = Cause("Ranks work at the same time: their times do not add up. Take the longest.")
MEAN_TIME = Cause("The slowest rank decides when a step is over: take the longest time.")
OWN_CLOCK = Cause("Each rank has a clock of its own: add up its steps, then take the longest time.")
BETWEEN = Cause("What lies between two steps is no step: add up end_s - start_s of each.")
WARMUP = Cause("The warm-up is still in it: the first steps are slow, leave `warmup` of them out.")
ROUNDED = Cause("Return all digits of the clock, and round where you print.")
SHARED = Cause("Ranks that share a copy of the model (TP, PP) see the same tokens: count it once.")
SOME_COUNT = Cause("Divided as if all ranks of a copy counted alike: some count nothing.")
ALL_COPIES = Cause("Copies of the model see tokens of their own: sum over the copies.")
LAST_STAGE = Cause("Only what has reached the last stage is computed: look at the last tp ranks.")
NOT_EVERY = Cause("Under TP not every rank may count: take the most of those that share a stage.")
WARMUP_TOKENS = Cause("The warm-up's tokens are in it, but not its time: leave out both.")
WARMUP_BYTES = Cause("The bytes of the warm-up are in the mean: it begins with less. Leave it out.")
PEAKS = Cause("Ranks do not peak at the same moment: sum_bytes adds up the means, not the peaks.")
LARGEST = Cause("A device that runs out of memory ends the run: take the largest peak of a rank.")
WITHIN = Cause('memory_bytes is read after a step, the peak lies within: run["memory"]["peak"].')

SLOWEST, TIMES = '"time_s": max(times)', '["start_s"] for step in mine) for mine in steps'
TOKENS = "sum(max(tokens[end - tp : end]) for end in ends)"
COUNTS, EACH = '["num_tokens"] for step in mine) for mine in steps', "/ len(mine) for mine in steps"
MEAN, SUM, PEAK = "sum(means) / len(means)", '"sum_bytes": sum(means)', "max(peaks)"
ALL = "(record.steps for record in records)"
SPAN = 'max(m[-1]["end_s"] for m in steps) - min(m[0]["start_s"] for m in steps)'
EVERY_STEP = 'max(step["memory_bytes"] for record in records for step in record.steps)'

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
        unchanged=CHANGED,
        parts=PARTS,
        success="Time, tokens and bytes of DP, TP, PP and combinations of them.",
    ),
    wrong=(
        Edit(SLOWEST, '"time_s": sum(times) / len(times)', MEAN_TIME),
        Edit(SLOWEST, '"time_s": sum(times)', AT_ONCE),
        Edit(SLOWEST, f'"time_s": {SPAN}', OWN_CLOCK),
        Edit(SLOWEST, '"time_s": max(m[-1]["end_s"] - m[0]["start_s"] for m in steps)', BETWEEN),
        Edit(SLOWEST, '"time_s": round(max(times), 3)', ROUNDED),
        Edit(TIMES, TIMES.replace("steps", ALL), WARMUP),
        Edit(TOKENS, "sum(tokens)", SHARED),
        Edit(TOKENS, "sum(tokens) / (tp * pp)", SOME_COUNT),
        Edit(TOKENS, "max(tokens)", ALL_COPIES),
        Edit(TOKENS, "sum(max(tokens[end - tp * pp : end]) for end in ends)", LAST_STAGE),
        Edit(TOKENS, "sum(tokens[end - 1] for end in ends)", NOT_EVERY),
        Edit(COUNTS, COUNTS.replace("steps", ALL), WARMUP_TOKENS),
        Edit(EACH, EACH.replace("steps", ALL), WARMUP_BYTES),
        Edit(
            MEAN,
            "torch.tensor(means).mean().item()",
            TOO_NARROW,
            also=(("steps =", "import torch\nsteps ="),),
        ),
        Edit(SUM, '"sum_bytes": sum(peaks)', PEAKS),
        Edit(PEAK, "sum(peaks)", LARGEST),
        Edit(PEAK, EVERY_STEP, WITHIN),
        Edit(
            "steps = [record.steps[warmup:]",
            "for record in records:\n    del record.steps[:warmup]\nsteps = [record.steps",
            CHANGED,
        ),
        Edit('"peak_bytes"', '"max_bytes"', NUMBERS),
    ),
)
