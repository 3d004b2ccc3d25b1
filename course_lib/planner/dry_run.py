"""The planner's prediction for a command of `python -m course_lib.train`: its `--dry-run`."""

from course_lib.core.errors import CourseError
from course_lib.core.units import format_seconds
from course_lib.planner.cluster import find_cluster
from course_lib.planner.plan import SCHEDULES, Plan
from course_lib.planner.predicting import predict
from course_lib.planner.prediction import CAUSE_NAMES, PredictedStep
from course_lib.train.config import TrainConfig

ZERO_STAGES = {"zero1": 1, "zero2": 2, "zero3": 3, "fsdp": 3}
PRECISIONS = {"float32": "fp32", "bfloat16": "bf16"}


def plan_of(config: TrainConfig, num_ranks: int) -> Plan:
    """Return a training run as a plan. Raises: CourseError where the planner has none like it"""
    axes = config.parallelism(num_ranks)
    count = config.num_micro_batches(axes.dp)
    precision = PRECISIONS.get(config.compute_dtype or config.dtype)
    schedule = config.schedule or "1f1b"
    wanted = {"--dtype": (precision, config.dtype), "--schedule": (schedule in SCHEDULES, schedule)}
    for option, (known, given) in wanted.items():
        if not known:
            raise CourseError(f"the planner has no {option} {given}.")
    plan = Plan(
        schedule=schedule,
        num_model_chunks=config.num_model_chunks,
        micro_batch=-(-config.global_batch // (axes.dp * count)),
        num_micro_batches=count,
        seq=config.seq,
        recompute=config.recompute or "none",
        precision=str(precision),
    )
    return plan.with_axes(
        dp=axes.dp,
        tp=axes.tp,
        pp=axes.pp,
        sequence_parallel=axes.sequence_parallel,
        zero=ZERO_STAGES.get(config.strategy.removesuffix("-offload"), 0),
    )


def predicted_text(config: TrainConfig, num_ranks: int, cluster: str) -> str:
    """Return the predicted time of a step on that cluster, in one or two lines.

    Raises: CourseError for an unknown cluster
    """
    where = find_cluster(cluster)
    where = where.with_nodes(-(-num_ranks // where.gpus_per_node))
    try:
        step = predict(config.model, where, plan_of(config, num_ranks))
    except CourseError as error:
        return f"No time is predicted: {error}"
    return _told(step)


def _told(step: PredictedStep) -> str:
    shares = (f"{CAUSE_NAMES[n]} {format_seconds(s)}" for n, s in step.shown_seconds.items())
    return (
        f"predicted on {step.plan.world_size:,} GPUs of {step.cluster.name}: "
        f"{format_seconds(step.step_s)} a step, MFU {step.mfu:.0%}\n  {', '.join(shares)}"
    )
