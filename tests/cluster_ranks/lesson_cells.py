"""Run the code cells of lessons as they stand, and tell which of them pass.

    COURSE_RANKS=slurm python -m tests.cluster_ranks.lesson_cells 04_collectives 06_ddp

With COURSE_KEEP=path/of/laptop.json and without COURSE_RANKS, it writes the laptop's points.
"""

import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from nbclient import NotebookClient
from nbformat import NotebookNode

from course_lib.workbooks.lessons import Lesson, read_notebook, tags_of

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"
ON_CLUSTER = (
    *("04_collectives", "06_ddp", "07_tensor_parallel", "08_pipeline"),
    *("10_fsdp", "13_scaling_study", "15_context_parallel", "16_experts"),
)


def run_cells(lesson: str, env: Mapping[str, str]) -> tuple[int, list[str], NotebookNode]:
    """Run the solved notebook; return how many code cells pass, what the others say, and it.

    A cell tagged raises-exception passes if it raises, any other if it does not.
    """
    notebook = read_notebook(Lesson(lesson, NOTEBOOKS).solved)
    with tempfile.TemporaryDirectory() as folder:
        client = NotebookClient(
            notebook,
            kernel_name="python3",
            timeout=300,
            allow_errors=True,
            resources={"metadata": {"path": folder}},
        )
        with client.setup_kernel(env={"COURSE_NO_WIDGETS": "1", **env}):
            code = [cell for cell in notebook.cells if cell.cell_type == "code"]
            for index, cell in enumerate(notebook.cells):
                client.execute_cell(cell, index)
    failures = [said for cell in code if (said := _failure(cell))]
    return len(code) - len(failures), failures, notebook


def _failure(cell: NotebookNode) -> str:
    errors = [output for output in cell.outputs if output.output_type == "error"]
    if bool(errors) == ("raises-exception" in tags_of(cell)):
        return ""
    said = f"{errors[0].ename}: {errors[0].evalue}" if errors else "did not raise"
    return f"{cell.source.splitlines()[0]} ...: {said}"


def main(lessons: Sequence[str]) -> int:
    """Print a line a lesson, and the cells that failed; return how many did."""
    lost = 0
    for lesson in lessons or ON_CLUSTER:
        start_s = time.monotonic()
        passed, failures, _ = run_cells(lesson, os.environ)
        seconds = time.monotonic() - start_s
        print(f"{lesson:20} {passed} of {passed + len(failures)} code cells, {seconds:.0f} s")
        print("".join(f"    {one}\n" for one in failures), end="", flush=True)
        lost += len(failures)
    return lost


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]) > 0)
