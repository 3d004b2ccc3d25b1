"""Execute a notebook in a fresh kernel of this Python, cell after cell, and keep the outputs."""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbformat import NotebookNode

from course_lib.core import CourseError
from course_lib.workbooks.lessons import tags_of
from course_lib.workbooks.progress_bar import CellEnded

# A saved notebook shows pictures and text; a widget without its kernel shows nothing. A claim that
# the measurement in it does not bear out stops the build. What is measured is this machine.
OF_BUILD = {"COURSE_NO_WIDGETS": "1", "COURSE_CLAIMS": "strict", "COURSE_RANKS": "laptop"}
BUILDING = {**os.environ, **OF_BUILD}
STARTUP_S = 180  # for a kernel to answer; a busy machine is slow


class CellStopped(CourseError):
    """A cell raised, timed out, or ended the kernel; `index` is its place in the notebook."""

    def __init__(self, index: int, what: str) -> None:
        super().__init__(what)
        self.index = index


def execute(notebook: NotebookNode, timeout_s: int, ended: CellEnded) -> None:
    """Run all cells in place, in a temporary folder; `ended(done, all)` is called after each.

    Cells tagged raises-exception must raise. The kernel is gone afterwards, also after Ctrl-C.
    Raises: CellStopped.
    """
    with tempfile.TemporaryDirectory() as folder:
        client = NotebookClient(
            notebook,
            kernel_name="python3",
            timeout=timeout_s,
            startup_timeout=STARTUP_S,
            record_timing=False,
            store_widget_state=False,
            resources={"metadata": {"path": folder}},
        )
        with client.setup_kernel(stderr=subprocess.DEVNULL, env=BUILDING):
            for index, cell in enumerate(notebook.cells):
                if cell.cell_type == "code":
                    _run_cell(client, cell, index)
                    _join_streams(cell)
                    _without_paths(cell, folder)
                ended(index + 1, len(notebook.cells))


def _run_cell(client: NotebookClient, cell: NotebookNode, index: int) -> None:
    try:
        client.execute_cell(cell, index)
    except CellExecutionError as error:
        raise CellStopped(index, f"raised {error.ename}: {error.evalue}") from None
    except CellTimeoutError:
        raise CellStopped(index, f"ran for more than {client.timeout} s") from None
    except DeadKernelError:
        raise CellStopped(index, "ended the kernel") from None
    raised = any(output.output_type == "error" for output in cell.outputs)
    if "raises-exception" in tags_of(cell) and not raised:
        raise CellStopped(index, "is tagged raises-exception and did not raise")


def _join_streams(cell: NotebookNode) -> None:
    """Join consecutive stream outputs: a kernel sends them in pieces, cut by the clock."""
    joined: list[NotebookNode] = []
    for output in cell.outputs:
        before = joined[-1] if joined else {}
        if output.output_type == "stream" and output.name == before.get("name"):
            before["text"] += output.text
        else:
            joined.append(output)
    cell.outputs = joined


def _without_paths(cell: NotebookNode, scratch: str) -> None:
    """Remove this machine's folders from a cell's output."""
    course = str(Path(__file__).parents[2])
    pattern = re.compile(
        r"/\S*/ipykernel_\d+/\d+\.py"
        f"|{re.escape(scratch)}/?|{re.escape(course)}/|{re.escape(sys.prefix)}/"
        f"|{re.escape(os.path.expanduser('~'))}/"
    )
    for output in cell.outputs:
        for where in (output, output.get("data", {})):
            for name, value in where.items():
                if isinstance(value, str) and not name.startswith("image/"):
                    where[name] = _cleaned(pattern, value)
        if "traceback" in output:
            output.traceback = [_cleaned(pattern, line) for line in output.traceback]


def _cleaned(pattern: re.Pattern[str], text: str) -> str:
    return pattern.sub(lambda match: "cell" if "ipykernel" in match[0] else "", text)
