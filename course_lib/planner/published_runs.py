"""Published training runs as models, clusters and plans, beside what `predict` says of them.

`published_runs("vtrain")` reads one table of `course_lib.cost.published`. What a table leaves out
is filled in from the named source, and said here. Notebook 12_planner.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache

from course_lib.core.errors import CourseError
from course_lib.core.parallelism import Parallelism
from course_lib.core.presets import MODELS
from course_lib.core.specs import ModelSpec
from course_lib.core.units import GIB
from course_lib.cost.published import rows
from course_lib.planner.cluster import cluster_for, find_cluster
from course_lib.planner.plan import Plan
from course_lib.planner.published_experts import expert_runs
from course_lib.planner.published_run import PublishedRun

Row = dict[str, str]


def _megatron(row: Row, name: str) -> ModelSpec:
    """Return a GPT of Megatron-LM: an MLP of 4 hidden, 51200 tokens."""
    hidden = int(row["hidden"])
    return ModelSpec(
        name=name,
        hidden=hidden,
        num_layers=int(row["layers"]),
        num_heads=int(row["heads"]),
        ffn_hidden=4 * hidden,
        vocab=51200,
        max_seq=int(row["seq"]),
    )


def _plan(row: Row, *, dp: int, global_batch: int, micro_batch: int, chunks: int = 1) -> Plan:
    """Return the plan of a Megatron run with full recomputation and unfused attention."""
    return Plan(
        parallelism=Parallelism(dp=dp, tp=int(row["tp"]), pp=int(row["pp"])),
        schedule="interleaved" if chunks > 1 else "1f1b",
        num_model_chunks=chunks,
        micro_batch=micro_batch,
        num_micro_batches=global_batch // dp // micro_batch,
        seq=int(row["seq"]),
        recompute="full",
        flash=False,
    )


def _korthikanti() -> Iterable[PublishedRun]:
    """Table 5, and the run with data parallelism of section 6.3."""
    for row in rows("korthikanti22"):
        if not row["iter_time_s"]:
            continue
        dp = 8 if "DP=8" in row["method"] else 1
        plan = _plan(
            row,
            dp=dp,
            global_batch=int(row["global_batch"]),
            micro_batch=int(row["micro_batch"]),
            chunks=int(row["interleave_m"]),
        )
        if "full" not in row["method"]:
            plan = replace(plan, recompute="selective").with_axes(sequence_parallel=True)
        yield PublishedRun(
            group=row["model"],
            model=_megatron(row, row["model"]),
            cluster=find_cluster("selene-a100", -(-plan.world_size // 8)),
            plan=plan,
            step_s=float(row["iter_time_s"]),
        )


# micro-batch and model chunks per rank, which the table leaves out: NVIDIA/Megatron-LM@79a3bb6
# examples/sc21/run_table_1.sh
SC21_BATCHES = {
    "1.7B": (16, 1),
    "3.6B": (16, 1),
    "7.5B": (16, 1),
    "18B": (8, 1),
    "39B": (4, 1),
    "76B": (2, 3),
    "145B": (2, 2),
    "310B": (1, 2),
    "530B": (1, 3),
    "1T": (1, 1),
}


def _sc21() -> Iterable[PublishedRun]:
    for row in rows("megatron_sc21"):
        if row["table"] != "SC21 Table 1":
            continue
        micro_batch, chunks = SC21_BATCHES[row["model"]]
        plan = _plan(
            row,
            dp=int(row["dp"]),
            global_batch=int(row["batch_size"]),
            micro_batch=micro_batch,
            chunks=chunks,
        )
        yield PublishedRun(
            group=row["model"],
            model=_megatron(row, row["model"]),
            cluster=find_cluster("selene-a100", -(-plan.world_size // 8)),
            plan=plan,
            step_s=float(row["derived_iter_time_s"]),
        )


def _vtrain() -> Iterable[PublishedRun]:
    for row in rows("vtrain_ground_truth"):
        if row["set"] != "multi":
            continue
        plan = _plan(
            row,
            dp=int(row["dp"]),
            global_batch=int(row["global_batch"]),
            micro_batch=int(row["micro_batch"]),
        )
        yield PublishedRun(
            group=f"{row['params_B']}B",
            model=_megatron(row, f"{row['params_B']}B"),
            cluster=find_cluster("vtrain-a100", -(-plan.world_size // 8)),
            plan=plan,
            step_s=float(row["measured_iter_time_s"]),
        )


# nanotron's scaling benchmark: keys and values for every head, 131072 tokens
NANOTRON = {
    "1B": replace(MODELS["llama-1b"], num_kv_heads=32, vocab=131072),
    "8B": replace(MODELS["llama-8b"], num_kv_heads=32, vocab=131072),
}


def _ultrascale() -> Iterable[PublishedRun]:
    for row in rows("ultrascale"):
        speed = float(row["tok_s_gpu"] or 0)
        if row["status"] != "ok" or not speed:
            continue
        sizes = {name: int(row[name]) for name in ("dp", "tp", "pp", "zero")}
        plan = Plan(
            parallelism=Parallelism(**sizes, sequence_parallel=sizes["tp"] > 1),
            micro_batch=int(row["mbs"]),
            num_micro_batches=int(row["grad_acc"]),
        )
        yield PublishedRun(
            group=f"{row['model']}, {row['nodes']} node{'s' * (row['nodes'] != '1')}",
            model=NANOTRON[row["model"]],
            cluster=find_cluster("hf-h100", int(row["nodes"])),
            plan=plan,
            step_s=plan.tokens / plan.world_size / speed,
            memory_bytes=float(row["gpu_mem_gb"] or 0) * GIB,
            mfu=float(row["mfu_pct_reported"] or 0) / 100,
        )


# layers, hidden and heads: github mosaicml/llm-foundry@8c8dd48f scripts/train/yamls/pretrain
MPT = {
    "125m": (12, 768, 12),
    "350m": (24, 1024, 16),
    "760m": (24, 1536, 12),
    "1b": (24, 2048, 16),
    "3b": (32, 2560, 20),
    "7b": (32, 4096, 32),
    "13b": (40, 5120, 40),
    "30b": (48, 7168, 56),
    "70b": (80, 8192, 64),
}


def _llm_foundry() -> Iterable[PublishedRun]:
    for row in rows("llm_foundry"):
        num_layers, hidden, num_heads = MPT[row["Model"]]
        seq, num_gpus = int(row["SeqLen (T)"]), int(row["# GPUs"])
        model = ModelSpec(
            name=f"mpt-{row['Model']}",
            hidden=hidden,
            num_layers=num_layers,
            num_heads=num_heads,
            ffn_hidden=4 * hidden,
            vocab=50368,
            max_seq=seq,
            bias=False,
        )
        plan = Plan(
            parallelism=Parallelism(
                dp=num_gpus, zero=3 if row["Sharding Strategy"] == "FULL_SHARD" else 2
            ),
            micro_batch=int(row["MicroBatchSize"]),
            num_micro_batches=int(row["GradAccum"]),
            seq=seq,
            recompute="full" if row["Activation Checkpointing"] == "True" else "none",
            precision="fp8" if "fp8" in row["Precision"] else "bf16",
        )
        yield PublishedRun(
            group=row["Model"],
            model=model,
            cluster=cluster_for(
                row["GPU"].split("_")[0].replace("a100", "a100-80"), -(-num_gpus // 8)
            ),
            plan=plan,
            step_s=plan.tokens / num_gpus / float(row["Throughput (T/s/GPU)"]),
            mfu=float(row["MFU"]) / 100,
        )


def _torchtitan() -> Iterable[PublishedRun]:
    """Llama 3 8B on H100, in bf16 and fp8, compiled or not."""
    for row in rows("torchtitan"):
        if "8B" not in row["model"] or "H100" not in row["gpu"] or not row["local_batch"]:
            continue
        ways = {"full": "full", "no": "none"}
        sizes = {"dp": int(row["fsdp"]), "tp": int(row["tp"]), "cp": int(row["cp"])}
        plan = Plan(
            parallelism=Parallelism(**sizes, zero=3, sequence_parallel=sizes["tp"] > 1),
            micro_batch=int(row["local_batch"]),
            seq=int(row["seq_len"]),
            recompute=ways.get(row["activation_ckpt"], "selective"),
            precision="bf16" if row["float8"] in ("0", "") else "fp8",
        )
        yield PublishedRun(
            group=row["model"],
            model=MODELS["llama-8b"],
            cluster=find_cluster("torchtitan-h100", -(-plan.world_size // 8)),
            plan=plan,
            step_s=plan.tokens / plan.world_size / float(row["TPS_per_GPU"]),
            mfu=float(row["mfu_pct"] or 0) / 100,
        )


TABLES: dict[str, Callable[[], Iterable[PublishedRun]]] = {
    "korthikanti": _korthikanti,
    "sc21": _sc21,
    "vtrain": _vtrain,
    "ultrascale": _ultrascale,
    "llm-foundry": _llm_foundry,
    "torchtitan": _torchtitan,
    "experts": expert_runs,
}


@cache
def published_runs(table: str) -> tuple[PublishedRun, ...]:
    """Return the runs of a published table.

    Raises: CourseError that names the tables
    """
    if table not in TABLES:
        raise CourseError(f"published_runs: need one of {', '.join(TABLES)}; got {table!r}.")
    return tuple(TABLES[table]())
