"""What other platforms take: an autograder, a class on GitHub, nbgrader, tables of grades."""

import base64
import csv
import json
import os
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from course_lib.core import CourseError
from course_lib.workbooks.assignment import read_assignment, write_assignment
from course_lib.workbooks.check_notebook import Verdict
from course_tools.grading.graded import Graded
from course_tools.platforms.autograder import classroom_result, gradescope_results
from course_tools.platforms.bundle import autograder_files, write_autograder, write_classroom
from course_tools.platforms.grade_table import Totals, canvas_table, moodle_table

POINTS = {"toy-1": 10.0, "toy-2": 10.0, "toy-3": 10.0}
WRONG = "def add(x, y):\n    return x - y\n"


def laid_out(home: Path, submission: Path) -> dict[str, str]:
    """Lay a machine out as the platform does; return its environment."""
    (home / "submission").mkdir()
    (home / "results").mkdir()
    (home / "submission/hw.ipynb").write_bytes(submission.read_bytes())
    (home / "submission/README.md").write_text("of the starter repository")
    (home / "env/bin").mkdir(parents=True)
    (home / "env/bin/python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (home / "env/bin/python").chmod(0o755)
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    return {**kept, "AUTOGRADER": str(home)}


def run(words: list[str], env: dict[str, str], folder: Path) -> None:
    done = subprocess.run(words, env=env, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.usefixtures("bubblewrap")
def test_gradescopes_zip_grades_in_a_folder_of_its_own(toy, tmp_path):
    """The zip, unpacked as Gradescope does, leaves scores and messages; by parts, too."""
    path, home = tmp_path / "hw-gradescope.zip", tmp_path / "autograder"
    write_autograder(path, autograder_files(toy.home))
    with zipfile.ZipFile(path) as archive:
        archive.extractall(home / "source")
        modes = {one.filename: one.external_attr >> 16 & 0o777 for one in archive.infolist()}
    assert modes["setup.sh"] == modes["run_autograder"] == 0o755
    (home / "source/run_autograder").rename(home / "run_autograder")
    env = laid_out(home, toy.hand_in("ann.ipynb", toy_1=WRONG))
    run(["bash", "-n", str(home / "source/setup.sh")], env, tmp_path)
    run(["bash", str(home / "run_autograder")], env, tmp_path)
    found = json.loads((home / "results/results.json").read_text())
    assert found["score"] == 25
    by_name = {test["name"]: test for test in found["tests"]}
    assert by_name["toy-1"]["status"] == "failed"
    assert "Subtracted, not added." in by_name["toy-1"]["output"]
    assert by_name["toy-1"]["score"] == 5  # right in one case of two
    assert (by_name["toy-3"]["score"], by_name["toy-3"]["max_score"]) == (10, 10)


def test_github_gets_two_repositories_and_only_one_has_solutions(toy, tmp_path, monkeypatch):
    starter, grader = write_classroom(toy.home, tmp_path / "export")
    solution = "return x * y"
    texts = {
        path: path.read_text(errors="replace") for path in starter.rglob("*") if path.is_file()
    }
    assert not [path for path, text in texts.items() if solution in text]
    assert solution in (grader / "course/assignments/toy/source/toy.py").read_text()
    assert os.access(grader / "run_autograder", os.X_OK)
    workflow = yaml.safe_load((starter / ".github/workflows/classroom.yml").read_text())
    steps = workflow["jobs"]["grade"]["steps"]
    run_here = [step["run"] for step in steps if "run" in step]
    assert run_here[1:] == ["autograder/source/setup.sh", "autograder/source/run_autograder"]
    assert steps[-1]["with"]["runners"] == steps[-2]["id"]


def graded(**verdicts: str) -> Graded:
    found = tuple(
        Verdict(key=key.replace("_", "-"), status=status, detail="why")
        for key, status in verdicts.items()
    )
    return Graded(student="ann", path="a", assignment="toy", verdicts=found, digest="")


def test_what_is_not_judged_has_no_score():
    found = gradescope_results(graded(toy_1="right", toy_2="not judged"), POINTS)
    assert found["score"] == 10
    assert ["score" in test for test in found["tests"]] == [True, False, False]
    assert found["output"].startswith("Not judged yet")


def test_githubs_reporter_can_read_the_result():
    found = gradescope_results(graded(toy_1="right", toy_2="wrong", toy_3="right"), POINTS)
    told = json.loads(base64.b64decode(classroom_result(found, 30)))
    assert (told["status"], told["max_score"]) == ("fail", 30)
    assert [test["score"] for test in told["tests"]] == [10, 0, 10]


def test_a_seeded_assignment_is_for_no_platform(toy):
    write_assignment(replace(read_assignment(toy.home), seeded=True), toy.home)
    with pytest.raises(CourseError, match="seeded = false"):
        autograder_files(toy.home)


REACHED = {"leeann": 8.5, "bob7": None, "Ann Lee": 3.0}
TOTALS = Totals(REACHED, dict.fromkeys(REACHED, "ok"), 10.0, "Toy")
CANVAS = (
    "Student,ID,SIS User ID,SIS Login ID,Section,Toy (4711),Final Score\n"
    "    Points Possible,,,,,10,(read only)\n"
    '"Lee, Ann",12,S1,,one,,1\n"Berg, Bob",13,S2,bob7,one,3,2\n"Roe, Cy",14,S3,cy,one,,\n'
)


def test_canvas_gets_the_columns_that_it_imports(tmp_path):
    (tmp_path / "canvas.csv").write_text(CANVAS)
    totals = replace(TOTALS, by_student={"leeann": 8.5, "bob7": None, "eve": 1.0})
    text, strangers = canvas_table(tmp_path / "canvas.csv", totals, "Toy")
    assert list(csv.reader(text.splitlines())) == [
        ["Student", "ID", "SIS User ID", "SIS Login ID", "Section", "Toy (4711)"],
        ["    Points Possible", "", "", "", "", "10"],
        ["Lee, Ann", "12", "S1", "", "one", "8.5"],
        ["Berg, Bob", "13", "S2", "bob7", "one", ""],
    ]
    assert strangers == ["eve"]


MOODLE = (
    "Identifier,Full name,Email address,Status,Grade,Maximum Grade,Feedback comments\n"
    "Participant 1,Ann Lee,ann@x.org,Submitted,,{most},\n"
    "Participant 2,Bob Berg,bob7@x.org,,7,{most},old\n"
)


def test_moodle_gets_its_worksheet_back(tmp_path):
    (tmp_path / "moodle.csv").write_text(MOODLE.format(most="10,00").replace("10,00", '"10,00"'))
    text, strangers = moodle_table(tmp_path / "moodle.csv", TOTALS, "")
    first, second = csv.DictReader(text.splitlines())
    assert (first["Grade"], first["Feedback comments"]) == ("3", "ok")
    assert (second["Grade"], second["Feedback comments"]) == ("7", "old")
    assert strangers == ["bob7", "leeann"]


def test_moodles_maximum_is_the_assignments(tmp_path):
    (tmp_path / "moodle.csv").write_text(MOODLE.format(most=100))
    with pytest.raises(CourseError, match="maximum grade 10"):
        moodle_table(tmp_path / "moodle.csv", TOTALS, "")


def test_two_of_one_name_are_not_mixed_up(tmp_path):
    (tmp_path / "canvas.csv").write_text(CANVAS.replace("Roe, Cy", "Lee, Ann"))
    with pytest.raises(CourseError, match="one row for leeann"):
        canvas_table(tmp_path / "canvas.csv", replace(TOTALS, by_student={"leeann": 1.0}), "Toy")
