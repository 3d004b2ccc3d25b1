"""Errors of the predictions on published runs: one number a table.

`score_table()` is what `tests/benchmarks/bench_planner.py` prints and docs/planner.md shows.
Errors are relative to the published value. Notebook 12_planner.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import mean, median

from course_lib.cost.published import rows
from course_lib.planner.pipeline_step import StepTimes, pipeline_step
from course_lib.planner.plan import schedule_named
from course_lib.planner.published_runs import PublishedRun, published_runs


@dataclass(frozen=True, kw_only=True)
class Score:
    """The error on one table.

    kind     "mean" or "median" of the absolute errors
    bias     median error with its sign: above 0, too slow or too much
    limit    what the course promises; 0: shown only
    """

    table: str
    kind: str
    count: int
    error: float
    bias: float
    limit: float = 0.0

    @property
    def holds(self) -> bool:
        """Whether the promise is kept."""
        return not self.limit or self.error <= self.limit


def step_errors(runs: Iterable[PublishedRun]) -> list[float]:
    """Return the relative errors of the predicted step times."""
    return [run.predicted().step_s / run.step_s - 1 for run in runs]


def memory_errors(runs: Iterable[PublishedRun]) -> list[float]:
    """Return the relative errors of the predicted memory, of runs where it was published."""
    return [run.predicted().memory_bytes / run.memory_bytes - 1 for run in runs if run.memory_bytes]


def is_efficient(run: PublishedRun) -> bool:
    """Return whether a run has an MFU of 30 % or more, and tensor parallelism within a node."""
    return run.mfu >= 0.3 and run.plan.parallelism.tp <= 8


def regrets(runs: Iterable[PublishedRun]) -> dict[str, float]:
    """Return by group the throughput that is lost by running the plan that is predicted fastest.

    Of the plans that are predicted to fit; plans of one group have the same global batch.
    """
    groups: dict[str, list[PublishedRun]] = {}
    for run in runs:
        groups.setdefault(run.group, []).append(run)
    lost = {}
    for name, some in groups.items():
        fitting = [run for run in some if run.predicted().fits] or some
        choice = min(fitting, key=lambda run: run.predicted().step_s)
        lost[name] = 1 - min(run.step_s for run in some) / choice.step_s
    return lost


def alternatives() -> list[PublishedRun]:
    """Return the Playbook's runs of 256 sequences per step: nine have other batches."""
    return [run for run in published_runs("ultrascale") if run.plan.global_batch == 256]


def zero_bubble_errors() -> list[float]:
    """Return the relative errors of samples/s, from the published T_F, T_B, T_W and T_comm.

    Interleaved 1F1B has two model chunks per rank.

    Source: Qi et al. 2024 (Zero bubble pipeline parallelism), tables 4 and 6
    """
    errors = []
    for row in rows("zero_bubble"):
        if not (row["T_F_ms"] and row["samples_per_gpu_per_s"]):
            continue
        p, m = int(row["stages_p"]), int(row["microbatches_m"])
        forward, backward, weight, message = (
            float(row[name]) / 1e3 for name in ("T_F_ms", "T_B_ms", "T_W_ms", "T_comm_ms")
        )
        times = StepTimes([forward] * p, [backward] * p, [weight] * p, message)
        schedule = schedule_named(row["schedule"])
        step = pipeline_step(schedule, m, times, 2 if schedule == "interleaved" else 1)
        samples_per_s = int(row["micro_batch"]) * m / sum(step) / p
        errors.append(samples_per_s / float(row["samples_per_gpu_per_s"]) - 1)
    return errors


def expert_errors(*, fitted: bool) -> list[float]:
    """Return the relative errors of the step times of models with experts."""
    return step_errors(run for run in published_runs("experts") if run.fitted == fitted)


def score_table() -> list[Score]:
    """Return the scores of all published tables."""
    playbook = published_runs("ultrascale")
    efficient = [run for run in playbook if is_efficient(run)]
    lost = list(regrets(alternatives()).values())
    steps = {name: step_errors(published_runs(name)) for name in ("korthikanti", "sc21", "vtrain")}
    foundry, torchtitan = (step_errors(published_runs(n)) for n in ("llm-foundry", "torchtitan"))
    return [
        _score("Korthikanti 2022, Table 5", steps["korthikanti"], 0.036, kind="mean"),
        _score("Megatron SC21, Table 1", steps["sc21"], 0.07, kind="mean"),
        _score("vTrain, multi-node A100", steps["vtrain"], 0.09),
        _score("Playbook H100, memory", memory_errors(playbook), 0.09),
        _score("Playbook H100, step, MFU >= 30 %, TP <= 8", step_errors(efficient), 0.15),
        _score("Playbook H100, step, all runs", step_errors(playbook)),
        _score("Playbook H100, lost by the first choice", lost, 0.05),
        _score("torchtitan, Llama 3 8B on H100", torchtitan, 0.10),
        _score("llm-foundry, MPT on A100 and H100", foundry, 0.10),
        _score("zero-bubble, samples/s from F, B, W", zero_bubble_errors(), 0.10),
        _score("experts on H100, runs in no fit", expert_errors(fitted=False), 0.20),
        _score("experts on H100, fitted runs", expert_errors(fitted=True), 0.10),
    ]


def _score(
    table: str,
    errors: Sequence[float],
    limit: float = 0.0,
    *,
    kind: str = "median",
) -> Score:
    summary = mean if kind == "mean" else median
    return Score(
        table=table,
        kind=kind,
        count=len(errors),
        error=summary(map(abs, errors)),
        bias=median(errors),
        limit=limit,
    )
