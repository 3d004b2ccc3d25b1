"""The fork server: one process that has imported torch; forking a rank from it takes milliseconds.

Importing torch takes a second or two, so the server starts as soon as `course_lib.ranks` is
imported, in parallel with the notebook's own imports, and ends with the process that started it.
"""

import atexit
import multiprocessing
import os
import signal
from contextlib import suppress
from multiprocessing import forkserver
from typing import Any

PRELOAD = [
    "torch",
    "torch.distributed",
    "torch.nn.parallel.distributed",
    "torch._dynamo",  # DDP imports it, which takes every rank a second if the server has not
    "course_lib.ranks.rank_process",
]
INSIDE = ("COURSE_FORK_SERVER", "RANK")  # the server itself, a rank, a job under torchrun


def start_method() -> Any:
    """Return the multiprocessing context of the ranks: fork server, or spawn without fork."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    return context


def warm_up() -> None:
    """Start the server, unless this process is the server, a rank or another child process."""
    if multiprocessing.parent_process() or any(name in os.environ for name in INSIDE):
        return
    if start_method().get_start_method() == "forkserver":
        os.environ["COURSE_FORK_SERVER"] = "1"
        try:
            forkserver.ensure_running()
        finally:
            del os.environ["COURSE_FORK_SERVER"]
        atexit.register(_end)


def _end() -> None:
    """End the server with this process: one that is still importing would keep our output open."""
    with suppress(ProcessLookupError):
        pid = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
        os.kill(pid, signal.SIGTERM)
