"""Collect run records: those of `runs/cluster/06_ddp-1/records` go to `runs/06_ddp-1`.

A job that was requeued ran several times, and each attempt left records of its own. One attempt of
each array task counts: the latest complete one, with a record of every rank, or else the latest.
The others stay where they are, under a name that no reader takes for a record's. Whole folders are
moved, so after an interruption the same command completes the work.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from course_lib.core.files import not_one, read_text
from course_lib.core.records import RunRecord
from course_lib.jobs.local.job import locked
from course_lib.jobs.submissions import Submission

RUNS = Path("runs")
SET_ASIDE = ".superseded"
WHOSE = "the number of an array task and of an attempt, as in 0.0"
MARK = "attempt"  # in the folder that was brought home: whose it is


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """The records that one attempt of an array task left in `folder`."""

    array_task: int
    restarts: int
    folder: Path
    world_size: int
    ranks: tuple[int, ...]

    @property
    def is_whole(self) -> bool:
        """Whether there is a record of every rank."""
        return len(self.ranks) == self.world_size


def collect(one: Submission, runs: Path = RUNS) -> list[Attempt]:
    """Move the records of ended array tasks to the run folder; return those that count now.

    Raises: CourseError for a record that cannot be read
    """
    ended = [state.array_task for state in one.seen if state.is_final]
    with locked(one.folder / "collect.lock"):
        found = [_bring(one, array_task, runs) for array_task in ended]
    return [attempt for attempt in found if attempt]


def _bring(one: Submission, array_task: int, runs: Path) -> Attempt | None:
    home = runs / one.id / str(array_task) if one.job.array else runs / one.id
    records = one.folder / "records"
    if not one.job.array:
        _take_in(one, records / f"0.{max(state.restarts for state in one.seen)}")
    new = [folder for folder in records.glob(f"{array_task}.*") if any(folder.glob("*.jsonl"))]
    if new and home.exists():  # an attempt that was brought home before this one ended
        home.rename(records / _attempt_of(home))
        new = [folder for folder in records.glob(f"{array_task}.*") if any(folder.glob("*.jsonl"))]
    if not new:
        return _read(home, array_task) if home.exists() else None
    attempts = [_read(folder, array_task) for folder in new]
    chosen = max(attempts, key=lambda each: (each.is_whole, each.restarts))
    for attempt in attempts:
        if attempt is not chosen:
            for path in attempt.folder.glob("*.jsonl"):
                path.rename(path.with_name(path.name + SET_ASIDE))
    (chosen.folder / MARK).write_text(chosen.folder.name, encoding="utf-8")
    home.parent.mkdir(parents=True, exist_ok=True)
    chosen.folder.rename(home)
    return _read(home, array_task)


def _take_in(one: Submission, latest: Path) -> None:
    """Take in records from the run folder itself, where a resumed program writes them."""
    for path in sorted(one.folder.glob("*.jsonl")):
        latest.mkdir(parents=True, exist_ok=True)
        path.rename(latest / path.name)


def _attempt_of(home: Path) -> str:
    """Return the name that a folder of records had before it was brought home."""
    name = read_text(home / MARK, WHOSE)
    if not re.fullmatch(r"\d{1,9}\.\d{1,9}", name, re.ASCII):
        raise not_one(home / MARK, WHOSE, f"got {name[:20]!r}", "Try to write 0.0 into it.")
    return name


def _read(folder: Path, array_task: int) -> Attempt:
    """Return the attempt whose records are in this folder: `records/3.1`, or where it was moved."""
    name = _attempt_of(folder) if (folder / MARK).exists() else folder.name
    records = [RunRecord.read(path) for path in sorted(folder.glob("*.jsonl"))]
    return Attempt(
        array_task=array_task,
        restarts=int(name.partition(".")[2]),
        folder=folder,
        world_size=max((record.world_size for record in records), default=0),
        ranks=tuple(sorted({record.rank for record in records})),
    )
