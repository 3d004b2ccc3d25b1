"""Submit the rest of a study as job arrays: one for each number of ranks, an array task per run.

What waits or runs already is not submitted again, and no more runs than the profile's limit of
GPU-hours has room for: they can use far less than they ask for, so there is room again later.
"""

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from course_lib.core.errors import CourseError
from course_lib.jobs.job import Job, fitted
from course_lib.jobs.profile import Profile
from course_lib.jobs.slurm_time import read_time_s, write_time
from course_lib.jobs.submissions import FOLDER, Submission, find_home, read_submissions, refresh
from course_lib.jobs.submit import submit_job
from course_lib.scaling_study.costing import Costing
from course_lib.scaling_study.prediction import PredictedRun
from course_lib.scaling_study.study_run import read_list

ARRAY_TASK = "course_lib.scaling_study.array_element"
SLOWER = 3  # how many times longer than predicted a run may take before it is ended
SPARE_S = 300


def submit_all(costing: Costing) -> int:
    """Submit the remaining runs, as many as the limits allow; return 0 if that is all of them."""
    submissions = find_home() / FOLDER
    before = [refresh(one, submissions) for one in read_submissions(submissions)]
    places = waiting(before)
    left = [one for one in costing.left if str(out_of(one, costing.folder)) not in places]
    if len(left) < len(costing.left):
        print(f"{len(costing.left) - len(left)} runs wait or run already: course status")
    profile = costing.profile
    used = sum(one.gpu_hours for one in before if one.profile == profile.name)
    jobs = make_jobs(left, costing.folder, profile, profile.limits.gpu_hours - used)
    taken = [job for job in jobs if _taken(job, profile, submissions)]
    missing = len(left) - sum(len(job.array_tasks) for job in taken)
    if taken:
        print("Ended? The same command again runs what failed. How it goes: course status.")
        print("To end one: course cancel and its name.")
    if missing:
        print(f"{missing} runs are left: the same command again, when some others have ended.")
    print(f"What there is: course report {costing.folder}")
    return 1 if missing else 0


def _taken(job: Job, profile: Profile, submissions: Path) -> bool:
    """Submit a job, or say why not."""
    try:
        one = submit_job(job, profile, submissions)
    except CourseError as problem:
        print(problem, file=sys.stderr)
        return False
    print(f"{one.id}: {len(job.array_tasks)} runs are handed in, as job {one.job_id}.")
    return True


def make_jobs(
    left: Sequence[PredictedRun], folder: Path, profile: Profile, gpu_hours: float
) -> list[Job]:
    """Return job arrays for as many of these runs as fit into `gpu_hours`, the shortest first.

    Together they take no more places than the profile allows. Each array has at least one run: if
    even that does not fit, the submission is refused and says why.

    Raises: CourseError for more ranks than the nodes of the profile hold
    """
    by_ranks: dict[int, list[PredictedRun]] = {}
    for one in sorted(left, key=lambda one: one.run_s):
        by_ranks.setdefault(one.run.ranks, []).append(one)
    at_once = max(1, profile.limits.max_jobs // max(1, len(by_ranks)))
    jobs = []
    for _, runs in sorted(by_ranks.items()):
        job = _job(runs, folder, profile, at_once)
        while len(runs) > 1 and job.gpu_hours > gpu_hours:
            runs = runs[:-1]
            job = _job(runs, folder, profile, at_once)
        gpu_hours -= job.gpu_hours if job.gpu_hours <= gpu_hours else 0  # else it is refused
        jobs.append(replace(job, arguments=(str(_list(runs, folder)),)))
    return jobs


def waiting(submissions: Iterable[Submission]) -> set[str]:
    """Return the folders of all runs that were submitted and have not ended."""
    found = set()
    for one in submissions:
        if one.job.program != ARRAY_TASK or one.is_over:
            continue
        ended = {state.array_task for state in one.seen if state.is_final}
        for array_task, listed in enumerate(read_list(one.job.arguments[0])):
            if array_task not in ended:
                found.add(listed.out)
    return found


def out_of(one: PredictedRun, folder: Path) -> Path:
    """Return the folder of a run's records, the same from wherever it is started."""
    return (folder / one.run.name).resolve()


def _job(runs: Sequence[PredictedRun], folder: Path, profile: Profile, at_once: int) -> Job:
    ranks = runs[0].run.ranks
    nodes = _nodes(ranks, profile)
    longest_s = max(one.run_s for one in runs) * SLOWER + SPARE_S
    job = Job(
        script="sweep",
        program=ARRAY_TASK,
        name=f"study-{ranks}-ranks",
        nodes=nodes,
        gpus_per_node=ranks // nodes if profile.gpus_per_node else None,
        ranks_per_node=ranks // nodes,
        time_limit=write_time(min(longest_s, read_time_s(profile.time_limit))),
        array=f"0-{len(runs) - 1}%{at_once}",
        run_folder=str(folder),
    )
    return fitted(job, profile)


def _list(runs: Sequence[PredictedRun], folder: Path) -> Path:
    """Write what each array task is to do into a file of its own."""
    lists = folder.resolve() / "lists"
    lists.mkdir(parents=True, exist_ok=True)
    each = [{"out": str(out_of(one, folder)), "run": one.run.plain()} for one in runs]
    path = lists / f"{len(list(lists.iterdir()))}.json"
    path.write_text(json.dumps(each, indent=1), encoding="utf-8")
    return path


def _nodes(ranks: int, profile: Profile) -> int:
    per_node = profile.gpus_per_node or ranks
    nodes = -(-ranks // per_node)
    if ranks % nodes or nodes > profile.max_nodes:
        raise CourseError(
            f"study: need {ranks} ranks on whole nodes; profile {profile.name} has "
            f"{profile.max_nodes} of {per_node} GPUs. Try --ranks {per_node}."
        )
    return nodes
