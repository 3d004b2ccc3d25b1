"""What `make release` builds: a wheel that works without a clone, and a zip without solutions."""

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from course_lib.checks.lesson_source import read_source, solved
from course_lib.core.course_files import course_folder, is_installed

ROOT = Path(__file__).resolve().parents[2]
Course = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def release():
    sys.path.insert(0, str(ROOT / "tools"))
    import release

    sys.path.pop(0)
    return release


@pytest.fixture(scope="module")
def source(release, tmp_path_factory) -> Path:
    """The course as it is here, with a learner's and an operator's files in it."""
    folder = tmp_path_factory.mktemp("release") / "source"
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.check_output(listed, cwd=ROOT, text=True).split("\0"):
        if name and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    (folder / "cluster/profiles/site.toml").write_text("mine = true\n")
    (folder / "notebooks/.backup").mkdir()
    (folder / "notebooks/.backup/00_ranks-1.ipynb").write_text("{}")
    return folder


@pytest.fixture(scope="module")
def wheel(release, source, tmp_path_factory) -> Path:
    try:
        return release.build_wheel(source, tmp_path_factory.mktemp("wheel"))
    except subprocess.CalledProcessError:
        pytest.skip("setuptools could not be installed from the package registry")


@pytest.fixture(scope="module")
def course(wheel, tmp_path_factory) -> Course:
    """`course` of an environment where only the wheel is the course's."""
    venv = tmp_path_factory.mktemp("venv")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    pip = [sys.executable, "-m", "pip", "--python", venv / "bin" / "python", "install", "-q"]
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([*pip, "--no-deps", "--no-index", wheel], check=True, env=kept, cwd=venv)
    (packages,) = (venv / "lib").glob("python*/site-packages")
    others = Path(json.__file__).parents[1] / "site-packages"
    mine = [path for path in sys.path if path.endswith("site-packages")] or [str(others)]
    (packages / "others.pth").write_text("\n".join(mine) + "\n")  # the packages, not the course

    def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
        path = f"{venv / 'bin'}{os.pathsep}{os.environ['PATH']}"
        return subprocess.run(
            [venv / "bin" / "course", *words],
            cwd=folder,
            env={**kept, "PATH": path, "COLUMNS": "200"},
            capture_output=True,
            text=True,
        )

    return run


@pytest.fixture(scope="module")
def started(course, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("learner") / "lessons"
    done = course(folder.parent, "start", "lessons")
    assert done.returncode == 0, done.stderr
    return folder


def test_this_is_a_clone():
    assert not is_installed()
    assert course_folder() == ROOT


def test_the_wheel_has_the_lessons_and_nothing_of_whoever_built_it(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    for pattern in ("[0-9]*.ipynb", "solved/[0-9]*.ipynb", "source/[0-9]*.py"):
        here = {path.relative_to(ROOT).as_posix() for path in (ROOT / "notebooks").glob(pattern)}
        assert here
        assert here <= {name.removeprefix("course_lib/course_files/") for name in names}
    assert "course_lib/course_files/cluster/exercises/00_hello_ranks.py" in names
    assert any("labextensions/distributed-training-course/package.json" in name for name in names)
    assert not [name for name in names if "site.toml" in name or ".backup" in name]
    assert not [name for name in names if name.startswith(("tests", "tools", "notebooks"))]


def test_the_wheel_alone_gives_the_command_and_its_version(course, release, tmp_path):
    assert course(tmp_path, "--version").stdout.strip() == release.version_of(ROOT)
    done = course(tmp_path, "progress")
    assert done.returncode == 1
    assert "Try `course start`" in done.stderr


def test_start_makes_a_folder_of_lessons_without_solutions(course, started):
    lessons = sorted(path.name for path in (ROOT / "notebooks").glob("*.ipynb"))
    assert sorted(path.name for path in (started / "notebooks").iterdir()) == lessons
    again = course(started.parent, "start", "lessons")
    assert again.returncode == 1
    assert "got one with files in it" in again.stderr


def test_a_right_answer_is_right_with_the_wheel_alone(course, started):
    path = started / "notebooks" / "02_accumulation.ipynb"
    notebook = json.loads(path.read_text())
    cells = read_source(ROOT / "notebooks" / "source" / "02_accumulation.py")
    right = next(cell for cell in cells if cell.is_exercise)
    for cell in notebook["cells"]:
        tags = cell["metadata"].get("tags", [])
        if "exercise" in tags and cell["metadata"].get("exercise") == right.exercise:
            cell["source"] = solved(right)
    path.write_text(json.dumps(notebook))
    done = course(started, "check", "02")
    assert re.search(rf"{right.exercise} +right", done.stdout), done.stdout + done.stderr
    assert "1 of 6" in course(started / "notebooks", "progress").stdout


def test_update_says_how_an_installed_course_is_updated(course, started):
    done = course(started, "update")
    assert done.returncode == 1
    assert "expected a clone of the course" in done.stderr
    assert "`course start NEW_FOLDER`" in done.stderr
    assert "fatal" not in done.stderr


def test_a_class_is_not_graded_with_solutions_in_reach(course, started):
    done = course(started, "grade", ".")
    assert done.returncode == 1
    assert "expected a clone of the course" in done.stderr


def test_the_students_zip_has_notebooks_pages_and_the_wheel_but_no_solutions(
    release, source, wheel, tmp_path
):
    files = release.student_files(source, wheel)
    assert {"README.md", "LICENSE", "requirements.lock", "docs/glossary.md", wheel.name} <= set(
        files
    )
    assert not [name for name in files if "solved" in name or "source" in name]
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        assert b"BEGIN SOLUTION" not in files[f"notebooks/{path.name}"]
        assert files[f"notebooks/{path.name}"] == path.read_bytes()
    readme = files["README.md"].decode()
    assert wheel.name in readme
    assert "torch==2.13.0" in readme
    release.write_zip(tmp_path / "one.zip", files)
    release.write_zip(tmp_path / "two.zip", dict(reversed(files.items())))
    assert (tmp_path / "one.zip").read_bytes() == (tmp_path / "two.zip").read_bytes()
    with zipfile.ZipFile(tmp_path / "one.zip") as archive:
        assert archive.testzip() is None
