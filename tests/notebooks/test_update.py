"""`course update`: a newer course arrives, and nothing a learner wrote is lost."""

import fcntl
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from course_lib.cli import main
from course_lib.core import CourseError
from course_lib.workbooks.update import finish_cut_off, update

ANSWER, OWN_CELL = "mine = 'my answer'", "note = 'my own cell'"
OTHER_ANSWER = "other = 'my other answer'"
NEW_TEXT = 'print("a new walk", 1)'

# Runs updates that die at their n-th side effect. One folder a step, or all steps in one folder.
KILLED = """
import os, shutil, signal, sys
from pathlib import Path
from course_lib.workbooks.update import update

ACTS = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "subprocess.Popen"}
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


def die_at(step):
    seen = 0

    def count(event, given):
        nonlocal seen
        seen += event in ACTS or (event == "open" and bool((given[2] or 0) & WRITES))
        if seen == step and event != "os.kill":  # this, too, is an event
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)


course, out, one_folder = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] == "one"
for step in range(1, 1000):
    folder = out / ("0" if one_folder else str(step))
    if not folder.exists():
        shutil.copytree(course, folder, symlinks=True)
    child = os.fork()
    if child == 0:
        die_at(step)
        update(folder / "notebooks")
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if status != signal.SIGKILL:
        print(step)
        sys.exit(os.waitstatus_to_exitcode(status))
"""
UPDATE = """
import sys
from pathlib import Path
from course_lib.workbooks.update import update

update(Path(sys.argv[1]))
"""


def git(folder: Path, *command: str) -> str:
    who = ["-c", "user.name=teacher", "-c", "user.email=teacher@example.org"]
    done = subprocess.run(
        ["git", "-C", str(folder), *who, *command], check=True, capture_output=True, text=True
    )
    return done.stdout


def python(text: str, *given: object, path: str = "") -> subprocess.CompletedProcess[str]:
    """Run a script in a process of its own, with `path` first where programs are looked for."""
    found = {"PATH": f"{path}:{os.environ['PATH']}"} if path else {}
    command = [sys.executable, "-c", text, *map(str, given)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, env={**os.environ, **found}
    )


@pytest.fixture
def course(toy, tmp_path: Path):
    """The teacher's toy course of two lessons, and a learner's clone of it."""
    teachers = tmp_path / "teacher"
    teachers.mkdir()
    shutil.copytree(toy.folder, teachers / "notebooks")
    for name, end in (("source/0{}_toy", "py"), ("0{}_toy", "ipynb")):
        text = (toy.folder / f"{name.format(0)}.{end}").read_text()
        other = text.replace("00_toy", "01_toy")
        (teachers / "notebooks" / f"{name.format(1)}.{end}").write_text(other)
    git(teachers, "init", "-q", "-b", "main")
    git(teachers, "add", "-A")
    git(teachers, "commit", "-q", "-m", "the course")
    git(tmp_path, "clone", "-q", str(teachers), "learner")
    toys = (teachers / "notebooks", tmp_path / "learner" / "notebooks")
    return tuple(type(toy)(folder) for folder in toys)


@pytest.fixture
def worked(course):
    """The same, after the learner has worked in both lessons and the first has changed."""
    teachers, learners = course
    learners.fill(1, ANSWER)
    notebook = learners.read()
    notebook.cells.insert(3, nbformat.v4.new_code_cell(OWN_CELL))
    learners.write(notebook)
    other = learners.folder / "01_toy.ipynb"
    notebook = nbformat.read(other, 4)
    learners.cell(notebook, "exercise-toy-2").source = OTHER_ANSWER
    nbformat.write(notebook, other)
    publish(teachers)
    return course


def publish(teachers) -> None:
    teachers.edit_source('print("walk", 1)', NEW_TEXT)
    teachers.build()
    git(teachers.folder, "add", "-A")
    git(teachers.folder, "commit", "-q", "-m", "a better lesson")


def fake_git(folder: Path, command: str, does: str) -> str:
    """A folder with a git that does something else instead of one of its commands."""
    folder.mkdir()
    program = folder / "git"
    program.write_text(
        f'#!/bin/sh\ncase " $* " in *" {command} "*) {does};; esac\n'
        f'exec {shutil.which("git")} "$@"\n'
    )
    program.chmod(0o755)
    return str(folder)


def wait_for_the_lock(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    os.close(handle)


def sources(folder: Path, name: str) -> list[str]:
    return [cell.source for cell in nbformat.read(folder / f"{name}.ipynb", 4).cells]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.ipynb")}


def is_on_disk(text: str, folder: Path) -> bool:
    return any(text in path.read_text() for path in folder.rglob("*.ipynb"))


def assert_updated_once(folder: Path) -> None:
    """The new lesson is there, with each piece of work in it once, and nothing is left to do."""
    found = sources(folder, "00_toy")
    assert [found.count(text) for text in (ANSWER, OWN_CELL, NEW_TEXT)] == [1, 1, 1]
    assert sources(folder, "01_toy").count(OTHER_ANSWER) == 1
    assert not (folder / ".backup" / "update.json").exists()
    assert finish_cut_off(folder) == []


def test_lessons_that_git_does_not_know_are_no_clone(tmp_path):
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    for folder in (tmp_path / "notebooks", tmp_path / "other" / "notebooks"):
        folder.mkdir(parents=True)
        with pytest.raises(CourseError, match="expected a clone of the course"):
            update(folder)


def test_the_new_lesson_arrives_around_the_learners_work(worked):
    _, learners = worked
    other = contents(learners.folder)["01_toy.ipynb"]
    told = update(learners.folder)
    assert_updated_once(learners.folder)
    assert told[0].startswith("00_toy: your work is carried over; a backup is ")
    assert contents(learners.folder)["01_toy.ipynb"] == other
    (backup,) = (learners.folder / ".backup").glob("*.ipynb")
    assert "my answer" in backup.read_text()


def test_without_anything_new_nothing_changes(course):
    _, learners = course
    learners.fill(1, "mine = 1")
    before = contents(learners.folder)
    assert update(learners.folder) == ["The course is up to date."]
    assert contents(learners.folder) == before
    assert not [*(learners.folder / ".backup").iterdir()]


def test_a_fetch_that_fails_leaves_the_notebooks_alone(course):
    teachers, learners = course
    learners.fill(1, "mine = 1")
    before = contents(learners.folder)
    shutil.rmtree(teachers.folder.parent)
    with pytest.raises(CourseError, match="need `git fetch` to work here"):
        update(learners.folder)
    assert contents(learners.folder) == before


def test_outside_of_git_it_says_so(toy):
    with pytest.raises(CourseError, match="course update: expected a clone of the course"):
        update(toy.folder)


def test_killed_at_any_step_no_work_is_lost(worked, tmp_path):
    _, learners = worked
    ran = python(KILLED, learners.folder.parent, tmp_path / "killed", "many")
    assert ran.returncode == 0, ran.stderr
    last = int(ran.stdout)
    assert last > 20
    for step in range(1, last):
        folder = tmp_path / "killed" / str(step) / "notebooks"
        assert all(is_on_disk(text, folder) for text in ("my answer", "my own", "my other")), step
        update(folder)
        assert_updated_once(folder)
    assert_updated_once(tmp_path / "killed" / str(last) / "notebooks")


def test_killed_again_and_again_it_still_ends_well(worked, tmp_path):
    _, learners = worked
    ran = python(KILLED, learners.folder.parent, tmp_path / "killed", "one")
    assert ran.returncode == 0, ran.stderr
    folder = tmp_path / "killed" / "0" / "notebooks"
    update(folder)
    assert_updated_once(folder)


@pytest.fixture
def cut_off(worked, tmp_path):
    """A learner's course whose update was killed while git fetched."""
    _, learners = worked
    before = contents(learners.folder)
    ran = python(
        UPDATE, learners.folder, path=fake_git(tmp_path / "bin", "fetch", "kill -9 $PPID; exit")
    )
    assert ran.returncode == -9
    assert "my answer" not in learners.lesson.student.read_text()
    return learners, before


def test_the_next_command_finishes_what_was_cut_off(cut_off, capsys, monkeypatch):
    learners, before = cut_off
    monkeypatch.chdir(learners.folder.parent)
    with pytest.raises(SystemExit, match="0"):
        main(["progress"])
    assert capsys.readouterr().err == (
        "An update of the course was cut off; it is finished now, and no work is lost.\n"
    )
    assert contents(learners.folder) == before
    assert not [*(learners.folder / ".backup").iterdir()]


def test_a_notebook_touched_since_is_left_and_its_backup_is_named(cut_off):
    learners, _ = cut_off
    learners.fill(1, "mine = 'begun again'")
    told = update(learners.folder)
    backups = (learners.folder / ".backup").glob("00_toy-*.ipynb")
    (backup,) = (path for path in backups if "my answer" in path.read_text())
    assert told[1] == (
        "00_toy: you have worked in it since, so it stays as it is; "
        f"what you had written before is in {backup}"
    )
    found = sources(learners.folder, "00_toy")
    assert [found.count(text) for text in ("mine = 'begun again'", NEW_TEXT, ANSWER)] == [1, 1, 0]
    assert OTHER_ANSWER in sources(learners.folder, "01_toy")


def test_git_killed_in_the_middle_leaves_the_notebooks_as_they_were(worked, tmp_path, monkeypatch):
    _, learners = worked
    before = contents(learners.folder)
    killed = fake_git(tmp_path / "bin", "merge", "kill -9 $$")
    with monkeypatch.context() as patch:
        patch.setenv("PATH", f"{killed}:{os.environ['PATH']}")
        with pytest.raises(CourseError, match=r"`git merge` .* ended with exit code -9"):
            update(learners.folder)
    assert contents(learners.folder) == before
    update(learners.folder)
    assert_updated_once(learners.folder)


def test_half_a_merge_is_taken_up(worked):
    teachers, learners = worked
    (teachers.folder / "new.py").write_text("new = 1\n")
    git(teachers.folder, "add", "-A")
    git(teachers.folder, "commit", "-q", "-m", "a new file")
    for name in ("source/00_toy.py", "new.py"):  # files are written, git's index is not
        shutil.copy(teachers.folder / name, learners.folder / name)
    update(learners.folder)
    assert_updated_once(learners.folder)
    assert git(learners.folder, "status", "--porcelain", "--", "new.py", "source") == ""


def test_what_a_learner_changed_elsewhere_is_named_and_kept(worked):
    _, learners = worked
    before = contents(learners.folder)
    source = learners.lesson.source
    source.write_text(source.read_text() + "# mine\n")
    with pytest.raises(CourseError, match=r"would be overwritten by merge: .*source/00_toy.py"):
        update(learners.folder)
    assert source.read_text().endswith("# mine\n")
    assert contents(learners.folder) == before


def test_without_room_for_a_backup_nothing_is_touched(worked):
    _, learners = worked
    before, head = contents(learners.folder), git(learners.folder, "rev-parse", "HEAD")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(CourseError, match=r"need to back up .* Nothing was changed"):
            update(learners.folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert contents(learners.folder) == before
    assert git(learners.folder, "rev-parse", "HEAD") == head
    assert not [*(learners.folder / ".backup").iterdir()]


def test_ctrl_c_leaves_the_notebooks_as_they_were(worked, tmp_path):
    _, learners = worked
    before = contents(learners.folder)
    stops = fake_git(tmp_path / "bin", "merge", "kill -INT $PPID; sleep 1; exit 1")
    ran = python(UPDATE, learners.folder, path=stops)
    assert "KeyboardInterrupt" in ran.stderr
    assert contents(learners.folder) == before
    assert not [*(learners.folder / ".backup").iterdir()]


def test_a_git_that_outlives_its_update_keeps_the_next_one_out(worked, tmp_path):
    _, learners = worked
    os.mkfifo(tmp_path / "ended")
    outlives = fake_git(
        tmp_path / "bin", "merge", f"kill -9 $PPID; read line < {tmp_path}/ended; exit"
    )
    assert python(UPDATE, learners.folder, path=outlives).returncode == -9
    with pytest.raises(CourseError, match="an update of this course is running"):
        update(learners.folder)
    (tmp_path / "ended").write_text("now\n")
    wait_for_the_lock(learners.folder)
    update(learners.folder)
    assert_updated_once(learners.folder)


def test_two_updates_do_not_run_at_once(worked):
    _, learners = worked
    before = contents(learners.folder)
    handle = os.open(learners.folder, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        with pytest.raises(CourseError, match="an update of this course is running"):
            update(learners.folder)
    finally:
        os.close(handle)
    assert contents(learners.folder) == before
