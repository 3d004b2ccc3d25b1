"""The process that runs one local job: its array tasks one after another, and their end.

It waits until the jobs before it are done, runs the script with what Slurm would have put into the
environment, and writes down how it ended. Cancelling, the time limit and `scontrol requeue` end
every process of an array task, whatever session it went into.
"""

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

from course_lib.jobs.local.job import (
    MARK,
    POLL_S,
    RUNNING,
    TASKS,
    LocalJob,
    end_processes,
    is_locked,
    mark_of,
    python_of,
    write_json,
)
from course_lib.jobs.scheduler import python_first

NO_LOG = 128 + 53  # as Slurm has it, which cannot say it anywhere either
TOOLS = ("srun", "scontrol")


class LocalRun:
    """A run of the job in `folder`, with its state on disk."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._job = folder, LocalJob.read(folder)

    def run(self) -> None:
        """Run all array tasks."""
        self._write_tools()
        while self._is_behind():
            if self._is_asked("cancel"):
                break
            time.sleep(POLL_S)
        for array_task in self._job.array_tasks:
            self._run_array_task(array_task)

    def _is_behind(self) -> bool:
        """Return whether an earlier job has not ended."""
        others = [path for path in self._folder.parent.iterdir() if path.name.isdigit()]
        before = [path for path in others if int(path.name) < int(self._folder.name)]
        return any(is_locked(path / "lock") for path in before)

    def _is_asked(self, what: str, array_task: int | None = None) -> bool:
        name = what if array_task is None else f"{what}-{array_task}"
        return (self._folder / name).exists()

    def _is_cancelled(self, array_task: int) -> bool:
        return self._is_asked("cancel") or self._is_asked("cancel", array_task)

    def _note(self, array_task: int, **words: object) -> None:
        write_json(self._folder / TASKS / f"{array_task}.json", words)

    def _run_array_task(self, array_task: int) -> None:
        restarts, state = 0, "REQUEUED"
        while state == "REQUEUED":
            if self._is_cancelled(array_task):
                self._note(array_task, state="CANCELLED", restarts=restarts)
                return
            (self._folder / f"requeue-{array_task}").unlink(missing_ok=True)
            self._note(array_task, state=RUNNING, restarts=restarts)
            begin_s = time.monotonic()
            state, code = self._run_script(array_task, restarts)
            seconds = round(time.monotonic() - begin_s, 3)
            restarts += state == "REQUEUED"
        exit_code = code if state in ("COMPLETED", "FAILED") else None
        self._note(array_task, state=state, exit_code=exit_code, restarts=restarts, seconds=seconds)

    def _run_script(self, array_task: int, restarts: int) -> tuple[str, int]:
        """Run the script once; return its state and exit code."""
        path = self._job.log_of(array_task)
        try:
            log = path.open("ab" if self._job.append else "wb")
        except OSError:
            return "FAILED", NO_LOG
        with log:
            process = subprocess.Popen(
                ["bash", str(self._folder / "script")],
                cwd=self._job.cwd,
                env=self._environment(array_task, restarts),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
            why = self._watch(process, array_task)
            end_processes(mark_of(self._folder, array_task))
            code = process.wait()
        return why or ("FAILED" if code else "COMPLETED"), code if code >= 0 else 128 - code

    def _watch(self, process: "subprocess.Popen[bytes]", array_task: int) -> str | None:
        """Return why the script has to end; None when it ended by itself."""
        give_up = time.monotonic() + self._job.time_limit_s
        while process.poll() is None:
            if self._is_cancelled(array_task):
                return "CANCELLED"
            if time.monotonic() > give_up:
                return "TIMEOUT"
            if self._is_asked("requeue", array_task):
                break
            time.sleep(POLL_S)
        return "REQUEUED" if self._is_asked("requeue", array_task) else None

    # -- what the script finds ---------------------------------------------------------------

    def _write_tools(self) -> None:
        """Put `srun` and `scontrol` into a folder that comes first in the script's PATH."""
        for tool in TOOLS:
            path = self._folder / "bin" / tool
            path.parent.mkdir(exist_ok=True)
            command = shlex.join([*python_of("tools"), tool])
            path.write_text(f'#!/bin/sh\nexec {command} "$@"\n', encoding="utf-8")
            path.chmod(0o755)

    def _environment(self, array_task: int, restarts: int) -> dict[str, str]:
        job = self._job
        outside = {k: v for k, v in os.environ.items() if not k.startswith("SLURM")}
        nodes = ",".join(["127.0.0.1"] * job.nodes)
        known = {
            "JOB_ID": job.job_id,
            "JOBID": job.job_id,
            "JOB_NAME": job.name,
            "SUBMIT_DIR": job.cwd,
            "JOB_NODELIST": nodes,
            "NODELIST": nodes,
            "JOB_NUM_NODES": job.nodes,
            "NNODES": job.nodes,
            "NTASKS": job.nodes * job.tasks_per_node,
            "NTASKS_PER_NODE": job.tasks_per_node,
            "CPUS_PER_TASK": job.cpus_per_task,
            "CPUS_ON_NODE": job.cpus_per_task * job.tasks_per_node,
            "NODEID": 0,
            "PROCID": 0,
            "LOCALID": 0,
        }
        if job.gpus_per_node:
            known["GPUS_ON_NODE"] = job.gpus_per_node
        if restarts:
            known["RESTART_COUNT"] = restarts
        if job.is_array:
            known |= {
                "ARRAY_JOB_ID": job.job_id,
                "ARRAY_TASK_ID": array_task,
                "ARRAY_TASK_COUNT": len(job.array_tasks),
                "ARRAY_TASK_MIN": min(job.array_tasks),
                "ARRAY_TASK_MAX": max(job.array_tasks),
            }
        tools = {"PATH": f"{self._folder / 'bin'}{os.pathsep}{python_first()}"}
        slurm = {f"SLURM_{name}": str(value) for name, value in known.items()}
        return outside | slurm | tools | {MARK: mark_of(self._folder, array_task)}


def main() -> None:
    """Run the job of the named folder; closing the terminal does not stop it."""
    for of_the_terminal in (signal.SIGINT, signal.SIGQUIT):  # a shell ignores them for what it left
        signal.signal(of_the_terminal, signal.SIG_DFL)
    LocalRun(Path(sys.argv[1])).run()
