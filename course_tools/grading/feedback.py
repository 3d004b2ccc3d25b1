"""Pages of feedback: one for each student, and one on the class for the instructor.

The words of the checks are shown as they are: they name the misconception. The overview counts
them, so that a class can talk about what many got wrong.
"""

import hashlib
import math
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePath
from urllib.parse import quote

from course_lib.checks.exercise import cause_in
from course_lib.core.files import write_result
from course_lib.core.html_page import block, html_page, line, table
from course_lib.core.plain_text import cut
from course_lib.workbooks.check_notebook import Verdict
from course_tools.grading.by_hand import LATE
from course_tools.grading.gradebook import EXERCISES, GRADEBOOK, number_text
from course_tools.grading.graded import STATUSES, Graded

FOLDER, OVERVIEW, SIMILARITY = "feedback", "index.html", "similarity.html"
NEXT = {
    "wrong": "Read what the check said, change your code, and run the check cell under it again. "
    "If the exercise has hints, unfold the one that fits what you see.",
    "not done": "The cell is still as it was handed out. Begin with the text above it.",
    "missing": "The cell of this exercise is gone, or its key was changed. Take a fresh copy of "
    "the assignment and put your code into the cell that it gives.",
    "twice": "Several cells claim to be this exercise. Keep the one that counts, and no other.",
    "not judged": "This exercise has no verdict yet, and that says nothing about your code. Ask "
    "your instructor.",
}
NOT_YET = "not judged yet"
MOST_MESSAGES = 5  # of each exercise in the overview
NAME_LENGTH = 60
UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")
DEVICES = re.compile(r"(?i)(con|prn|aux|nul|com\d|lpt\d)(\.|$)")  # no files on Windows
SENTENCE_END = re.compile(r"(?<=[.?!])\s+(?=[A-Z`'\"(])")
DIGITS = re.compile(r"\d+(?:\.\d+)?(?:e[+-]?\d+)?")


def write_feedback(
    folder: Path, rows: Sequence[Graded], points: Mapping[str, float], title: str = ""
) -> Path:
    """Write `feedback/STUDENT.html` for each student and `index.html`; return the overview's path.

    `rows` are the graded submissions, `points` the points of each exercise by key, `title` what
    stands above each page; empty: the assignment's name.

    Raises: CourseError where a page cannot be written
    """
    by_student: dict[str, list[Graded]] = defaultdict(list)
    for graded in rows:
        by_student[graded.student].append(graded)
    names = page_names(by_student)
    for student, files in by_student.items():
        page = student_page(student, files, points, title)
        write_result(folder / FOLDER / names[student], page)
    has_similarity = (folder / SIMILARITY).is_file()
    page = overview(rows, points, names, title, has_similarity=has_similarity)
    write_result(folder / OVERVIEW, page)
    return folder / OVERVIEW


def page_names(students: Iterable[str]) -> dict[str, str]:
    """Return a file name for each student's page; no two are equal on any file system.

    A name of ASCII letters, digits, `.`, `_` and `-` is kept; otherwise, and where two students
    differ in case only, a hash tells them apart.
    """
    students = list(dict.fromkeys(students))
    count = Counter(student.casefold() for student in students)
    names = {}
    for student in students:
        letters = unicodedata.normalize("NFKD", student[:1000]).encode("ascii", "ignore").decode()
        name = UNSAFE.sub("_", letters)[:NAME_LENGTH].strip("._-")
        if not name or name != student or count[student.casefold()] > 1 or DEVICES.match(name):
            digest = hashlib.sha256(student.encode(errors="surrogatepass")).hexdigest()[:12]
            name = (
                f"{name.replace('.', '_') or 'student'}~{digest}"  # no name that is kept holds a ~
            )
        names[student] = f"{name}.html"
    return names


def student_page(
    student: str, files: Sequence[Graded], points: Mapping[str, float], title: str = ""
) -> str:
    """Return the page of one student, with each of their files."""
    title = title or files[0].assignment
    body = [f"<h1>{line(title)}</h1>"]
    body.append(f'<p class="quiet">Feedback for <bdi>{line(student)}</bdi></p>')
    body += _comment(files[0], "")
    for graded in files:
        if len(files) > 1:
            body.append(f"<h2>{line(PurePath(graded.path).name)}</h2>")
        body += _one_file(graded, points)
    return html_page(f"{title}: feedback for {student}", body)


def overview(
    rows: Sequence[Graded],
    points: Mapping[str, float],
    names: Mapping[str, str],
    title: str = "",
    *,
    has_similarity: bool = False,
) -> str:
    """Return the instructor's page: all students, each exercise, and what checks said most often.

    `names` are the file names of the students' pages.
    """
    title = title or (rows[0].assignment if rows else "No submissions")
    num_files = sum(graded.is_handed_in for graded in rows)
    files = "submission" if num_files == 1 else "submissions"
    links = [(GRADEBOOK, "grades"), (EXERCISES, "exercises")]
    links += [(SIMILARITY, "similar answers")] if has_similarity else []
    linked = " · ".join(f'<a href="{name}">{words}</a>' for name, words in links)
    body = [
        f"<h1>{line(title)}</h1>",
        f'<p class="quiet">{num_files} {files} · {linked}</p>',
        f'<p class="score">{_average(rows, points)}</p>',
        "<h2>Exercises</h2>",
        _exercise_table(rows, points),
        "<h2>What the checks said most often</h2>",
        *_messages(rows, points),
        "<h2>Students</h2>",
        _student_table(rows, points, names),
    ]
    return html_page(title, body, wide=True)


def cause_of(detail: str) -> str:
    """Return the part of a check's message that names the misconception.

    A message goes from what was seen, in its first sentence, to the cause, in the others; lines
    that are indented show the learner's code. Where there is one sentence only, it is returned.
    """
    lines = [one for one in detail.splitlines() if one.strip() and not one.startswith("  ")]
    sentences = SENTENCE_END.split(" ".join(" ".join(lines).split()), maxsplit=1)
    return sentences[-1]


def misconception(detail: str) -> tuple[str, str]:
    """Return the name of the misconception in a check's message, and its words.

    The name is the cause's key; where no known cause is named, the words without their numbers.
    """
    words = cause_of(detail)
    cause = cause_in(cut(detail))
    return (cause.key if cause else DIGITS.sub("#", words)), words


def _one_file(graded: Graded, points: Mapping[str, float]) -> Iterator[str]:
    """Yield the parts on one file: points, what comes next, exercises, notes."""
    out_of = number_text(math.fsum(points.values()))
    reached = number_text(graded.points(points))
    later = f"; an exercise is {NOT_YET}" if graded.total(points) is None else ""
    if not graded.is_handed_in:
        yield f'<p class="score">{line(graded.problem)}</p>'
    elif graded.problem and graded.total(points) is None:
        yield f'<p class="score">This file is {NOT_YET}</p>'
        yield f'<p class="said">{block(graded.problem)}</p>'
        yield "<p>Please talk to your instructor, who can grade it again.</p>"
    else:
        yield f'<p class="score">{reached} of {out_of} points{later}</p>'
        yield f"<p>{line(str(graded.late))}</p>" if graded.late.days else ""
        yield from _comment(graded, LATE)
        found = {verdict.key: verdict for verdict in graded.verdicts}
        shown = [
            replace(found.get(key, Verdict(key=key, status="")), status=graded.status(key))
            for key in points
        ]
        yield from _look_next(shown)
        yield "<h2>Exercises</h2>"
        yield table(
            "Points of each exercise",
            ("Exercise", "Verdict", "Points", "of"),
            [
                (line(one.key), _status(one.status), *_points(graded, one.key, points))
                for one in shown
            ],
            numbers=(2, 3),
        )
        for verdict in shown:
            yield from _exercise(verdict, graded)
    if graded.notes:
        yield "<h2>Notes</h2><ul>"
        yield from (f"<li>{line(note)}</li>" for note in graded.notes)
        yield "</ul>"


def _points(graded: Graded, key: str, points: Mapping[str, float]) -> tuple[str, str]:
    reached = "–" if graded.is_open(key) else number_text(graded.points_of(key, points))
    by_hand = "" if graded.points_by_hand(key) is None else " (by hand)"
    return f"{reached}{by_hand}", number_text(points[key])


def _comment(graded: Graded, key: str) -> Iterator[str]:
    """Yield what a person wrote on an exercise, or on all of it."""
    if key in graded.hand and graded.hand[key].comment:
        yield f'<p class="said">{block(graded.hand[key].comment)}</p>'


def _look_next(shown: Sequence[Verdict]) -> Iterator[str]:
    """Yield where to go on: with what is wrong, because there the check has said why."""
    yield "<h2>What to look at next</h2>"
    left = [one for status in NEXT for one in shown if one.status == status]
    if left:
        first, *later = (f"<strong>{line(one.key)}</strong> ({line(one.status)})" for one in left)
        then = f" Then go on with {', '.join(later)}." if later else ""
        yield f"<p>Begin with {first}; what to do about it stands below.{then}</p>"
    else:
        yield "<p>Everything is right. Compare your code with the solution when it is out.</p>"


def _exercise(verdict: Verdict, graded: Graded) -> Iterator[str]:
    yield f'<section class="box"><h3>{line(verdict.key)}: {_status(verdict.status)}</h3>'
    if verdict.detail:
        yield f'<p class="said">{block(verdict.detail)}</p>'
    yield from _comment(graded, verdict.key)
    if verdict.status in NEXT:
        yield f"<p>{NEXT[verdict.status]}</p>"
    if verdict.note:
        yield f'<p class="quiet">Note: {line(verdict.note)}</p>'
    yield "</section>"


def _status(status: str) -> str:
    kind = f" {status}" if status in ("right", "wrong") else ""
    return f'<span class="status{kind}">{line(status)}</span>'


def _average(rows: Sequence[Graded], points: Mapping[str, float]) -> str:
    found = (graded.total(points) for graded in rows)
    totals = [total for total in found if total is not None]
    if not totals:
        return "Nothing is judged yet"
    out_of = number_text(math.fsum(points.values()))
    mean = math.fsum(totals) / len(totals)
    missing = len(rows) - len(totals)
    later = f"; {missing} {NOT_YET}, not counted here" if missing else ""
    return f"{mean:.1f} of {out_of} points on average{later}"


def _exercise_table(rows: Sequence[Graded], points: Mapping[str, float]) -> str:
    """Return how many reached the points of each exercise, and what became of the others."""

    def row(key: str) -> tuple[str, ...]:
        count = Counter(graded.status(key) for graded in rows)
        share = count["right"] / max(1, count.total() - count["not judged"])
        bar = f'<meter min="0" max="1" value="{share:.3f}">{share:.0%}</meter> {share:.0%}'
        numbers = (str(count[status]) for status in STATUSES)
        return line(key), number_text(points[key]), bar, *numbers

    headers = ("Exercise", "Points", "Share that is right", *map(str.capitalize, STATUSES))
    caption = "Number of submissions by verdict; a share is of those that are judged"
    return table(caption, headers, map(row, points), numbers=(1, *range(3, 9)))


def _messages(rows: Sequence[Graded], points: Mapping[str, float]) -> Iterator[str]:
    """Yield for each exercise the causes that its check named, by the number of students."""
    for key in points:
        by_cause: dict[str, dict[str, str]] = defaultdict(dict)  # cause -> student -> its words
        for graded in rows:
            for verdict in graded.verdicts:
                if verdict.key == key and verdict.status == "wrong" and verdict.detail.strip():
                    name, words = misconception(verdict.detail)
                    by_cause[name][graded.student] = words
        ranked = sorted(by_cause.values(), key=len, reverse=True)
        if ranked:
            yield f'<section class="box"><h3>{line(key)}</h3><ol>'
            yield from map(_message, ranked[:MOST_MESSAGES])
            yield "</ol>"
            more = len(ranked) - MOST_MESSAGES
            yield f'<p class="quiet">and {more} more</p></section>' if more > 0 else "</section>"
    if all(verdict.status != "wrong" for graded in rows for verdict in graded.verdicts):
        yield "<p>No exercise is wrong.</p>"


def _message(by_student: Mapping[str, str]) -> str:
    words, _ = Counter(by_student.values()).most_common(1)[0]
    students = "student" if len(by_student) == 1 else "students"
    names = ", ".join(f"<bdi>{line(name)}</bdi>" for name in by_student)
    return (
        f"<li><details><summary><strong>{len(by_student)} {students}:</strong> {line(words)}"
        f'</summary><p class="quiet">{names}</p></details></li>'
    )


def _student_table(
    rows: Sequence[Graded], points: Mapping[str, float], names: Mapping[str, str]
) -> str:
    def row(graded: Graded) -> tuple[str, ...]:
        link = f"{FOLDER}/{quote(names[graded.student])}"
        student = f'<a href="{link}"><bdi>{line(graded.student) or "(no name)"}</bdi></a>'
        total = graded.total(points)
        reached = "–" if total is None else number_text(total)
        statuses = (_status(graded.status(key)) for key in points)
        notes = " ".join(filter(None, (graded.problem, *graded.notes)))
        return student, reached, *statuses, line(notes)

    headers = ("Student", "Total", *map(line, points), "Note")
    return table("Each submission; a name leads to its page", headers, map(row, rows), numbers=(1,))
