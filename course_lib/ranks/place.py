"""Where ranks live: the interface of a place, and the place that is this machine.

The pool and its jobs know ranks only as members of a place. Ranks on other nodes are members of the
same shape (`course_lib.cluster_ranks`), so that a job is watched in the same way everywhere.
"""

import multiprocessing
import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from typing import Any, Protocol

import psutil

from course_lib.core.errors import MachineError
from course_lib.ranks.call_board import CallBoard
from course_lib.ranks.fork_server import end_orphans, start_method, without_main_script
from course_lib.ranks.process_tree import end_trees
from course_lib.ranks.rank_process import RankFailure, WorkerConfig, live

STOPPED = (
    "died: its process is stopped by a signal (SIGSTOP), and nothing continues it. "
    "Try time.sleep() for a rank that is to be late"
)
REPLACED = (
    "died: its process runs another program now (os.exec...), so it is no rank any more. "
    "Try subprocess.run()"
)
RESTARTED = "The ranks were restarted; what they held is gone."


class Member(Protocol):
    """What the notebook holds of one rank, wherever it lives.

    jobs     the pipe of jobs: send, poll, recv, close
    signals  become ready, for `connection.wait`, with an answer and with the end of the rank
    """

    rank: int
    jobs: Any

    @property
    def signals(self) -> list[Any]:
        """Things to wait on."""

    def is_alive(self) -> bool:
        """Return whether the process of the rank runs."""

    def is_stopped(self) -> bool:
        """Return whether a signal such as SIGSTOP has halted the rank."""

    def death(self) -> RankFailure:
        """Return how the rank ended."""


class Place(Protocol):
    """A place that starts ranks and ends them.

    over          whether this place has no room for ranks any more until `start` asks for it again
    sees_at_once  whether ranks see each other's calls at once, and refuse one that does not match
    """

    over: bool
    sees_at_once: bool

    @property
    def members(self) -> Sequence[Member]:
        """The ranks, in order; none before `start` and after `stop`."""

    def start(self, configs: Sequence[WorkerConfig], call_board: CallBoard) -> None:
        """Start these ranks; their calls appear on the call board."""

    def before_job(self) -> None:
        """Say what a learner should know before the next job."""

    def send(self, job: tuple[str, bytes]) -> None:
        """Send a job to every rank.

        Raises: BrokenPipeError where one is gone
        """

    def is_current(self) -> bool:
        """Return whether the call board shows what all ranks do now."""

    def kill(self) -> None:
        """Kill the ranks and every process they started."""

    def stop(self) -> None:
        """Kill the ranks and let go of them; others can be started."""

    def end(self) -> None:
        """Stop the ranks, and give back what they ran on."""

    def after_loss(self) -> str:
        """Return the sentence on what becomes of the ranks after a failure that cost them."""


class LocalMember:
    """A rank of this machine: its process, the pipe of jobs, and the lifeline pipe."""

    def __init__(
        self,
        rank: int,
        process: BaseProcess,
        jobs: connection.Connection,
        lifeline: connection.Connection,
    ) -> None:
        self.rank, self.process, self.jobs, self.lifeline = rank, process, jobs, lifeline

    @property
    def signals(self) -> list[Any]:
        """The pipe of jobs, and the end of the process: a child may hold the pipe open."""
        return [self.jobs, self.process.sentinel]

    def is_alive(self) -> bool:
        """Return whether the process runs."""
        return self.process.is_alive()

    def is_stopped(self) -> bool:
        """Return whether a signal such as SIGSTOP has halted the rank."""
        with suppress(psutil.Error):
            return psutil.Process(self.process.pid).status() == psutil.STATUS_STOPPED
        return False

    def death(self) -> RankFailure:
        """Return how the process ended."""
        self.process.join(2)
        code = self.process.exitcode
        if code is None:
            return RankFailure("RankDied", REPLACED)
        if code >= 0:
            return RankFailure("RankDied", f"died: its process ended with exit code {code}")
        name = signal.Signals(-code).name
        because = " (by hand, or because memory ran out)" if name == "SIGKILL" else ""
        because = because or " (a crash in C++)"
        return RankFailure("RankDied", f"died: its process was killed by {name}{because}")


class LocalPlace:
    """This machine: ranks are forked from the fork server, or else from this process.

    forks   start ranks by a fork of this process, which is there for nothing else
    apart   what it has open besides, with close(), and a rank must not keep
    """

    over, sees_at_once = False, True

    def __init__(self, *, forks: bool = False, apart: Sequence[Any] = ()) -> None:
        self.members: list[LocalMember] = []
        self._forks, self._apart = forks, tuple(apart)

    def start(self, configs: Sequence[WorkerConfig], call_board: CallBoard) -> None:
        """Start these ranks.

        Raises: MachineError where a process cannot be started
        """
        context = multiprocessing.get_context("fork") if self._forks else start_method()
        with without_main_script():
            for config in configs:
                open(config.output_file, "a").close()
                self.members.append(self._start_rank(context, config))

    def _start_rank(self, context: Any, config: WorkerConfig) -> LocalMember:
        jobs, jobs_there = context.Pipe()
        lifeline_there, lifeline = context.Pipe(duplex=False)
        ends = [end for member in self.members for end in (member.jobs, member.lifeline)]
        extra = ([*self._apart, *ends, jobs, lifeline],) if self._forks else ()
        process = context.Process(
            target=_live_apart if self._forks else live,
            args=(config, jobs_there, lifeline_there, *extra),
            name=f"rank {config.rank}",
        )
        try:
            process.start()
        except (EOFError, OSError) as error:
            raise MachineError(
                f"Ranks: need a new process for rank {config.rank}; got: {error}. Try again, or "
                "`course doctor`, which shows what this machine has."
            ) from error
        jobs_there.close()
        lifeline_there.close()
        return LocalMember(config.rank, process, jobs, lifeline)

    def before_job(self) -> None:
        """Say nothing: this machine is there."""

    def send(self, job: tuple[str, bytes]) -> None:
        """Send a job to every rank.

        Raises: BrokenPipeError where one is gone
        """
        for member in self.members:
            member.jobs.send(job)

    def is_current(self) -> bool:
        """Return True: the ranks write the call board themselves."""
        return True

    def kill(self) -> None:
        """Kill the ranks and every process they started."""
        alive = [member.process.pid for member in self.members if member.is_alive()]
        end_trees([pid for pid in alive if pid is not None])

    def stop(self) -> None:
        """Kill the ranks and let go of them."""
        self.kill()
        for member in self.members:
            member.process.join(5)
            member.jobs.close()
            member.lifeline.close()
        self.members.clear()
        end_orphans(os.getpid() if self._forks else None)

    def end(self) -> None:
        """Stop the ranks."""
        self.stop()

    def after_loss(self) -> str:
        """Return the sentence on what becomes of the ranks after a failure that cost them."""
        return RESTARTED


def _live_apart(
    config: WorkerConfig,
    jobs: connection.Connection,
    alive: connection.Connection,
    inherited: Sequence[Any],
) -> None:
    """Live as a rank that was forked from the process that holds the others' pipes."""
    for end in inherited:
        end.close()  # else no rank ever sees that this process has gone
    live(config, jobs, alive)
