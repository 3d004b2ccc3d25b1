"""What fits together: options and strategies, models and data. What does not is one sentence."""

from typing import TYPE_CHECKING

from course_lib.core.errors import CourseError, MeshError

if TYPE_CHECKING:  # which imports this file
    from course_lib.training.config import TrainConfig

COMPUTE_DTYPES = ("bfloat16",)


def check_fits(config: "TrainConfig") -> None:
    """Raises: CourseError or MeshError for an option that does not fit the others."""
    name = config.strategy
    framework = name.startswith(("deepspeed", "accelerate"))
    if (framework or name.startswith(("zero", "fsdp", "torch-fsdp"))) and config.tp * config.pp > 1:
        raise MeshError(
            f"--strategy {name}: need --tp 1 and --pp 1, as it shards whole layers; got "
            f"{config.tp} and {config.pp}. Try --strategy ddp."
        )
    if not config.reshard and name not in ("fsdp", "torch-fsdp"):
        raise CourseError(_need("--no-reshard", "fsdp or torch-fsdp", name))
    if config.compute_dtype and name != "fsdp":
        raise CourseError(_need("--compute-dtype", "fsdp", name))
    if config.momentum and (config.optimizer != "sgd" or config.momentum >= 1):
        raise CourseError(
            f"--momentum: need --optimizer sgd and a number below 1; got {config.optimizer} and "
            f"{config.momentum}. Try --optimizer sgd --momentum 0.9."
        )
    if framework:
        _check_framework(config)
    if config.clip_norm and config.tp * config.pp > 1:
        raise MeshError(
            "--clip-norm: need --tp 1 and --pp 1, as no rank has the whole gradient; got "
            f"{config.tp} and {config.pp}. Try it without --clip-norm."
        )
    _check_data(config)


def _check_framework(config: "TrainConfig") -> None:
    name = config.strategy
    if config.save_every or config.resume:
        raise CourseError(
            f"--save-every, --resume: need a strategy that saves the state of one process; got "
            f"{name}, which keeps its own. Try --strategy fsdp."
        )
    if "deepspeed" in name and config.dtype != "float32":
        raise CourseError(
            f"--dtype: need float32 with {name}, as its gradients travel in it; got {config.dtype}."
        )
    given = {"--clip-norm": config.clip_norm, "--warmup": config.warmup}
    if option := next((option for option, value in given.items() if value), ""):
        raise CourseError(
            f"{option}: need a strategy of the course or of PyTorch; got {name}. "
            "Try --strategy fsdp."
        )
    if name == "accelerate-deepspeed" and config.micro_batch:
        raise CourseError(
            "--micro-batch: need a strategy that steps apart from backward; got "
            "accelerate-deepspeed. Try --strategy deepspeed-3."
        )


def _check_data(config: "TrainConfig") -> None:
    if config.masked and config.tp * config.pp > 1:
        raise MeshError(
            f"--model {config.model.name}: need --tp 1 and --pp 1 for a BERT; got {config.tp} and "
            f"{config.pp}. Try --strategy fsdp."
        )
    if config.data == "dialogues" and not config.masked:
        raise CourseError(
            "--data dialogues: need a BERT, which guesses hidden words; got the GPT "
            f"{config.model.name}. Try --model bert-tiny."
        )
    if config.epochs and config.data == "synthetic":
        raise CourseError(
            "--epochs: need data with an end; got synthetic ones. Try --data shakespeare."
        )


def _need(option: str, names: str, name: str) -> str:
    return f"{option}: need --strategy {names}; got {name}. Try it without {option}."
