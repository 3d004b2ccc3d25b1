"""Aggregate run records: each rank's steps into totals, all ranks' totals into an experiment.

A step counts in one place, the training loop. Its first quarter is warm-up, in every process that
took part, and is left out. Time is that of the slowest rank; tokens are those of each copy of the
model, once: so they are summed over the ranks of DP and ZeRO, those of the last stage under PP,
and the most of any rank under TP. Lesson 13_scaling_study.
"""

import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from course_lib.core.errors import CourseError
from course_lib.core.plain_values import build
from course_lib.core.records import RunRecord
from course_lib.cost.flops import train_step_flop
from course_lib.scaling_study.machines import check_machine
from course_lib.scaling_study.study_run import RECORDED, StudyRun, run_of

WARMUP = 4  # one step of so many
GOOD, POOR = 80, 70  # per cent of efficiency: about good, and poor below
SHORTEST_S, LONGEST_S = 1e-6, 1e9  # of all steps together; a spoilt file says anything
STEP = {
    "step": int,
    "start_s": float,
    "end_s": float,
    "num_tokens": int,
    "memory_bytes": float | None,
    "utilisation": float | None,
}
STATES = ("params", "grads", "optim_state")


@dataclass(frozen=True, kw_only=True)
class RankTotals:
    """Totals of one rank of a run after the warm-up steps.

    mean_bytes, utilisation   means over the steps; None where nothing was sampled
    held                      bytes by kind, when the last backward had ended
    """

    rank: int
    num_steps: int
    time_s: float
    num_tokens: int
    mean_bytes: float | None = None
    peak_bytes: int | None = None
    utilisation: float | None = None
    held: Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """The aggregated run of all ranks.

    mean_bytes, sum_bytes   mean and sum, over the ranks, of what each held on average
    peak_bytes              the largest peak of any rank
    held                    bytes by kind on the rank that holds most
    losses                  of every step, warm-up too
    machine                 what the first rank ran on
    """

    run: StudyRun
    num_steps: int
    time_s: float
    num_tokens: int
    mean_bytes: float | None = None
    sum_bytes: float | None = None
    peak_bytes: int | None = None
    utilisation: float | None = None
    held: Mapping[str, int]
    losses: tuple[float, ...] = ()
    machine: Mapping[str, Any]

    def __post_init__(self) -> None:
        build(dict[str, int], self.held, "experiment.held")
        check_machine(self.machine)
        memory = (self.mean_bytes, self.sum_bytes, self.peak_bytes, self.utilisation)
        counts = (self.num_steps, self.num_tokens)
        least = min(*counts, *(known for known in memory if known is not None), *self.held.values())
        if least < 0 or not all(counts) or not SHORTEST_S <= self.time_s <= LONGEST_S:
            raise CourseError(
                f"experiment {self.run.name}: need steps, tokens and seconds above 0, and bytes "
                f"from 0; got {counts}, {self.time_s:g} s, and {least:g} as the least."
            )

    @property
    def tokens_per_s(self) -> float:
        """Throughput of all ranks together."""
        return self.num_tokens / self.time_s

    @property
    def step_s(self) -> float:
        """Mean seconds of a step."""
        return self.time_s / self.num_steps

    @property
    def rank_flop_per_s(self) -> float:
        """Model FLOP per second of one rank, without recomputation."""
        run = self.run
        step_flop = train_step_flop(run.spec, run.global_batch, run.seq)
        return step_flop / self.step_s / run.ranks


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """An experiment compared with the run of one rank on the same model and batch.

    speed_up             how many times as many tokens a second
    efficiency_percent   that speed-up in per cent of the number of ranks
    *_memory_factor      mean, sum and peak of the bytes, as multiples of the one rank's
    """

    speed_up: float
    efficiency_percent: float
    mean_memory_factor: float | None
    sum_memory_factor: float | None
    peak_memory_factor: float | None


def rank_totals(records: Sequence[RunRecord]) -> RankTotals:
    """Return the totals of one rank from its records, one for each process of the run.

    Raises: CourseError where no step is left after the warm-up
    """
    last = max(records, key=lambda record: record.steps[-1]["step"] if record.steps else -1)
    warmup = last.run["steps"] // WARMUP
    steps = [step for record in records for step in record.steps[warmup:]]
    if not steps:
        raise CourseError(
            f"rank {last.rank}: need a step after {warmup} of warm-up; got none. Try more steps."
        )
    held = build(dict[str, int], last.run.get("memory", {}), f"rank {last.rank}, memory")
    return RankTotals(
        rank=last.rank,
        num_steps=len(steps),
        time_s=sum(step["end_s"] - step["start_s"] for step in steps),
        num_tokens=sum(step["num_tokens"] for step in steps),
        mean_bytes=_mean(step.get("memory_bytes") for step in steps),
        peak_bytes=held.pop("peak", None),
        utilisation=_mean(step.get("utilisation") for step in steps),
        held=held,
    )


def aggregate(records: Sequence[RunRecord]) -> Experiment:
    """Return the experiment of one run from the records of all its ranks.

    Raises: CourseError for records that are not those of one whole run
    """
    by_rank = _by_rank(records)
    run = run_of(by_rank[0][-1])
    totals = [rank_totals(by_rank[rank]) for rank in range(run.ranks)]
    steps = [step for record in by_rank[0] for step in record.steps]
    return Experiment(
        run=run,
        num_steps=min(total.num_steps for total in totals),
        time_s=max(total.time_s for total in totals),
        num_tokens=count_tokens(totals, run.tp, run.pp),
        mean_bytes=_mean(total.mean_bytes for total in totals),
        sum_bytes=_over(sum, (total.mean_bytes for total in totals)),
        peak_bytes=_over(max, (total.peak_bytes for total in totals)),
        utilisation=_mean(total.utilisation for total in totals),
        held=max((total.held for total in totals), key=lambda held: sum(held.values())),
        losses=tuple(step["loss"] for step in steps if "loss" in step),
        machine=by_rank[0][-1].machine,
    )


def count_tokens(totals: Sequence[RankTotals], tp: int = 1, pp: int = 1) -> int:
    """Count the tokens of a run: of each copy those of its last stage, once for all of tp.

    The ranks are counted with tp innermost, then pp. So DP and ZeRO sum over all ranks, PP takes
    the last stage's number, and TP the largest.
    """
    one_copy = tp * pp
    last_stages = [
        totals[first + one_copy - tp : first + one_copy]
        for first in range(0, len(totals), one_copy)
    ]
    return sum(max(total.num_tokens for total in stage) for stage in last_stages)


def against(experiment: Experiment, baseline: Experiment) -> Comparison:
    """Compare an experiment with the run of one rank; a step of both is the same batch."""
    factor = experiment.tokens_per_s / baseline.tokens_per_s
    return Comparison(
        speed_up=factor,
        efficiency_percent=factor / experiment.run.ranks * 100,
        mean_memory_factor=_ratio(experiment.mean_bytes, baseline.mean_bytes),
        sum_memory_factor=_ratio(experiment.sum_bytes, baseline.sum_bytes),
        peak_memory_factor=_ratio(experiment.peak_bytes, baseline.peak_bytes),
    )


def find_baseline(run: StudyRun, among: Iterable[Experiment]) -> Experiment | None:
    """Return the one-rank run with the same model, batch and accumulation; None without one.

    A pipeline cuts its batch anyway: it is compared with the whole batch at once.
    """
    alone = (one for one in among if one.run.ranks == 1 and one.run.strategy == "single")
    return next((one for one in alone if one.run.work == run.work), None)


def read_experiments(folder: str | Path) -> tuple[list[Experiment], dict[str, str]]:
    """Read every complete run below a folder; and why the others are left out, by folder."""
    found, left_out = [], {}
    for inside in sorted({path.parent for path in Path(folder).rglob("rank*.jsonl")}):
        try:
            found.append(read_experiment(inside))
        except CourseError as problem:
            left_out[str(inside)] = str(problem)
    return found, left_out


def read_experiment(folder: Path) -> Experiment:
    """Read the run whose records are in this folder.

    Raises: CourseError where a rank, a step or the folder is missing
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a line that was cut short is a step that is missing
        return aggregate([RunRecord.read(path) for path in sorted(folder.glob("rank*.jsonl"))])


def _check_steps(record: RunRecord) -> None:
    """Check that the steps of a record are numbers. Raises: CourseError"""
    for step in record.steps:
        for name, kind in STEP.items():
            build(kind, step.get(name), f"rank {record.rank}, a step's {name}")
        loss = step.get("loss", 0.0)
        if not isinstance(loss, float):  # which may be nan: a run that diverged
            build(float, loss, f"rank {record.rank}, a step's loss")


def _by_rank(records: Sequence[RunRecord]) -> dict[int, list[RunRecord]]:
    """Return the records of each rank in the order of their steps.

    Raises: CourseError unless every rank has every step once
    """
    found: dict[int, list[RunRecord]] = defaultdict(list)
    for record in records:
        found[record.rank].append(record)
    sizes = {record.world_size for record in records}
    if len(sizes) != 1 or {len(found)} != sizes or min(found) < 0 or max(found) >= len(found):
        raise CourseError(
            f"records: need one of each of {' or '.join(map(str, sorted(sizes)))} ranks; got "
            f"those of {len(found)} ranks. The run has not ended, or others are mixed in."
        )
    for rank, mine in found.items():
        if not mine[0].run.keys() >= {*RECORDED, "model"}:
            raise CourseError("records: need those of course_lib.train; got another program's.")
        for record in mine:
            _check_steps(record)
        mine.sort(key=lambda record: record.steps[0]["step"] if record.steps else -1)
        steps = [step["step"] for record in mine for step in record.steps]
        if steps != list(range(len(steps))) or len(steps) != mine[-1].run["steps"]:
            raise CourseError(
                f"rank {rank}: need {mine[-1].run['steps']} steps, each once; got {len(steps)} "
                "lines. The run has not ended, or others are mixed in."
            )
    return found


def _mean(values: Iterable[float | None]) -> float | None:
    return _over(fmean, values)


def _over(reduce: Any, values: Iterable[Any]) -> Any:
    """Reduce the values; None where one of them is not known."""
    known = list(values)
    return None if None in known else reduce(known)


def _ratio(one: float | None, other: float | None) -> float | None:
    return one / other if one is not None and other else None
