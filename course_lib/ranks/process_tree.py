"""Ending a process with all it has started, whatever session or process group that is in.

Linux hands a process whose parent has ended to the nearest ancestor that adopts orphans, so what a
rank has started always stays among the descendants of the rank, or of the fork server.
"""

import ctypes
import os
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Collection
from contextlib import suppress

import psutil

PR_SET_CHILD_SUBREAPER = 36
PATIENCE_S = 5.0  # the kernel does not end a process that waits for a broken disk
TICK_S = 0.002


def adopt_orphans() -> None:
    """Make this process the parent of every descendant whose own parent ends (on Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_descendants(pids: Collection[int]) -> None:
    """Kill all processes that these have started, and those that they have started in turn."""
    _end_all(lambda: _descendants(pids))


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


def end_orphans_of(adopter: int, spare: Callable[[], Collection[int | None]]) -> None:
    """Kill the children of `adopter` that it did not fork, and all that they have started.

    What it did not fork is in another session; `spare` names those of its own forks that are, too.
    """

    def orphans() -> set[psutil.Process]:
        with suppress(psutil.NoSuchProcess, ProcessLookupError):
            session = os.getsid(adopter)
            children = psutil.Process(adopter).children()
            own, spared = (None, session), spare()
            found = {c for c in children if _session(c.pid) not in own and c.pid not in spared}
            return found | _descendants([process.pid for process in found])
        return set()

    _end_all(orphans)


def _end_all(find: Callable[[], set[psutil.Process]]) -> None:
    """Kill what `find` finds until, twice in a row, it finds nothing that still runs.

    It misses a process whose parent ends while it looks: that one gets another parent.
    """
    ended: set[psutil.Process] = set()
    num_empty, give_up_s = 0, time.monotonic() + PATIENCE_S
    while num_empty < 2 and time.monotonic() < give_up_s:
        running = {p for p in find() if not (p in ended and _is_zombie(p))}
        for process in running:
            with suppress(psutil.Error):
                process.kill()
        ended |= running
        num_empty = 0 if running else num_empty + 1
        time.sleep(TICK_S if running else 0)  # the end of a process takes a moment


def _is_zombie(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    return True


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
