"""Building: two notebooks of one source, only what is stale, and never a learner's work lost."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import nbformat
import psutil
import pytest

from course_lib.core import CourseError
from course_tools.authoring.build import main

UP_TO_DATE = "00_toy: up to date; 0 of 14 code cells are measured\n"
# The outputs of these depend on the machine: on time, process, folder, settings, cores, hashes.
DEPENDS = """
import os, tempfile, time

print(time.time())

print("so far the same\\nprocess", os.getpid())

os.getcwd()

print(course_lib.__file__)

print(os.environ.get("COURSE_CLAIMS"), os.environ.get("COURSE_NO_WIDGETS"))

print(len(os.sched_getaffinity(0)), "cores")

display({"text/plain": "a", "text/html": f"<p>{tempfile.gettempdir()}</p>"}, raw=True)

print({"a", "b", "c", "d", "e", "f", "g", "h"})

if "COURSE_CLAIMS" not in os.environ: print("one line more")

if "COURSE_CLAIMS" in os.environ: print("one line less")

raise ValueError(os.getpid())

if "COURSE_CLAIMS" not in os.environ: raise OSError("only here")
""".strip().split("\n\n")


def cell_texts(texts):
    """The text of a source's cells; one that raises says so."""
    tags = {text: ' tags=["raises-exception"]' * text.startswith("raise") for text in texts}
    return "\n".join(f"# %%{tags[text]}\n{text}\n" for text in texts)


def sources(notebook):
    return [cell.source for cell in notebook.cells]


def test_the_two_notebooks_of_one_source(toy):
    student, solved = toy.read(), nbformat.read(toy.lesson.solved, 4)
    assert [cell.id for cell in student.cells] == [cell.id for cell in solved.cells]
    exercise = toy.cell(student, "exercise-toy-1")
    assert exercise.source.endswith('raise NotImplementedError("exercise toy-1: add the two")')
    assert "BEGIN SOLUTION" not in str(sources(student))
    assert "return x + y" in toy.cell(solved, "exercise-toy-1").source
    assert not any(cell.get("outputs") for cell in student.cells)
    check = toy.cell(solved, "check-toy-1")
    assert check.outputs[0].text == "toy-1: right. 1 + 2 = 3.\n"
    assert "nbval-check-output" in check.metadata.tags
    assert "raises-exception" in toy.cell(student, "check-toy-1").metadata.tags


def test_a_second_build_writes_nothing(toy):
    before = [path.stat().st_mtime_ns for path in (toy.lesson.student, toy.lesson.solved)]
    assert toy.build() == UP_TO_DATE
    assert before == [path.stat().st_mtime_ns for path in (toy.lesson.student, toy.lesson.solved)]


def test_a_forced_build_gives_the_same_bytes(toy):
    before = toy.lesson.student.read_bytes(), toy.lesson.solved.read_bytes()
    toy.build(force=True)
    assert before == (toy.lesson.student.read_bytes(), toy.lesson.solved.read_bytes())


def test_what_is_printed_in_pieces_is_one_output(toy):
    pieces = (
        'import time\nprint("walk", flush=True)\ntime.sleep(0.5)\nprint(1)\ndisplay(2)\nprint(3)'
    )
    toy.edit_source('print("walk", 1)', pieces)
    toy.build()
    solved = nbformat.read(toy.lesson.solved, 4)
    outputs = next(cell.outputs for cell in solved.cells if "time.sleep" in cell.source)
    assert [output.get("text") for output in outputs] == ["walk\n1\n", None, "3\n"]


def test_stale_notebooks_are_named_and_nothing_is_written(toy, capsys):
    assert main(["--check"]) == 0
    toy.edit_source("# 00 Toy", "# 00 Toys")
    before = toy.lesson.student.read_bytes()
    assert main(["--check"]) == 1
    told = capsys.readouterr().out
    assert "solved/00_toy.ipynb is stale" in told
    assert "notebooks/00_toy.ipynb is stale" in told
    assert before == toy.lesson.student.read_bytes()


def test_where_only_prose_has_changed_the_outputs_stay(toy):
    before = nbformat.read(toy.lesson.solved, 4)
    toy.edit_source("# 00 Toy", "# 00 Toys")
    assert "all outputs kept" in toy.build()
    solved = nbformat.read(toy.lesson.solved, 4)
    assert solved.cells[0].source.startswith("# 00 Toys")
    assert toy.read().cells[0].source.startswith("# 00 Toys")
    for old, new in zip(before.cells[1:], solved.cells[1:], strict=True):
        assert new.get("outputs") == old.get("outputs")
    assert toy.build() == UP_TO_DATE


@pytest.mark.parametrize("what", ["code", "a check that never ran", "--force"])
def test_outputs_do_not_stay_where(toy, what):
    toy.edit_source("# 00 Toy", "# 00 Toys")
    if what == "code":
        toy.edit_source('print("walk", 4)', 'print("walk", 2 + 2)')
    notebook = nbformat.read(toy.lesson.solved, 4)
    if what == "a check that never ran":
        toy.cell(notebook, "check-toy-2").outputs = []
    notebook.cells[-1].outputs = []
    nbformat.write(notebook, toy.lesson.solved)
    if what == "--force":
        assert main(["--force"]) == 0
    else:
        assert "all outputs kept" not in toy.build()
    solved = nbformat.read(toy.lesson.solved, 4)
    assert all(cell.outputs for cell in solved.cells if "check" in cell.metadata.get("tags", []))


def test_a_solved_notebook_whose_check_never_ran_is_stale(toy):
    notebook = nbformat.read(toy.lesson.solved, 4)
    toy.cell(notebook, "check-toy-2").outputs = []
    nbformat.write(notebook, toy.lesson.solved)
    assert "solved/00_toy.ipynb is stale" in toy.build(check=True)


def test_an_edited_solved_notebook_is_stale(toy):
    notebook = nbformat.read(toy.lesson.solved, 4)
    toy.cell(notebook, "exercise-toy-2").source = "add_2 = sum"
    nbformat.write(notebook, toy.lesson.solved)
    assert "solved/00_toy.ipynb is stale" in toy.build(check=True)


def test_a_learners_work_makes_nothing_stale(toy):
    toy.fill(1, "add_1 = 3")
    notebook = toy.read()
    notebook.cells[0].source = "# my own title"
    toy.write(notebook)
    before = toy.lesson.student.read_bytes()
    assert toy.build() == UP_TO_DATE
    assert before == toy.lesson.student.read_bytes()


def test_an_update_keeps_the_work_and_a_backup(toy):
    notebook = toy.read()
    toy.cell(notebook, "exercise-toy-1").source = "def add_1(x, y):\n    return y + x"
    place = notebook.cells.index(toy.cell(notebook, "check-toy-1"))
    notebook.cells.insert(place + 1, nbformat.v4.new_code_cell("add_1(3, 4)", id="abcd1234"))
    notebook.cells[2].source = "# tried something"
    toy.write(notebook)
    before = toy.lesson.student.read_bytes()
    toy.edit_source('"""The sum."""', '"""The sum of both."""')
    told = toy.build()
    updated = toy.read()
    assert toy.cell(updated, "exercise-toy-1").source == "def add_1(x, y):\n    return y + x"
    assert "The sum of both" in toy.cell(updated, "exercise-toy-2").source
    place = updated.cells.index(toy.cell(updated, "check-toy-1"))
    assert updated.cells[place + 1].source == "add_1(3, 4)"
    assert "# tried something" not in sources(updated)
    (backup,) = (toy.folder / ".backup").iterdir()
    assert backup.read_bytes() == before
    assert str(backup.name) in told
    assert "1 changed lesson cells" in told
    assert "1 cells of your own" in told
    assert toy.build() == UP_TO_DATE


def test_work_whose_exercise_is_gone_stays_at_the_end_for_good(toy):
    toy.fill(4, "def add_4(x, y):\n    return y + x")
    toy.edit_source("toy-4", "toy-3")
    toy.edit_source("add_4", "add_3")
    text = toy.lesson.source.read_text()
    first = text.index('# %% tags=["exercise"] exercise="toy-3"')
    toy.lesson.source.write_text(
        text[:first] + text[text.index('# %% tags=["exercise"] exercise="toy-3"', first + 1) :]
    )
    assert "toy-4: no place in the lesson any more" in toy.build()
    kept = "# your work on toy-4\ndef add_4(x, y):\n    return y + x"
    assert sources(toy.read())[-1] == kept
    assert sources(toy.read())[-2].startswith("## Kept from an earlier version")
    toy.edit_source("# 00 Toy", "# 00 Toys")
    toy.build()
    assert sources(toy.read())[-1] == kept
    assert sum("## Kept" in source for source in sources(toy.read())) == 1


def test_work_survives_a_tool_that_drops_the_ids_of_cells(toy):
    toy.fill(1, "add_1 = 3")
    notebook = json.loads(toy.lesson.student.read_text())
    for cell in notebook["cells"]:
        del cell["id"]
    toy.lesson.student.write_text(json.dumps({**notebook, "nbformat_minor": 0}))
    toy.edit_source("# 00 Toy", "# 00 Toys")
    toy.build()
    assert toy.cell(toy.read(), "exercise-toy-1").source == "add_1 = 3"
    assert len(toy.read().cells) == 15


def test_a_spoiled_student_notebook_is_kept_aside(toy):
    toy.lesson.student.write_text("{ half a notebook")
    told = toy.build()
    (backup,) = (toy.folder / ".backup").iterdir()
    assert backup.read_text() == "{ half a notebook"
    assert "a new notebook is in its place" in told
    assert len(toy.read().cells) == 15


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('print("walk", 3)', "1 / 0", r"line \d+: the cell raised ZeroDivisionError"),
        ('print("walk", 3)', "assert 0, 'no.'", r"AssertionError: no\. Nothing was written\."),
        ('print("walk", 3)', "import os; os._exit(1)", "the cell ended the kernel"),
        ("raise ValueError(", "print(", "is tagged raises-exception and did not raise"),
        ('print("walk", 3)', 'print("x" * 600_000)', "at most 500 kB; got 60. kB"),
        ("# # 00 Toy", "# 00 Toy", "00_toy.py, line 1: need a markdown cell"),
    ],
)
def test_a_lesson_that_cannot_be_built_leaves_everything_as_it_was(toy, old, new, says):
    toy.edit_source(old, new)
    before = toy.lesson.student.read_bytes(), toy.lesson.solved.read_bytes()
    with pytest.raises(CourseError, match=says):
        toy.build()
    assert before == (toy.lesson.student.read_bytes(), toy.lesson.solved.read_bytes())


def test_paths_of_this_machine_are_not_kept(toy):
    toy.edit_source('print("walk", 1)', "print(course_lib.__file__)")
    toy.build()
    walk = nbformat.read(toy.lesson.solved, 4).cells[5]
    assert walk.outputs[0].text == "course_lib/__init__.py\n"


def test_an_unknown_lesson_is_one_sentence(toy, capsys):
    assert main(["07"]) == 1
    assert "got '07'. There are: 00_toy." in capsys.readouterr().out


def test_stopping_a_build_ends_the_kernel_and_leaves_the_notebooks(toy, kernels):
    toy.edit_source('print("walk", 1)', "while True: pass")
    before = toy.lesson.student.read_bytes(), toy.lesson.solved.read_bytes()
    command = [sys.executable, "-m", "course_tools.authoring.build"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as build:
        kernel = kernels.of(build.pid)
        time.sleep(1)
        os.kill(build.pid, signal.SIGINT)
        told, _ = build.communicate(timeout=20)
    assert build.returncode == 130
    assert "stopped; the notebooks are as they were" in told
    assert kernels.ends(kernel)
    assert before == (toy.lesson.student.read_bytes(), toy.lesson.solved.read_bytes())


def test_an_output_that_depends_on_the_machine_is_refused_with_its_line(toy):
    toy.edit_source('print("walk", 1)', f'print("walk", 1)\n\n{cell_texts(DEPENDS)}')
    before = toy.lesson.student.read_bytes(), toy.lesson.solved.read_bytes()
    with pytest.raises(CourseError) as refused:
        toy.build(twice=True)
    assert before == (toy.lesson.student.read_bytes(), toy.lesson.solved.read_bytes())
    told = str(refused.value)
    lines = toy.lesson.source.read_text().splitlines()
    _, *planted = DEPENDS
    wanted = [lines.index(text.splitlines()[0]) for text in planted]
    assert [int(n) for n in re.findall(r"00_toy.py, line (\d+): in the second", told)] == wanted
    assert re.search(r"stdout\n    stored: process \d+\n    again:  process \d+\n", told)
    assert "    stored: course_lib/__init__.py\n    again:  /" in told
    assert "    stored: strict 1\n    again:  None None\n" in told
    assert re.search(r"text/html\n    stored: <p>/.*</p>\n    again:  <p>/.*again-", told)
    assert "    stored: (nothing)\n    again:  one line more\n" in told
    assert "    stored: one line less\n    again:  (nothing)\n" in told
    assert re.search(r"error\n    stored: ValueError: \d+\n    again:  ValueError: \d+\n", told)
    assert "raised OSError: only here" in told
    assert "\nTag a cell measured where its output depends on the machine, or show" in told


def test_a_measured_cell_is_run_twice_and_not_compared(toy):
    measured = cell_texts(DEPENDS[:-1]).replace("# %%\n", '# %% tags=["measured"]\n')
    measured = measured.replace('["raises', '["measured", "raises')
    toy.edit_source('print("walk", 1)', f'print("walk", 1)\n\n{measured}')
    assert toy.build(twice=True).endswith("; 12 of 26 code cells are measured\n")
    solved = nbformat.read(toy.lesson.solved, 4)
    ignored = [c for c in solved.cells if "nbval-ignore-output" in c.metadata.get("tags", [])]
    assert [cell.source for cell in ignored] == DEPENDS[:-1]
    assert all("measured" not in cell.metadata.tags for cell in ignored)
    student = {cell.source: cell for cell in toy.read().cells}
    tags = [student[text].metadata.get("tags", []) for text in DEPENDS[:-1]]
    assert tags == [[]] * 11 + [["raises-exception"]]


def test_stopping_the_second_run_ends_all_and_leaves_the_notebooks(toy, kernels):
    toy.edit_source(
        'print("walk", 1)',
        'import os\nif "COURSE_CLAIMS" not in os.environ:\n'
        f'    open("{toy.folder}/here", "w").close()\n    while True: pass',
    )
    before = toy.lesson.student.read_bytes(), toy.lesson.solved.read_bytes()
    command = [sys.executable, "-m", "course_tools.authoring.build"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as build:
        give_up = time.monotonic() + 60
        while not (toy.folder / "here").exists() and time.monotonic() < give_up:
            time.sleep(0.1)
        started = psutil.Process(build.pid).children(recursive=True)
        assert len(started) == 2  # the kernel, and a process that keeps its core busy
        os.kill(build.pid, signal.SIGINT)
        told, _ = build.communicate(timeout=20)
    assert build.returncode == 130
    assert "stopped; the notebooks are as they were" in told
    assert all(kernels.ends(one) for one in started)
    assert before == (toy.lesson.student.read_bytes(), toy.lesson.solved.read_bytes())
