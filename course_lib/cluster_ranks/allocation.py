"""Nodes of Slurm for a notebook: asked for by the site's profile, waited for, surely given back.

The job is `cluster/ranks.sbatch`, handed in like any other: the profile's limits count it, and
`course status` shows it. The servers are the job, so that when they end, because the notebook is
gone, nothing is left to cancel; a process that outlives the notebook cancels one that still waits.
"""

import json
import os
import secrets
import subprocess
import time
from contextlib import suppress
from pathlib import Path

from course_lib.cluster_ranks.door import Door, address_of
from course_lib.core.errors import CourseError, MachineError
from course_lib.jobs.job import Job
from course_lib.jobs.scheduler import JobState, SchedulerError, in_words
from course_lib.jobs.site_commands import pick_profile
from course_lib.jobs.slurm import Slurm
from course_lib.jobs.slurm_time import write_time
from course_lib.jobs.submissions import FOLDER, Submission, find_home, settle
from course_lib.jobs.submit import submit_job
from course_lib.ranks.progress import ProgressLine

SERVER = "course_lib.cluster_ranks.node_server"
SCRIPT = "ranks"
ASK_EVERY_S, POLL_S = 2.0, 0.1
JOIN_S = 120.0  # in which servers connect once the job runs
WARN_S = 120.0
FATE_S = 8.0  # in which Slurm says what became of a job, at the latest
# reasons for which a job waits for ever
NEVER = ("BadConstraints", "PartitionNodeLimit", "PartitionTimeLimit", "DependencyNeverSatisfied")
GUARD = 'cat >/dev/null; exec scancel --quiet "$1"'  # its stdin ends with the notebook


class Allocation:
    """An allocation of Slurm for as many minutes; asked for when it is opened."""

    def __init__(
        self, num_nodes: int, world_size: int, *, minutes: int = 30, profile: str | None = None
    ) -> None:
        if not isinstance(num_nodes, int) or num_nodes < 1 or minutes < 1:
            raise CourseError(
                f"Ranks: need nodes and minutes from 1; got {num_nodes!r} and {minutes!r}."
            )
        self.profile = pick_profile(profile)
        if self.profile.scheduler != "slurm":
            raise CourseError(
                f"Ranks: need a profile of Slurm; got {self.profile.name}. Try course cluster init "
                'on the login node, profile="slurm", or cluster="ssh".'
            )
        self.num_nodes, self.minutes, self.id = num_nodes, minutes, 0
        self.idle_minutes = float(self.profile.idle_minutes)
        self._per_node = max(world_size // num_nodes, 1)
        self._folder = find_home() / FOLDER
        self._submission: Submission | None = None
        self._guard: subprocess.Popen[bytes] | None = None
        self._key: Path | None = None
        self._end_s = 0.0

    def open(self) -> Door:
        """Ask for the nodes, show the queue, and wait until the servers have connected.

        Raises: CourseError where the request can never run, or the job ends before that
        """
        door = Door(address_of(self.profile.kernel_address), self.num_nodes)
        line = ProgressLine()
        try:
            key = self._write_key(door)
            self._submit(key)
            self._wait(door, line)
        except BaseException:
            door.turn_away()
            self.release()
            raise
        finally:
            line.clear()
            self._forget_key()
        self._end_s = time.monotonic() + self.minutes * 60
        nodes = ", ".join(sorted(facts["node"] for _, facts in door.nodes.values()))
        print(f"Slurm job {self.id}: {self.num_nodes} nodes ({nodes}) for {self.minutes} minutes.")
        return door

    def _write_key(self, door: Door) -> Path:
        """Write where the door is, and the token, for the servers: a file of this user alone."""
        folder = self._folder / "doors"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._key = path = folder.resolve() / secrets.token_hex(8)
        facts = {"address": door.address, "port": door.port, "token": door.token.hex()}
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump(facts, file)
        return path

    def _forget_key(self) -> None:
        if self._key is not None:
            self._key.unlink(missing_ok=True)
        self._key = None

    def _submit(self, key: Path) -> None:
        gpus = self._per_node if self._per_node <= self.profile.gpus_per_node else 0
        job = Job(
            name="ranks",
            program=SERVER,
            arguments=(str(key),),
            script=SCRIPT,
            nodes=self.num_nodes,
            gpus_per_node=gpus,
            ranks_per_node=self._per_node,
            time_limit=write_time(self.minutes * 60),
            run_folder="runs",
        )
        try:
            self._submission = submit_job(job, self.profile, self._folder)
        except CourseError as problem:
            raise CourseError(f"{problem}\n{self._free()}") from problem
        self.id = int(self._submission.job_id or 0)
        self._guard = subprocess.Popen(
            ["sh", "-c", GUARD, "guard", str(self.id)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def _wait(self, door: Door, line: ProgressLine) -> None:
        start_s = asked_s = time.monotonic()
        runs_s = 0.0
        state = JobState(array_task=0, state="PENDING")
        while not door.wait(POLL_S):
            now_s = time.monotonic()
            if now_s - asked_s < (ASK_EVERY_S if runs_s else 0.5):
                continue
            asked_s, (state, *_) = now_s, Slurm().states(str(self.id))
            if state.is_final or state.reason in NEVER:
                raise MachineError(
                    f"Ranks: need {self.num_nodes} nodes of Slurm; job {self.id} is "
                    f"{in_words([state])}. {self._log()} {self._free()}"
                )
            runs_s = runs_s or (now_s if state.state == "RUNNING" else 0.0)
            if runs_s and now_s - runs_s > JOIN_S:
                raise MachineError(
                    f"Ranks: need the servers of job {self.id} to connect to {door.address}, port "
                    f"{door.port}; {len(door.nodes)} of {self.num_nodes} did. {self._log()} Try "
                    "kernel_address in the profile: an address that the nodes can reach."
                )
            place = "" if runs_s else self._place_in_queue()
            line.tell(f"Slurm job {self.id}: {in_words([state])}{place}, {now_s - start_s:.0f} s")

    def _place_in_queue(self) -> str:
        waiting = _said("squeue", "-h", "-t", "PD", "-S", "-p", "-o", "%i").split()
        if str(self.id) not in waiting:
            return ""
        return f", {waiting.index(str(self.id)) + 1} of {len(waiting)} that wait"

    def _free(self) -> str:
        """Return a sentence on the nodes that are free."""
        words = ["-p", self.profile.partition] if self.profile.partition else []
        counts = [one.split() for one in _said("sinfo", "-h", *words, "-o", "%t %D").splitlines()]
        free = sum(int(count) for state, count in counts if state.startswith("idle"))
        total = sum(int(count) for _, count in counts)
        return f"Free now: {free} of {total} nodes. Try fewer nodes, or later."

    def _log(self) -> str:
        """Return the last words of the job's log, where it has some."""
        if self._submission is None:
            return ""
        log = self._submission.folder / f"log-{self.id}.out"
        with suppress(OSError):
            lines = log.read_text(errors="replace").strip().splitlines()[-2:]
            return f"Its log ends: {' / '.join(lines)}" if lines else ""
        return ""

    def warning(self) -> str:
        """Return the sentence on an allocation that ends within two minutes."""
        left_s = self._end_s - time.monotonic()
        if not 0 < left_s < WARN_S:
            return ""
        return (
            f"Slurm job {self.id} ends in less than {left_s // 60 + 1:.0f} min, and what the ranks "
            "hold with it."
        )

    def fate(self) -> str:
        """Return the state of the job, as soon as it is no longer running."""
        give_up_s = time.monotonic() + FATE_S
        with suppress(SchedulerError):
            while True:
                state = Slurm(pauses_s=()).states(str(self.id))[0]
                if state.state not in ("RUNNING", "COMPLETING"):
                    return f": Slurm job {self.id} is {in_words([state])}"
                if time.monotonic() > give_up_s:
                    break
                time.sleep(POLL_S)
        return f", which Slurm job {self.id} had"

    def release(self) -> None:
        """Cancel the job, and note what it used."""
        submission, guard = self._submission, self._guard
        self._submission = self._guard = None
        if guard is not None:  # it cancels the job when its stdin ends
            guard.stdin.close()  # type: ignore[union-attr]
            with suppress(subprocess.TimeoutExpired):
                guard.wait(10)
        if submission is not None:
            with suppress(CourseError):
                settle(submission, self._folder)


def _said(*command: str) -> str:
    with suppress(OSError):
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout
    return ""
