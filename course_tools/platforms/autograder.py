"""Grade one submission where a platform runs it, and write the results in the platform's form.

`python -m course_tools.platforms.autograder ASSIGNMENT SUBMISSION RESULTS [--trust]` grades what
lies in the folder SUBMISSION, and writes RESULTS/results.json, as Gradescope's documentation has
it. In a workflow of GitHub it also sets the output `result`, which GitHub Classroom's reporter
reads, and the summary of the run.
"""

import base64
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from course_lib.core import CourseError
from course_lib.core.files import write_result
from course_lib.workbooks.check_notebook import Verdict
from course_tools.grading.class_run import grade_class, graders
from course_tools.grading.gradebook import Gradebook, number_text
from course_tools.grading.graded import Graded
from course_tools.grading.sandbox import find_sandbox
from course_tools.grading.submission import KINDS, find_submissions
from course_tools.grading.task import GradingTask, task_of_assignment

STUDENT = "student"
ONE_NEEDED = "not judged: need one notebook of {name}; got {count}."
TIMEOUT_S = 120.0


def grade_one(task: GradingTask, submission: Path, *, trust: bool = False) -> Graded:
    """Grade what one student handed in, which lies in a folder.

    Raises: CourseError where this machine cannot judge
    """
    with tempfile.TemporaryDirectory(prefix="grading-") as name:
        folder = Path(name, "submissions", STUDENT)
        folder.mkdir(parents=True)
        files = [path for path in sorted(submission.rglob("*")) if path.is_file()]
        visible = [one for one in files if not _is_hidden(one.relative_to(submission))]
        work = [one for one in visible if one.suffix.lower() in KINDS] or visible
        for number, path in enumerate(work):
            (folder / str(number)).mkdir()
            shutil.copy(path, folder / str(number), follow_symlinks=False)
        found = find_submissions(folder.parent, task.name)
        with (
            Gradebook(Path(name, "grades"), task.points) as book,
            graders(task, find_sandbox(trust=trust), 1, TIMEOUT_S) as made,
        ):
            rows = grade_class(made, found, book, lambda _: None)
    own = [one for one in rows if not one.problem]
    if len(own) == 1 or len(rows) == 1:
        return (own or rows)[0]
    problem = ONE_NEEDED.format(name=task.name, count=len(own) or "none")
    row = Graded(student=STUDENT, path="", assignment=task.name, verdicts=(), digest="")
    return replace(row, problem=problem)


def _is_hidden(path: Path) -> bool:
    return any(part.startswith((".", "__MACOSX")) for part in path.parts)


def gradescope_results(graded: Graded, points: Mapping[str, float]) -> dict[str, Any]:
    """Return results.json: a test for each exercise, with its points and what the check said.

    What is not judged has no score, and the first line says so.
    """
    by_key = {one.key: one for one in graded.verdicts}
    tests = list[dict[str, Any]]()
    for key, most in points.items():
        verdict = by_key.get(key, Verdict(key=key, status="not judged"))
        test = {"name": key, "max_score": most, "output": _words(verdict), "visibility": "visible"}
        if not graded.is_open(key):
            score = graded.points_of(key, points)
            passed = "passed" if verdict.status == "right" else "failed"
            test |= {"score": score, "status": passed}
        tests.append(test)
    is_open = graded.total(points) is None
    late = "Not judged yet, and that says nothing about the answers: tell your instructor.\n"
    told = [late if is_open else "", graded.problem, *graded.notes]
    return {
        "score": graded.points(points),
        "output": "\n".join(filter(None, told)) or "Every exercise was judged.",
        "stdout_visibility": "hidden",
        "execution_time": round(graded.seconds),
        "tests": tests,
    }


def _words(verdict: Verdict) -> str:
    return "\n".join(filter(None, [verdict.status, verdict.detail, verdict.note]))


def classroom_result(results: Mapping[str, Any], most: float) -> str:
    """Return the output that GitHub Classroom's reporter reads: base64 of JSON, a test a line."""
    tests = [
        {
            "name": test["name"],
            "status": "pass" if test.get("status") == "passed" else "fail",
            "score": test.get("score", 0),
            "message": test["output"],
            "test_code": "",
            "filename": "",
            "line_no": 0,
            "duration": 0,
        }
        for test in results["tests"]
    ]
    is_right = all(test["status"] == "pass" for test in tests)
    status = "pass" if is_right else "fail"
    told = {"version": 1, "status": status, "max_score": most, "tests": tests}
    return base64.b64encode(json.dumps(told).encode()).decode()


def _tell_github(results: Mapping[str, Any], most: float) -> None:
    """Set the output of a workflow's step, and its summary."""
    with Path(os.environ["GITHUB_OUTPUT"]).open("a", encoding="utf-8") as file:
        file.write(f"result={classroom_result(results, most)}\n")
    lines = [f"# {number_text(results['score'])} of {number_text(most)} points", results["output"]]
    for test in results["tests"]:
        score = number_text(test["score"]) if "score" in test else "–"
        lines.append(f"## {test['name']}: {score} of {number_text(test['max_score'])}")
        lines.append("\n".join(f"    {line}" for line in test["output"].splitlines()))
    with Path(os.environ["GITHUB_STEP_SUMMARY"]).open("a", encoding="utf-8") as file:
        file.write("\n\n".join(lines) + "\n")


def main(words: Sequence[str]) -> int:
    """Grade, and write the results; 1 where this machine could not judge."""
    assignment, submission, results = map(Path, words[:3])
    try:
        task = task_of_assignment(assignment)
        graded = grade_one(task, submission, trust="--trust" in words)
    except CourseError as error:
        print(error, file=sys.stderr)
        return 1
    found = gradescope_results(graded, task.points)
    results.mkdir(parents=True, exist_ok=True)
    write_result(results / "results.json", json.dumps(found, indent=1) + "\n")
    if "GITHUB_OUTPUT" in os.environ:
        _tell_github(found, sum(task.points.values()))
    print(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
