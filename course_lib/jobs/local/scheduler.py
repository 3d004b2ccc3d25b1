"""A scheduler for this machine: the same batch scripts, one job at a time, without Slurm.

A process of its own (`runner.py`) works a job off, so it goes on when the terminal is closed.
"""

import os
import subprocess
import zlib
from dataclasses import asdict
from pathlib import Path

from course_lib.jobs.job import Job
from course_lib.jobs.lint.directives import read_directives
from course_lib.jobs.local.job import (
    LocalJob,
    end_processes,
    is_locked,
    locked,
    mark_of,
    python_of,
    state_of,
    write_json,
)
from course_lib.jobs.scheduler import GONE, JobState, SchedulerError, split_id
from course_lib.jobs.slurm_time import read_time_s

NUM_FIRST_IDS = 20_000  # scripts make ports of ids: those of two folders should differ


class LocalRunner:
    """Runs jobs on this machine in the order of submission; `folder` holds them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder.resolve()

    def check(self, script: Path) -> None:
        """Check the script's syntax with bash.

        Raises: SchedulerError for what it does not understand
        """
        answer = subprocess.run(
            ["bash", "-n", str(script)], capture_output=True, text=True, errors="replace"
        )
        if answer.returncode:
            raise SchedulerError(f"bash cannot read the script: {answer.stderr.strip()}")

    def submit(self, script: Path, job: Job, token: str) -> str:
        """Start a process that runs the script when the earlier jobs have ended."""
        text = script.read_text(encoding="utf-8")
        folder = self._new_folder()
        (folder / "script").write_text(text, encoding="utf-8")
        options = {one.option: one.value for one in read_directives(text)}
        plain = asdict(_local(job, options, folder.name, token))
        with locked(folder / "lock") as lock:
            write_json(folder / "job.json", plain)
            with (folder / "runner.log").open("ab") as log:
                subprocess.run(
                    ["sh", "-c", '"$@" &', "sh", *python_of("runner"), str(folder)],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    pass_fds=[lock],  # the lock is held until that process ends
                    check=True,
                )
        return folder.name

    def _new_folder(self) -> Path:
        self._folder.mkdir(parents=True, exist_ok=True)
        there = [int(path.name) for path in self._folder.iterdir() if path.name.isdigit()]
        first = zlib.crc32(str(self._folder).encode()) % NUM_FIRST_IDS + 1
        number = max(there, default=first - 1) + 1
        while True:
            try:
                (self._folder / str(number)).mkdir()
            except FileExistsError:  # somebody else was faster
                number += 1
            else:
                return self._folder / str(number)

    def find(self, token: str) -> str | None:
        """Return the id of the job with this token."""
        for path in self._folder.glob("*/job.json"):
            if LocalJob.read(path.parent).token == token:
                return path.parent.name
        return None

    def states(self, job_id: str) -> list[JobState]:
        """Return the states from the job's folder; processes without their runner are NODE_FAIL."""
        whole, wanted = split_id(job_id)
        folder = self._folder / whole
        if not (folder / "job.json").exists():
            return [JobState(array_task=wanted or 0, state=GONE)]
        job, lives = LocalJob.read(folder), is_locked(folder / "lock")
        found = [state_of(folder, job, array_task, lives) for array_task in job.array_tasks]
        return [one for one in found if wanted in (None, one.array_task)]

    def cancel(self, job_id: str) -> None:
        """Ask the job's process to end it; where that process is lost, end what it started."""
        whole, array_task = split_id(job_id)
        folder = self._folder / whole
        if not (folder / "job.json").exists():
            return
        (folder / ("cancel" if array_task is None else f"cancel-{array_task}")).touch()
        if not is_locked(folder / "lock"):
            for one in LocalJob.read(folder).array_tasks if array_task is None else [array_task]:
                end_processes(mark_of(folder, one))


def _local(job: Job, options: dict[str, str], job_id: str, token: str) -> LocalJob:
    return LocalJob(
        job_id=job_id,
        name=job.name,
        token=token,
        cwd=os.getcwd(),
        log=options.get("output") or ("slurm-%A_%a.out" if job.array else "slurm-%j.out"),
        append=options.get("open-mode") == "append",
        nodes=job.nodes,
        tasks_per_node=int(options.get("ntasks-per-node", 1)),
        gpus_per_node=job.gpus_per_node or 0,
        cpus_per_task=int(options.get("cpus-per-task", 1)),
        time_limit_s=read_time_s(job.time_limit),
        is_array=bool(job.array),
        array_tasks=job.array_tasks,
    )
