"""A save that is being written while training goes on.

The thread has a process group of its own: two threads in one group would read each other's
messages. Notebook 14_checkpoint.
"""

import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from course_lib.checkpoint.agree import rank_in
from course_lib.checkpoint.folder import Checkpoint
from course_lib.collectives.group import Group

# Of the process, as process groups are: whoever saves next has to find them.
_OWN: "WeakKeyDictionary[Any, Group]" = WeakKeyDictionary()  # groups of threads, by the callers'
_PENDING: list["PendingSave"] = []  # at most one


class PendingSave:
    """Handle of an asynchronous save. Call `wait()` before the program ends.

    Without it, a save that fails is a line on stderr, and the program's exit code does not tell.

    blocked_s   seconds for which the caller was blocked: agreeing, copying, a save before
    write_s     seconds for which the thread has written, so far
    """

    def __init__(self, write: Callable[[], Checkpoint], start_s: float) -> None:
        self._write, self._result = write, Future[Checkpoint]()
        self._start_s, self._end_s = time.perf_counter(), float("inf")
        _PENDING.append(self)
        # not a daemon: Python waits for it at exit
        self._thread = threading.Thread(target=self._run, name="save_async")
        self._thread.start()
        self.blocked_s = time.perf_counter() - start_s

    def _run(self) -> None:
        try:
            self._result.set_result(self._write())
        except BaseException as problem:
            if rank_in(None) == 0:
                print(f"save_async: {problem}", file=sys.stderr)  # wait() may never be called
            self._result.set_exception(problem)
        self._end_s = time.perf_counter()

    def done(self) -> bool:
        """Return whether the checkpoint is published, or has failed."""
        return not self._thread.is_alive()

    def wait(self) -> Checkpoint:
        """Wait until the checkpoint is published, and return it.

        Raises:  what the writing has raised
        """
        self._thread.join()
        if self in _PENDING:
            _PENDING.remove(self)
        return self._result.result()

    @property
    def write_s(self) -> float:
        """Seconds for which the thread has written, so far."""
        return min(self._end_s, time.perf_counter()) - self._start_s


def wait_for_pending() -> None:
    """Wait for the asynchronous save of this process, if there is one. Raises: what it raised"""
    if _PENDING:
        _PENDING[0].wait()


def group_of_its_own(group: Group) -> Group:
    """Return a process group of the same ranks for the thread, the same one for all saves.

    It is on gloo: what it sends is on the host.

    Cost:    a new process group at the first call
    """
    if not dist.is_initialized():
        return None
    caller = group or dist.group.WORLD
    if caller not in _OWN:
        ranks = dist.get_process_group_ranks(caller)
        _OWN[caller] = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
    return _OWN[caller]
