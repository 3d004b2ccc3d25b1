"""Published training runs of models with experts, as `published_runs("experts")` has them.

What the table leaves out is said here. Notebook 12_planner.
"""

from collections.abc import Iterable
from dataclasses import replace

from course_lib.core.parallelism import Parallelism
from course_lib.core.presets import MODELS as PRESETS
from course_lib.core.specs import Experts, ModelSpec
from course_lib.cost.flops import train_step_flop
from course_lib.cost.published import rows
from course_lib.planner.cluster import Cluster, find_cluster
from course_lib.planner.constants import SOFTWARE
from course_lib.planner.plan import Plan
from course_lib.planner.published_run import PublishedRun

Row = dict[str, str]

_QWEN, _GPT_OSS = PRESETS["qwen3-30b-a3b"], PRESETS["gpt-oss-20b"]
_DEEPSEEK = PRESETS["deepseek-v3"]
# those that are no presets: config.json of mistralai/Mixtral-8x22B-v0.1, Qwen/Qwen3-235B-A22B,
# openai/gpt-oss-120b and moonshotai/Kimi-K2-Base
_OTHERS = (
    replace(
        PRESETS["mixtral-8x7b"],
        name="mixtral-8x22b",
        hidden=6144,
        num_layers=56,
        num_heads=48,
        ffn_hidden=16384,
        experts=Experts(count=8, active=2, ffn_hidden=16384),
    ),
    replace(
        _QWEN,
        name="qwen3-235b-a22b",
        hidden=4096,
        num_layers=94,
        num_heads=64,
        experts=Experts(count=128, active=8, ffn_hidden=1536),
    ),
    replace(
        _GPT_OSS,
        name="gpt-oss-120b",
        num_layers=36,
        window_layers=tuple(range(0, 36, 2)),
        experts=Experts(count=128, active=4, ffn_hidden=2880, bias=True, router_bias=True),
    ),
    # the layer that predicts one token more, without its output projection
    replace(_DEEPSEEK, name="deepseek-v3-mtp", num_layers=62),
    replace(
        _DEEPSEEK,
        name="kimi-k2",
        num_heads=64,
        vocab=163840,
        experts=Experts(
            count=384, active=8, ffn_hidden=2048, shared_hidden=2048, dense_layers=(0,)
        ),
    ),
)
MODELS = {spec.name: spec for spec in (_QWEN, _GPT_OSS, _DEEPSEEK, *_OTHERS)}
PROGRAMS = {"megatron": "megatron-core", "automodel": "automodel", "hai-llm": "megatron-core"}
# NVLink of an H800, bytes/s in one direction: DeepSeek-AI 2024 (DeepSeek-V3), section 3.2.2
H800_BYTES_PER_S = 160e9


def expert_runs() -> Iterable[PublishedRun]:
    """Yield the rows of `moe.csv`.

    A published TFLOPS counts half of attention's scores: with that, rows of Qwen3 that have the
    time, too, agree. More model chunks than layers are as many as the layers. DualPipe is taken for
    zb-v, AutoModel's FSDP with a pipeline for ZeRO-1: it gathers and reduces once a step.
    """
    for row in rows("moe"):
        model, plan = MODELS[row["model"]], _plan(row)
        yield PublishedRun(
            group=f"{row['model']}, {row['program']}",
            model=model,
            cluster=_cluster(row),
            plan=plan,
            step_s=_step_s(row, model, plan),
            fitted=row["fitted"] == "1",
        )


def _plan(row: Row) -> Plan:
    sizes = {name: int(row[name]) for name in ("tp", "cp", "pp", "ep")}
    dp = int(row["gpus"]) // (sizes["tp"] * sizes["cp"] * sizes["pp"])
    micro_batch = int(row["micro_batch"])
    chunks = min(int(row["vpp"]), MODELS[row["model"]].num_layers // sizes["pp"])
    schedule = "zb-v" if row["program"] == "hai-llm" else "interleaved"
    return Plan(
        parallelism=Parallelism(
            **sizes,
            dp=dp,
            zero=int(row["zero"]),
            sequence_parallel=sizes["tp"] > 1,
            expert_tp=int(row["etp"]),
        ),
        schedule=schedule if chunks > 1 else "1f1b",
        num_model_chunks=chunks,
        micro_batch=micro_batch,
        num_micro_batches=int(row["global_batch"]) // dp // micro_batch,
        seq=int(row["seq"]),
        recompute=row["recompute"],
        precision=row["precision"],
    )


def _cluster(row: Row) -> Cluster:
    cluster = find_cluster("dgx-h100", int(row["gpus"]) // 8)
    program = SOFTWARE[PROGRAMS[row["program"]]]
    software = replace(
        program,
        imbalance=1.0 if row["balance"] == "forced" else program.imbalance,
        sends_once=row["dispatcher"] == "deepep",
        hides_routing=row["overlap"] == "1",
    )
    if "H800" in row["gpu"]:
        inside = replace(cluster.inside, bytes_per_s=H800_BYTES_PER_S)
        return replace(cluster, software=software, inside=inside)
    return replace(cluster, software=software)


def _step_s(row: Row, model: ModelSpec, plan: Plan) -> float:
    """Return the published seconds of a step: as such, from tokens/s, or from TFLOPS of a GPU."""
    if row["step_s"]:
        return float(row["step_s"])
    if row["tokens_per_s_per_gpu"]:
        return plan.tokens / plan.world_size / float(row["tokens_per_s_per_gpu"])
    flop = train_step_flop(model, plan.global_batch, plan.seq, causal=True)
    return flop / plan.world_size / (1e12 * float(row["model_TFLOPs_per_GPU"]))
