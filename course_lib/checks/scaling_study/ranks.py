"""Exercise 1 of 13_scaling_study, with its mistakes: the totals of all ranks of a run."""

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from course_lib.checks.exercise import Exercise
from course_lib.checks.scaling_study.parts import Wrong, expect_numbers
from course_lib.core import RunRecord

Records = Sequence[RunRecord]
Case = tuple[Records, int, int, int]  # records, tp, pp, warmup


def experiment_of(records: Records, tp: int, pp: int, warmup: int) -> dict[str, float]:
    """Aggregate the records of a run: the right answer."""
    means, peaks = _means(records, warmup), _peaks(records)
    return {
        "time_s": max(_times(records, warmup)),
        "num_tokens": _counted(records, tp, pp, warmup),
        "mean_bytes": fmean(means),
        "sum_bytes": sum(means),
        "peak_bytes": max(peaks),
    }


def _times(records: Records, warmup: int) -> list[float]:
    return [sum(s["end_s"] - s["start_s"] for s in one.steps[warmup:]) for one in records]


def _across_clocks(records: Records, warmup: int) -> float:
    ends = [one.steps[-1]["end_s"] for one in records]
    return float(max(ends) - min(one.steps[warmup]["start_s"] for one in records))


def _tokens(records: Records, warmup: int) -> list[int]:
    return [sum(step["num_tokens"] for step in one.steps[warmup:]) for one in records]


def _means(records: Records, warmup: int) -> list[float]:
    return [fmean(step["memory_bytes"] for step in one.steps[warmup:]) for one in records]


def _peaks(records: Records) -> list[int]:
    return [one.run["memory"]["peak"] for one in records]


def _counted(records: Records, tp: int, pp: int, warmup: int) -> int:
    """Count of each copy the last stage, of that the rank which counted most."""
    tokens, one_copy = _tokens(records, warmup), tp * pp
    ends = range(one_copy, len(tokens) + 1, one_copy)
    return sum(max(tokens[end - tp : end]) for end in ends)


# --- planted mistakes, which are also what the check compares a wrong answer with

AT = "The slowest rank decides when a step is over: take the longest time"
WRONG = (
    Wrong("mean time", "time_s", lambda r, tp, pp, w: fmean(_times(r, w)),
          f"{AT}, not the mean of the ranks."),
    Wrong("times added", "time_s", lambda r, tp, pp, w: sum(_times(r, w)),
          "Ranks work at the same time: their times do not add up. Take the longest."),
    Wrong("first rank's time", "time_s", lambda r, tp, pp, w: _times(r, w)[0],
          "That is rank 0's time, and another rank may be slower: take the longest."),
    Wrong("shortest time", "time_s", lambda r, tp, pp, w: min(_times(r, w)),
          "The fastest rank waits for the others: take the longest time."),
    Wrong("warm-up kept", "time_s", lambda r, tp, pp, w: max(_times(r, 0)),
          "The warm-up is still in it: the first steps are slow, leave `warmup` of them out."),
    Wrong("a step too many left out", "time_s", lambda r, tp, pp, w: max(_times(r, w + 1)),
          "One step too many is left out: with warmup = 2, the third step counts."),
    Wrong("clocks subtracted", "time_s", lambda r, tp, pp, w: _across_clocks(r, w),
          "Each rank has a clock of its own: add up its steps first, then take the longest."),
    Wrong("slowest of each step", "time_s", lambda r, tp, pp, w: _step_by_step(r, w),
          "Another rank may be the slowest in each step: total each rank, then take the longest."),
    Wrong("all ranks summed", "num_tokens", lambda r, tp, pp, w: sum(_tokens(r, w)),
          "Ranks that share a copy of the model (TP, PP) see the same tokens: count a copy once."),
    Wrong("most of any rank", "num_tokens", lambda r, tp, pp, w: max(_tokens(r, w)),
          "Copies of the model see tokens of their own, under DP and ZeRO: sum over the copies."),
    Wrong("first stage counted", "num_tokens", lambda r, tp, pp, w: _first_stages(r, tp, pp, w),
          "Those are the first stages' tokens: only what has reached the last one is computed."),
    Wrong("most of a copy", "num_tokens", lambda r, tp, pp, w: _most_of_copies(r, tp, pp, w),
          "An earlier stage may count more than has reached the last: look at the last tp ranks."),
    Wrong("first of tp", "num_tokens", lambda r, tp, pp, w: _first_of_tp(r, tp, pp, w),
          "The first of the ranks that share the last stage may count nothing: take the most."),
    Wrong("one of tp", "num_tokens", lambda r, tp, pp, w: _last_ranks(r, tp, pp, w),
          "Under TP not every rank may count: take the most of those that share a stage."),
    Wrong("copies as neighbours", "num_tokens", lambda r, tp, pp, w: _strided(r, tp, pp, w),
          "The ranks of a copy are neighbours: ranks 0 to tp * pp - 1 are the first one."),
    Wrong("tokens with warm-up", "num_tokens", lambda r, tp, pp, w: _counted(r, tp, pp, 0),
          "The warm-up's tokens are in it, but not its time: leave out the same steps of both."),
    Wrong("mean is the sum", "mean_bytes", lambda r, tp, pp, w: sum(_means(r, w)),
          "That is what all ranks hold together: mean_bytes is the mean over the ranks."),
    Wrong("mean with warm-up", "mean_bytes", lambda r, tp, pp, w: fmean(_means(r, 0)),
          "The bytes of the warm-up are in the mean: it begins with less. Leave it out here, too."),
    Wrong("sum of peaks", "sum_bytes", lambda r, tp, pp, w: sum(_peaks(r)),
          "Ranks do not peak at the same moment: sum_bytes adds up the means, not the peaks."),
    Wrong("mean for sum", "sum_bytes", lambda r, tp, pp, w: fmean(_means(r, w)),
          "That is the mean over the ranks: sum_bytes adds up what they hold."),
    Wrong("peaks summed", "peak_bytes", lambda r, tp, pp, w: sum(_peaks(r)),
          "No device holds a sum of peaks: one that runs out ends the run, so take the largest."),
    Wrong("peaks averaged", "peak_bytes", lambda r, tp, pp, w: fmean(_peaks(r)),
          "A mean of peaks fits where the fullest rank does not: take the largest."),
    Wrong("largest of the means", "peak_bytes", lambda r, tp, pp, w: max(_means(r, w)),
          'A mean over steps is no peak: each record has its own, run["memory"]["peak"].'),
    Wrong("peak between steps", "peak_bytes", lambda r, tp, pp, w: _most_between(r),
          'memory_bytes is read after a step, the peak lies within: run["memory"]["peak"].'),
)  # fmt: skip


def _first_stages(records: Records, tp: int, pp: int, warmup: int) -> int:
    tokens, one_copy = _tokens(records, warmup), tp * pp
    return sum(max(tokens[at : at + tp]) for at in range(0, len(tokens), one_copy))


def _last_ranks(records: Records, tp: int, pp: int, warmup: int) -> int:
    return sum(_tokens(records, warmup)[tp * pp - 1 :: tp * pp])


def _step_by_step(records: Records, warmup: int) -> float:
    steps = zip(*(one.steps[warmup:] for one in records), strict=True)
    return sum(max(step["end_s"] - step["start_s"] for step in ranks) for ranks in steps)


def _most_of_copies(records: Records, tp: int, pp: int, warmup: int) -> int:
    tokens, one_copy = _tokens(records, warmup), tp * pp
    return sum(max(tokens[at : at + one_copy]) for at in range(0, len(tokens), one_copy))


def _first_of_tp(records: Records, tp: int, pp: int, warmup: int) -> int:
    return sum(_tokens(records, warmup)[tp * (pp - 1) :: tp * pp])


def _strided(records: Records, tp: int, pp: int, warmup: int) -> int:
    tokens, copies = _tokens(records, warmup), len(records) // (tp * pp)
    return sum(max(tokens[copy::copies][-tp:]) for copy in range(copies))


def _most_between(records: Records) -> int:
    return max(step["memory_bytes"] for one in records for step in one.steps)


# --- the check


def _record(rank: int, tokens: Sequence[int], step_s: float, held: int) -> RunRecord:
    """Return six steps of a rank: the first two are slow, and hold less; one later is its own."""
    steps, now_s = [], 0.5 * rank
    for number in range(6):
        takes_s = step_s * (4 if number == 0 else 2 if number == 1 else 1) + (
            number == 2 + rank % 4
        )
        steps.append(
            {
                "step": number,
                "start_s": now_s,
                "end_s": now_s + takes_s,
                "num_tokens": tokens[rank],
                "memory_bytes": held * (2 + min(number, 3)),
            }
        )
        now_s += takes_s
    run = {"steps": 6, "memory": {"peak": 7 * held}}
    return RunRecord(rank=rank, world_size=len(tokens), run=run, steps=steps)


def _run(*tokens: int) -> Records:
    """Return a record for each number of tokens; rank 1 is the slowest, and holds most."""
    step_s, held = (1.25, 1.75, 1.0, 1.5, 1.1, 1.3), (10, 40, 20, 30, 15, 25)
    return [_record(rank, tokens, step_s[rank], held[rank]) for rank in range(len(tokens))]


CASES: dict[str, Case] = {
    "1 rank": (_run(1000), 1, 1, 2),
    "DP on 3 ranks": (_run(1, 10, 100), 1, 1, 2),
    "PP on 2 ranks": (_run(50, 50), 1, 2, 2),
    "PP on 2 ranks, where the first stage counts nothing": (_run(0, 50), 1, 2, 1),
    "TP on 2 ranks": (_run(70, 70), 2, 1, 2),
    "TP on 2 ranks, where rank 1 counts nothing": (_run(70, 0), 2, 1, 2),
    "TP on 2 ranks, where rank 0 counts nothing, and no warm-up": (_run(0, 70), 2, 1, 0),
    "PP on 2 ranks, where the first stage counts more": (_run(80, 50), 1, 2, 2),
    "TP 3 x PP 2, where one of each three counts": (_run(90, 0, 0, 0, 60, 0), 3, 2, 1),
    "DP 2 x PP 2": (_run(3, 5, 30, 50), 1, 2, 2),
    "DP 2 x TP 2": (_run(5, 5, 50, 50), 2, 1, 1),
    "TP 2 x PP 2": (_run(0, 0, 90, 90), 2, 2, 2),
}


def check_ranks(answer: Any) -> str:
    """Check every way to split, with ranks that differ in time, tokens and bytes."""
    got = [answer(*case) for case in CASES.values()]
    expect_numbers(got, CASES, experiment_of, WRONG)
    return "Time, tokens and bytes of DP, TP, PP and what is between them."


RANKS = Exercise(
    key="scaling_study-1",
    title="from ranks to a run",
    check=check_ranks,
    reference=experiment_of,
    mistakes=tuple(wrong.planted(experiment_of) for wrong in WRONG),
)
