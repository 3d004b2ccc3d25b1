"""A term: what all gradings so far say of each student, and of each exercise.

It reads `results.json` of each folder that `course grade` has filled, in the given order.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from urllib.parse import quote

from course_lib.checks.exercise import find_exercise
from course_lib.core import CourseError
from course_lib.core.files import not_one, read_json, write_result
from course_lib.core.html_page import block, html_page, line, table
from course_tools.grading.feedback import misconception, page_names
from course_tools.grading.gradebook import RESULTS, number_text
from course_tools.grading.graded import Graded

SAMPLE = 3  # answers that are shown for a cause
STUDENTS, EXERCISES_FOLDER = "students", "exercises"


@dataclass(frozen=True)
class Grading:
    """One grading of the term: what was graded, the points of its exercises, the rows."""

    title: str
    points: Mapping[str, float]
    rows: Sequence[tuple[Graded, float | None]]  # with their totals


@dataclass(frozen=True)
class Mistake:
    """A wrong answer: whose, in which grading, the misconception by name, and the code."""

    student: str
    grading: int
    key: str
    name: str
    words: str
    code: str


def read_term(folders: Sequence[Path]) -> list[Grading]:
    """Return the gradings in these folders, in order. Raises: CourseError for anything else"""
    found = list[Grading]()
    for folder in folders:
        need = "the results of course grade"
        data = read_json(folder / RESULTS, need, hint="Grade first.")
        try:
            rows = [(Graded.from_json(row), row["total"]) for row in data["rows"]]
            name = data["title"] or (rows[0][0].assignment if rows else folder.name)
            found.append(Grading(name, dict(data["points"]), rows))
        except (KeyError, TypeError, AttributeError, CourseError):
            raise not_one(
                str(folder / RESULTS), need, "a field is missing", "Grade again."
            ) from None
    return found


def mistakes(gradings: Sequence[Grading]) -> list[Mistake]:
    """Return every wrong answer of the term, by the misconception that its check named."""
    found = list[Mistake]()
    for number, grading in enumerate(gradings):
        for key in grading.points:
            with suppress(CourseError):
                find_exercise(key).causes()  # imports the checks, whose causes are then known
        for graded, _ in grading.rows:
            for one in graded.verdicts:
                if graded.status(one.key) == "wrong" and one.detail.strip():
                    name, words = misconception(one.detail)
                    code = graded.code.get(one.key, "")
                    found.append(Mistake(graded.student, number, one.key, name, words, code))
    return found


def write_term(gradings: Sequence[Grading], folder: Path) -> Path:
    """Write a page for each student and each exercise, and an index; return the index's path.

    Raises: CourseError where a page cannot be written
    """
    found = mistakes(gradings)
    students = sorted({row.student for one in gradings for row, _ in one.rows}, key=str.casefold)
    names = page_names(students)
    keys = list(dict.fromkeys(key for one in gradings for key in one.points))
    for student in students:
        own = [one for one in found if one.student == student]
        page = student_term(student, gradings, own)
        write_result(folder / STUDENTS / names[student], page)
    for key in keys:
        page = exercise_term(key, gradings, [one for one in found if one.key == key])
        write_result(folder / EXERCISES_FOLDER / f"{key}.html", page)
    write_result(folder / "index.html", _index(gradings, names, keys, found))
    return folder / "index.html"


def _totals(student: str, gradings: Sequence[Grading]) -> list[str]:
    """Return what a student reached in each grading, as text."""
    found = list[str]()
    for grading in gradings:
        own = [total for row, total in grading.rows if row.student == student]
        out_of = number_text(sum(grading.points.values()))
        totals = ["not judged yet" if t is None else f"{number_text(t)} of {out_of}" for t in own]
        found.append("; ".join(totals) or "–")
    return found


def student_term(student: str, gradings: Sequence[Grading], own: Sequence[Mistake]) -> str:
    """Return a student's page: the points so far, the misconceptions, and which are overcome."""
    rows = zip((one.title for one in gradings), _totals(student, gradings), strict=True)
    body = [f"<h1><bdi>{line(student)}</bdi></h1>", "<h2>Progress</h2>"]
    body.append(table("Points", ("Assignment", "Points"), ([*map(line, row)] for row in rows)))
    body.append("<h2>Misconceptions that the checks named</h2>")
    by_name = _by_name(own)
    for same in by_name:
        last = max(one.grading for one in same)
        where = ", ".join(dict.fromkeys(f"{gradings[o.grading].title}, {o.key}" for o in same))
        keys = {one.key for one in same}
        later = [
            row.status(key)
            for grading in gradings[last + 1 :]
            for row, _ in grading.rows
            for key in keys & grading.points.keys()
            if row.student == student
        ]
        now = "right since" if "right" in later else f"seen {len(same)} times" * (len(same) > 1)
        body.append(
            f'<section class="box"><p class="said">{block(same[-1].words)}</p>'
            f'<p class="quiet">{line(where)}{"; " if now else ""}{now}</p></section>'
        )
    if not by_name:
        body.append("<p>None.</p>")
    return html_page(f"{student}: the term so far", body)


def exercise_term(key: str, gradings: Sequence[Grading], own: Sequence[Mistake]) -> str:
    """Return an exercise's page: how often which misconception, with a sample of answers."""
    rows = [row for one in gradings if key in one.points for row, _ in one.rows]
    judged = [row.status(key) for row in rows if row.status(key) != "not judged"]
    right = judged.count("right")
    body = [f"<h1>{line(key)}</h1>", f'<p class="score">{right} of {len(judged)} are right</p>']
    for same in _by_name(own):
        who = {one.student: one for one in same}
        share = f"{len(who)} student{'s' if len(who) > 1 else ''}"
        body.append(f'<section class="box"><h2>{share}: {line(same[0].words)}</h2>')
        for one in sample(list(who.values())):
            name = f"<p><bdi>{line(one.student)}</bdi></p>"
            body.append(f'{name}<p class="said">{block(one.code)}</p>')
        body.append("</section>")
    if not own:
        body.append("<p>No answer is wrong.</p>")
    return html_page(f"{key}: what to explain again", body, wide=True)


def sample(found: Sequence[Mistake]) -> list[Mistake]:
    """Return a few of these, drawn by a hash: always the same ones, and not the first by name."""
    drawn = sorted(
        found, key=lambda one: sha256(f"{one.grading} {one.key} {one.student}".encode()).digest()
    )
    return drawn[:SAMPLE]


def _by_name(found: Sequence[Mistake]) -> list[list[Mistake]]:
    """Return mistakes by misconception, the most frequent first."""
    groups: dict[tuple[str, str], list[Mistake]] = defaultdict(list)
    for one in found:
        groups[one.key.rpartition("-")[0], one.name].append(one)
    return sorted(groups.values(), key=len, reverse=True)


def _index(
    gradings: Sequence[Grading],
    names: Mapping[str, str],
    keys: Sequence[str],
    found: Sequence[Mistake],
) -> str:
    def student_rows() -> Iterator[Sequence[str]]:
        for student, name in names.items():
            link = f'<a href="{STUDENTS}/{quote(name)}"><bdi>{line(student) or "-"}</bdi></a>'
            yield link, *map(line, _totals(student, gradings))

    def exercise_rows() -> Iterator[Sequence[str]]:
        for key in keys:
            groups = _by_name([one for one in found if one.key == key])
            link = f'<a href="{EXERCISES_FOLDER}/{quote(key)}.html">{line(key)}</a>'
            first = groups[0] if groups else []
            yield (
                link,
                str(len({one.student for one in first})),
                line(first[0].words if first else "–"),
            )

    titles = [line(one.title) for one in gradings]
    body = ["<h1>The term so far</h1>", "<h2>What to explain again</h2>"]
    heads = ("Exercise", "Students", "The most frequent misconception")
    body.append(table("Each exercise", heads, exercise_rows(), numbers=(1,)))
    body.append("<h2>Students</h2>")
    body.append(table("Points in each assignment", ("Student", *titles), student_rows()))
    return html_page("The term so far", body, wide=True)
