"""The 1,657 benchmark runs behind the Ultra-Scale Playbook: 1B and 8B models on 8 to 512 H100s.

Each run is a row of `published/ultrascale.csv`: how it splits the model and the batch, and what it
reached. Source: Tazi et al. 2025, The Ultra-Scale Playbook. Lesson 13_scaling_study.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from course_lib.core.errors import CourseError
from course_lib.core.parallelism import Parallelism
from course_lib.core.units import GIB
from course_lib.cost.published import rows
from course_lib.planner.cluster import find_cluster
from course_lib.planner.plan import Plan
from course_lib.planner.predicting import predict
from course_lib.planner.published_runs import NANOTRON
from course_lib.scaling_study.amdahl import StrongScaling

BATCH = 256  # sequences of nearly all runs
GPUS_PER_NODE = 8
SOURCE = "Tazi et al. 2025, The Ultra-Scale Playbook, benchmark runs (sequences of 4,096 tokens)"


@dataclass(frozen=True, kw_only=True)
class PlaybookRun:
    """One run of the benchmark; `tokens_per_s_per_gpu` is 0 if the run has no throughput.

    micro_batch, batch   sequences per forward pass of a replica, and per step of all replicas
    """

    model: str
    nodes: int
    dp: int
    tp: int
    pp: int
    zero: int
    micro_batch: int
    num_micro_batches: int
    failed: bool
    tokens_per_s_per_gpu: float
    memory_bytes: float
    seq: int = 4096

    @property
    def batch(self) -> int:
        """Sequences of a step."""
        return self.dp * self.micro_batch * self.num_micro_batches

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        rate = self.tokens_per_s_per_gpu * GPUS_PER_NODE * self.nodes
        return self.batch * self.seq / rate

    @property
    def tokens_per_s_per_replica(self) -> float:
        """Throughput of one copy of the model, which has tp * pp GPUs."""
        return self.tokens_per_s_per_gpu * self.tp * self.pp

    @property
    def layout(self) -> tuple[str, int, int, int, int]:
        """All that stays the same when data parallelism adds nodes."""
        return self.model, self.tp, self.pp, self.zero, self.micro_batch


@cache
def playbook_runs() -> tuple[PlaybookRun, ...]:
    """Return all runs of the table, failed ones too."""
    return tuple(
        PlaybookRun(
            model=row["model"],
            **{name: int(row[name]) for name in ("nodes", "dp", "tp", "pp", "zero")},
            micro_batch=int(row["mbs"]),
            num_micro_batches=int(row["grad_acc"]),
            failed=row["status"] != "ok",
            tokens_per_s_per_gpu=float(row["tok_s_gpu"] or 0),
            memory_bytes=float(row["gpu_mem_gb"] or 0) * GIB,
        )
        for row in rows("ultrascale")
    )


def measured_runs() -> list[PlaybookRun]:
    """Return the runs of 256 sequences that have a throughput, the slower of repetitions too."""
    return [run for run in playbook_runs() if run.tokens_per_s_per_gpu and run.batch == BATCH]


@cache
def all_series() -> Mapping[tuple[str, int, int, int, int], Mapping[int, PlaybookRun]]:
    """Return the runs by layout and then by nodes: the faster one where a run was repeated."""
    found: dict[tuple[str, int, int, int, int], dict[int, PlaybookRun]] = defaultdict(dict)
    for run in sorted(measured_runs(), key=lambda run: (run.nodes, run.tokens_per_s_per_gpu)):
        found[run.layout][run.nodes] = run
    return found


def series(
    model: str, *, tp: int = 1, pp: int = 1, zero: int = 0, micro_batch: int = 1
) -> Mapping[int, PlaybookRun]:
    """Return the runs of one layout by their number of nodes.

    Raises: CourseError where there are none
    """
    found = all_series().get((model, tp, pp, zero, micro_batch))
    if not found:
        raise CourseError(
            f"series: need a layout of the table; got {model}, tp={tp}, pp={pp}, zero={zero}, "
            f"micro_batch={micro_batch}. Try series('1B') or series('8B', tp=4)."
        )
    return found


def efficiencies(runs: Sequence[PlaybookRun]) -> list[float]:
    """Return the efficiency of each run in per cent: n0 T0 / (n T).

    n0, T0 belong to the fastest of the runs on the fewest nodes with the same work (model, batch
    and sequence).
    """
    by_work = defaultdict(list)
    for run in runs:
        by_work[run.model, run.batch, run.seq].append(run)
    base = {
        work: min(same, key=lambda run: (run.nodes, run.step_s)) for work, same in by_work.items()
    }
    node_s = {work: one.nodes * one.step_s for work, one in base.items()}
    return [100 * node_s[run.model, run.batch, run.seq] / (run.nodes * run.step_s) for run in runs]


def fit(runs: Mapping[int, PlaybookRun], few: int, many: int) -> StrongScaling:
    """Return the law of Amdahl through the runs on `few` and on `many` nodes, per node.

    T_n = fixed_s + shared_s / n; two equations have one solution.
    """
    few_s, many_s = runs[few].step_s, runs[many].step_s
    shared_s = (few_s - many_s) / (1 / few - 1 / many)
    return StrongScaling(fixed_s=few_s - shared_s / few, shared_s=shared_s)


def zero_ratios(model: str, nodes: int) -> list[float]:
    """Return throughput with ZeRO-1 divided by that without, for pairs that differ in nothing else.

    Only layouts without pipeline parallelism.
    """
    pairs = [
        (found.get(nodes), all_series().get((name, tp, pp, 1, micro_batch), {}).get(nodes))
        for (name, tp, pp, zero, micro_batch), found in all_series().items()
        if (name, pp, zero) == (model, 1, 0)
    ]
    return [
        with_it.tokens_per_s_per_gpu / plain.tokens_per_s_per_gpu
        for plain, with_it in pairs
        if plain and with_it and plain.dp > 1
    ]


def outliers(times: float = 2.0) -> tuple[list[PlaybookRun], int]:
    """Return runs at least `times` slower per GPU than both neighbors, and how many have two.

    The neighbors have the same layout, on half and on twice the nodes.
    """
    inner = [
        (run, (found[nodes // 2], found[2 * nodes]))
        for found in all_series().values()
        for nodes, run in found.items()
        if nodes > 1 and {nodes // 2, 2 * nodes} <= found.keys()
    ]
    slow = [run for run, beside in inner if times * _rate(run) < min(map(_rate, beside))]
    return slow, len(inner)


def verdicts(runs: Iterable[PlaybookRun]) -> dict[str, int]:
    """Return the numbers of runs by what the cost model of lesson 12 says of their memory."""
    found = dict.fromkeys(("more stages than layers", "above 80 GiB", "should fit"), 0)
    for run in runs:
        found[_verdict(run)] += 1
    return found


def _rate(run: PlaybookRun) -> float:
    return run.tokens_per_s_per_gpu


def _verdict(run: PlaybookRun) -> str:
    model = NANOTRON[run.model]
    if run.pp > model.num_layers:
        return "more stages than layers"
    plan = Plan(
        parallelism=Parallelism(
            dp=run.dp, tp=run.tp, pp=run.pp, zero=run.zero, sequence_parallel=run.tp > 1
        ),
        micro_batch=run.micro_batch,
        num_micro_batches=run.num_micro_batches,
    )
    told = predict(model, find_cluster("hf-h100", run.nodes), plan)
    return "above 80 GiB" if told.memory_bytes > 80 * GIB else "should fit"
