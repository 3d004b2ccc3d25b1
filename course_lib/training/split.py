"""How a run splits its model, as the options ask for it: what they must keep, and the schedule.

`dp = ranks / (tp * pp)`: so many copies of the model are trained, each by tp * pp ranks.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from course_lib.core.degrees import Degrees
from course_lib.core.errors import MeshError, ShapeError
from course_lib.cost.actions import Schedule, ScheduleError
from course_lib.cost.schedules import gpipe, interleaved, naive, one_f_one_b, zero_bubble_h1

if TYPE_CHECKING:  # which imports this file
    from course_lib.training.config import TrainConfig

SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "naive": naive,
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zb-h1": zero_bubble_h1,
}


def schedule_of(config: "TrainConfig", num_micro_batches: int) -> Schedule:
    """The schedule of a run with --pp.

    Raises: ScheduleError for a number of micro-batches that it cannot take
    """
    chunks = [config.model_chunks] if config.schedule == "interleaved" else []
    try:
        return SCHEDULES[str(config.schedule)](config.pp, num_micro_batches, *chunks)
    except ScheduleError as error:
        where = "(num_micro_batches = global_batch / (micro_batch * dp))"
        raise ScheduleError(f"--schedule {error} {where}") from error


def degrees_of(config: "TrainConfig", num_ranks: int) -> Degrees:
    """How many ways so many ranks split data, tensors and layers.

    Raises: MeshError if they make no whole number of copies of the model
    """
    one_copy = config.tp * config.pp
    if num_ranks % one_copy:
        near = max(round(num_ranks / one_copy), 1) * one_copy
        raise MeshError(
            f"--tp, --pp: need a number of ranks divisible by tp * pp; got {num_ranks} and "
            f"{config.tp} * {config.pp}. Try --ranks {near}."
        )
    dp, sequence_parallel = num_ranks // one_copy, config.sequence_parallel
    return Degrees(dp=dp, tp=config.tp, pp=config.pp, sequence_parallel=sequence_parallel)


def check_split(config: "TrainConfig") -> None:
    """Raises: MeshError or ShapeError for a model that cannot be split that way."""
    _check_tensors(config)
    _check_stages(config)
    if config.strategy == "torch-ddp" and config.pp > 1:
        raise MeshError(
            "--strategy torch-ddp: need --pp 1, as it sends gradients with the first backward "
            f"after its own forward; got --pp {config.pp}. Try --strategy ddp."
        )


def _check_tensors(config: "TrainConfig") -> None:
    model, tp = config.model, config.tp
    for what in ("num_heads", "kv_heads"):
        heads = getattr(model, what)
        if heads % tp:
            fits = max(n for n in range(1, tp) if model.num_heads % n == model.kv_heads % n == 0)
            raise MeshError(
                f"--tp: need {what} of model {model.name} divisible by tp, as a head stays whole; "
                f"got {heads} and {tp}. Try --tp {fits}."
            )
    if not config.sequence_parallel:
        return
    if tp == 1:
        raise MeshError("--sequence-parallel: need --tp of 2 or more; got 1. Try --tp 2.")
    if config.seq % tp:
        raise ShapeError(
            f"--sequence-parallel: need --seq divisible by --tp; got {config.seq} and {tp}. "
            f"Try --seq {max(config.seq - config.seq % tp, tp)}."
        )


def _check_stages(config: "TrainConfig") -> None:
    pp, chunks, layers = config.pp, config.model_chunks or 1, config.model.num_layers
    if config.schedule and pp == 1:
        raise MeshError(
            f"--schedule {config.schedule}: need stages to schedule; got --pp 1. Try --pp 2."
        )
    if chunks > 1 and config.schedule != "interleaved":
        raise MeshError(
            f"--model-chunks: need --schedule interleaved; got {chunks} chunks and "
            f"{config.schedule or 'no stages'}. Try --pp 2 --schedule interleaved."
        )
    if pp * chunks > layers:
        raise MeshError(
            f"--pp, --model-chunks: need pp * model chunks of at most the {layers} layers of model "
            f"{config.model.name}; got {pp} * {chunks}. Try --layers {pp * chunks}."
        )
