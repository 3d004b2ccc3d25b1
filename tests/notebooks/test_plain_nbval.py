"""`pytest --nbval notebooks/solved`, as an instructor types it: what it finds, what it ignores."""

import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from course_lib.workbooks.lessons import find_folder, tags_of

REPOSITORY = find_folder().parent
REAL_LESSON = "01_memory"
Change = Callable[[NotebookNode], object]


def run_nbval(folder: Path) -> dict[int, str]:
    """How the code cells of the notebook in a folder end, with the settings of the repository."""
    shutil.copy(REPOSITORY / "notebooks" / "solved" / "conftest.py", folder)
    command = [sys.executable, "-m", "pytest", "-c", str(REPOSITORY / "pyproject.toml"), "-v"]
    command += ["-p", "no:cacheprovider", "--nbval", str(folder)]
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    found = re.findall(r"^\S*\.ipynb::Cell (\d+) (\w+)", run.stdout, re.MULTILINE)
    assert found, run.stdout + run.stderr
    return {int(number): how for number, how in found}


def those_that_fail(ended: dict[int, str]) -> list[int]:
    return [number for number, how in ended.items() if how != "PASSED"]


def edit(path: Path, changes: Iterable[tuple[int, Change]]) -> None:
    """Change the outputs of some code cells of a notebook; every change changes something."""
    notebook = nbformat.read(path, 4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    for number, change in changes:
        before = str(code[number])
        change(code[number])
        assert str(code[number]) != before, f"cell {number} is as it was"
    nbformat.write(notebook, path)


def text(old: str, new: str, kind: str = "") -> Change:
    """Replace `old` in a cell's first output: in its stream, or in its data of this kind."""

    def change(cell: NotebookNode) -> None:
        output = cell.outputs[0]
        where, key = (output.data, kind) if kind else (output, "text")
        where[key] = where[key].replace(old, new, 1)

    return change


def error(field: str, value: str) -> Change:
    return lambda cell: cell.outputs[0].update({field: value})


def pixels(cell: NotebookNode) -> None:
    data = cell.outputs[0].data
    data["image/png"] = data["image/png"].replace("A", "B", 3)
    data["text/html"] = data["text/html"].replace("base64,", "base64,AAAA")


def says_more(cell: NotebookNode) -> None:
    cell.outputs = [nbformat.v4.new_output("stream", name="stdout", text="more\n")]


PICTURE = """\
from matplotlib.figure import Figure
from course_lib.display import show
show(Figure(figsize=(1, 1)), alt="the ring sends 6 messages")"""
TABLE = 'display({"text/html": "<td>3</td><td>4</td>", "text/plain": "3 4"}, raw=True)'
LINES = 'print("first\\nsecond\\nthird")'
FAILURE = ' tags=["raises-exception"]'
# the cell's tags, the cell, and the change that nbval has to find
FOUND: list[tuple[str, str, Change]] = [
    ("", 'print("bytes:", 1234)', text("1234", "1235")),
    ("", LINES, text("second\n", "")),
    ("", LINES, text("second\n", "second\nagain\n")),
    ("", LINES, text("first\nsecond", "second\nfirst")),
    ("", "40 + 2", text("42", "43", "text/plain")),
    ("", "x = 1", says_more),
    ("", LINES, lambda cell: cell.update(outputs=[])),
    ("", TABLE, text("<td>4", "<td>5", "text/html")),
    ("", PICTURE, text("6 messages", "7 messages", "text/html")),
    ("", PICTURE, text("6 messages", "7 messages", "text/plain")),
    (FAILURE, 'raise ValueError("need 4; got 5")', error("evalue", "need 4; got 6")),
    (FAILURE, 'raise ValueError("need 4; got 5")', error("ename", "TypeError")),
]
NOT_COMPARED: list[tuple[str, str, Change]] = [
    (' tags=["measured"]', 'print("seconds:", 1)', text("1", "2")),
    (' tags=["measured", "raises-exception"]', "raise OSError(1)", error("evalue", "2")),
    ("", PICTURE, pixels),
    (FAILURE, "raise OSError(1)", error("traceback", "in another file")),
]


def test_planted_changes_of_outputs_fail_and_nothing_else(toy):
    cells = "\n\n".join(f"# %%{tags}\n{text}" for tags, text, _ in [*FOUND, *NOT_COMPARED])
    toy.edit_source('print("walk", 4)', f'print("walk", 4)\n\n{cells}')
    toy.build()
    solved = toy.lesson.solved
    assert those_that_fail(run_nbval(solved.parent)) == []
    first, check = 14, 12  # of the cells here; of the last exercise's check
    planted = list(enumerate((change for *_, change in [*FOUND, *NOT_COMPARED]), start=first))
    edit(solved, [(check, text("1 + 2 = 3", "1 + 2 = 4")), *planted])
    failed = those_that_fail(run_nbval(solved.parent))
    assert failed == [check, *range(first, first + len(FOUND))]


def first_digit(cell: NotebookNode) -> tuple[NotebookNode, str, re.Match[str]] | None:
    """The first digit that an output of a cell shows, with its place."""
    for output in cell.outputs:
        data = output.get("data", {})
        for where, key in ((output, "text"), (output, "evalue"), (data, "text/plain")):
            if digit := re.search(r"\d", where.get(key, "")):
                return where, key, digit
    return None


def other_digit(cell: NotebookNode) -> None:
    where, key, digit = first_digit(cell)
    other = str((int(digit[0]) + 1) % 10)
    where[key] = where[key][: digit.start()] + other + where[key][digit.end() :]


def test_ten_changed_digits_in_a_lesson_fail_and_nothing_else(tmp_path):
    path = Path(shutil.copy(REPOSITORY / "notebooks" / "solved" / f"{REAL_LESSON}.ipynb", tmp_path))
    code = [cell for cell in nbformat.read(path, 4).cells if cell.cell_type == "code"]
    compared = [
        number
        for number, cell in enumerate(code)
        if first_digit(cell) and "nbval-ignore-output" not in tags_of(cell)
    ]
    planted = compared[:: len(compared) // 10][:10]
    edit(path, [(number, other_digit) for number in planted])
    assert len(planted) == 10
    assert those_that_fail(run_nbval(tmp_path)) == planted
