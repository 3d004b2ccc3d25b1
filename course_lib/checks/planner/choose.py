"""Exercise 5 of 12_planner: choose a plan for any cluster."""

from collections.abc import Sequence
from functools import cache
from typing import Any

from course_lib.checks.cases import Case, Cases, Raised
from course_lib.checks.edits import Edit, Own
from course_lib.checks.exercise import Cause, Exercise, failed
from course_lib.core import MODELS, CourseError, ModelSpec
from course_lib.planner import Cluster, Plan, find_cluster, predict, search

SLACK = 1.25  # of the best step: a choice by hand need not try every schedule

NO_PLAN = Cause("Need a Plan, as `Plan(...).with_axes(...)` makes.")
INVALID = Cause("predict refuses that plan: read why, and skip such plans.")
TOO_LARGE = Cause("It does not fit: ask `.fits` of what predict returns.")
BATCH = Cause("The batch is another one: dp * micro_batch * num_micro_batches sequences.")
SEQ = Cause("The sequences have another length: Plan(seq=...).")
IDLE = Cause("Some GPUs stay idle: dp * tp * pp is all of them.")
SLOW = Cause(
    "A plan of other axes, micro-batch, ZeRO stage or recomputation is over a quarter faster: "
    "compare each one's step_s. With tp above 1, compare sequence_parallel, too."
)
NOTHING_FITS = Cause(
    "Nothing that you try fits here. TP with sequence_parallel, PP, ZeRO-3, recomputation and "
    "smaller micro-batches reduce memory: try all of them."
)

JOBS = (
    ("llama-8b", "hf-h100", 1, 64, 4096),
    ("llama-1b", "a6000-pcie", 1, 128, 2048),
    ("llama-70b", "hf-h100", 8, 512, 4096),
    ("megatron-22b", "selene-a100", 2, 64, 2048),
    ("llama-8b", "hf-h100", 1, 16, 4096),  # each of these differs from the first in one thing
    ("llama-8b", "hf-h100", 1, 64, 2048),
    ("llama-8b", "hf-h100", 2, 64, 4096),
    ("llama-1b", "hf-h100", 1, 64, 4096),
    ("llama-8b", "selene-a100", 4, 96, 4096),
    ("llama-70b", "selene-a100", 8, 256, 4096),
    ("llama-1b", "hf-h100", 2, 512, 1024),
    # of the next ones, each has a method without which nothing fits, or all is slow
    ("llama-8b", "a6000-pcie", 1, 32, 16384),
    ("llama-1b", "a6000-pcie", 2, 64, 2048),
    ("llama-8b", "hf-h100", 8, 128, 2048),
    ("llama2-13b", "a6000-pcie", 2, 16, 4096),
    ("llama2-13b", "a6000-pcie", 8, 64, 2048),
    ("llama-8b", "a6000-pcie", 8, 64, 16384),
)


def _cases() -> list[Case]:
    found: list[Case] = []
    for model, cluster, nodes, batch, seq in JOBS:
        text = f"{model} on {nodes} nodes of {cluster}, {batch} sequences of {seq}"
        found.append((text, (MODELS[model], find_cluster(cluster, nodes), batch, seq)))
    return found


@cache
def _best_s(model: ModelSpec, cluster: Cluster, batch: int, seq: int) -> float:
    return search(model, cluster, batch, seq=seq).steps[0].step_s


def _judged(plan: Any, model: ModelSpec, cluster: Cluster, batch: int, seq: int) -> str:
    """Return that a plan is near the best. Raises: CheckFailed with what it lacks"""
    if plan is None:
        raise failed("got None", NOTHING_FITS)
    if not isinstance(plan, Plan):
        raise failed(f"got {type(plan).__name__}", NO_PLAN)
    try:
        step = predict(model, cluster, plan)
    except CourseError as error:
        raise failed(f"{plan}: {error}", INVALID) from None
    if plan.seq != seq:
        raise failed(f"{plan}: sequences of {plan.seq} tokens", SEQ)
    if plan.global_batch != batch:
        raise failed(f"{plan}: {plan.global_batch} sequences", BATCH)
    if plan.world_size != cluster.num_gpus:
        raise failed(f"{plan}: {plan.world_size} of {cluster.num_gpus} GPUs", IDLE)
    if not step.fits:
        raise failed(f"{plan}: {step.bound}", TOO_LARGE)
    best_s = _best_s(model, cluster, batch, seq)
    if step.step_s > SLACK * best_s:
        raise failed(f"{plan}: {step.step_s:.2f} s a step; the best one {best_s:.2f} s", SLOW)
    return "near the best"


def _found_none(got: Sequence[Any], _need: Sequence[Any]) -> bool:
    """Return whether an answer took the plan of a best one that there is not."""
    return any(isinstance(one, Raised) and "NoneType" in one.text for one in got)


def _of_axes(cluster: Cluster, batch: int, seq: int, **axes: int) -> Plan:
    """Return the plan with these axes and micro-batches of one; dp is the rest."""
    dp = cluster.num_gpus // (axes.get("tp", 1) * axes.get("pp", 1))
    plan = Plan(seq=seq, num_micro_batches=max(1, batch // dp))
    return plan.with_axes(dp=dp, **axes)


def _only_dp(model: ModelSpec, cluster: Cluster, batch: int, seq: int) -> Plan:
    return _of_axes(cluster, batch, seq)


def _deep(model: ModelSpec, cluster: Cluster, batch: int, seq: int) -> Plan:
    """Return the deepest pipeline, which fits and has few micro-batches for its stages."""
    return _of_axes(cluster, batch, seq, pp=cluster.num_gpus)


def _half(model: ModelSpec, cluster: Cluster, batch: int, seq: int) -> Plan:
    dp = cluster.num_gpus // 2
    return Plan(seq=seq, num_micro_batches=batch // dp).with_axes(dp=dp, zero=3)


def _one_step(model: ModelSpec, cluster: Cluster, batch: int, seq: int) -> Plan:
    return Plan(seq=seq).with_axes(dp=cluster.num_gpus, zero=3)


def _name(model: ModelSpec, cluster: Cluster, batch: int, seq: int) -> str:
    return "fsdp"


def _too_many_stages(model: ModelSpec, cluster: Cluster, batch: int, seq: int) -> Plan:
    return Plan(seq=seq).with_axes(pp=2 * cluster.num_gpus)


def _other_seq(model: ModelSpec, cluster: Cluster, batch: int, seq: int) -> Plan:
    return _of_axes(cluster, 2 * batch, seq // 2, zero=3)


_FIRST: dict[tuple[str, int, int], Plan] = {}


def _of_the_first_batch(model: ModelSpec, cluster: Cluster, batch: int, seq: int) -> Plan:
    """Choose well once for a model, a cluster and a length, whatever the batch is."""
    key = (model.name, cluster.num_gpus, seq)
    if key not in _FIRST:
        _FIRST[key] = search(model, cluster, batch, seq=seq).steps[0].plan
    return _FIRST[key]


CHOOSE = Exercise(
    key="planner-5",
    title="choose for a cluster",
    check=Cases(
        cases=_cases,
        show=_judged,
        look="Return a Plan for every cluster.",
        success="Near the best plan for seventeen jobs.",
        symptoms=((_found_none, NOTHING_FITS),),
    ),
    wrong=(
        Own(_only_dp, TOO_LARGE),
        Own(_half, IDLE),
        Own(_one_step, BATCH),
        Own(_name, NO_PLAN),
        Own(_too_many_stages, INVALID),
        Own(_other_seq, SEQ),
        Own(_deep, SLOW),
        Own(_of_the_first_batch, BATCH),
        Edit("num * dp * micro_batch != batch", "num < 1", BATCH),
        Edit("(*sizes, 16), sizes,", "(*sizes, 16), (1,),", SLOW),
        Edit("product(sizes", "product((1,)", NOTHING_FITS),
        Edit("product(sizes", "product((1, 8)", NOTHING_FITS),
        Edit("(*sizes, 16)", "(1,)", SLOW),
        Edit("(*sizes, 16)", "(1, 2, 4)", SLOW),
        Edit("(0, 1, 3)", "(0,)", SLOW),
        Edit("(0, 1, 3)", "(0, 1)", SLOW),
        Edit("(0, 1, 3)", "(0, 3)", SLOW),
        Edit("(0, 1, 3)", "(1,)", SLOW),
        Edit("(0, 1, 3)", "(3,)", SLOW),
        Edit("sequence_parallel=tp > 1", "sequence_parallel=False", SLOW),
        Edit('("none", "full")', '("none",)', NOTHING_FITS),
        Edit('("none", "full")', '("full",)', SLOW),
        Edit("(*sizes, 16), sizes,", "(*sizes, 16), (1, 2),", SLOW),
        Edit("step.fits", "step.memory_bytes <= cluster.device.memory_bytes", TOO_LARGE),
        Edit("if step.fits and", "if", TOO_LARGE),
        Edit("step.step_s < best.step_s", "step.step_s > best.step_s", SLOW),
    ),
)
