"""Follow the processes of a sandbox, and end them when they pass a limit.

Memory is what the kernel charges to the processes, plus what lies in their memory file systems:
no limit on addresses could do this, since torch reserves far more than it uses.
"""

import os
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

GiB, MiB = 2**30, 2**20
LOOK_EVERY_S = 0.25
LAST_CHARACTERS = 4000
INODE_BYTES = 1024  # what an empty file costs in a memory file system
END_WITHIN_S = 60


@dataclass(frozen=True, kw_only=True)
class RunLimits:
    """The limits of one run; a run that uses more is ended.

    processes counts threads, too. disk_bytes limits each file and, in bubblewrap, /out, and each of
    /tmp, /dev/shm and HOME; these are kept in memory, and count there as well.
    Raises: ValueError where a limit is not positive.
    """

    wall_s: float = 300
    memory_bytes: int = 4 * GiB
    processes: int = 200
    output_bytes: int = 10 * MiB
    disk_bytes: int = 512 * MiB

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value <= 0:
                raise ValueError(f"RunLimits: expected {name} above 0; got {value}.")


@dataclass(frozen=True)
class Process:
    """One process as /proc shows it: its threads, and its resident memory in bytes."""

    pid: int
    parent: int
    num_threads: int
    resident_bytes: int


def processes() -> Iterator[Process]:
    """Yield the processes of this machine that can be seen."""
    for name in os.listdir("/proc"):
        with suppress(OSError):
            if name.isdecimal():
                text = Path("/proc", name, "stat").read_text(errors="replace")
                words = text.rpartition(")")[2].split()  # the name before may contain anything
                size = int(words[21]) * os.sysconf("SC_PAGE_SIZE")
                yield Process(int(name), int(words[1]), int(words[17]), size)


def descendants(pid: int) -> list[Process]:
    """Return the processes that this one started, directly or not, without itself."""
    below: dict[int, list[Process]] = {}
    for process in processes():
        below.setdefault(process.parent, []).append(process)
    found = list(below.get(pid, []))
    for process in found:  # grows while it is read
        found += below.get(process.pid, [])
    return found


def proportional_bytes(process: Process) -> int:
    """Return its memory, with its part of each page that it shares."""
    try:
        lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
    except PermissionError:
        return process.resident_bytes
    except OSError:  # it has just ended
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def anonymous_files(process: Process) -> Iterator[tuple[int, int]]:
    """Yield (inode, bytes) of the files without a name that it holds in memory."""
    with suppress(OSError):
        for entry in os.scandir(f"/proc/{process.pid}/fd"):
            with suppress(OSError):
                if os.readlink(entry).startswith("/memfd:"):
                    found = os.stat(entry)
                    yield found.st_ino, found.st_blocks * 512


def holds_more(found: Sequence[Process], scratch: int, limit: int) -> bool:
    """Do these processes, and `scratch` bytes of their files, take more memory than the limit?

    Memory that is both a file and mapped counts twice. What processes share counts once; that sum
    is slow, and is taken only where the quick one passes the limit.
    """
    files = {inode: size for process in found for inode, size in anonymous_files(process)}
    left = limit - scratch - sum(files.values())
    if sum(process.resident_bytes for process in found) <= left:
        return False
    return sum(map(proportional_bytes, found)) > left


def scratch_bytes(folders: Sequence[int]) -> int:
    """Return what is used of the memory file systems that these folders (open) lie on."""
    used = 0
    for place in map(os.fstatvfs, folders):
        used += (place.f_blocks - place.f_bfree) * place.f_frsize
        used += (place.f_files - place.f_ffree) * INODE_BYTES
    return used


def end(process: subprocess.Popen, mark: str) -> None:
    """End a run with everything that it started.

    In bubblewrap, the child of its first process is pid 1 of a namespace, with which the rest ends.
    Without isolation, they are the processes with the mark.
    Raises: RuntimeError where something in it could not be ended.
    """
    give_up = time.monotonic() + END_WITHIN_S
    while (left := marked(mark)) or process.poll() is None:
        if time.monotonic() > give_up:
            process.kill()
            raise RuntimeError(f"sandbox: process {process.pid} did not end in {END_WITHIN_S} s.")
        if mark:
            process.kill()
        else:
            left = [found for found in processes() if found.parent == process.pid]
        for found in left:
            with suppress(ProcessLookupError):
                os.kill(found.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            process.wait(0.02)


def marked(mark: str) -> list[Process]:
    """Return the processes of this user whose environment has a mark; none without one."""
    found = list[Process]()
    for process in processes() if mark else ():
        with suppress(OSError):  # of another user, or it has ended
            if mark.encode() in Path(f"/proc/{process.pid}/environ").read_bytes():
                found.append(process)
    return found


@dataclass
class Watchdog:
    """Follows one sandbox: its output, and what it uses. `watch` returns how it ended."""

    process: subprocess.Popen
    channel: socket.socket
    limits: RunLimits
    mark: str  # in the environment of what runs without isolation; "" in bubblewrap
    stopped: Callable[[], bool]
    told: bytearray = field(default_factory=bytearray)
    num_told: int = 0
    folders: list[int] = field(default_factory=list)  # of the sandbox, open: the first is /out

    @property
    def output(self) -> IO[bytes]:
        """The pipe with all that the sandbox prints."""
        if self.process.stdout is None:
            raise ValueError("Watchdog: expected a process with a pipe for its output; got none.")
        return self.process.stdout

    def watch(self) -> str:
        """Return when the command has ended ("ended"), or when it has to be ended, and why.

        Raises: RuntimeError where the sandbox could not be set up.
        """
        started = looked = time.monotonic()
        os.set_blocking(self.output.fileno(), False)
        with selectors.DefaultSelector() as ready:
            ready.register(self.output, selectors.EVENT_READ, self.read)
            ready.register(self.channel, selectors.EVENT_READ, self.receive)
            while self.process.poll() is None:
                for key, _ in ready.select(LOOK_EVERY_S):
                    if not key.data():
                        ready.unregister(key.fileobj)
                now = time.monotonic()
                if now - started > self.limits.wall_s:
                    return "time"
                if self.num_told > self.limits.output_bytes:
                    return "output"
                if now - looked >= LOOK_EVERY_S:
                    looked = now
                    if why := self.passed():
                        return why
        if not self.folders:
            self.receive()
        return "ended"

    def passed(self) -> str:
        """Return the limit that the sandbox has passed, or an empty string."""
        if self.stopped():
            return "killed"
        found = marked(self.mark) if self.mark else descendants(self.process.pid)
        if sum(process.num_threads for process in found) > self.limits.processes:
            return "processes"
        scratch = 0 if self.mark else scratch_bytes(self.folders)
        return "memory" if holds_more(found, scratch, self.limits.memory_bytes) else ""

    def read(self) -> bool:
        """Read what there is of the output, and keep its end; False at the end of it."""
        try:
            text = os.read(self.output.fileno(), 2**16)
        except BlockingIOError:
            return True
        self.num_told += len(text)
        self.told += text
        del self.told[: -4 * LAST_CHARACTERS]  # a character has up to 4 bytes
        return bool(text)

    def receive(self) -> bool:
        """Receive the open folders, which the launcher sends just before the command starts."""
        with suppress(BlockingIOError):
            flags = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
            _, self.folders, _, _ = socket.recv_fds(self.channel, 16, 8, flags)
        return False

    def last_words(self) -> str:
        """Return the last characters of the output, once every process has ended."""
        for _ in range(64):  # more than a pipe holds
            self.read()
        return self.told.decode(errors="replace")[-LAST_CHARACTERS:]
