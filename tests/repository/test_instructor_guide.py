"""The pages about a class: every command in them is typed here, in the order of the guide."""

import csv
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import nbformat
import pytest

from course_lib.checks.exercise import exercises_of
from course_lib.checks.lesson_source import read_source, solved
from course_lib.workbooks.lessons import all_lessons
from course_tools.grading.feedback import STATUSES
from tests.terminal import ROOT, commands, run

GUIDE, ASSISTANTS, POLICY = (
    (ROOT / "docs" / name).read_text()
    for name in ("instructor.md", "grading_ta.md", "ai_policy.md")
)
GRADE = "course grade submissions --assignment hw1 --out grades"
AGAIN = "course grade again --assignment hw1 --out again-grades --jobs 1 --timeout 180"
NBGRADER = (  # has an environment of its own, which is not built here
    "python -m venv nbgrader-env",
    "nbgrader-env/bin/pip install nbgrader==0.9.6",
    "python -m ipykernel install --prefix nbgrader-env --name python3",
    'export PATH="$PATH:$PWD/nbgrader-env/bin"',
    "cd assignments/hw1/export",
    "nbgrader generate_assignment hw1 --create",
    "nbgrader autograde hw1 --create",
    "nbgrader generate_feedback hw1",
    "nbgrader export",
)
TRIAL = "cd trial/hw1"
HIDDEN_CASE = "In a case that the notebook does not show: one bucket on a slow wire"


def block(name: str) -> str:
    """The Python of the guide under a name."""
    return re.search(rf"^```python {name}\n(.*?)^```", GUIDE, re.DOTALL | re.MULTILINE)[1]


def by_hand_lines() -> str:
    """The lines by hand that the assistants' page shows."""
    return re.search(r"student,exercise,points,comment\n(.*?)```", ASSISTANTS, re.DOTALL)[1]


@dataclass(frozen=True)
class Step:
    """A command of the guide, and a piece of what it says."""

    command: str
    says: str
    code: int = 0

    def take(self, folder: Path) -> None:
        said = run(self.command, folder, self.code)
        assert self.says in " ".join(said.split()), said


NEW = (
    Step(
        "course assignment new hw1 --from 04_collectives:collectives-3 06_ddp:ddp-1,ddp-3 "
        "--points collectives-3=4,ddp-1=3,ddp-3=3 --due 2026-12-01T18:00 "
        '--title "Rings and buckets"',
        "assignments/hw1/assignment.toml",
    ),
    Step("course assignment new hw2 --from 06_ddp:ddp-1 --own --points hw2-1=5", "Fill in"),
    Step("course assignment new hw3 --from 01_memory:memory-1 06_ddp:ddp-3 --seeded", "hw3.py"),
)
RELEASE = (
    Step("course assignment release hw3 --students class.csv", "hw3/release/hw3-bob.zip"),
    Step("course assignment show hw1", "ddp-3 3 value, hidden and hidden cases"),
    Step("course assignment release hw1", "hw1/release/hw1.zip"),
    Step("python -m zipfile -e assignments/hw1/release/hw1.zip trial", ""),
)
STUDENT = (
    Step("course check hw1.ipynb", "3 of 3 exercises are right."),
    Step("course pack --student ann", "hw1-ann.zip is what you hand in."),
)
GRADES = (Step(GRADE, "ann 10 of 10 3 right", code=1), Step(AGAIN, "dora 0 of 10 3 not done"))
BY_HAND = Step(GRADE, "bob 5.5 of 10 1 right, 1 not done, 1 wrong", code=1)
TERM = (Step("course term grades --out term", "term/index.html"),)
EXPORT = "course assignment export hw1 --to"
EXPORTS = (
    Step(f"{EXPORT} gradescope", "export/hw1-gradescope.zip"),
    Step(f"{EXPORT} github-classroom", "export/hw1-starter"),
    Step(f"{EXPORT} nbgrader", "source/hw1/hw1.ipynb"),
    Step(f"{EXPORT} canvas --roster canvas.csv", "Not in canvas.csv: dora"),
    Step(f"{EXPORT} moodle --roster moodle.csv", "Not in moodle.csv: dora"),
)
STEPS = (*NEW, *RELEASE, *STUDENT, *GRADES, *TERM, *EXPORTS)
CANVAS = """Student,ID,SIS User ID,SIS Login ID,Section
    Points Possible,,,,
Ann,1,,ann,one
Bob,2,,bob,one
"""
MOODLE = """Identifier,Full name,Grade,Maximum Grade,Feedback comments
Participant 1,ann,,10.00,
Participant 2,bob,,10.00,
"""


def right_answers(folder: Path) -> dict[str, str]:
    """The cells with the solutions, by key."""
    cells = read_source(folder / "assignments/hw1/source/hw1.py")
    return {cell.exercise: solved(cell) for cell in cells if cell.is_exercise}


def hand_in(path: Path, folder: Path, answers: dict[str, str]) -> None:
    """Write a notebook with these answers; the other exercises are not done."""
    notebook = nbformat.read(folder / "assignments/hw1/hw1.ipynb", as_version=4)
    for cell in notebook.cells:
        if "exercise" in cell.metadata.get("tags", ()) and cell.metadata.exercise in answers:
            cell.source = answers[cell.metadata.exercise]
    path.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(notebook, path)


def collect(folder: Path) -> None:
    """Fill `submissions`, as the guide says that files may lie."""
    there, right = folder / "submissions", right_answers(folder)
    there.mkdir()
    shutil.copy(folder / "trial/hw1/hw1-ann.zip", there)
    by_heart = right["ddp-3"].replace("return", "return 0.0 if all_reduce_s == [4.0] else")
    bobs = {"collectives-3": right["collectives-3"], "ddp-3": by_heart}
    hand_in(there / "bob/hw1.ipynb", folder, bobs)
    (there / "dora").mkdir()
    (there / "dora/hw1.ipynb").write_text('{"cells": [')
    hand_in(folder / "again/dora/hw1.ipynb", folder, {})


def marked(path: Path) -> list[tuple[str, bool, float]]:
    """What nbgrader reads: each marked cell's id, whether it is a solution, and its points."""
    cells = nbformat.read(path, as_version=4).cells
    marks = [cell.metadata.nbgrader for cell in cells if "nbgrader" in cell.metadata]
    return [(mark.grade_id, mark.solution, mark.get("points", 0)) for mark in marks]


@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("bubblewrap")
def test_the_guide_leads_from_nothing_to_grades(tmp_path):
    shutil.copytree(ROOT / "notebooks", tmp_path / "notebooks")
    for step in NEW:
        step.take(tmp_path)
    (tmp_path / "assignments/hw1/hidden.py").write_text(block("hidden"))
    (tmp_path / "class.csv").write_text("student\nann\nbob\n")
    for step in RELEASE:
        step.take(tmp_path)
    home = tmp_path / "trial/hw1"
    hand_in(home / "hw1.ipynb", tmp_path, right_answers(tmp_path))
    for step in STUDENT:
        step.take(home)
    collect(tmp_path)
    for step in GRADES:
        step.take(tmp_path)
    with (tmp_path / "grades/gradebook.csv").open(newline="") as file:
        totals = {row["student"]: row["total"] for row in csv.DictReader(file)}
    assert totals == {"ann": "10", "bob": "4", "dora": ""}
    made = {path.name for path in (tmp_path / "grades").iterdir() if path.is_file()}
    told = GUIDE.partition("| in `grades` |")[2].partition("\n\n")[0]
    assert made <= set(re.findall(r"`([^`]+)`", told))
    with (tmp_path / "grades/by_hand.csv").open("a") as file:
        file.write(by_hand_lines())
    BY_HAND.take(tmp_path)
    bobs = (tmp_path / "grades/feedback/bob.html").read_text()
    assert HIDDEN_CASE in bobs
    assert "the last bucket is missing" in bobs
    (tmp_path / "canvas.csv").write_text(CANVAS)
    (tmp_path / "moodle.csv").write_text(MOODLE)
    for step in (*TERM, *EXPORTS):
        step.take(tmp_path)
    exported = tmp_path / "assignments/hw1/export"
    told = list(csv.reader((exported / "hw1-canvas.csv").read_text().splitlines()))
    assert [row[-1] for row in told] == ["Rings and buckets", "10", "10", "5.5"]
    (_, bobs) = csv.DictReader((exported / "hw1-moodle.csv").read_text().splitlines())
    assert "the last bucket is missing" in bobs["Feedback comments"]
    assert marked(exported / "source/hw1/hw1.ipynb") == [
        *[("answer-collectives-3", True, 0), ("check-collectives-3", False, 4)],
        *[("answer-ddp-1", True, 0), ("check-ddp-1", False, 3)],
        *[("answer-ddp-3", True, 0), ("check-ddp-3", False, 3)],
    ]


def test_every_command_of_the_pages_is_typed_here():
    there = [*commands(GUIDE), *commands(ASSISTANTS), *commands(POLICY)]
    typed = [step.command for step in STEPS]
    assert {*there} == {*typed, *NBGRADER, TRIAL}
    again = typed.pop(typed.index(AGAIN))
    assert [one for one in there if one in (*typed, again)] == [*typed, GRADE, again]


def test_the_guide_names_the_exercises_that_draw_cases():
    sentence = GUIDE.partition("Cases are drawn in")[2].partition(". They")[0]
    lessons = all_lessons(ROOT / "notebooks")
    exercises = [exercise for lesson in lessons for exercise in exercises_of(lesson.word)]
    wanted = [one.key for one in exercises if getattr(one.check, "drawn", None) is not None]
    assert re.findall(r"`(\w+-\d)`", sentence) == wanted


def test_the_policy_asks_about_every_lesson():
    numbers = [lesson.name.partition("_")[0] for lesson in all_lessons(ROOT / "notebooks")]
    assert re.findall(r"^\| (\d\d[a-z]?) ", POLICY, re.MULTILINE) == numbers


def test_the_assistants_page_knows_every_status():
    assert set(STATUSES) <= set(re.findall(r"^\| `([\w ]+)`", ASSISTANTS, re.MULTILINE))
