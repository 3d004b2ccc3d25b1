"""How long a class takes to grade: `python -m tests.benchmarks.bench_class --students 200`.

An assignment of five exercises of three lessons, and a class with a known mixture of right, wrong,
empty and hostile work, a fourth of it each but for the hostile (one in ten). Every grade has to be
what it should be; then the seconds are printed: of a submission, and of the whole class.
"""

import argparse
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from statistics import median

import nbformat

from course_lib.checks import find_exercise
from course_lib.checks.edits import Edit, edited
from course_lib.checks.right_answer import solved_cell
from course_lib.workbooks.assignment import Assignment
from course_lib.workbooks.lessons import find_folder, find_lesson
from course_tools.grading.class_run import grade_class, graders, num_jobs, write_reports
from course_tools.grading.compose import compose
from course_tools.grading.gradebook import Gradebook
from course_tools.grading.graded import Graded
from course_tools.grading.sandbox import find_sandbox
from course_tools.grading.submission import find_submissions
from course_tools.grading.task import GradingTask, task_of_assignment
from tests.benchmarks.harness import print_table

EXERCISES = (
    *(("00", "ranks-1"), ("00", "ranks-3"), ("04", "collectives-2")),
    *(("06", "ddp-1"), ("06", "ddp-3")),
)
HOSTILE = (  # what stands before a stub; each is wrong in its exercise, whatever it does
    "import os\nos._exit(0)\n",
    "import course_lib.checks\ncourse_lib.checks.check = print\n",
    "import os\nopen(os.environ['COURSE_OUT'] + '/ranks-1.pt', 'wb').write(b'right')\n",
    "import subprocess\nsubprocess.Popen(['sleep', '1000'], start_new_session=True)\n",
    "raise SystemExit\n",
)


def text_of(kind: str, key: str, number: int, task: GradingTask) -> str:
    """Return the answer of a student of this kind to an exercise."""
    if kind == "right":
        return solved_cell(key)
    edits = [one for one in find_exercise(key).wrong if isinstance(one, Edit) and not one.also]
    edit = edits[number % len(edits)]
    if kind == "wrong":
        return edited(solved_cell(key), edit.old, edit.new)
    if kind == "hostile" and key == "ranks-1":
        return HOSTILE[number % len(HOSTILE)] + task.stubs[key]
    return task.stubs[key]


def kind_of(number: int) -> str:
    """Return what a student hands in: right, wrong, mixed, empty, hostile."""
    return "hostile" if number % 10 == 9 else ("right", "wrong", "mixed", "empty")[number % 4]


def hand_in(folder: Path, number: int, task: GradingTask) -> dict[str, bool]:
    """Write a submission; return by key whether it is right."""
    kind, right, cells = kind_of(number), {}, []
    for place, key in enumerate(task.checks):
        own = ("right", "wrong")[place % 2] if kind == "mixed" else kind
        metadata = {"tags": ["exercise"], "exercise": key}
        text = text_of(own, key, number, task)
        cells.append(nbformat.v4.new_code_cell(text, metadata=metadata))
        right[key] = own == "right"
    notebook = nbformat.v4.new_notebook(cells=cells, metadata={"course": {"lesson": task.name}})
    nbformat.write(notebook, folder / f"{task.name}-student{number:03}.ipynb")
    return right


def wrong_grades(found: list[Graded], right: Mapping[str, Mapping[str, bool]]) -> list[str]:
    """Return a line for each exercise that is graded as it should not be."""
    return [
        f"{graded.student}, {key}: {graded.status(key)}: {graded.problem}"
        for graded in found
        for key, is_right in right[graded.student].items()
        if (graded.status(key) == "right") != is_right or graded.status(key) == "not judged"
    ]


def main() -> None:
    """Grade a class; print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--students", type=int, default=200)
    parser.add_argument("--jobs", type=int, default=num_jobs())
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder, handed_in = Path(name, "hw1"), Path(name, "submissions")
        handed_in.mkdir()
        items = tuple((key, 10.0) for _, key in EXERCISES)
        chosen = [(find_lesson(lesson, find_folder()), key) for lesson, key in EXERCISES]
        compose(Assignment(name="hw1", title="A class", items=items), chosen, folder, own=False)
        task = task_of_assignment(folder)
        right = {f"student{n:03}": hand_in(handed_in, n, task) for n in range(given.students)}
        start_s = time.monotonic()
        with (
            Gradebook(Path(name, "grades"), task.points) as book,
            graders(task, find_sandbox(), given.jobs, 60) as made,
        ):
            found = grade_class(made, find_submissions(handed_in, "hw1"), book, lambda _: None)
        write_reports(task, book)
        all_s = time.monotonic() - start_s
    rows = []
    for kind, count in Counter(kind_of(number) for number in range(given.students)).items():
        seconds = [one.seconds for one in found if kind_of(int(one.student[-3:])) == kind]
        rows.append([kind, count, median(seconds), max(seconds)])
    print_table("A class", ("kind", "submissions", "s each, median", "s each, most"), rows)
    print(f"{len(found)} submissions, {given.jobs} at a time: {all_s / 60:.1f} min in all")
    if wrong := wrong_grades(found, right):
        sys.exit("graded as they should not be:\n" + "\n".join(wrong))


if __name__ == "__main__":
    main()
