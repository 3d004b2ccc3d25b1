"""Hosts that are reached by ssh, for a lab without a scheduler: one server on each."""

import json
import os
import random
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from course_lib.cluster_ranks.door import Door, address_of
from course_lib.core.errors import CourseError, MachineError

HOSTS = "COURSE_HOSTS"
SSH = "COURSE_SSH"  # the command, with its options
OPTIONS = "ssh -o BatchMode=yes -o ConnectTimeout=10"
OPEN_S = 60.0
POLL_S = 0.1


class SshHosts:
    """One node a host; the servers are started with `ssh HOST`, in this folder with this Python."""

    idle_minutes = 0.0

    def __init__(self, hosts: Sequence[str]) -> None:
        self.hosts = list(hosts) or [one for one in os.environ.get(HOSTS, "").split(",") if one]
        if not self.hosts or any(not isinstance(one, str) or one[:1] == "-" for one in self.hosts):
            raise CourseError(
                f"Ranks: need names of hosts for ssh; got {self.hosts}. Try "
                f'hosts=["alpha", "beta"], or {HOSTS}=alpha,beta.'
            )
        self.num_nodes, self.id = len(self.hosts), random.randrange(10**6)
        self._processes: list[subprocess.Popen[str]] = []

    def open(self) -> Door:
        """Start a server on each host, and wait until all have connected.

        Raises: MachineError with what ssh said where one does not
        """
        address = address_of(os.environ.get("COURSE_KERNEL_ADDRESS", ""))
        local = all(host in ("localhost", "127.0.0.1") for host in self.hosts)
        door = Door("127.0.0.1" if local else address, self.num_nodes)
        try:
            self._processes = [self._start(host, n, door) for n, host in enumerate(self.hosts)]
            give_up_s = time.monotonic() + OPEN_S
            while not door.wait(POLL_S):
                self._check(time.monotonic() > give_up_s)
        except BaseException:
            door.turn_away()
            raise
        return door

    def _start(self, host: str, number: int, door: Door) -> subprocess.Popen[str]:
        """Start a server; the token goes through stdin, where no list of processes shows it."""
        paths = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
        words = ["env", f"PYTHONPATH={paths}", sys.executable, "-m"]
        there = shlex.join([*words, "course_lib.cluster_ranks.node_server"])
        command = [*shlex.split(os.environ.get(SSH, OPTIONS)), host]
        try:
            process = subprocess.Popen(
                [*command, f"cd {shlex.quote(os.getcwd())} && exec {there}"],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,  # Ctrl-C is for the notebook
            )
        except OSError as problem:
            raise MachineError(f"Ranks, {command[0]}: need ssh; got {problem}.") from problem
        facts = {"address": door.address, "port": door.port, "token": door.token.hex()}
        with suppress(OSError):  # it has ended, which `_check` tells
            print(json.dumps({**facts, "number": number}), file=process.stdin, flush=True)
        return process

    def _check(self, is_late: bool) -> None:
        """Raise MachineError where a server has ended, or does not come."""
        for host, process in zip(self.hosts, self._processes, strict=True):
            if process.poll() is not None or is_late:
                process.kill()
                said = process.communicate()[1].strip()[-500:]
                raise MachineError(
                    f"Ranks, host {host}: need a server that connects back within {OPEN_S:.0f} s; "
                    f"got {said or 'silence'!r}. Try `ssh {host} true`; the folder of the course "
                    "and its environment have to be there, under the same path."
                )

    def warning(self) -> str:
        """Return nothing: hosts have no time limit."""
        return ""

    def fate(self) -> str:
        """Return what ssh said at the end."""
        for host, process in zip(self.hosts, self._processes, strict=True):
            if process.poll():
                return f" (ssh {host} ended with {process.returncode})"
        return ""

    def release(self) -> None:
        """End the connections; the servers end themselves with their channel."""
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(3)
            process.kill()
            process.wait()
            with suppress(OSError, ValueError):
                process.communicate(timeout=1)
        self._processes = []
