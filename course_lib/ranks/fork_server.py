"""The fork server: one process that has imported torch; forking a rank from it takes milliseconds.

Importing torch takes a second or two, so in a notebook the server starts as soon as
`course_lib.ranks` is imported, in parallel with the notebook's own imports; elsewhere it starts
with the first ranks, which most programs never ask for. It ends with the process that started it.
"""

import atexit
import multiprocessing
import os
import signal
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import forkserver, process, resource_tracker, util
from pathlib import Path
from typing import Any

from course_lib.core.errors import CourseError
from course_lib.ranks.process_tree import adopt_orphans, end_orphans_of
from course_lib.ranks.scratch import make_folder

PRELOAD = [
    "torch",
    "torch.distributed",
    "torch.nn.parallel.distributed",
    "torch._dynamo",  # DDP imports it, which takes every rank a second if the server has not
    "course_lib.ranks.rank_process",
    "course_lib.checks.on_ranks",  # what is sent to ranks in most lessons
    "course_lib.collectives",
    "course_lib.models",
]
# what only the process that has the ranks uses: drawing, running notebooks, judging
NOT_ON_RANKS = {"display", "pictures", "explorer", "html_report", "notebooks", "grading", "cli"}
SERVER = "COURSE_FORK_SERVER"
LATER = "COURSE_RANKS_LATER"  # set for a notebook whose cells may need no ranks
MAX_FOLDER_CHARS = 64  # the path of a socket may have about 100 characters; it is in this folder
SHORT_FOLDER = "/tmp"


def start_method(preload: Sequence[str] = PRELOAD) -> Any:
    """Return the multiprocessing context of the ranks: fork server, or spawn without fork.

    preload   modules that the server imports once for all ranks; those loaded here are added

    Raises: CourseError where there is no room for the server's temporary files
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*preload, *_loaded()])
    _make_socket_folder()
    os.environ[SERVER] = "1"
    resource_tracker.ensure_running()  # first: where it starts, it lets SIGINT through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # the server inherits it
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        del os.environ[SERVER]
    return context


@contextmanager
def without_main_script() -> Iterator[None]:
    """Keep the ranks that are started here from running this program's script again."""
    main = sys.modules["__main__"]
    hidden = {
        name: main.__dict__.pop(name) for name in ("__file__", "__spec__") if hasattr(main, name)
    }
    main.__spec__ = None
    try:
        yield
    finally:
        main.__dict__.update(hidden)


def warm_up() -> None:
    """Start the server in the process of a notebook, unless it is to start with the first ranks."""
    if multiprocessing.parent_process():  # a rank
        return
    if SERVER in os.environ:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Stop is for the notebook
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        adopt_orphans()
        warnings.filterwarnings("ignore", "forkserver: waitpid")  # an orphan has ended
        return
    if "RANK" in os.environ:  # a job under torchrun
        return
    atexit.register(_end)
    if "ipykernel.kernelapp" in sys.modules and LATER not in os.environ:
        with suppress(CourseError):  # `Ranks` says so
            start_method()


def end_orphans(adopter: int | None = None) -> None:
    """Kill what ranks that died by themselves had started: their server has adopted it."""
    server = adopter or _pid()
    if server is not None:
        end_orphans_of(server, lambda: {rank.pid for rank in multiprocessing.active_children()})


def _loaded() -> list[str]:
    """Return the modules of the course that this process has loaded: its ranks will ask for them.

    What the server has imported, no rank imports again.
    """
    course = str(Path(__file__).parents[1])
    found = []
    for name, module in list(sys.modules.items()):
        is_ours = str(getattr(module, "__file__", "")).startswith(
            course
        )  # no assignment's, no test's
        if name.startswith("course_lib.") and is_ours and NOT_ON_RANKS.isdisjoint(name.split(".")):
            found.append(name)
    return found


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
