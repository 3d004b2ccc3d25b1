"""Starts what of a study has not been run: here, one run after the other, or as job arrays.

A run is done when its folder holds the records of all its ranks with all its steps. What failed,
was preempted or never began is started again from its first step.
"""

import json
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from course_lib.cluster.aggregate import Experiment, read_experiment
from course_lib.cluster.job import Job
from course_lib.cluster.profile import Profile
from course_lib.cluster.slurm_time import read_time_s, write_time
from course_lib.cluster.study_cost import Prediction
from course_lib.cluster.study_run import TRAIN, StudyRun
from course_lib.core.errors import CourseError

LOG = "log.txt"
SLOWER = 4  # how many times longer than predicted a run may take before it is ended
SPARE_S = 600


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


def make_jobs(predictions: Sequence[Prediction], folder: Path, profile: Profile) -> list[Job]:
    """Job arrays for these runs: one for each number of ranks, an element a run.

    Raises: CourseError for more ranks than the nodes of the profile hold
    """
    by_ranks: dict[int, list[Prediction]] = {}
    for one in predictions:
        by_ranks.setdefault(one.run.ranks, []).append(one)
    return [_job(ranks, by_ranks[ranks], folder, profile) for ranks in sorted(by_ranks)]


def _job(ranks: int, predictions: Sequence[Prediction], folder: Path, profile: Profile) -> Job:
    nodes = _nodes(ranks, profile)
    lines = folder / "lists" / f"{ranks}-ranks.json"
    lines.parent.mkdir(parents=True, exist_ok=True)
    words = [one.run.arguments(str((folder / one.run.name).resolve())) for one in predictions]
    lines.write_text(json.dumps(words, indent=1), encoding="utf-8")
    longest_s = max(one.run_s for one in predictions) * SLOWER + SPARE_S
    return Job(
        script="sweep",
        program="course_lib.cluster.study_element",
        arguments=(str(lines.resolve()),),
        name=f"study-{ranks}",
        nodes=nodes,
        gpus_per_node=ranks // nodes if profile.gpus_per_node else None,
        ranks_per_node=ranks // nodes,
        time_limit=write_time(min(longest_s, read_time_s(profile.time_limit))),
        array=f"0-{len(predictions) - 1}%{profile.limits.max_jobs}",
        run_folder=str(folder / "jobs" / f"{ranks}-ranks"),
    )


def _nodes(ranks: int, profile: Profile) -> int:
    per_node = profile.gpus_per_node or ranks
    nodes = -(-ranks // per_node)
    if ranks % nodes or nodes > profile.max_nodes:
        raise CourseError(
            f"study: need {ranks} ranks on whole nodes; profile {profile.name} has "
            f"{profile.max_nodes} of {per_node} GPUs. Try --ranks {per_node}."
        )
    return nodes
