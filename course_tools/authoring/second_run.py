"""Run a solved notebook a second time under other conditions, and find the outputs that differ.

Every output is compared as `pytest --nbval` does it, except in cells tagged nbval-ignore-output.
The kernel has one core, which a busy process shares with it, another folder and other settings.
"""

import copy
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from nbformat import NotebookNode

from course_lib.workbooks.lessons import write_notebook
from course_lib.workbooks.nbval_run import Outcome, run_nbval
from course_lib.workbooks.progress_bar import CellEnded

HOW = {
    "died": "ended the kernel",
    "timeout": "ran too long",
    "printing": "printed without end",
    "memory": "took too much memory",
}
# Hashes, threads, and an older processor: it adds in another order, and last digits differ.
OTHERS = {
    "PYTHONHASHSEED": "4711",
    "TZ": "UTC-9",
    "OMP_NUM_THREADS": "3",
    "ATEN_CPU_CAPABILITY": "default",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
}
BUSY = """
import os, sys
os.nice(5)
while os.getppid() == int(sys.argv[1]):
    sum(range(100_000))
"""


def differences(notebook: NotebookNode, timeout_s: float, ended: CellEnded) -> dict[int, str]:
    """Return what differs the second time, by the index of the cell.

    Each cell may run for `timeout_s`; `ended(done, all)` is called after each. The kernel and the
    busy process are gone afterwards, also after Ctrl-C.
    """
    with tempfile.TemporaryDirectory(prefix="again-", ignore_cleanup_errors=True) as scratch:
        path = Path(scratch) / "again.ipynb"
        write_notebook(copy.deepcopy(notebook), path)
        with _other_settings(scratch), _one_busy_core():
            outcomes = run_nbval(path, timeout_s, ended, compare_all=True)
    code = ((index, cell) for index, cell in enumerate(notebook.cells) if cell.cell_type == "code")
    ends = {index: outcomes[cell.id] for index, cell in code if cell.id in outcomes}
    return {index: _told(end) for index, end in ends.items() if end.how != "passed"}


def _told(outcome: Outcome) -> str:
    if outcome.how == "differs":
        return f"shows something else: {outcome.message}"
    if outcome.how == "raised":
        return f"raised {outcome.name}: {outcome.message}"
    return HOW[outcome.how]


@contextmanager
def _other_settings(scratch: str) -> Iterator[None]:
    """Change the environment of the processes started meanwhile; a learner's has no COURSE_*."""
    before = dict(os.environ)
    own = ("COURSE_CLAIMS", "COURSE_NO_WIDGETS")
    try:
        for name in own:
            os.environ.pop(name, None)
        os.environ.update(OTHERS, TMPDIR=scratch)
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def _one_busy_core() -> Iterator[None]:
    """Give the processes started meanwhile one core, and a process that computes without end."""
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    if cores:
        _keep_to({max(cores)})
    command = [sys.executable, "-S", "-c", BUSY, str(os.getpid())]
    busy = subprocess.Popen(command, start_new_session=True)
    try:
        yield
    finally:
        busy.kill()
        busy.wait()
        if cores:
            _keep_to(cores)


def _keep_to(cores: set[int]) -> None:
    """Let all threads of this process run on these cores only: any of them may start a kernel."""
    for thread in Path("/proc/self/task").iterdir():
        with suppress(ProcessLookupError):  # it has ended meanwhile
            os.sched_setaffinity(int(thread.name), cores)
