"""Grade a learner's notebook: their exercise cells in the solved notebook, run by nbval.

Only what the learner wrote into the exercise cells counts, by exercise key. Every other cell and
every expected output comes from the solved notebook, so neither saved outputs nor changed checks
can pass for an answer. It runs the learner's code; it is no sandbox.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from nbformat import NotebookNode

from course_lib.checks.right_answer import SETTINGS, at_work_in
from course_lib.core import CourseError
from course_lib.workbooks.learner_work import built_from
from course_lib.workbooks.lessons import (
    Lesson,
    all_lessons,
    exercise_cells,
    find_lesson,
    key_of,
    read_notebook,
    short_hash,
    tags_of,
)
from course_lib.workbooks.merge_answers import run_exercises
from course_lib.workbooks.nbval_run import Outcome
from course_lib.workbooks.progress_bar import CellEnded

SHOWN_LINES = 12
UNJUDGED = ("NotJudged", "Stopped", "TooLong")  # errors of a check that has seen no whole answer
TOO_SLOW = (
    "Too slow here: it ran for more than {timeout_s:g} s. Does a loop never end? Otherwise try "
    "--timeout {more_s:g}."
)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The verdict on one exercise.

    `status` is one of right, wrong, not done, missing, twice, not judged; `detail` says why in a
    few lines; `note` tells of a check cell that was changed. Who passes the clock's limit is not
    judged: it may be the machine. `parts` has what a wrong answer has reached by parts, where these
    have points (course_lib.checks.parts).
    """

    key: str
    status: str
    detail: str = ""
    note: str = ""
    parts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class GradeReport:
    """The verdicts on one notebook, in the order of its exercises, and further messages."""

    lesson: str
    path: str
    verdicts: tuple[Verdict, ...]
    notes: tuple[str, ...] = ()

    @property
    def all_right(self) -> bool:
        return all(verdict.status == "right" for verdict in self.verdicts)


def grade(path: Path, folder: Path, timeout_s: float, ended: CellEnded) -> GradeReport:
    """Return the verdict on every exercise of a notebook, a lesson of the course in `folder`.

    Each cell may run for `timeout_s`; `ended(done, all)` is told of progress.
    Raises: CourseError where the file is no notebook of this course, or the lesson is not built.
    """
    learner = read_notebook(path)
    lesson = lesson_of(learner, path, folder)
    reference = read_reference(lesson)
    verdicts = {
        key: first_look(key, learner, built_from(reference)) for key in exercise_cells(reference)
    }
    open_keys = [key for key, verdict in verdicts.items() if verdict.status == "open"]
    with at_work_in(lesson.folder):
        outcomes = run_exercises(reference, learner, open_keys, timeout_s, ended)
    for key in open_keys:
        verdicts[key] = verdict_of(key, outcomes, timeout_s)
    notes = _lesson_notes(reference, outcomes)
    notes += _strangers(learner, reference)
    if all(verdict.status == "not done" for verdict in verdicts.values()):
        notes.append("No exercise is filled in yet. Is the notebook saved (Ctrl+S)?")
    told = tuple(
        replace(verdict, note=_check_note(key, learner, reference))
        for key, verdict in verdicts.items()
    )
    return GradeReport(lesson=lesson.name, path=str(path), verdicts=told, notes=tuple(notes))


def lesson_of(notebook: NotebookNode, path: Path, folder: Path) -> Lesson:
    """Return the lesson, or the assignment in its folder, that a notebook was built for.

    Raises: CourseError where it names none, or another one than its file does.
    """
    name = built_from(notebook).get("lesson")
    if not isinstance(name, str):
        raise CourseError(
            f"{path}: need a notebook of this course; this one does not say of which lesson it is."
        )
    here = Lesson(name, path.parent.resolve())
    known = here.solved.exists() or _original(here.folder, name).exists()
    if known and (here.folder / SETTINGS).is_file():
        return here
    named = [lesson.name for lesson in all_lessons(folder) if path.stem == lesson.name]
    if named and named != [name]:
        raise CourseError(f"{path}: need the lesson {named[0]}; the notebook in it is {name}.")
    return find_lesson(name, folder)


def read_reference(lesson: Lesson) -> NotebookNode:
    """Read the solved notebook of a lesson, with the outputs to compare with.

    A student's assignment has none: there it is the notebook as it was handed out, in which a check
    that raises fails.
    """
    original = _original(lesson.folder, lesson.name)
    if original.exists() and not lesson.solved.exists():
        reference = read_notebook(original)
        for cells in exercise_cells(reference, "check").values():
            for cell in cells:
                cell.metadata.tags = [tag for tag in tags_of(cell) if tag != "raises-exception"]
        return reference
    if not lesson.solved.exists():
        raise CourseError(f"{lesson.name}: there is no solved notebook yet. Try make notebooks.")
    reference = read_notebook(lesson.solved)
    checks = [cell for cells in exercise_cells(reference, "check").values() for cell in cells]
    if "stubs" not in built_from(reference) or any(not cell.outputs for cell in checks):
        raise CourseError(
            f"{lesson.name}: the solved notebook is not whole, or a check in it never ran. "
            "Try make notebooks."
        )
    return reference


def _original(folder: Path, name: str) -> Path:
    """Return the path of an assignment's notebook as it was handed out."""
    return folder / f".{name}.original.ipynb"


def first_look(key: str, learner: NotebookNode, built: dict) -> Verdict:
    """Return the verdict that needs no run; status `open` where the cells have to run."""
    cells = exercise_cells(learner).get(key, [])
    if not cells:
        detail = (
            f"The cell is gone, or its key was changed. Try course reset {built['lesson']} {key}"
        )
        return Verdict(key=key, status="missing", detail=detail)
    if len(cells) > 1:
        numbered = enumerate(learner.cells, start=1)
        places = [str(number) for number, cell in numbered if any(cell is one for one in cells)]
        detail = f"Cells {' and '.join(places)} are both this exercise. Delete all but one."
        return Verdict(key=key, status="twice", detail=detail)
    is_stub = short_hash(cells[0].source) == built["stubs"].get(key)
    return Verdict(key=key, status="not done" if is_stub or not cells[0].source.strip() else "open")


def verdict_of(key: str, outcomes: dict[str, Outcome], timeout_s: float) -> Verdict:
    """Return the verdict from the outcomes of an exercise's two cells."""
    cell, check = outcomes.get(f"exercise-{key}"), outcomes.get(f"check-{key}")
    first = cell if cell and cell.how != "passed" else check
    if first is None:
        return Verdict(key=key, status="not judged", detail="The run ended before this exercise.")
    if first.how == "passed" and f"\n{key}: right." in f"\n{first.printed}":
        return Verdict(key=key, status="right", detail=told(key, first.printed))
    if first.name in ("NotDone", "NotImplementedError"):
        return Verdict(key=key, status="not done", detail=told(key, first.message))
    is_open = first.how == "timeout" or first.name in UNJUDGED
    status = "not judged" if is_open else "wrong"
    return Verdict(key=key, status=status, detail=_what_went_wrong(key, first, timeout_s))


def _what_went_wrong(key: str, outcome: Outcome, timeout_s: float) -> str:
    if outcome.how == "timeout":
        _, _, where = outcome.message.partition("\n")  # the ranks' report, where there is one
        late = TOO_SLOW.format(timeout_s=timeout_s, more_s=3 * timeout_s)
        return told(key, f"{late}\n{where}")
    if outcome.how == "died":
        return "Your code ended the Python process."
    if outcome.how == "printing":
        return f"It printed without end:\n{outcome.printed[:200]}"
    if outcome.how == "memory":
        return "It took more than 4 GiB of memory. Does it print, or append, without end?"
    if outcome.how in ("differs", "passed"):
        return f"The check printed something else than expected:\n{outcome.printed.strip()}"
    if outcome.name in ("CheckFailed", *UNJUDGED):
        return told(key, outcome.message)
    if outcome.name == "NameError":
        return f"The name is missing, or spelled in another way: {outcome.message}."
    return told(key, f"Your code raised {outcome.name}: {outcome.message}")


def told(key: str, text: str) -> str:
    """Return the first lines of a check's text, without what the table says already."""
    for opening in (f"{key}: ", "right. ", f"{key} is not done yet: "):
        text = text.strip().removeprefix(opening)
    lines = text.splitlines()
    more = ["(run the check in the notebook to read on)"] if len(lines) > SHOWN_LINES else []
    return "\n".join(lines[:SHOWN_LINES] + more)


def _check_note(key: str, learner: NotebookNode, reference: NotebookNode) -> str:
    """Return a note on a check cell that was changed; the verdict comes from the original."""
    right = exercise_cells(reference, "check")[key][0].source.strip()
    found = [cell.source.strip() for cell in exercise_cells(learner, "check").get(key, [])]
    if found == [right]:
        return ""
    what = "was changed" if found else "is missing"
    return f"The check cell {what}; the original was used."


def _lesson_notes(reference: NotebookNode, outcomes: dict[str, Outcome]) -> list[str]:
    """Return notes on cells of the lesson itself that failed, and on those only."""
    allowed = ("passed", "raised")
    return [
        f"The lesson's own cell `{cell.source.splitlines()[0]}` failed "
        f"({outcomes[cell.id].name or outcomes[cell.id].how}: {outcomes[cell.id].message[:80]})."
        for cell in reference.cells
        if not key_of(cell)
        and cell.id in outcomes
        and outcomes[cell.id].how not in allowed[: 1 + ("raises-exception" in tags_of(cell))]
    ]


def _strangers(learner: NotebookNode, reference: NotebookNode) -> list[str]:
    """Return notes on exercise cells whose key the lesson does not know."""
    unknown = exercise_cells(learner).keys() - exercise_cells(reference).keys()
    return [
        f"A cell carries the key {key}, which is no exercise of this lesson."
        for key in sorted(unknown)
    ]
