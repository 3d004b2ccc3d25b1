"""Ending a process with all it has started, whatever session or process group that is in.

Linux hands a process whose parent has ended to the nearest ancestor that adopts orphans, so what a
rank has started always stays among the descendants of the rank, or of the fork server.
"""

import ctypes
import os
import signal
import sys
from collections import defaultdict
from collections.abc import Collection
from contextlib import suppress

import psutil

PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Make this process the parent of every descendant whose own parent ends (on Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_descendants(pids: Collection[int]) -> None:
    """Kill all processes that these have started, and those that they have started in turn."""
    ended: set[psutil.Process] = set()
    while new := _descendants(pids) - ended:  # one may have started another before its end
        for process in new:
            with suppress(psutil.Error):
                process.kill()
        ended |= new


def end_trees(pids: Collection[int]) -> None:
    """Kill these processes and all that they have started."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)  # so that it starts and prints nothing more
    if pids:
        end_descendants(pids)
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def orphans_of(adopter: int, spare: Collection[int]) -> list[int]:
    """Return the children of `adopter` that it did not fork: they are in another session.

    Its own forks that have left its session are to be named in `spare`.
    """
    with suppress(psutil.NoSuchProcess, ProcessLookupError):
        session = os.getsid(adopter)
        children = [child.pid for child in psutil.Process(adopter).children()]
        return [
            pid for pid in children if pid not in spare and _session(pid) not in (None, session)
        ]
    return []


def _session(pid: int) -> int | None:
    with suppress(ProcessLookupError):
        return os.getsid(pid)
    return None


def _descendants(pids: Collection[int]) -> set[psutil.Process]:
    psutil.process_iter.cache_clear()  # else it misses processes that got the pid of an old one
    children = defaultdict(list)
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            children[process.ppid()].append(process)
    found, todo = set(), list(pids)
    while todo:
        for child in children[todo.pop()]:
            if child not in found:
                found.add(child)
                todo.append(child.pid)
    return found
