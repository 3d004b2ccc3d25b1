"""A plan's bill and memory, and the best plans of a model on a cluster. Notebook 12_planner."""

import json
import shlex
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from course_lib.core.errors import CourseError
from course_lib.core.live import Bars, Drawing, Live, Table
from course_lib.core.parallelism import ZERO_STAGES, Parallelism
from course_lib.core.presets import MODELS, find_model
from course_lib.core.specs import ModelSpec
from course_lib.core.units import GIB, format_bytes, format_seconds
from course_lib.cost.flops import RECOMPUTE
from course_lib.hub.config import read_values
from course_lib.planner.cluster import cluster_names, find_cluster
from course_lib.planner.notes import legend, plan_notes
from course_lib.planner.plan import Plan
from course_lib.planner.predicting import predict
from course_lib.planner.prediction import CAUSE_NAMES, HEADERS, PredictedStep
from course_lib.planner.searching import SearchResult, search

SIZES = [1, 2, 4, 8, 16, 32]
BATCHES = [2**n for n in range(3, 13)]
CHOICES = ("llama-1b", "llama-8b", "llama-70b", "llama-405b", "megatron-175b", "megatron-530b")
SEEN = 1e-3  # of a step: smaller parts have no row
TOP = 8  # plans of a table


def bill_parts(predicted: PredictedStep) -> dict[str, float]:
    """Return the seconds of the causes that can be seen."""
    least_s = SEEN * predicted.step_s
    return {name: seconds for name, seconds in predicted.seconds.items() if seconds > least_s}


def bill_title(predicted: PredictedStep) -> str:
    """Return a step's seconds, its MFU, and what bounds it."""
    step = f"{format_seconds(predicted.step_s)} per step"
    return f"{step}, MFU {100 * predicted.mfu:.0f} %. {predicted.bound}"


def bill_words(predicted: PredictedStep) -> str:
    """Return the title, and the share of each cause."""
    shares = ", ".join(
        f"{CAUSE_NAMES[name]} {100 * seconds / predicted.step_s:.0f} %"
        for name, seconds in bill_parts(predicted).items()
    )
    return f"{bill_title(predicted)} {shares}"


def bill_where(predicted: PredictedStep) -> str:
    """Return the model, the cluster and the plan."""
    cluster = predicted.cluster
    return (
        f"{predicted.model.name} on {predicted.plan.world_size} x {cluster.device.name} "
        f"({cluster.name}): {predicted.plan}; {predicted.plan.pipeline_words}"
    )


# --- one plan


def step_of_choices(
    spec: ModelSpec,
    cluster: str,
    nodes: int,
    global_batch: int,
    tp: int,
    pp: int,
    zero: int,
    model_chunks: int,
    micro_batch: int,
    recompute: str,
    *,
    seq: int = 4096,
    ep: int = 1,
    expert_tp: int | None = None,
) -> PredictedStep:
    """Return the prediction of a plan that uses all GPUs; dp and the micro-batches follow.

    Raises: CourseError or MeshError for choices that do not go together
    """
    gpus = find_cluster(cluster, nodes)
    dp, rest = divmod(gpus.num_gpus, tp * pp)
    if rest:
        raise CourseError(
            f"plan_explorer: need tp * pp that divides {gpus.num_gpus} GPUs; got {tp} * {pp}. "
            "Try a smaller pp, or more nodes."
        )
    num_micro_batches, rest = divmod(global_batch, dp * micro_batch)
    if rest:
        raise CourseError(
            f"plan_explorer: need a global batch that dp * micro_batch divides; got "
            f"{global_batch}, {dp} * {micro_batch}. Try a larger global batch."
        )
    axes = Parallelism(dp=dp, tp=tp, pp=pp, zero=zero, sequence_parallel=tp > 1)
    if spec.experts is not None:  # no slider has them: they stay as they were at the start
        axes = replace(axes, ep=ep, expert_tp=expert_tp)
    plan = Plan(
        parallelism=axes,
        schedule="interleaved" if model_chunks > 1 else "1f1b",
        num_model_chunks=model_chunks,
        micro_batch=micro_batch,
        num_micro_batches=num_micro_batches,
        seq=seq,
        recompute=recompute,
    )
    return predict(spec, gpus, plan)


def panels_of(predicted: PredictedStep) -> list[Bars]:
    """Return the bill of a step by cause, and the memory of the fullest rank by kind."""
    usable = predicted.cluster.usable_bytes / GIB
    bill = {CAUSE_NAMES[name]: {name: s} for name, s in bill_parts(predicted).items()}
    held = {kind: num_bytes / GIB for kind, num_bytes in predicted.memory.items() if num_bytes}
    return [
        Bars(rows=bill, x_label="predicted time of a step (s)"),
        Bars(
            rows={"memory": held},
            x_label="memory of the fullest rank (GiB)",
            limit=(usable, f"usable {usable:.0f} GiB"),
        ),
    ]


def plan_drawing(model: str, **choices: int | str) -> Drawing:
    """Return the bill and the memory of one plan."""
    predicted = step_of_choices(MODELS[model], **choices)  # type: ignore[arg-type]
    finding = f"{bill_words(predicted)}; memory {memory_words(predicted)}"
    return Drawing(finding=finding, panels=panels_of(predicted), note=bill_where(predicted))


def memory_words(predicted: PredictedStep) -> str:
    """Return the bytes of the fullest rank, and those that it may use."""
    usable = predicted.cluster.usable_bytes / GIB
    return f"{format_bytes(predicted.memory_bytes)} of {usable:.0f} GiB"


PLAN = Live(
    name="plan_explorer",
    lesson="12_planner",
    question="What does each axis of a plan cost, in time and in memory?",
    choices={
        "model": ([*CHOICES], "llama-8b"),
        "cluster": (cluster_names(), "selene-a100"),
        "nodes": (SIZES, 4),
        "global_batch": (BATCHES, 1024),
        "tp": (SIZES[:4], 2),
        "pp": (SIZES, 2),
        "zero": ([*ZERO_STAGES], 1),
        "model_chunks": ([1, 2, 4, 5, 8], 1),
        "micro_batch": (SIZES, 1),
        "recompute": ([*RECOMPUTE], "none"),
    },
    compute=plan_drawing,
)


# --- the best plans


def spec_of(model: str) -> ModelSpec:
    """Return the model of a preset's name, or of the text of a Hugging Face config.json.

    Raises: CourseError for another name, or a text that is no config.json
    """
    if not model.lstrip().startswith("{"):
        return find_model(model.strip())
    try:
        values = json.loads(model)
    except ValueError as problem:
        raise CourseError(f"config.json: need JSON; got {problem}. Paste the whole file.") from None
    return read_values(Path("config.json"), values)


@lru_cache(maxsize=8)
def _searched(
    model: str, cluster: str, nodes: int, global_batch: int, seq: int
) -> tuple[SearchResult, list[PredictedStep]]:
    spec, machines = spec_of(model), find_cluster(cluster, nodes)
    if spec.positions == "learned" and seq > spec.max_seq:
        raise CourseError(
            f"seq: need at most {spec.max_seq}, the learned positions of {spec.name}; got {seq}."
        )
    found = search(spec, machines, global_batch, seq=seq)
    if not found.steps:
        raise CourseError(
            f"None of {found.num_plans:,} plans of {spec.name} fits into {machines.num_gpus} GPUs "
            f"of {format_bytes(machines.usable_bytes)}. Try more nodes."
        )
    return found, found.best(TOP)


def plans_drawing(
    model: str, cluster: str, nodes: int, global_batch: int, seq: int, plan: int
) -> Drawing:
    """Return the table of the best plans, and the bill of one; its command is in the note."""
    found, best = _searched(model, cluster, nodes, global_batch, seq)
    if plan > len(best):
        raise CourseError(f"plan: need one of the {len(best)} that fit; got {plan}.")
    step = best[plan - 1]
    rows = [(str(number), *one.cells) for number, one in enumerate(best, 1)]
    name = "config.json" if model.lstrip().startswith("{") else model.strip()
    command = (
        f"course plan --model {shlex.quote(name)} --cluster {cluster} --nodes {nodes} "
        f"--global-batch-tokens {global_batch * seq} --seq {seq} --explain {plan}"
    )
    return Drawing(
        finding=f"{len(found.steps):,} of {found.num_plans:,} plans of {step.model.name} fit on "
        f"{step.cluster.num_gpus} GPUs. Plan {plan}: {bill_words(step)}; memory "
        f"{memory_words(step)}",
        panels=[Table(header=("", *HEADERS), rows=rows, chosen=plan - 1), *panels_of(step)],
        note="\n".join([bill_where(step), *plan_notes(step), legend(best)]),
        command=command,
    )


SEARCH = Live(
    name="plan_search",
    lesson="12_planner",
    question="Which plan suits your model and your cluster? Paste a config.json.",
    choices={
        "model": "llama-8b",
        "cluster": (cluster_names(), "hf-h100"),
        "nodes": (SIZES, 1),
        "global_batch": (BATCHES, 512),
        "seq": ([1024, 2048, 4096, 8192], 4096),
        "plan": (1, TOP, 1),
    },
    compute=plans_drawing,
)
