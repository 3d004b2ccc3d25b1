"""Which runs of a study are done, and how one is started here.

A run is done when its folder holds the records of all its ranks with all its steps. What failed,
was preempted or never began is started again from its first step.
"""

import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from course_lib.core.errors import CourseError
from course_lib.study.aggregate import Experiment, read_experiment
from course_lib.study.run import TRAIN, StudyRun

LOG = "log.txt"


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A run that ended badly: the last thing it said, and where the rest stands."""

    run: StudyRun
    said: str
    log: Path


def find_done(runs: Iterable[StudyRun], folder: Path) -> dict[StudyRun, Experiment]:
    """Which of these runs have a whole record in the study's folder, and what it says."""
    done = {}
    for run in runs:
        try:
            experiment = read_experiment(folder / run.name)
        except CourseError:
            continue
        if experiment.run == run:
            done[run] = experiment
    return done


def run_here(run: StudyRun, folder: Path) -> Failure | None:
    """Run it on this machine, and wait for it; what it says goes into the log in its folder."""
    out = folder / run.name
    out.mkdir(parents=True, exist_ok=True)
    with (out / LOG).open("w+", encoding="utf-8") as log:
        command = [sys.executable, "-m", TRAIN, *run.arguments(str(out))]
        code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False).returncode
        log.seek(0)
        said = [line.strip() for line in log if line.strip()]
    if code == 0:
        return None
    return Failure(run=run, said=said[-1] if said else f"exit code {code}", log=out / LOG)
