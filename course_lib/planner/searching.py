"""Search: predict every plan of a model on a cluster, and rank those that fit.

A plan is pruned by its memory before its time is predicted. Closed forms make that cheap: over
10,000 plans per second on one core. Notebook 12_planner.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from course_lib.core.errors import CourseError, MeshError
from course_lib.core.parallelism import ZERO_STAGES, Parallelism
from course_lib.core.specs import ModelSpec
from course_lib.planner.cluster import Cluster
from course_lib.planner.memory import plan_memory
from course_lib.planner.plan import Plan
from course_lib.planner.predicting import predict
from course_lib.planner.prediction import PredictedStep

MOST_CHUNKS = 8  # per rank: more have not been published
LONG = 2**15  # tokens of a sequence from which runs with cp are published
WAYS = ("none", "full")  # of recomputation: fused attention leaves no scores to recompute


@dataclass(frozen=True)
class SearchResult:
    """The result of a search.

    steps       the plans that fit, the fastest first
    num_plans   how many plans are valid, whether they fit or not
    """

    steps: Sequence[PredictedStep]
    num_plans: int

    @property
    def pareto_front(self) -> list[PredictedStep]:
        """The plans that no other one beats in both time and memory, the fastest first."""
        front: list[PredictedStep] = []
        for step in self.steps:
            if not front or step.memory_bytes < front[-1].memory_bytes:
                front.append(step)
        return front

    def best(self, count: int) -> list[PredictedStep]:
        """Return the best plans, ranked again after their schedules are simulated."""
        again = (
            predict(step.model, step.cluster, step.plan, simulated=True)
            for step in self.steps[: 2 * count]
        )
        return sorted(again, key=lambda step: step.step_s)[:count]


def search(
    model: ModelSpec, cluster: Cluster, global_batch: int, *, seq: int = 4096
) -> SearchResult:
    """Return the plans that use all GPUs of a cluster and fit, ranked by their predicted step.

    global_batch   sequences of a step

    Raises:  CourseError where no plan is valid
    """
    found, num_plans = [], 0
    for plan in valid_plans(model, cluster, global_batch, seq):
        num_plans += 1
        if sum(plan_memory(model, plan, cluster.software).values()) <= cluster.usable_bytes:
            found.append(predict(model, cluster, plan))
    if not num_plans:
        raise CourseError(
            f"search: need a batch and a model that {cluster.num_gpus} GPUs can share; got "
            f"{global_batch} sequences and {model.num_layers} layers of {model.name}. Try a batch "
            f"of {cluster.num_gpus} sequences."
        )
    return SearchResult(sorted(found, key=lambda step: step.step_s), num_plans)


def valid_plans(
    model: ModelSpec, cluster: Cluster, global_batch: int, seq: int = 4096
) -> Iterator[Plan]:
    """Yield the plans that use all GPUs: every axis, batch, schedule, stage and recomputation.

    Tensor parallelism stays inside a node, and with it activations are split by tokens, too
    (sequence parallelism), where the sequence allows it. Context parallelism, in zigzag, is tried
    for sequences of LONG tokens or more. Experts are divided over ep, which may
    span nodes, and each is split over the tp ranks or not at all. In a pipeline ZeRO shards the
    optimizer state only, as in Megatron-LM: stages 2 and 3 communicate in every micro-batch.
    """
    for axes in _axes(model, cluster, seq):
        if global_batch % axes.dp:
            continue
        share = global_batch // axes.dp
        for micro_batch in _divisors(share):
            m = share // micro_batch
            schedules = list(_schedules(model, axes.pp, m))
            stages = ZERO_STAGES[: 1 if axes.zero_ranks == 1 else 2 if axes.pp > 1 else None]
            for (schedule, chunks), zero, recompute in product(schedules, stages, WAYS):
                yield Plan(
                    parallelism=replace(axes, zero=zero),
                    schedule=schedule,
                    num_model_chunks=chunks,
                    micro_batch=micro_batch,
                    num_micro_batches=m,
                    seq=seq,
                    recompute=recompute,
                )


def _axes(model: ModelSpec, cluster: Cluster, seq: int) -> Iterator[Parallelism]:
    """Yield the sizes of the axes that multiply to the GPUs and divide the model."""
    for tp in _divisors(cluster.num_gpus):
        if tp > cluster.gpus_per_node or cluster.gpus_per_node % tp:
            continue
        for pp, cp in product(_divisors(others := cluster.num_gpus // tp), repeat=2):
            if others % (pp * cp) or (cp > 1 and (seq < LONG or seq % (2 * cp))):
                continue
            is_split = tp > 1 and seq % (tp * cp) == 0
            dp = others // (pp * cp)
            whole = Parallelism(dp=dp, tp=tp, pp=pp, cp=cp, sequence_parallel=is_split)
            for axes in _with_experts(model, whole):
                if _allows(model, axes):
                    yield axes


def _allows(model: ModelSpec, axes: Parallelism) -> bool:
    """Return whether a model can be split that way."""
    try:
        axes.check(model)
    except MeshError:
        return False
    return model.experts is None or axes.tp == 1 or axes.sequence_parallel


def _with_experts(model: ModelSpec, axes: Parallelism) -> Iterator[Parallelism]:
    """Yield the ways to divide the experts of a layer over the ranks of a stage."""
    if model.experts is None:
        yield axes
        return
    ranks = axes.dp * axes.cp * axes.tp
    for expert_tp in sorted({1, axes.tp}):
        for ep in _divisors(math.gcd(model.experts.count, ranks // expert_tp)):
            yield replace(axes, ep=ep, expert_tp=None if expert_tp == axes.tp else expert_tp)


def _schedules(model: ModelSpec, pp: int, num_micro_batches: int) -> Iterator[tuple[str, int]]:
    """Yield the schedules, and their model chunks per rank."""
    yield "1f1b", 1
    if pp == 1:
        return
    yield "zb-h1", 1
    for chunks in range(2, min(MOST_CHUNKS, model.num_layers // pp) + 1):
        if num_micro_batches % pp == 0 and model.num_layers % (pp * chunks) == 0:
            yield "interleaved", chunks


def _divisors(number: int) -> list[int]:
    low = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return sorted({*low, *(number // n for n in low)})
