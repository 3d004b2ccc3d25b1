"""`course update`: a newer course arrives, and nothing a learner wrote is lost."""

import shutil
import subprocess
from pathlib import Path

import pytest

from course_lib.core import CourseError
from course_lib.notebooks.update import update


def git(folder: Path, *command: str) -> None:
    who = ["-c", "user.name=teacher", "-c", "user.email=teacher@example.org"]
    subprocess.run(["git", "-C", str(folder), *who, *command], check=True, capture_output=True)


@pytest.fixture
def course(toy, tmp_path: Path):
    """The teacher's toy course, and a learner's clone of it."""
    teachers = tmp_path / "teacher"
    teachers.mkdir()
    shutil.copytree(toy.folder, teachers / "notebooks")
    git(teachers, "init", "-q", "-b", "main")
    git(teachers, "add", "-A")
    git(teachers, "commit", "-q", "-m", "the course")
    git(tmp_path, "clone", "-q", str(teachers), "learner")
    toys = (teachers / "notebooks", tmp_path / "learner" / "notebooks")
    return tuple(type(toy)(folder) for folder in toys)


def publish(teachers) -> None:
    teachers.edit_source('print("walk", 1)', 'print("a new walk", 1)')
    teachers.build()
    git(teachers.folder, "commit", "-q", "-a", "-m", "a better lesson")


def test_the_new_lesson_arrives_around_the_learners_work(course):
    teachers, learners = course
    learners.fill(1, "mine = 'my answer'")
    publish(teachers)
    told = update(learners.folder)
    sources = [cell.source for cell in learners.read().cells]
    assert "mine = 'my answer'" in sources
    assert 'print("a new walk", 1)' in sources
    assert told[0].startswith("00_toy: your work is carried over; a backup is ")
    (backup,) = (learners.folder / ".backup").glob("*.ipynb")
    assert "my answer" in backup.read_text()


def test_without_anything_new_nothing_changes(course):
    _, learners = course
    learners.fill(1, "mine = 1")
    before = learners.lesson.student.read_bytes()
    assert update(learners.folder) == ["The course is up to date."]
    assert learners.lesson.student.read_bytes() == before


def test_a_pull_that_fails_leaves_the_notebooks_alone(course):
    teachers, learners = course
    learners.fill(1, "mine = 1")
    before = learners.lesson.student.read_bytes()
    shutil.rmtree(teachers.folder.parent)
    with pytest.raises(CourseError, match="need `git pull` to work here"):
        update(learners.folder)
    assert learners.lesson.student.read_bytes() == before


def test_outside_of_git_it_says_so(toy):
    with pytest.raises(CourseError, match="course update: need `git rev-parse` to work here"):
        update(toy.folder)
