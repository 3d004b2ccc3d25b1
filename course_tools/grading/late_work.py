"""How late each student was: the times in the platform's file, and the assignment's rule.

The file is `times.csv` beside the gradebook, a copy of what the platform exports: a column with the
student and one with the time. The course reads it and never changes it.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, tzinfo
from pathlib import Path

from course_lib.core import CourseError
from course_lib.workbooks.assignment import Assignment
from course_tools.grading.by_hand import LATE, ByHand, read_table

TIMES = "times.csv"
STUDENT_TITLES = (
    *("student", "sis login id", "username", "sid", "id number", "email address", "email"),
    *("full name", "name"),
)
TIME_TITLES = (
    *("time", "submission time", "submitted at", "submitted_at", "handed in"),
    *("last modified (submission)", "timestamp"),
)
FORMATS = ("%A, %d %B %Y, %I:%M %p", "%A, %d %B %Y, %H:%M", "%Y-%m-%d %H:%M:%S %z")
NONE = ("", "-")


@dataclass(frozen=True)
class Late:
    """How many days late, and what that takes off, as a percent of the points reached."""

    days: float = 0.0
    percent: float = 0.0

    def __str__(self) -> str:
        days = f"{self.days:g} day{'' if self.days == 1 else 's'} late"
        return f"{days}: {self.percent:g} % taken off" if self.days else ""


ON_TIME = Late()


def read_times(path: Path, zone: tzinfo | None) -> dict[str, datetime]:
    """Return when each student has handed in; the last time counts.

    zone  of a time that names none; None: this machine's, with its summer time

    Whoever has another's name is left out: nobody knows whose time it is.

    Raises: CourseError where a column is missing, or for what is no time
    """
    rows = read_table(path, "the times of submissions, as CSV")
    titles = {(title or "").strip().lower(): title for title in rows.fieldnames or ()}
    who = [titles[name] for name in STUDENT_TITLES if name in titles]
    when = next((titles[name] for name in TIME_TITLES if name in titles), None)
    if not who or when is None:
        raise CourseError(
            f"{path}: need a column with students ({', '.join(STUDENT_TITLES[:3])}, ...) and one "
            f"with times ({', '.join(TIME_TITLES[:3])}, ...); got {', '.join(titles.values())}."
        )
    found, people = dict[str, datetime](), defaultdict[str, set[tuple[str, ...]]](set)
    for row in rows:
        if (text := (row[when] or "").strip()) in NONE:
            continue
        time = _time(text, zone, f"{path}, line {rows.line_num}")
        names = tuple((row[column] or "").strip() for column in who)
        for name in names:
            people[name].add(names)
            found[name] = max(time, found.get(name, time))
    return {name: time for name, time in found.items() if len(people[name]) == 1}


def _time(text: str, zone: tzinfo | None, where: str) -> datetime:
    time = None
    try:
        time = datetime.fromisoformat(text.removesuffix(" UTC"))
        time = time.replace(tzinfo=UTC) if text.endswith(" UTC") else time
    except ValueError:
        for form in FORMATS:
            try:
                time = datetime.strptime(text, form)
            except ValueError:
                continue
    if time is None:
        raise CourseError(f"{where}: need a time like 2026-12-01T18:00; got {text!r}.")
    if time.tzinfo:
        return time
    return time.replace(tzinfo=zone) if zone else time.astimezone()


@dataclass(frozen=True)
class LateWork:
    """The rule of an assignment, and the times of its class; None: there is no file with them."""

    assignment: Assignment
    times: Mapping[str, datetime] | None = None

    def of(self, student: str, by_hand: ByHand) -> Late:
        """Return how late a student was; days that a person wrote into by_hand.csv count first."""
        rule, due = self.assignment.late, self.assignment.due
        if rule is None or due is None:
            return ON_TIME
        hand = by_hand.get(student, {}).get(LATE)
        days: float = 0
        if hand and hand.points is not None:
            days = max(0.0, hand.points)
        elif self.times and student in self.times:
            days = rule.days(due, self.times[student])
        return Late(days, rule.percent(days))

    def without_time(self, students: Iterable[str]) -> list[str]:
        """Return who has no time, where the assignment has a rule for late work."""
        if self.assignment.late is None:
            return []
        return sorted({*students} - {*(self.times or ())})


def late_work(assignment: Assignment, folder: Path) -> LateWork:
    """Return the times in the folder of a gradebook, where the assignment has a rule.

    Raises: CourseError where they cannot be read
    """
    path = folder / TIMES
    if assignment.late is None or assignment.due is None or not path.exists():
        return LateWork(assignment)
    due = assignment.due
    is_here = due.astimezone().utcoffset() == due.utcoffset()
    return LateWork(assignment, read_times(path, None if is_here else due.tzinfo))
