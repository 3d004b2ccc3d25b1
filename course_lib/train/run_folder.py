"""Check, before a training run starts, the files that it needs and those that must not be there.

`--help` and a first run should not wait for torch, which only reading a checkpoint needs.
"""

from dataclasses import replace
from pathlib import Path

from course_lib.core.errors import CourseError
from course_lib.train.config import SOURCES, TrainConfig


def check_files(config: TrainConfig, restarted: bool) -> None:
    """Check the text file, the output folder, and the checkpoint to resume from.

    restarted   torchrun or Slurm has started the run again, so it resumes if it can

    Raises: CourseError for one that is missing, or in the way
    """
    if config.data not in SOURCES and not Path(config.data).is_file():
        raise CourseError(
            f"--data: need {', '.join(SOURCES)} or the path of a text file; got {config.data!r}."
        )
    if config.checkpoints is None:
        return
    _check_checkpoints(config, config.checkpoints, restarted)
    try:
        config.checkpoints.parent.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise CourseError(
            f"--out: need a folder that can be made ({problem.strerror}); got {config.out}. "
            "Try --out runs/NAME."
        ) from problem


def _check_checkpoints(config: TrainConfig, folder: Path, restarted: bool) -> None:
    found = there = None
    if folder.is_dir():
        from course_lib.train.checkpoint import latest_of

        other = "dcp" if config.checkpoint_format == "course" else "course"
        found = latest_of(config)
        if not config.uses_framework:  # which have one format
            there = latest_of(replace(config, checkpoint_format=other, async_save=False))
    if found and not (config.resume or restarted):
        raise CourseError(
            f"--out: need a folder without a checkpoint; there is {found.path}. "
            "Try --resume to continue from it, or another --out."
        )
    if config.resume and not found:
        hint = "it without --resume, with --save-every 50"
        hint = f"--checkpoint-format {other}: there is one" if there else hint
        raise CourseError(
            f"--resume: need a whole checkpoint; there is none in {folder}. Try {hint}."
        )
