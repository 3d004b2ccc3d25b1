"""The `course` command: what it prints, its exit codes, and that Ctrl-C leaves nothing behind."""

import json
import os
import signal
import subprocess
import sys
import time
from xml.etree import ElementTree

import nbformat
import pytest
from typer.main import get_command

from course_lib.cli.commands import GROUPS, app, main

RIGHT = "def add_{0}(x, y):\n    return x + y\n"
WRONG = "def add_{0}(x, y):\n    return x - y\n"


@pytest.fixture
def course(toy, monkeypatch, capsys):
    """Run `course ...` beside the toy lesson: exit code, stdout, stderr."""
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stopped:
            main(arguments)
        told = capsys.readouterr()
        return int(stopped.value.code or 0), told.out, told.err

    return run


def test_alone_it_shows_its_help(course):
    code, out, _ = course()
    assert code == 0
    assert all(f"\n{title}:\n" in out for title in GROUPS)
    assert out.count("\n  check  ") == 1
    assert "..." not in out.partition("COMMAND")[2].partition("]...")[2]


def test_a_copy_without_the_instructors_tools_has_a_learners_commands():
    """A student's zip is such a copy."""
    code = "import importlib.util as u; find = u.find_spec\n"
    code += "u.find_spec = lambda name, *of: None if name == 'course_tools' else find(name, *of)\n"
    code += "import course_lib.cli; course_lib.cli.main(['--help'])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
    names = ("pack", "submit", "grade", "assignment")
    assert [name for name in names if f"  {name}  " in out] == ["pack", "submit"]


def test_each_command_has_one_group():
    grouped = [name for names in GROUPS.values() for name in names]
    assert sorted(grouped) == sorted(get_command(app).commands)


def test_progress_of_a_lesson_that_was_not_begun_is_a_bar(course, toy):
    _, out, _ = course("progress")
    assert [line.split() for line in out.splitlines()[1:2]] == [["00_toy", "....", "0", "of", "4"]]
    assert out.endswith("0 of 4 exercises are right. Next: toy-1 in 00_toy.\n")


def test_version_and_usage(course):
    assert course("--version")[:2] == (0, "0.1.0\n")
    assert course("check")[0] == 2
    assert course("nonsense")[0] == 2
    assert course("check", "00", "--timeout", "0")[0] == 2


@pytest.mark.parametrize("name", ["00", "0", "toy", "00_toy", "notebooks/00_toy.ipynb"])
def test_a_lesson_goes_by_many_names(course, name):
    code, out, _ = course("check", name)
    assert code == 1
    assert "0 of 4 exercises are right." in out


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("07", "got '07'. There are: 00_toy."),
        ("nowhere/x.ipynb", "need a notebook; it cannot be read (No such file or directory)"),
    ],
)
def test_an_error_is_one_sentence(course, name, says):
    code, out, err = course("check", name)
    assert (code, out) == (1, "")
    assert says in err
    assert len(err.splitlines()) == 1


def test_check_and_progress_tell_the_same_story(course, toy):
    toy.fill(1, RIGHT.format(1))
    toy.fill(2, WRONG.format(2))
    assert "toy-1, toy-2 not checked; toy-3, toy-4 not done" in course("progress")[1]
    code, out, _ = course("check", "00")
    assert code == 1
    rows = [line.strip().split(maxsplit=2) for line in out.splitlines() if "toy-" in line]
    assert rows[0] == ["toy-1", "right", "1 + 2 = 3."]
    assert rows[1][1:] == ["wrong", "rank 0: need 3; got -1. Subtracted, not added."]
    assert "saved just now" in out
    progress = course("progress")[1]
    assert "#...  1 of 4  toy-2 wrong; toy-3, toy-4 not done" in progress
    assert "1 of 4 exercises are right. Next: toy-2 in 00_toy." in progress
    toy.fill(1, RIGHT.format(1) + "# changed since")
    assert "toy-1 not checked; toy-2 wrong; " in course("progress")[1]


def test_progress_tells_of_missing_cells_and_notebooks(course, toy):
    notebook = toy.read()
    notebook.cells.remove(toy.cell(notebook, "exercise-toy-2"))
    toy.write(notebook)
    (toy.folder / ".progress.json").write_text("spoiled")
    assert "toy-1, toy-3, toy-4 not done; toy-2 missing" in course("progress")[1]
    toy.lesson.student.unlink()
    code, out, _ = course("progress")
    assert code == 1
    assert "not judged:" in out
    assert "No such file" in out


def test_all_right_is_exit_code_0_and_files_for_instructors(course, toy, tmp_path):
    for number in range(1, 5):
        toy.fill(number, RIGHT.format(number))
    code, out, _ = course("check", "00", "--json", "--junitxml", str(tmp_path / "x" / "j.xml"))
    assert code == 0
    report = json.loads(out)
    assert [verdict["status"] for verdict in report["verdicts"]] == ["right"] * 4
    suite = ElementTree.parse(tmp_path / "x" / "j.xml").getroot()[0]
    assert (suite.get("tests"), suite.get("failures")) == ("4", "0")


def test_nothing_to_grade_is_an_error(course, tmp_path):
    (tmp_path / "empty").mkdir()
    assert course("grade", "empty")[0] == 1


def reset_state(toy):
    ids = [cell.id for cell in toy.read().cells if cell.metadata.get("exercise") == "toy-2"]
    return ids, toy.cell(toy.read(), "exercise-toy-2").source


def test_reset_puts_the_stub_back_and_keeps_a_backup(course, toy):
    fresh = reset_state(toy)
    toy.fill(2, WRONG.format(2))
    toy.fill(1, RIGHT.format(1))
    code, out, _ = course("reset", "00", "toy-2", "--yes")
    assert code == 0
    assert reset_state(toy) == fresh
    assert toy.cell(toy.read(), "exercise-toy-1").source == RIGHT.format(1)
    (backup,) = (toy.folder / ".backup").iterdir()
    assert "x - y" in backup.read_text()
    assert backup.name in out


def test_reset_mends_deleted_and_doubled_cells(course, toy):
    fresh = reset_state(toy)
    notebook = toy.read()
    notebook.cells.append(
        nbformat.from_dict({**toy.cell(notebook, "exercise-toy-2"), "id": "twin"})
    )
    toy.write(notebook)
    course("reset", "00", "toy-2", "--yes")
    assert reset_state(toy) == fresh
    notebook = toy.read()
    notebook.cells.remove(toy.cell(notebook, "exercise-toy-2"))
    toy.write(notebook)
    course("reset", "00", "toy-2", "--yes")
    assert reset_state(toy) == fresh
    assert len(list((toy.folder / ".backup").iterdir())) == 2


def test_reset_asks_and_knows_its_exercises(course, toy, monkeypatch):
    before = toy.lesson.student.read_bytes()
    monkeypatch.setattr("typer.confirm", lambda text, abort: (_ for _ in ()).throw(SystemExit(1)))
    assert course("reset", "00", "toy-2")[0] == 1
    code, _, err = course("reset", "00", "toy-9", "--yes")
    assert code == 1
    assert "need one of its exercises, toy-1, toy-2, toy-3, toy-4; got 'toy-9'" in err
    assert before == toy.lesson.student.read_bytes()


def test_doctor_tells_of_this_machine(course):
    code, out, _ = course("doctor")
    assert code == 0
    assert "memory" in out


def test_doctor_writes_one_file_to_attach_to_a_question(course, tmp_path):
    code, out, _ = course("doctor", "--report", str(tmp_path / "doctor.txt"))
    assert code == 0
    assert "all of its tests passed" in out
    said = (tmp_path / "doctor.txt").read_text()
    assert "gloo works: 4 bytes in" in said
    assert str(tmp_path) not in said
    code, out, err = course("doctor", "--report", str(tmp_path))
    assert (code, out) == (1, "")
    assert "Is a directory" in err


def test_start_in_a_clone_says_where_the_lessons_are(course, tmp_path):
    code, _, err = course("start", str(tmp_path / "new"))
    assert code == 1
    assert "this is a clone, whose lessons are in" in err
    assert not (tmp_path / "new").exists()


def test_ctrl_c_ends_a_check_and_its_kernel(toy, kernels):
    toy.fill(1, "def add_1(x, y):\n    while True:\n        continue\n")
    command = [sys.executable, "-m", "course_lib.cli", "check", "00"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as check:
        kernel = kernels.of(check.pid)
        time.sleep(1.5)
        os.kill(check.pid, signal.SIGINT)
        _, err = check.communicate(timeout=20)
    assert (check.returncode, err) == (130, "")
    assert kernels.ends(kernel)
