"""Every lesson: its source is sound, its notebooks are up to date, and both run under nbval."""

import ast
import io
import re
import subprocess
from functools import cache, partial

import nbformat
import pytest
from rich.console import Console

from course_lib.checks.exercise import exercises_of
from course_lib.checks.lesson_source import read_source
from course_lib.display.predict import stand_in
from course_lib.workbooks.lessons import all_lessons, find_folder, tags_of, write_notebook
from course_lib.workbooks.nbval_run import run_nbval
from course_tools.authoring.build import build, read_lesson, student_notebook

FOLDER = find_folder()
CELL_TIMEOUT_S = 120
AFRESH = """\
if "ranks" in globals():
    ranks.close()
get_ipython().extension_manager.loaded.discard("course_lib.ranks")
%reset -f
assert "check" not in globals() and "ranks" not in globals()"""

ASKED = re.compile(r"^(\w+) *= *predict\(", re.MULTILINE)
QUICK, SAMPLE = "00_ranks", "12_planner"


def lessons(tier):
    """Every lesson as a parameter, with a function that says in which tier it is tested."""
    params = []
    for lesson in all_lessons(FOLDER):
        files = f"notebooks/source/{lesson.name}.py", f"notebooks/{lesson.name}.ipynb"
        marks = [pytest.mark.reaches(*files), *tier(lesson)]
        params.append(pytest.param(lesson, id=lesson.name, marks=marks))
    return pytest.mark.parametrize("lesson", params)


def tier_under_nbval(lesson):
    """One runs in `make test`, one more in CI, the others nightly."""
    if lesson.name == QUICK:
        return []
    return [pytest.mark.ci if lesson.name == SAMPLE else pytest.mark.nightly]


every_lesson = lessons(lambda lesson: [])
under_nbval = lessons(tier_under_nbval)


def exercises_alone(lesson):
    """The student notebook's exercises and their checks, behind its first cell."""
    notebook = student_notebook(lesson, read_lesson(lesson))
    first, *code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    cells = [first, *(cell for cell in code if "exercise" in cell.metadata)]
    for cell in cells:
        if cell.id.startswith("check-"):
            cell.metadata.tags = [tag for tag in tags_of(cell) if tag != "raises-exception"]
        cell.id = f"student-{cell.id}"
    return cells


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """How cells end under nbval, by cell id: of the solved notebook, then of `exercises_alone`.

    nbval compares as `pytest --nbval notebooks/solved` does. One kernel runs both, as it takes long
    to start; between them it forgets all names.
    """

    @cache
    def run(lesson):
        notebook = nbformat.read(lesson.solved, 4)
        notebook.cells += [nbformat.v4.new_code_cell(AFRESH, id="afresh"), *exercises_alone(lesson)]
        path = tmp_path_factory.mktemp(lesson.name) / "notebook.ipynb"
        write_notebook(notebook, path)
        once = partial(run_nbval, path, CELL_TIMEOUT_S, lambda done, total: None, compare_all=True)
        return once() or once()  # no cell has ended: another process took the kernel's port

    return run


@every_lesson
def test_the_source_is_sound(lesson):
    read_lesson(lesson)


@every_lesson
def test_the_exercises_are_those_of_the_checks(lesson):
    keys = [cell.exercise for cell in read_source(lesson.source) if cell.is_exercise]
    assert keys == [exercise.key for exercise in exercises_of(lesson.word)]


@every_lesson
def test_the_notebooks_are_up_to_date(lesson):
    told = io.StringIO()
    assert not build(lesson, Console(file=told, width=300), check=True), told.getvalue()


@every_lesson
def test_the_committed_student_notebook_is_as_built(lesson):
    name = lesson.student.relative_to(FOLDER.parent)
    git = ["git", "-C", str(FOLDER.parent)]
    changed = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", str(name)], check=False)
    if changed.returncode or not lesson.student.exists():
        pytest.skip("somebody is working in it, or it is not committed yet")
    built = student_notebook(lesson, read_lesson(lesson))
    assert nbformat.read(lesson.student, 4) == built


@under_nbval
def test_the_solved_notebook_passes_nbval(lesson, outcomes):
    ids = [c.id for c in nbformat.read(lesson.solved, 4).cells if c.cell_type == "code"]
    ended = {name: how for name, how in outcomes(lesson).items() if name in ids}
    failed = {name: how for name, how in ended.items() if how.how != "passed"}
    assert failed == {}, "\n".join(f"{name}: {how.message}" for name, how in failed.items())
    assert list(ended) == ids


SCORES = re.compile(r"^print\(scores\(\w+\)\)$", re.M)  # says so where the exercise is not done


@every_lesson
def test_only_its_check_uses_what_an_exercise_defines(lesson):
    """So a cell of the walkthrough does the same in the student notebook as in the solved one."""
    cells = [cell for cell in read_source(lesson.source) if cell.kind == "code"]
    defined = {
        node.name
        for cell in cells
        if cell.is_exercise
        for node in lines_of_python(cell.text)
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }
    others = (cell for cell in cells if not cell.is_exercise and not cell.is_exercise_check)
    for cell in others:
        if SCORES.search(cell.text):
            continue
        nodes = (node for tree in lines_of_python(cell.text) for node in ast.walk(tree))
        used = {node.id for node in nodes if isinstance(node, ast.Name)}
        assert not used & defined, f"line {cell.line}: use course_lib's own"


def lines_of_python(text):
    """The statements of a cell, without its magics."""
    return ast.parse(re.sub(r"^%.*$", "", text, flags=re.M)).body


def without_guesses(cell):
    """The text of a cell, without the predictions that only the solved notebook makes."""
    is_asked = "predict" in tags_of(cell)
    lines = cell.source.splitlines()
    return "\n".join(
        line for line in lines if not (is_asked and re.match(r"\w+\.commit\(", line))
    ).strip("\n")


@every_lesson
def test_the_solved_notebook_commits_to_every_prediction(lesson):
    """So `reveal` shows a guess, the truth and their ratio to whoever only reads."""
    for cell in read_lesson(lesson):
        if cell.kind == "code":
            for name in ASKED.findall(cell.text):
                assert f"\n{name}.commit(" in cell.text, f"line {cell.line}: ### GUESS {name}..."


@every_lesson
def test_a_skipped_prediction_stops_no_cell(lesson):
    """Only reveal uses a prediction, under a name for which `stand_in` finds another one."""
    asked = {name for cell in read_lesson(lesson) for name in ASKED.findall(cell.text)}
    for cell in read_lesson(lesson):
        if cell.kind == "code" and "predict" not in cell.tags:
            nodes = (node for tree in lines_of_python(cell.text) for node in ast.walk(tree))
            used = asked & {node.id for node in nodes if isinstance(node, ast.Name)}
            found = {}
            stand_in(found, cell.text, "this cell")
            assert used <= found.keys(), f"line {cell.line}: a prediction is called guess_..."


@under_nbval
def test_the_student_notebook_stops_at_the_exercise_checks_and_nowhere_else(lesson, outcomes):
    """The cells of the walkthrough are those of the solved notebook; here the others are run."""
    notebook = student_notebook(lesson, read_lesson(lesson))
    solved = nbformat.read(lesson.solved, 4).cells
    solved = [cell for cell in solved if "instructor-only" not in tags_of(cell)]
    pairs = list(zip(notebook.cells, solved, strict=True))
    walkthrough = [pair for pair in pairs if "exercise" not in pair[0].metadata]
    assert walkthrough
    for cell, shown in walkthrough:
        assert cell.source == without_guesses(shown)
    ids = [cell.id for cell in exercises_alone(lesson)]
    assert outcomes(lesson)["afresh"].how == "passed"
    ended = {name: how for name, how in outcomes(lesson).items() if name in ids}
    assert list(ended) == ids
    failed = {name: how for name, how in ended.items() if how.how != "passed"}
    assert list(failed) == [name for name in ids if name.startswith("student-check-")]
    assert {how.name for how in failed.values()} <= {"NotDone"}
