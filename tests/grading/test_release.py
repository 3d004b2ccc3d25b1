"""The zip of an assignment: what is in it and what is not, checking at home, packing."""

import io
import json
import os
import subprocess
import sys
import zipfile
from datetime import UTC, datetime, timedelta
from pathlib import Path

import nbformat
import pytest
from rich.console import Console

from course_lib.checks import CheckFailed
from course_lib.checks.exercise import find_exercise
from course_lib.core import CourseError
from course_lib.workbooks import pack as packing
from course_lib.workbooks.assignment import read_assignment, write_assignment
from course_lib.workbooks.lessons import Lesson
from course_lib.workbooks.pack import pack
from course_tools.grading.compose import chosen, compose
from course_tools.grading.release import read_class, release
from tests.grading.test_assignment import NOTEBOOKS, assignment, write_own

REAL = ("ranks-1", "collectives-2", "ddp-1", "ddp-2", "hw1-1")
LESSONS = ("00:ranks-1", "04_collectives:collectives-2", "06_ddp:ddp-1,ddp-2")
QUIET = Console(file=io.StringIO())


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an assignment of four lesson exercises and one of its own, released."""
    folder = tmp_path_factory.mktemp("real") / "assignments" / "hw1"
    compose(
        assignment(*REAL, due=datetime(2026, 12, 1, 18, tzinfo=UTC)),
        chosen(LESSONS, NOTEBOOKS),
        folder,
        own=True,
    )
    write_own(folder)
    release(folder, folder / "release", console=QUIET)
    return folder


@pytest.fixture
def bundle(real: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The zip, unpacked, as the working folder."""
    zipfile.ZipFile(real / "release" / "hw1.zip").extractall(tmp_path / "home")
    monkeypatch.chdir(tmp_path / "home" / "hw1")
    return tmp_path / "home" / "hw1"


def texts(path: Path) -> dict[str, str]:
    with zipfile.ZipFile(path) as packed:
        return {name: packed.read(name).decode(errors="replace") for name in packed.namelist()}


def fill(bundle: Path, real: Path, **edits: tuple[str, str]) -> None:
    """Solve the notebook, but for exercises with an edit (`ddp_1=(old, new)`); new "": the stub."""
    solved = nbformat.read(real / "solved" / "hw1.ipynb", 4)
    right = {cell.id: cell.source for cell in solved.cells}
    notebook = nbformat.read(bundle / "hw1.ipynb", 4)
    for cell in notebook.cells:
        if cell.id.startswith("exercise-"):
            old, new = edits.get(cell.metadata.exercise.replace("-", "_"), ("\n", "\n"))
            assert old in right[cell.id]
            cell.source = right[cell.id].replace(old, new) if new else cell.source
    nbformat.write(notebook, bundle / "hw1.ipynb")


# --- what is in it


def test_no_answer_is_in_the_zip(real):
    files = texts(real / "release" / "hw1.zip")
    for name, text in files.items():
        assert name.startswith("hw1/")
        assert not name.startswith("hw1/course_tools")
        assert not {"solved", "source", "hidden.py", ".git", "__pycache__"} & set(name.split("/"))
        if not name.startswith("hw1/course_lib/"):
            assert "-(-count" not in text, name  # the solution of hw1-1
            assert "in_flight.append" not in text, name  # of ddp-2
            assert "no numbers at all" not in text, name  # hidden cases
            assert "### BEGIN SOLUTION" not in text, name
    assert "_in_bits" not in files["hw1/checks/packed.py"]  # a planted mistake, by name
    assert read_assignment(real).points == dict.fromkeys(REAL, 2.5)


def test_the_notebook_is_empty_and_its_exercises_are_stubs(real):
    for name in ("hw1/hw1.ipynb", "hw1/.hw1.original.ipynb"):
        text = texts(real / "release" / "hw1.zip")[name]
        notebook = nbformat.reads(text, as_version=4)
        assert not any(cell.get("outputs") for cell in notebook.cells)
        stubs = [cell for cell in notebook.cells if cell.id.startswith("exercise-")]
        assert [cell.metadata.exercise for cell in stubs] == list(REAL)
        assert all("raise NotImplementedError" in cell.source for cell in stubs)


def test_what_make_lab_needs_is_in_it(bundle):
    told = subprocess.run(["make", "--dry-run", "lab"], capture_output=True, text=True, check=True)
    assert "jupyterlab --allow-root" in told.stdout
    assert f'--ServerApp.root_dir="{bundle}"  "hw1.ipynb"' in told.stdout
    quiet = ["make", "--no-print-directory"]  # which a make within a make prints
    help_text = subprocess.run(quiet, capture_output=True, text=True, check=True).stdout
    assert [line.split()[1] for line in help_text.splitlines()] == [
        *("help", "environment", "lab", "check", "pack")
    ]
    assert (bundle / "course_lib/workbooks/lab_extension/static/remoteEntry.js").is_file()
    check = "import sys; sys.path.insert(0, 'tools'); import environment"
    subprocess.run([sys.executable, "-S", "-c", check], check=True, env={})
    readme = (bundle / "README.md").read_text()
    assert "| `ddp-2` | 2.5 |" in readme
    assert "01 December 2026, 18:00" in readme


def test_the_same_assignment_makes_the_same_zip(real, tmp_path):
    (again,) = release(real, tmp_path, console=QUIET)
    assert again.read_bytes() == (real / "release" / "hw1.zip").read_bytes()


def test_a_solution_in_a_check_is_not_handed_out(real, tmp_path):
    checks = real / "checks" / "packed.py"
    before = checks.read_text()
    leak = "def right(count, num_bits):\n    return -(-count * num_bits // 8)"
    try:
        checks.write_text(f"{before}\n\n{leak}\n\n\nEXERCISES = (right,)\n")
        with pytest.raises(CourseError, match=r"checks/packed\.py would hand out .* of hw1-1"):
            release(real, tmp_path / "out", console=QUIET)
    finally:
        checks.write_text(before)
    assert not (tmp_path / "out").exists()


def test_hidden_cases_that_the_right_answer_fails_are_told(real, tmp_path):
    hidden = real / "hidden.py"
    before = hidden.read_text()
    try:
        hidden.write_text(before.replace("(0, 5)", "(0, None)"))
        with pytest.raises(CourseError, match=r"right answer of hw1-1 fails.*case 1: TypeError"):
            release(real, tmp_path / "out", console=QUIET)
    finally:
        hidden.write_text(before)
    assert not (tmp_path / "out").exists()


# --- at home, without any source


def at_home(bundle: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run `course` as the bundle's own environment does: with the library that is in it."""
    return subprocess.run(
        [sys.executable, "-m", "course_lib.cli", *words],
        cwd=bundle,
        env={**os.environ, "PYTHONPATH": str(bundle), "COLUMNS": "160"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_notebook_is_checked_at_home_and_mistakes_are_named(bundle, real):
    fill(
        bundle,
        real,
        ddp_1=("reversed", "list"),
        ddp_2=("\n", ""),
        hw1_1=("-(-count * num_bits // 8)", "count * num_bits // 8"),
    )
    ended = at_home(bundle, "check", "hw1.ipynb", "--json")
    assert ended.stderr == ""
    verdicts = {one["key"]: one for one in json.loads(ended.stdout)["verdicts"]}
    statuses = ["right", "right", "wrong", "not done", "wrong"]
    assert [verdicts[key]["status"] for key in REAL] == statuses
    assert "Backward begins at the end" in verdicts["ddp-1"]["detail"]
    assert "Rounded down: the last bits" in verdicts["hw1-1"]["detail"]
    for key, named in (("ddp-1", "Backward begins"), ("hw1-1", "Rounded down"), ("ddp-2", None)):
        cause = verdicts[key]["cause"]
        assert cause["sentence"].startswith(named) if named else cause is None
        assert verdicts[key]["section"]
    assert verdicts["ddp-1"]["cause"]["key"] == find_exercise("ddp-1").causes()[0].key
    assert "do not write" in (bundle / "AGENTS.md").read_text()
    assert ended.returncode == 1
    told = at_home(bundle, "pack", "--student", "ann")
    assert told.returncode == 0
    sentences = told.stdout.splitlines()
    assert sentences[0] == "hw1-ann.zip is what you hand in."
    assert set(sentences[1:]) == {
        "- ddp-1 was wrong when it was last checked.",
        "- ddp-2 is not done yet.",
        "- hw1-1 was wrong when it was last checked.",
    }


def test_the_checks_in_the_notebook_work_at_home(bundle):
    """The cells run in the bundle's folder, and find its checks and values there."""
    exercise = find_exercise("hw1-1")
    assert exercise.wrong == ()
    assert exercise.verdict(lambda count, num_bits: (count * num_bits + 7) // 8)
    with pytest.raises(CheckFailed, match="Those are bits: a byte has eight"):
        exercise.verdict(lambda count, num_bits: count * num_bits)


# --- each student's own


@pytest.fixture(scope="module")
def seeded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a seeded assignment of one exercise of its own, released for a class."""
    folder = tmp_path_factory.mktemp("seeded") / "hw1"
    compose(assignment("hw1-1", seeded=True), [], folder, own=True)
    write_own(folder)
    (folder / "class.csv").write_text("name,student\nAnn A.,ann\nBob B.,bob\n")
    release(folder, folder / "release", read_class(folder / "class.csv"), console=QUIET)
    return folder


def test_each_student_of_a_seeded_assignment_has_a_zip(seeded):
    ann, bob = (texts(seeded / "release" / f"hw1-{name}.zip") for name in ("ann", "bob"))
    assert {name for name in ann if ann[name] != bob[name]} == {
        "hw1/assignment.toml",
        "hw1/values.json",
    }
    values = [json.loads(files["hw1/values.json"])["hw1-1"]["right"] for files in (ann, bob)]
    assert values[0][:3] == values[1][:3] == [1, 2, 4]
    assert [len(each) for each in values] == [7, 7]
    assert "bob" not in ann["hw1/assignment.toml"]


def test_a_student_is_checked_with_cases_of_their_own(seeded, tmp_path, monkeypatch):
    zipfile.ZipFile(seeded / "release" / "hw1-ann.zip").extractall(tmp_path)
    monkeypatch.chdir(tmp_path / "hw1")
    exercise = find_exercise("hw1-1")
    assert exercise.verdict(lambda count, num_bits: (count * num_bits + 7) // 8)
    table = {(1, 8): 1, (3, 3): 2, (7, 4): 4}
    with pytest.raises(CheckFailed, match=r"\d\d numbers of \d bits"):
        exercise.verdict(lambda count, num_bits: table.get((count, num_bits), 0))


def test_a_seeded_assignment_needs_the_class(seeded, tmp_path):
    with pytest.raises(CourseError, match="--students"):
        release(seeded, tmp_path, console=QUIET)


@pytest.mark.parametrize(
    ("text", "found"),
    [("student\nann\nbob\n", ["ann", "bob"]), ("ann\n\nbob,x\n", ["ann", "bob"])],
)
def test_a_class_list(text, found, tmp_path):
    (tmp_path / "class.csv").write_text(text)
    assert read_class(tmp_path / "class.csv") == found


@pytest.mark.parametrize(("text", "says"), [("", "found none"), ("ann\nAnn\n", "ann again")])
def test_a_spoilt_class_list_is_one_sentence(text, says, tmp_path):
    (tmp_path / "class.csv").write_text(text)
    with pytest.raises(CourseError, match=says):
        read_class(tmp_path / "class.csv")


# --- packing


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A folder with an assignment's settings and an empty notebook."""
    due = datetime(2026, 12, 1, 18, tzinfo=UTC)
    write_assignment(assignment("hw1-1", student="ann", due=due), tmp_path)
    stub = nbformat.v4.new_code_cell("stub", metadata={"exercise": "hw1-1", "tags": ["exercise"]})
    notebook = nbformat.v4.new_notebook(cells=[stub])
    notebook.metadata.course = {"lesson": "hw1", "build": "", "stubs": {"hw1-1": "other"}}
    nbformat.write(notebook, tmp_path / "hw1.ipynb")
    return tmp_path


NOW = datetime(2026, 12, 1, 20, tzinfo=UTC)


def packed(path: Path) -> tuple[bytes, dict]:
    with zipfile.ZipFile(path) as made:
        return made.read("hw1.ipynb"), json.loads(made.read("submission.json"))


def test_a_submission_says_whose_it_is_and_what_is_missing(home):
    notebook = home / "hw1.ipynb"
    saved = (NOW - timedelta(days=3, hours=1)).timestamp()
    os.utime(notebook, (saved, saved))
    path, told = pack(notebook, now=NOW)
    content, about = packed(path)
    assert path == home / "hw1-ann.zip"
    assert content == notebook.read_bytes()
    assert (about["assignment"], about["student"], about["kit"]) == ("hw1", "ann", "0.1.0")
    assert told == [
        "hw1-1 was not checked since it was changed.",
        "The notebook was saved 3 days ago (Ctrl+S).",
        "The due time, 01 December 2026 18:00 UTC, was 2 h ago.",
    ]


@pytest.mark.parametrize("content", [b"", b"{", b"[" * 200_000, b"\xff\x00", b'{"cells": 3}'])
def test_a_damaged_notebook_is_packed_as_it_is(content, home):
    (home / "hw1.ipynb").write_bytes(content)
    path, told = pack(home / "hw1.ipynb", now=NOW - timedelta(days=9))
    assert packed(path)[0] == content
    assert told[0].startswith("It is packed as it is, but: ")


def test_what_was_packed_before_is_kept(home):
    first = pack(home / "hw1.ipynb", now=NOW)[0].read_bytes()
    (home / "hw1.ipynb").write_bytes(b"")
    path, told = pack(home / "hw1.ipynb", now=NOW)
    (kept,) = (home / ".backup").glob("hw1-ann-*.zip")
    assert kept.read_bytes() == first != path.read_bytes()
    assert str(kept) in told[0]


def test_without_settings_it_is_packed_all_the_same(home, monkeypatch):
    monkeypatch.setattr(packing.getpass, "getuser", lambda: "../b b")
    (home / "assignment.toml").write_text("[")
    path, told = pack(home / "hw1.ipynb", now=NOW)
    assert path == home / "hw1-..-b-b.zip"
    assert packed(path)[1]["student"] == "..-b-b"
    assert "Not you? Try --student." in told[0]
    assert "assignment.toml" in told[1]


def test_a_disk_that_is_full_leaves_the_earlier_zip(home, monkeypatch):
    first = pack(home / "hw1.ipynb", now=NOW)[0].read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(packing, "write_zip", full)
    with pytest.raises(CourseError, match=r"No space left.*Hand in hw1\.ipynb itself"):
        pack(home / "hw1.ipynb", now=NOW)
    assert (home / "hw1-ann.zip").read_bytes() == first


def test_no_notebook_is_one_sentence(home):
    with pytest.raises(CourseError, match="need a notebook to pack"):
        pack(home / "hw2.ipynb")


# --- the commands


def test_the_commands_compose_release_and_show(tmp_path, monkeypatch, course):
    monkeypatch.chdir(tmp_path)
    words = ["--from", "01:memory-1", "06:ddp-1,ddp-3", "--points", "ddp-1=5,ddp-3=2.5"]
    course("assignment", "new", "hw2", *words, "--due", "2026-12-01T18:00+01:00", "--title", "Two")
    made = read_assignment(Path("assignments/hw2"))
    assert made.items == (("memory-1", 1.0), ("ddp-1", 5.0), ("ddp-3", 2.5))
    assert Lesson("hw2", Path("assignments/hw2")).solved.exists()
    assert "hw2.zip" in course("assignment", "release", "hw2", "--out", "out")
    assert Path("out/hw2.zip").is_file()
    shown = course("assignment", "show", "hw2")
    assert "ddp-3" in shown
    assert "2.5" in shown
    assert "2026-12-01 18:00:00+01:00" in shown
    assert "There are: hw2" in course("assignment", "show", "hw3", fails=True)
    assert "need one of memory-1" in course(
        *("assignment", "new", "hw4", "--from", "01:memory-1", "--points", "x=1"), fails=True
    )
    begun = course("assignment", "new", "hw5", "--own")
    assert "Fill in" in begun
    assert Path("assignments/hw5/checks/hw5_1.py").is_file()


def test_a_lesson_that_is_no_assignment_is_packed_and_called_so(tmp_path):
    lesson = tmp_path / "00_ranks.ipynb"
    lesson.write_bytes((NOTEBOOKS / lesson.name).read_bytes())
    path, told = pack(lesson, "ann", now=NOW)
    assert path.name == "00_ranks-ann.zip"
    assert told[0].startswith("00_ranks is no assignment, so nobody may expect this file.")
    assert "assignment.toml" not in "".join(told)
    ignored = (NOTEBOOKS.parent / ".gitignore").read_text().splitlines()
    assert "notebooks/*.zip" in ignored
