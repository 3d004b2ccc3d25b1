"""Run a notebook under nbval, and report the outcome of each cell."""

import contextlib
import gc
import io
import os
import time
import warnings
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty
from typing import Any, NoReturn
from unittest.mock import patch

import psutil
import pytest
from nbval.plugin import IPyNbCell

from course_lib.core.errors import CourseError
from course_lib.workbooks import nbval_pictures
from course_lib.workbooks.nbval_difference import difference
from course_lib.workbooks.progress_bar import CellEnded

POLL_S = 0.5
MOST_STARTS = 3  # two kernels that start at the same time may take one port, and one of them ends
STOPPED_S = 10  # for a cell that is stopped to end, and its ranks with it
MOST_OUTPUT = 20_000_000  # characters of one cell
MOST_BYTES = 4 * 2**30  # of the kernel; one that prints without end keeps most of it to itself
SHOWN = 10_000


@dataclass(frozen=True)
class Outcome:
    """The outcome of a cell: `passed`, `raised`, `differs` (its output), `timeout`, `died`,
    `printing` (without end) or `memory` (too much of it).

    `name` and `message` are of the exception it raised; `printed` is what it wrote to stdout. Where
    the output differs, `message` says in what.
    """

    how: str
    name: str = ""
    message: str = ""
    printed: str = ""


def run_nbval(
    path: Path,
    timeout_s: float,
    ended: CellEnded,
    outcomes: dict[str, Outcome] | None = None,
    *,
    compare_all: bool = False,
) -> dict[str, Outcome]:
    """Run the cells of a notebook under nbval; return their outcomes by cell id.

    Only cells tagged nbval-check-output are compared with their saved output; with `compare_all`
    every cell but those tagged nbval-ignore-output, as `pytest --nbval` does. `ended(done, all)`
    is told after every cell, when its outcome is in the dict `outcomes` already. Each cell may take
    `timeout_s`; a cell that ends the kernel ends the run, and the cells behind it are left out.
    Raises: CourseError where no kernel starts
    """
    (path.parent / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    watcher = _Watcher(ended, {} if outcomes is None else outcomes)
    arguments = (
        *("-c", str(path.parent / "pytest.ini"), "--rootdir", str(path.parent)),
        *("--disable-plugin-autoload", "-p", "nbval.plugin", "-p", "no:cacheprovider"),
        "--nbval" if compare_all else "--nbval-lax",
        *("--nbval-current-env", f"--nbval-cell-timeout={timeout_s}"),
        *("-p", "no:unraisableexception", "-W", "ignore", "-q", "--color=no", str(path)),
    )
    for _ in range(MOST_STARTS):
        told = io.StringIO()
        with (
            contextlib.redirect_stdout(told),
            contextlib.redirect_stderr(told),
            _no_warnings(),
            patch.dict(os.environ, COURSE_RANKS="laptop"),  # also of who has set a cluster
        ):
            code = pytest.main(list(arguments), plugins=[watcher, nbval_pictures])
        if code == pytest.ExitCode.INTERRUPTED and not watcher.died:
            raise KeyboardInterrupt
        if code not in (0, 1, 2):
            raise RuntimeError(f"nbval stopped with exit code {code}:\n{told.getvalue()}")
        if watcher.outcomes:
            return watcher.outcomes
    raise CourseError(
        f"{path.name}: need a Python kernel to run it in; {MOST_STARTS} of them ended at once. "
        f"Try: course doctor. The last one said:\n{told.getvalue()[-SHOWN:]}"
    )


@contextlib.contextmanager
def _no_warnings() -> Iterator[None]:
    """Suppress the warning about the file that nbval leaves open for each kernel."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
        gc.collect()


class _Watcher:
    """A pytest plugin that records outcomes and notices at once when the kernel has died."""

    def __init__(self, ended: CellEnded, outcomes: dict[str, Outcome]) -> None:
        self.ended = ended
        self.outcomes = outcomes
        self.died = False

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: IPyNbCell) -> None:
        item.parent.timed_out = False  # a late cell says nothing about the next one

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: IPyNbCell) -> Iterator[None]:
        kernel = item.parent.kernel
        kernel.get_message = _Messages(kernel, item.config.option.nbval_cell_timeout).get
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: IPyNbCell, call: pytest.CallInfo[None]
    ) -> Iterator[None]:
        report = yield
        if call.when == "call" and not self.died:
            outcome = _outcome(item, call)
            self.outcomes[item.cell.id] = outcome
            self.ended(item.cell_num + 1, len(item.session.items))
            if not item.parent.kernel.is_alive():
                self.died = True
                item.parent.kernel.kc.stop_channels()
                item.session.shouldstop = "the kernel is gone"
        return report


class _KernelDied(RuntimeError):
    """The kernel ended while a cell ran in it."""


class _TooMuch(RuntimeError):
    """A cell printed more than MOST_OUTPUT, or took more memory than MOST_BYTES."""


class _Messages:
    """The kernel's messages while one cell runs, read as they come: neither time nor memory slip.

    A cell that goes on printing is stopped like any other; one that goes on after that, or prints
    more than MOST_OUTPUT, ends its kernel.
    """

    def __init__(self, kernel: Any, timeout_s: float) -> None:
        self.kernel = kernel
        self.read = type(kernel).get_message
        self.last_s = time.monotonic() + timeout_s + STOPPED_S
        self.waiting: deque[Any] = deque()
        self.num_characters = 0

    def get(self, stream: str, timeout: float) -> Any:
        """Return the next message. Raises: Empty after `timeout` seconds without one"""
        left_s = timeout
        while True:
            if stream == "iopub" and self.waiting:
                return self.waiting.popleft()
            start_s = time.monotonic()
            if stream == "shell":
                self._drain()
            if start_s > self.last_s:
                raise Empty
            try:
                message = self.read(self.kernel, stream, timeout=max(0, min(POLL_S, left_s)))
                self._count(message)
                return message
            except Empty:
                left_s -= time.monotonic() - start_s
                if not self.kernel.is_alive():
                    raise _KernelDied from None
                if psutil.Process(self.kernel.km.provisioner.pid).memory_info().rss > MOST_BYTES:
                    self._end("memory")
                if left_s <= 0:
                    raise

    def _drain(self) -> None:
        """Read what the cell has printed so far; nbval itself reads it when the cell has ended."""
        with suppress(Empty):
            while True:
                message = self.read(self.kernel, "iopub", timeout=0)
                self._count(message)
                self.waiting.append(message)

    def _count(self, message: Any) -> None:
        self.num_characters += len(str(message["content"]))
        if self.num_characters > MOST_OUTPUT:
            self._end("printing")

    def _end(self, how: str) -> NoReturn:
        self.kernel.km.shutdown_kernel(now=True)
        raise _TooMuch(how)


def _outcome(item: IPyNbCell, call: pytest.CallInfo[None]) -> Outcome:
    outputs = item.test_outputs or []
    printed = "".join(out.text for out in outputs if out.get("name") == "stdout")
    if call.excinfo is None:
        return Outcome("passed", printed=printed)
    error: dict[str, Any] = next((out for out in outputs if out.output_type == "error"), {})
    name, message = error.get("ename", ""), error.get("evalue", "")
    if isinstance(call.excinfo.value, _KernelDied):
        return Outcome("died", printed=printed)
    if isinstance(call.excinfo.value, _TooMuch):
        return Outcome(str(call.excinfo.value), printed=printed[:SHOWN])
    if item.parent.timed_out:
        return Outcome("timeout", name, message, printed)
    if error and str(call.excinfo.value) != "Cell outputs differ":
        return Outcome("raised", name, message, printed)
    return Outcome("differs", message=difference(item), printed=printed)
