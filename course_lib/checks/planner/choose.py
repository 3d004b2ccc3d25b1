"""Exercise 5 of 12_planner: choose a plan for any cluster."""

from collections.abc import Sequence
from functools import cache
from typing import Any

from course_lib.checks.cases import Case, Cases, Raised
from course_lib.checks.edits import Edit
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
SLOW = Cause("Try more axes, micro-batches, stages, and sequence_parallel: compare their step_s.")
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


SIZES, STAGES = "(*sizes, 16)", "(0, 1, 3)"
HALF = ("!= cluster.num_gpus", "!= cluster.num_gpus // 2")
CHOICES, PLAN = f"product(sizes, {SIZES}, sizes, {STAGES}", "return best.plan"

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
        Edit(PLAN, 'return "fsdp"', NO_PLAN),
        Edit(PLAN, "return Plan(seq=seq).with_axes(pp=2 * cluster.num_gpus)", INVALID),
        Edit("cluster.num_gpus //", "cluster.num_gpus // 2 //", IDLE, also=(HALF,)),
        Edit(PLAN, "return Plan(seq=seq).with_axes(dp=cluster.num_gpus, zero=3)", BATCH),
        Edit("num * dp * micro_batch != batch", "num < 1", BATCH),
        Edit("seq=seq", "seq=seq // 2", SEQ),
        Edit("step.fits", "step.memory_bytes <= cluster.device.memory_bytes", TOO_LARGE),
        Edit("if step.fits and", "if", TOO_LARGE),
        Edit(CHOICES, CHOICES.replace("sizes", "(1,)", 1), NOTHING_FITS),
        Edit('("none", "full")', '("none",)', NOTHING_FITS),
        Edit(SIZES, "(1,)", SLOW),
        Edit(STAGES, "(0,)", SLOW),
        Edit("sequence_parallel=tp > 1", "sequence_parallel=False", SLOW),
        Edit("step.step_s < best.step_s", "step.step_s > best.step_s", SLOW),
    ),
)
