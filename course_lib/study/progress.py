"""Runs what is left of a study here, one run after the other, and tells how far it is."""

import sys

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)

from course_lib.cluster.slurm_time import write_time
from course_lib.study.costing import Costing
from course_lib.study.here import Failure, run_here

FAILED = 1


def run_all(costing: Costing) -> int:
    """Run what is left on this machine; return an exit code. What fails does not stop the rest."""
    console, failures = Console(file=sys.stderr), []
    left_s = sum(one.run_s for one in costing.left)
    with _bar(console) as bar:
        task = bar.add_task("", total=len(costing.left), left="")
        for number, one in enumerate(costing.left, start=1):
            note = f"{one.run.name}, about {write_time(left_s)} left"
            bar.update(task, left=note)
            if not console.is_terminal:
                print(f"{number}/{len(costing.left)}  {note}", flush=True)
            if failure := run_here(one.run, costing.folder):
                failures.append(failure)
            left_s -= one.run_s
            bar.advance(task)
    for failure in failures:
        print(_words(failure), file=sys.stderr)
    if not failures:
        print(f"All runs are done. Next: course report {costing.folder}")
    return FAILED if failures else 0


def _bar(console: Console) -> Progress:
    return Progress(
        MofNCompleteColumn(),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[left]}"),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


def _words(failure: Failure) -> str:
    return f"{failure.run.name} failed: {failure.said} (all it said: {failure.log})"
