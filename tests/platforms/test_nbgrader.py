"""nbgrader itself takes what `course assignment export --to nbgrader` writes."""

import csv
import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from course_lib.checks.lesson_source import read_source, solved
from tests.terminal import run

VERSION = "nbgrader==0.9.6"
NEW = "course assignment new hw1 --from 01_memory:memory-1 06_ddp:ddp-1 --points memory-1=4"


def nbgrader(env: Path, folder: Path, *words: str) -> None:
    """Run nbgrader, in an environment of its own, in a folder."""
    path = f"{os.environ['PATH']}{os.pathsep}{env / 'bin'}"  # it calls its own alembic
    done = subprocess.run(
        [env / "bin/nbgrader", *words],
        cwd=folder,
        env={**os.environ, "PATH": path, "PYTHONPATH": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def hand_in(release: Path, path: Path, answers: dict[str, str]) -> None:
    """Hand in what nbgrader has released, with these answers."""
    notebook = nbformat.read(release, as_version=4)
    for cell in notebook.cells:
        if "exercise" in cell.metadata.get("tags", ()) and cell.metadata.exercise in answers:
            cell.source = answers[cell.metadata.exercise]
    path.parent.mkdir(parents=True)
    nbformat.write(notebook, path)


@pytest.mark.timeout(1800)
def test_nbgrader_generates_and_grades_an_assignment(tmp_path):
    env, there = tmp_path / "env", tmp_path / "nbgrader"
    subprocess.run([sys.executable, "-m", "venv", env], check=True)
    subprocess.run([env / "bin/pip", "install", "-q", VERSION], check=True, capture_output=True)
    kernel = [sys.executable, "-m", "ipykernel", "install", "--prefix", env, "--name", "python3"]
    subprocess.run(kernel, check=True, capture_output=True)
    run(NEW, tmp_path)
    run(f"course assignment export hw1 --to nbgrader --out {there}", tmp_path)
    nbgrader(env, there, "generate_assignment", "hw1", "--create")
    release = there / "release/hw1/hw1.ipynb"
    source = read_source(tmp_path / "assignments/hw1/source/hw1.py")
    right = {cell.exercise: solved(cell) for cell in source if cell.is_exercise}
    cells = nbformat.read(release, as_version=4).cells
    handed_out = [cell.source for cell in cells if "exercise" in cell.metadata.get("tags", ())]
    assert len(handed_out) == len(right)
    assert all("YOUR CODE HERE" in text for text in handed_out)
    assert not {*handed_out} & {*right.values()}
    hand_in(release, there / "submitted/ann/hw1/hw1.ipynb", right)
    hand_in(release, there / "submitted/bob/hw1/hw1.ipynb", {"ddp-1": right["ddp-1"]})
    nbgrader(env, there, "autograde", "hw1", "--create")
    nbgrader(env, there, "generate_feedback", "hw1")
    nbgrader(env, there, "export")
    with (there / "grades.csv").open(newline="") as file:
        scores = {
            row["student_id"]: (row["score"], row["max_score"]) for row in csv.DictReader(file)
        }
    assert scores == {"ann": ("5.0", "5.0"), "bob": ("1.0", "5.0")}
    assert (there / "feedback/ann/hw1/hw1.html").is_file()
