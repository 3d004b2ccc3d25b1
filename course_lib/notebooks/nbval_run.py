"""Run a notebook under nbval, and report the outcome of each cell."""

import contextlib
import gc
import io
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from queue import Empty
from typing import Any

import pytest
from nbval.plugin import IPyNbCell

from course_lib.notebooks.progress_bar import CellEnded

POLL_S = 0.5


@dataclass(frozen=True)
class Outcome:
    """The outcome of a cell: `passed`, `raised`, `differs` (its output), `timeout` or `died`.

    `name` and `message` are of the exception it raised; `printed` is what it wrote to stdout.
    """

    how: str
    name: str = ""
    message: str = ""
    printed: str = ""


def run_nbval(path: Path, timeout_s: float, ended: CellEnded) -> dict[str, Outcome]:
    """Run the cells of a notebook under nbval; return their outcomes by cell id.

    Only cells tagged nbval-check-output are compared with their saved output. `ended(done, all)`
    is told after every cell. Each cell may take `timeout_s`; a cell that ends the kernel ends the
    run, and the cells behind it are left out.
    """
    (path.parent / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    watcher = _Watcher(ended)
    arguments = (
        *("-c", str(path.parent / "pytest.ini"), "--rootdir", str(path.parent)),
        *("--disable-plugin-autoload", "-p", "nbval.plugin", "-p", "no:cacheprovider"),
        *("--nbval-lax", "--nbval-current-env", f"--nbval-cell-timeout={timeout_s}"),
        *("-p", "no:unraisableexception", "-W", "ignore", "-q", "--color=no", str(path)),
    )
    told = io.StringIO()
    with contextlib.redirect_stdout(told), contextlib.redirect_stderr(told), _no_warnings():
        code = pytest.main(list(arguments), plugins=[watcher])
    if code == pytest.ExitCode.INTERRUPTED and not watcher.died:
        raise KeyboardInterrupt
    if code not in (0, 1, 2):
        raise RuntimeError(f"nbval stopped with exit code {code}:\n{told.getvalue()}")
    return watcher.outcomes


@contextlib.contextmanager
def _no_warnings() -> Iterator[None]:
    """Suppress the warning about the file that nbval leaves open for each kernel."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
        gc.collect()


class _Watcher:
    """A pytest plugin that records outcomes and notices at once when the kernel has died."""

    def __init__(self, ended: CellEnded) -> None:
        self.ended = ended
        self.outcomes: dict[str, Outcome] = {}
        self.died = False

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: IPyNbCell) -> None:
        item.parent.timed_out = False  # a late cell says nothing about the next one

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: IPyNbCell) -> Iterator[None]:
        kernel = item.parent.kernel
        kernel.get_message = _impatient(kernel, type(kernel).get_message)
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


def _impatient(kernel: Any, get_message: Callable[..., Any]) -> Callable[..., Any]:
    """Wait for a message of the kernel up to its timeout, but not when the kernel has died."""

    def wait(stream: str, timeout: float) -> Any:
        left_s = timeout
        while True:
            try:
                return get_message(kernel, stream, timeout=min(POLL_S, left_s))
            except Empty:
                left_s -= POLL_S
                if not kernel.is_alive():
                    raise _KernelDied from None
                if left_s <= 0:
                    raise

    return wait


def _outcome(item: IPyNbCell, call: pytest.CallInfo[None]) -> Outcome:
    outputs = item.test_outputs or []
    printed = "".join(out.text for out in outputs if out.get("name") == "stdout")
    if call.excinfo is None:
        return Outcome("passed", printed=printed)
    error: dict[str, Any] = next((out for out in outputs if out.output_type == "error"), {})
    name, message = error.get("ename", ""), error.get("evalue", "")
    if isinstance(call.excinfo.value, _KernelDied):
        return Outcome("died", printed=printed)
    if item.parent.timed_out:
        return Outcome("timeout", name, message, printed)
    if error:
        return Outcome("raised", name, message, printed)
    return Outcome("differs", message=str(call.excinfo.value), printed=printed)
