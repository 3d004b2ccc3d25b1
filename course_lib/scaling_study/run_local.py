"""Run the rest of a study on this machine, one run after another, and report progress.

Every run has processes of its own, forked from one that has PyTorch ready.
"""

import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn

from course_lib.core.errors import CourseError
from course_lib.jobs.slurm_time import write_time
from course_lib.ranks import RankError
from course_lib.scaling_study.costing import Costing
from course_lib.scaling_study.measure_link import note_link, on_ranks
from course_lib.scaling_study.study_run import StudyRun
from course_lib.train.progress import terminal_bar
from course_lib.train.trainer import train

FAILED, CTRL_C = 1, 130
LOG = "log.txt"


@dataclass(frozen=True, kw_only=True)
class RunFailure:
    """A failed run: the reason, and the path of its full log."""

    run: StudyRun
    said: str
    log: Path


def run_all(costing: Costing) -> int:
    """Run the rest of a study; return an exit code. A failed run does not stop the others."""
    try:
        failures = _run_left(costing)
    except KeyboardInterrupt:
        print("Stopped. The same command goes on with the runs that are left.", file=sys.stderr)
        return CTRL_C
    for failure in failures:
        words = f"{failure.run.name} failed: {failure.said} (all of it: {failure.log})"
        print(words, file=sys.stderr)
    if failures:
        return FAILED
    print(f"All runs are done. Next: course report {costing.folder}")
    return 0


def run_here(run: StudyRun, folder: Path) -> RunFailure | None:
    """Run it and wait for it; an error is returned, and written into its folder.

    Raises: KeyboardInterrupt on Ctrl-C, when its ranks have ended
    """
    out = folder / run.name
    try:
        on_ranks(run.ranks, train, run.config(str(out)))
    except CourseError as problem:
        return _failure(run, problem, out)
    return None


def _failure(run: StudyRun, problem: CourseError, out: Path) -> RunFailure:
    said = str(problem)
    if isinstance(problem, RankError):
        said = next((message for _, message in problem.failures.values()), said)
    out.mkdir(parents=True, exist_ok=True)
    (out / LOG).write_text(f"{problem}\n", encoding="utf-8")
    return RunFailure(run=run, said=said.strip().splitlines()[0], log=out / LOG)


def _run_left(costing: Costing) -> list[RunFailure]:
    failures, left_s = [], sum(one.run_s for one in costing.left)
    columns = (MofNCompleteColumn(), BarColumn(), TimeElapsedColumn())
    with terminal_bar(*columns, TextColumn("{task.fields[left]}")) as bar:
        task = bar.add_task("", total=len(costing.left), left="")
        for number, one in enumerate(costing.left, start=1):
            note = f"{one.run.name}, about {write_time(left_s)} left"
            bar.update(task, left=note)
            if not bar.console.is_terminal:
                print(f"{number}/{len(costing.left)}  {note}", flush=True)
            with suppress(CourseError):  # without a measured link, that of a data sheet has to do
                note_link(costing.folder, one.run.ranks)
            if failure := run_here(one.run, costing.folder):
                failures.append(failure)
            left_s -= one.run_s
            bar.advance(task)
    return failures
