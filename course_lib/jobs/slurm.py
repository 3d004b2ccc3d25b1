"""Slurm as a scheduler: its own commands, repeated while the controller does not answer."""

import getpass
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from course_lib.core.errors import CourseError
from course_lib.jobs.job import Job, read_array
from course_lib.jobs.scheduler import (
    FINAL,
    GONE,
    JobState,
    NoAnswerError,
    SchedulerError,
    python_first,
    split_id,
)
from course_lib.jobs.slurm_time import read_time_s

PAUSES_S = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0)
NO_ANSWER = (  # what its commands say where the controller is away, or too busy
    "Unable to contact slurm controller",
    "Socket timed out",
    "Connection refused",
    "Zero Bytes were transmitted",
    "Communication connection failure",
    "standby mode",
    "temporarily unable",
)
NO_CLUSTER = ("Unable to process configuration file", "Could not establish a configuration source")
FORGOTTEN = "Invalid job id"
OWN_SETTINGS = ("SLURM_CONF", "SLURM_TIME_FORMAT")


def tell(sentence: str) -> None:
    """Print a message on stderr, where it belongs to no output."""
    print(sentence, file=sys.stderr, flush=True)


class Slurm:
    """The Slurm whose commands are on this machine; `pauses_s` are the waits between attempts."""

    def __init__(
        self, *, pauses_s: Iterable[float] = PAUSES_S, say: Callable[[str], None] = tell
    ) -> None:
        self._pauses_s, self._say = tuple(pauses_s), say

    def is_here(self) -> bool:
        """Return whether this machine belongs to a cluster.

        Raises: NoAnswerError where it does and the controller is silent, SchedulerError where
            SLURM_CONF names no cluster
        """
        try:
            return not self._ask("sinfo", "--noheader").returncode
        except SchedulerError as problem:
            if isinstance(problem, NoAnswerError) or "SLURM_CONF" in os.environ:
                raise
            return False  # no commands, or no configuration for them

    def check(self, script: Path) -> None:
        """Let sbatch check the script and whether the cluster could ever run it."""
        answer = self._ask("sbatch", "--test-only", str(script))
        if answer.returncode:
            raise _refused(answer.stderr)

    def submit(self, script: Path, job: Job, token: str) -> str:
        """Submit with sbatch; where the answer was lost, look for the job before trying again."""
        command = ("sbatch", "--parsable", f"--comment={token}", str(script))
        answer = self._ask(*command, unless=lambda: self.find(token))
        if answer.returncode:
            raise _refused(answer.stderr)
        return answer.stdout.strip().split(";")[0]

    def find(self, token: str) -> str | None:
        """Return the id of the job with this comment."""
        command = ("squeue", "-h", "-t", "all", "-u", getpass.getuser(), "-o", "%F %k")
        for line in self._ask(*command).stdout.splitlines():
            job_id, _, comment = line.partition(" ")
            if comment.strip() == token:
                return job_id
        return None

    def states(self, job_id: str) -> list[JobState]:
        """Return the states from the controller; those it has forgotten, from the accounting."""
        whole, wanted = split_id(job_id)
        answer = self._ask("scontrol", "show", "job", "-o", whole)
        if answer.returncode and FORGOTTEN not in answer.stderr:
            raise _refused(answer.stderr)
        found = [state for line in answer.stdout.splitlines() for state in _read(line)]
        found = found or self._accounted(whole) or [JobState(array_task=wanted or 0, state=GONE)]
        of_interest = [one for one in found if wanted in (None, one.array_task)]
        return sorted(of_interest, key=lambda one: one.array_task)

    def _accounted(self, job_id: str) -> list[JobState]:
        command = ("sacct", "-X", "-n", "-P", "-j", job_id, "-o", "JobID,State,ExitCode,ElapsedRaw")
        found = []
        for line in self._ask(*command).stdout.splitlines():
            name, state, code, seconds = line.split("|")
            number = name.partition("_")[2]
            array_task = int(number) if number.isdigit() else 0
            word, ran_s = state.split()[0], float(seconds or 0)
            found.append(_state(array_task, state=word, code=code, seconds=ran_s))
        return found

    def cancel(self, job_id: str) -> None:
        """Cancel with scancel."""
        answer = self._ask("scancel", job_id)
        if answer.returncode:
            raise _refused(answer.stderr)

    def _ask(
        self, *command: str, unless: Callable[[], str | None] = lambda: None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command, again while nothing answers; `unless` may find the answer in between."""
        for pause_s in (*self._pauses_s, None):
            answer = _run(command)
            if not answer.returncode or not any(text in answer.stderr for text in NO_ANSWER):
                return answer
            if pause_s is None:
                break
            self._say(f"Slurm's controller does not answer; asking again in {pause_s:g} s.")
            time.sleep(pause_s)
            if known := unless():
                return subprocess.CompletedProcess(command, 0, known, "")
        said = f"{_sentence(answer.stderr)!r}, {len(self._pauses_s) + 1} times"
        raise NoAnswerError(
            f"{command[0]}: need an answer of Slurm's controller; got {said}. Jobs that run go on. "
            "Try again in some minutes; `scontrol ping` says whether it is back."
        )


def _run(command: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    """Run it without the environment of a surrounding job, which sbatch would obey.

    Raises: SchedulerError where there is no Slurm, or none any more
    """
    conf = os.environ.get("SLURM_CONF", "")
    if conf and not Path(conf).exists():  # the command itself would look for it for a minute
        raise _no_cluster(command[0], f"SLURM_CONF={conf}, which is not there")
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("SLURM_") or name in OWN_SETTINGS
    }
    own = {
        "SLURM_BITSTR_LEN": "0",  # else long lists of array tasks end in dots
        "PATH": python_first(),  # sbatch takes it along: the job finds this torchrun
    }
    try:
        answer = subprocess.run(
            command,
            env=kept | own,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
    except FileNotFoundError:
        raise SchedulerError(
            f"{command[0]}: need Slurm's commands on this machine; got none. "
            "Try it on the cluster's login node, or --profile laptop to run it here."
        ) from None
    if answer.returncode and any(text in answer.stderr for text in NO_CLUSTER):
        raise _no_cluster(command[0], repr(_sentence(answer.stderr)))
    return answer


def _no_cluster(command: str, got: str) -> SchedulerError:
    return SchedulerError(
        f"{command}: need a cluster that is there; got {got}. "
        "Try export SLURM_CONF=..., or --profile laptop."
    )


def _refused(stderr: str) -> SchedulerError:
    return SchedulerError(f"Slurm does not take it: {_sentence(stderr)}")


def _sentence(stderr: str) -> str:
    """Return the last line, without the name of the command."""
    lines = [line for line in stderr.splitlines() if line.strip()] or ["it says nothing"]
    return re.sub(r"^(\w+:? )?(error|fatal): |^allocation failure: ", "", lines[-1]).strip()


def _read(line: str) -> list[JobState]:
    """Return the states in one line of `scontrol show job -o`; waiting array tasks share one."""
    known = dict(re.findall(r"([A-Z][\w/:]*)=(.*?)(?= [A-Z][\w/:]*=|\s*$)", line))
    if "JobState" not in known:
        return []
    reason = known["Reason"] if known["JobState"] not in FINAL else ""  # why it waited once
    return [
        _state(
            array_task,
            state=known["JobState"],
            code=known["ExitCode"],
            restarts=int(known.get("Restarts", 0)),
            seconds=_seconds(known.get("RunTime", "")),
            reason="" if reason == "None" else reason,
            log=known.get("StdOut", ""),
        )
        for array_task in read_array(known.get("ArrayTaskId", "0"))
    ]


def _state(
    array_task: int,
    *,
    state: str,
    code: str,
    restarts: int = 0,
    seconds: float = 0.0,
    reason: str = "",
    log: str = "",
) -> JobState:
    """Return a state: of `7:0` the exit code is 7, of `0:9` it is 128 + 9."""
    number, _, signal = code.partition(":")
    by_itself = state in ("COMPLETED", "FAILED")
    return JobState(
        array_task=array_task,
        state=state,
        exit_code=(int(number) or (128 + int(signal) if int(signal or 0) else 0))
        if by_itself
        else None,
        restarts=restarts,
        seconds=seconds,
        reason=reason,
        log=log,
    )


def _seconds(text: str) -> float:
    """Return the seconds of a time as Slurm writes it; 0 where there is none."""
    try:
        return read_time_s(text)
    except CourseError:
        return 0.0
