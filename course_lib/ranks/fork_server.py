"""The fork server: one process that has imported torch; forking a rank from it takes milliseconds.

Importing torch takes a second or two, so the server starts as soon as `course_lib.ranks` is
imported, in parallel with the notebook's own imports, and ends with the process that started it.
"""

import atexit
import multiprocessing
import os
import signal
import tempfile
import warnings
from contextlib import suppress
from multiprocessing import forkserver, process, util
from typing import Any

from course_lib.core.errors import CourseError
from course_lib.ranks.process_tree import adopt_orphans, end_trees, orphans_of
from course_lib.ranks.scratch import make_folder

PRELOAD = [
    "torch",
    "torch.distributed",
    "torch.nn.parallel.distributed",
    "torch._dynamo",  # DDP imports it, which takes every rank a second if the server has not
    "course_lib.ranks.rank_process",
]
SERVER = "COURSE_FORK_SERVER"
MAX_FOLDER_CHARS = 64  # the path of a socket may have about 100 characters; it is in this folder
SHORT_FOLDER = "/tmp"


def start_method() -> Any:
    """Return the multiprocessing context of the ranks: fork server, or spawn without fork.

    Raises: CourseError where there is no room for the server's temporary files
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    _make_socket_folder()
    os.environ[SERVER] = "1"
    try:
        forkserver.ensure_running()
    finally:
        del os.environ[SERVER]
    return context


def warm_up() -> None:
    """Start the server, unless this process is the server, a rank or another child process."""
    if multiprocessing.parent_process() or "RANK" in os.environ:  # a rank, a job under torchrun
        return
    if SERVER in os.environ:
        adopt_orphans()
        warnings.filterwarnings("ignore", "forkserver: waitpid")  # an orphan has ended
        return
    with suppress(CourseError):  # `Ranks` says so
        start_method()
        atexit.register(_end)


def end_orphans() -> None:
    """Kill what ranks that died by themselves had started: the server has adopted it."""
    server = _pid()
    if server is not None:
        ranks = [child.pid for child in multiprocessing.active_children() if child.pid]
        end_trees(orphans_of(server, spare=ranks))


def _make_socket_folder() -> None:
    """Give multiprocessing, which keeps its sockets there, a folder of ours with a short path."""
    config = process.current_process()._config  # type: ignore[attr-defined]
    if config.get("tempdir") is None:
        parent = tempfile.gettempdir()
        folder = make_folder(parent if len(parent) <= MAX_FOLDER_CHARS else SHORT_FOLDER)
        util.Finalize(None, folder.remove, exitpriority=-100)  # after all that uses it
        config["tempdir"] = folder.path


def _pid() -> int | None:
    return forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]


def _end() -> None:
    """End the server with this process: one that is still importing would keep our output open."""
    server = _pid()
    if server is not None:
        with suppress(ProcessLookupError):
            os.kill(server, signal.SIGTERM)
