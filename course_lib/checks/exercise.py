"""An exercise, the mistakes it must name, and the one call a notebook makes: `check(key, answer)`.

The key says where to look: `collectives-1` is in `course_lib.checks.collectives`, in the tuple
`EXERCISES`, and that module is imported only then. A check first observes: it runs the learner's
answer and notes plain data. Then it judges that data, in this process or in another one: it
returns one line about what is right, or raises CheckFailed with a sentence that goes from the
symptom to the misconception (its `Cause`) to what to look at.
"""

import contextlib
import difflib
import importlib
import importlib.util
import io
import re
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from hashlib import sha256
from importlib.machinery import PathFinder
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, NoReturn, Protocol, runtime_checkable

import cloudpickle

from course_lib.checks.limits import COMPUTING_S, MOST_BYTES, Endless, OutOfTime, at_most
from course_lib.checks.right_answer import assignment_here, frozen_values, right_answer, seen_values
from course_lib.core import CourseError
from course_lib.core.errors import MachineError

LIMIT_S = 180  # for one check: on two quiet cores, the slowest takes 5 s


class _ShortError(CourseError):
    """An error that a notebook shows as its own text, without a traceback."""

    def _render_traceback_(self) -> list[str]:
        return str(self).splitlines()


@dataclass(frozen=True)
class Cause:
    """A misconception, as the sentence that a learner reads: what it is, and what to look at.

    Values of the moment stand in braces: `SUMMED = Cause("{p} times too large: summed.")`, and
    `SUMMED.of(p=4)` fills them in. Two causes are equal if their sentences with braces are.
    """

    sentence: str
    values: Mapping[str, Any] = field(default_factory=dict, compare=False)
    known: ClassVar[dict[str, "Cause"]] = {}  # all there are, by sentence

    def __post_init__(self) -> None:
        Cause.known[self.sentence] = self

    @property
    def key(self) -> str:
        """A short name that stays the same as long as the sentence does."""
        return sha256(self.sentence.encode()).hexdigest()[:8]

    def is_in(self, text: str) -> bool:
        """Whether a text has this sentence, with any values for its braces."""
        pieces = [re.escape(piece) for piece in re.split(r"\{\w+[^}]*\}", self.sentence)]
        return re.search(".+?".join(pieces), text, re.DOTALL) is not None

    def of(self, **values: Any) -> "Cause":
        """Return this cause with values for the names in its braces."""
        return replace(self, values={**self.values, **values})

    def __str__(self) -> str:
        return self.sentence.format_map(self.values) if self.values else self.sentence


def cause_in(text: str) -> Cause | None:
    """Return the known cause that a check's message names, the longest; None where it has none.

    Known are those of the checks that are imported.
    """
    longest = sorted(filter(None, Cause.known), key=len, reverse=True)
    return next((Cause.known[one] for one in longest if Cause.known[one].is_in(text)), None)


class CheckFailed(_ShortError, AssertionError):
    """The answer is wrong; the text names what it shows and what to look at.

    `cause` is the misconception behind it, or None where no known one fits.
    """

    def __init__(self, text: str, cause: Cause | None = None) -> None:
        super().__init__(text)
        self.cause = cause


def failed(what: str, cause: Cause | None = None, **values: Any) -> CheckFailed:
    """Return the error that says what was seen, then its cause: `raise failed(where, SUMMED)`."""
    cause = cause.of(**values) if cause else None
    end = "" if what.endswith((".", "?", ":")) else "."
    return CheckFailed(f"{what}{end} {cause or ''}".rstrip(), cause)


class NotDone(_ShortError):
    """The exercise still raises the NotImplementedError of its stub."""


class NotJudged(_ShortError):
    """The check ended before it had seen the answer: Stop, a time limit, or the machine."""


class TooLong(NotJudged):
    """The check ran into its limit."""


class Stopped(NotJudged):
    """The check was interrupted."""


@runtime_checkable
class Check(Protocol):
    """Observes and judges an answer: `Cases` for plain values, `ByExample` on ranks."""

    def observe(self, answer: Any) -> Iterator[Any]:
        """Run the answer; yield plain data, piece by piece."""

    def judge(self, observed: Iterable[Any], exercise: "Exercise") -> str:
        """Return one line about what is right, or raise CheckFailed; runs no learner's code."""


class Wrong(Protocol):
    """A planted wrong answer: `Edit` or `Own`."""

    @property
    def name(self) -> str:
        """A few words for tables."""

    @property
    def cause(self) -> Cause:
        """The misconception that the check has to name."""

    def answer(self, exercise: "Exercise", /) -> Any:
        """Return the wrong answer."""


@dataclass(frozen=True, kw_only=True)
class Exercise:
    """One exercise: its check, and the wrong answers that a test sends through the check.

    The right answer, `right`, is the one that the lesson's source shows. `title` is a few words
    for tables. `library` names what the library has of it, `course_lib.ddp.buckets:make_buckets`:
    in the sandbox that grades an answer, this raises. An exercise that is in no lesson's source
    brings its right answer along, `reference`.
    `seen` keeps what was observed of its own answers, with which others are compared.
    """

    key: str
    title: str
    check: Check
    wrong: tuple[Wrong, ...] = ()
    library: tuple[str, ...] = ()
    reference: Any = None
    seen: dict[Any, list[Any]] = field(default_factory=dict, init=False, compare=False, repr=False)

    @property
    def right(self) -> Any:
        """The right answer: what the solved notebook shows."""
        return right_answer(self.key) if self.reference is None else self.reference

    def seeded(self, seed: str) -> "Exercise":
        """Return this exercise with a student's own cases, where its check draws some."""
        if not seed or getattr(self.check, "drawn", None) is None:
            return self
        return replace(self, check=replace(self.check, seed=seed))  # type: ignore[type-var]

    def right_values(self) -> list[Any]:
        """Return what the check observes of the right answer.

        Where there is a file with it, as in a student's assignment, it is read from that.
        """
        frozen = self._frozen()
        return self._read(frozen["right"]) if frozen else self._observed()

    def wrong_values(self) -> Iterator[tuple[Cause, list[Any]]]:
        """Yield the cause of each planted mistake, and what the check observes of the mistake.

        On ranks, that is its first difference from the right answer (course_lib.checks.judge).
        """
        if frozen := self._frozen():
            for sentence, values in frozen["wrong"]:
                yield Cause(sentence), self._read(values)
            return
        for wrong in self.wrong:
            yield wrong.cause, self._observed(wrong)

    def causes(self) -> list[Cause]:
        """Return the misconceptions that its planted mistakes are about, without running any."""
        frozen = frozen_values(self.key)
        planted = [Cause(sentence) for sentence, _ in frozen["wrong"]] if frozen else []
        return planted or [wrong.cause for wrong in self.wrong]

    def _frozen(self) -> Mapping[str, Any] | None:
        """Return the values in a file; those of a lesson are of its own check, not of others."""
        frozen = frozen_values(self.key)
        is_own = any(one is self for one in exercises_of(self.key.rpartition("-")[0]))
        return seen_values(self.key) if frozen is None and is_own else frozen

    def _observed(self, wrong: Wrong | None = None) -> list[Any]:
        """Return what the check observes of a planted mistake, or of the right answer; once."""
        if id(wrong) not in self.seen:
            answer = wrong.answer(self) if wrong else self.right
            compare = wrong and getattr(self.check, "first_difference", None)
            found = compare(answer, self) if compare else self.check.observe(answer)
            self.seen[id(wrong)] = list(found)
        return self.seen[id(wrong)]

    def _read(self, values: list[Any]) -> list[Any]:
        from course_lib.checks.cases import from_json  # which imports this module

        return list(map(from_json, values))

    def verdict(self, answer: Any) -> str:
        """Return one line about a right answer.

        Raises: CheckFailed for a wrong one, NotDone for a stub
        """
        return self.check.judge(self.check.observe(answer), self)


def check(key: str, answer: Any, *, limit_s: float = LIMIT_S) -> None:
    """Check an answer; print `KEY: right. ...` or raise CheckFailed or NotDone with a short text.

    What the answer itself prints is shown only when it is wrong, so that a right one always prints
    the same single line. After `limit_s` seconds the check is ended, and the ranks with it.
    """
    exercise = find_exercise(key)
    with explained(key, answer, limit_s):
        detail = exercise.verdict(answer)
    print(f"{key}: right. {detail}")


@contextlib.contextmanager
def explained(key: str, answer: Any, limit_s: float = LIMIT_S) -> Iterator[None]:
    """Turn whatever goes wrong in the block, which runs an answer, into a short text.

    What is printed in it is shown only then. It is ended after `limit_s` seconds (0: no limit), and
    sooner where it computes in this process for COMPUTING_S: longer than any right answer.
    Raises: CheckFailed, NotDone or NotJudged, which begin with the key
    """
    _demand_own(key, answer)
    printed = io.StringIO()
    computing_s = max(COMPUTING_S, COMPUTING_S * limit_s / LIMIT_S)
    try:
        with (
            contextlib.redirect_stdout(printed),
            contextlib.redirect_stderr(printed),
            at_most(limit_s),
            at_most(computing_s, computing=True),
        ):
            yield
    except (Exception, OutOfTime, KeyboardInterrupt) as error:
        print(printed.getvalue(), end="")
        _explain(key, error)


def find_exercise(key: str) -> Exercise:
    """Return the exercise of a key, from its lesson's package.

    In a student's assignment it has the student's own cases.

    Raises: CourseError that lists the keys that come nearest.
    """
    lesson = key.rpartition("-")[0] or key
    exercises = exercises_of(lesson)
    for exercise in exercises:
        if exercise.key == key:
            here = assignment_here()
            return exercise.seeded(here.seed) if here else exercise
    known = [exercise.key for exercise in exercises]
    near = difflib.get_close_matches(key, known, n=3, cutoff=0.0)
    raise _ShortError(
        f"check: need the key of an exercise; got {key!r}. "
        + (f"Try {' or '.join(near)}." if near else f"The lesson {lesson!r} has no exercises.")
    )


def exercises_of(lesson: str) -> tuple[Exercise, ...]:
    """Return all exercises of a lesson (`collectives`), in order; none for a lesson without any.

    Those of an assignment (`hw1`) are in the package `checks` of its folder, which is imported as
    `course_lib.checks.hw1`.
    """
    name = f"course_lib.checks.{lesson}"
    here = assignment_here()
    if here and here.name == lesson and (here.folder / "checks" / "__init__.py").is_file():
        _import_from(here.folder / "checks", name)
    elif PathFinder.find_spec(name, importlib.import_module("course_lib.checks").__path__) is None:
        return ()
    return getattr(importlib.import_module(name), "EXERCISES", ())


def _import_from(package: Path, name: str) -> None:
    """Import the package in a folder under this name, once; ranks get what is in it by value."""
    file = str(package / "__init__.py")
    if getattr(sys.modules.get(name), "__file__", "") == file:
        return
    for old in [one for one in sys.modules if one == name or one.startswith(f"{name}.")]:
        del sys.modules[old]
    spec = importlib.util.spec_from_file_location(
        name, file, submodule_search_locations=[str(package)]
    )
    if spec is None or spec.loader is None:
        raise _ShortError(f"{file}: need a Python package of checks; it cannot be imported.")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    cloudpickle.register_pickle_by_value(module)


def _demand_own(key: str, answer: Any) -> None:
    """Reject the course's own function, which a later cell may have imported over the answer."""
    module = getattr(answer, "__module__", None) or ""
    if module.split(".")[0] == "course_lib":
        raise CheckFailed(
            f"{key}: this is the course's own {getattr(answer, '__name__', answer)}, not yours. "
            "Run your exercise cell again, then this check."
        )


def _explain(key: str, error: BaseException) -> NoReturn:
    """Raise a short text that starts with the key for any error in a check."""
    where = own_line(error.__traceback__)
    if isinstance(error, NotDone | NotImplementedError):
        raise NotDone(not_done(key, str(error))) from None
    if isinstance(error, CheckFailed):
        raise CheckFailed(f"{key}: {error}", error.cause) from None
    at = f", at {where}" if where else ""
    if isinstance(error, KeyboardInterrupt):
        raise Stopped(f"{key}: stopped{at}") from None
    more = "On a slow machine, give it more: check(..., limit_s=600)."
    if isinstance(error, Endless):
        raise CheckFailed(
            f"{key}: your code does not return: {error}{at}\n    A right answer needs a few. Does "
            f"a loop never end? {more}"
        ) from None
    if isinstance(error, OutOfTime):
        raise TooLong(
            f"{key}: {error}{at}\n    A right answer needs a few. Does a wait never return? {more}"
        ) from None
    if isinstance(error, MemoryError):
        traceback.clear_frames(error.__traceback__)  # which hold what has filled the memory
        raise CheckFailed(
            f"{key}: your code took more than {MOST_BYTES >> 30} GiB of memory{at}. Does a loop "
            "never end, or a list take all of an endless iterator?"
        ) from None
    if isinstance(error, NotJudged | MachineError):
        raise NotJudged(f"{key}: {error}") from None
    if "Ranks live in the notebook" in str(error):
        raise CheckFailed(
            f"{key}: `ranks` lives in the notebook; on a rank, use dist.get_world_size()."
        ) from None
    what = f"{type(error).__name__}: {error}"
    if where:
        raise CheckFailed(f"{key}: your code raised {what}\n    {where}") from error
    raise CheckFailed(
        f"{key}: the check cannot use what your code returned ({what}). "
        "Compare its type and shape with what the exercise asks for."
    ) from error


def not_done(key: str, hint: str) -> str:
    """Return the text for an exercise that still raises its stub's NotImplementedError."""
    hint = hint.removeprefix(f"exercise {key}").removeprefix(":").strip()
    return f"{key} is not done yet" + (f": {hint}" if hint else ".")


def described(error: BaseException) -> str:
    """Return the type and the text of an error, and the learner's line where it was raised."""
    line = own_line(error.__traceback__)
    return f"{type(error).__name__}: {error}" + (f" ({line})" if line else "")


def own_line(trace: TracebackType | None) -> str:
    """Return the innermost line of the learner's own code in a traceback, or an empty text."""
    frames = [
        frame
        for frame in traceback.extract_tb(trace)
        if "ipykernel" in frame.filename or frame.filename.startswith(("<cell", "<ipython-input"))
    ]
    return f"line {frames[-1].lineno} of your cell: {frames[-1].line}" if frames else ""
