"""One graded submission as plain data: what the judge says, for every report on the class."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from course_lib.core import CourseError
from course_lib.core.files import not_one, parse_json
from course_lib.workbooks.check_notebook import Verdict
from course_tools.grading.by_hand import Hand
from course_tools.grading.late_work import ON_TIME, Late

STATUSES = ("right", "wrong", "not done", "missing", "twice", "not judged")
NEED = "one graded submission"
AGAIN = "It will be graded again."


@dataclass(frozen=True, kw_only=True)
class Graded:
    """The verdicts on one submission.

    digest   sha256 of what was graded: the submission, the assignment, the kit
    problem  why the whole file was not judged ("not judged: ..."), else empty
    code     the learner's text of each exercise, for the similarity report
    hand     what a person gave, by exercise ("": all of it); it is kept in a file of its own
    late     what is taken off for late work, from a file of its own, too
    """

    student: str
    path: str
    assignment: str
    verdicts: tuple[Verdict, ...]
    notes: tuple[str, ...] = ()
    seconds: float = 0.0
    digest: str
    problem: str = ""
    code: Mapping[str, str] = field(default_factory=dict)
    hand: Mapping[str, Hand] = field(default_factory=dict)
    late: Late = ON_TIME

    @property
    def is_handed_in(self) -> bool:
        """Whether there is a file; it is not for a student of the class who handed in nothing."""
        return bool(self.path)

    @property
    def is_judged(self) -> bool:
        """Whether the file was judged, and each of its verdicts is one."""
        return not self.problem and all(one.status != "not judged" for one in self.verdicts)

    def status(self, key: str) -> str:
        """Return the status of an exercise; `not judged` where it has none or several."""
        found = [one.status for one in self.verdicts if one.key == key]
        return found[0] if len(found) == 1 and not self.problem else "not judged"

    def points_by_hand(self, key: str) -> float | None:
        """Return the points that a person gave for an exercise, or None."""
        return self.hand[key].points if key in self.hand else None

    def is_open(self, key: str) -> bool:
        """Whether nobody has judged an exercise: no check, and no person."""
        return self.status(key) == "not judged" and self.points_by_hand(key) is None

    def points_of(self, key: str, by_key: Mapping[str, float]) -> float:
        """Return the points of one exercise: those by hand, else all where it is right.

        A wrong answer has those of its parts, where these have some.
        """
        by_hand = self.points_by_hand(key)
        if by_hand is not None:
            return by_hand
        if self.status(key) != "wrong":
            return by_key[key] if self.status(key) == "right" else 0.0
        own = next(one for one in self.verdicts if one.key == key)
        return math.fsum(own.parts.values())

    def points(self, by_key: Mapping[str, float]) -> float:
        """Return the points of all exercises of the assignment, without those for late work."""
        reached = math.fsum(self.points_of(key, by_key) for key in by_key)
        return reached * (1 - self.late.percent / 100)

    def total(self, by_key: Mapping[str, float]) -> float | None:
        """Return the sum of the points, or None where an exercise has no verdict yet."""
        return None if any(map(self.is_open, by_key)) else self.points(by_key)

    def to_line(self) -> str:
        """Return it as JSON on one line of ASCII; half a surrogate pair becomes `?`."""
        value = {**asdict(self), "seconds": float(self.seconds), "code": dict(self.code)}
        del value["hand"], value["late"]
        whole = json.dumps(value, ensure_ascii=False).encode(errors="replace")
        return json.dumps(json.loads(whole))

    @classmethod
    def from_line(cls, line: str) -> "Graded":
        """Read what `to_line` wrote. Raises: CourseError for anything else."""
        return cls.from_json(parse_json(line, "the line", NEED, hint=AGAIN))

    @classmethod
    def from_json(cls, value: Any) -> "Graded":
        """Return what `to_line` wrote, read as JSON. Raises: CourseError for anything else"""
        match value:
            case {
                "student": str(student),
                "path": str(path),
                "assignment": str(assignment),
                "verdicts": list(verdicts),
                "notes": list(notes),
                "seconds": float(seconds),
                "digest": str(digest),
                "problem": str(problem),
                "code": dict(code),
            } if _are_texts([*notes, *code.values()]) and math.isfinite(seconds):
                return cls(
                    student=student,
                    path=path,
                    assignment=assignment,
                    verdicts=tuple(map(_verdict, verdicts)),
                    notes=tuple(notes),
                    seconds=seconds,
                    digest=digest,
                    problem=problem,
                    code=code,
                )
        raise _spoilt()


def _verdict(value: Any) -> Verdict:
    match value:
        case {
            "key": str(key),
            "status": str(status),
            "detail": str(detail),
            "note": str(note),
            "parts": dict(parts),
        } if status in STATUSES and all(type(n) in (int, float) for n in parts.values()):
            return Verdict(key=key, status=status, detail=detail, note=note, parts=parts)
    raise _spoilt()


def _are_texts(values: list[Any]) -> bool:
    return all(isinstance(value, str) for value in values)


def _spoilt() -> CourseError:
    return not_one("the line", NEED, "a field is missing, or of another type", AGAIN)
