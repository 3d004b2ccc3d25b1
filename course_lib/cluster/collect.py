"""Brings run records home: those of `runs/cluster/06_ddp-1/records` to `runs/06_ddp-1`.

A job that was put back into the queue ran several times, and each attempt left records of its own.
One attempt of each element counts: the latest whole one, with a record of every rank, or else the
latest. The others stay where they are, under a name that no reader takes for a record's.
Whole folders are moved, so whatever interrupts it, doing it again puts it right.
"""

from dataclasses import dataclass
from pathlib import Path

from course_lib.cluster.local.job import locked
from course_lib.cluster.submissions import Submission
from course_lib.core.records import RunRecord

RUNS = Path("runs")
SET_ASIDE = ".superseded"
MARK = "attempt"  # in the folder that was brought home: whose it is


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """The records that one attempt of an element left in `folder`."""

    element: int
    restarts: int
    folder: Path
    world_size: int
    ranks: tuple[int, ...]

    @property
    def is_whole(self) -> bool:
        """Is there a record of every rank?"""
        return len(self.ranks) == self.world_size


def collect(one: Submission, runs: Path = RUNS) -> list[Attempt]:
    """Bring the records of all elements that ended; return what counts now, where it lies now.

    Raises: CourseError for a record that cannot be read
    """
    ended = [state.element for state in one.seen if state.is_final]
    with locked(one.folder / "collect.lock"):
        found = [_bring(one, element, runs) for element in ended]
    return [attempt for attempt in found if attempt]


def _bring(one: Submission, element: int, runs: Path) -> Attempt | None:
    home = runs / one.id / str(element) if one.job.array else runs / one.id
    records = one.folder / "records"
    if not one.job.array:
        _take_in(one, records / f"0.{max(state.restarts for state in one.seen)}")
    new = [folder for folder in records.glob(f"{element}.*") if any(folder.glob("*.jsonl"))]
    if new and home.exists():  # an attempt that was brought home before this one ended
        home.rename(records / (home / MARK).read_text(encoding="utf-8"))
        new = [folder for folder in records.glob(f"{element}.*") if any(folder.glob("*.jsonl"))]
    if not new:
        return _read(home, element) if home.exists() else None
    attempts = [_read(folder, element) for folder in new]
    chosen = max(attempts, key=lambda each: (each.is_whole, each.restarts))
    for attempt in attempts:
        if attempt is not chosen:
            for path in attempt.folder.glob("*.jsonl"):
                path.rename(path.with_name(path.name + SET_ASIDE))
    (chosen.folder / MARK).write_text(chosen.folder.name, encoding="utf-8")
    home.parent.mkdir(parents=True, exist_ok=True)
    chosen.folder.rename(home)
    return _read(home, element)


def _take_in(one: Submission, latest: Path) -> None:
    """Records in the run folder itself, of a program that goes on there from its checkpoint."""
    for path in sorted(one.folder.glob("*.jsonl")):
        latest.mkdir(parents=True, exist_ok=True)
        path.rename(latest / path.name)


def _read(folder: Path, element: int) -> Attempt:
    """The attempt whose records lie in this folder: `records/3.1`, or what became of it."""
    mark = folder / MARK
    name = mark.read_text(encoding="utf-8") if mark.exists() else folder.name
    records = [RunRecord.read(path) for path in sorted(folder.glob("*.jsonl"))]
    return Attempt(
        element=element,
        restarts=int(name.partition(".")[2]),
        folder=folder,
        world_size=max((record.world_size for record in records), default=0),
        ranks=tuple(sorted({record.rank for record in records})),
    )
