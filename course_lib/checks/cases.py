"""Judge an answer of plain values against a table of cases; tell the cause that fits every case.

    Cases(cases=models, show=names_by_bucket, look="Go through it by hand: ...", success="...")

The right values come from the right answer. What a planted wrong answer returns for all the cases
is compared with what the learner's returned: if they are equal, its cause is told.
"""

import math
import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import count
from numbers import Real
from random import Random
from types import FrameType, FunctionType
from typing import Any

import torch
from torch import Tensor

from course_lib.checks.exercise import (
    Cause,
    CheckFailed,
    Exercise,
    NotDone,
    NotJudged,
    failed,
    own_line,
)
from course_lib.checks.limits import little_memory
from course_lib.checks.on_ranks import Run
from course_lib.checks.parts import VALUE
from course_lib.core import CourseError

MOST_LINES = 1_000_000
MOST_SHOWN = 250  # characters of a value
NO_RESULT = Cause("Does your function return its result?")
A_FLOAT = Cause(
    "An int is needed, and that is a float, which keeps 16 digits: count with int, and with // in "
    "place of /."
)
TOO_NARROW = Cause(
    "float32 keeps 7 digits, and int32 ends at 2**31 - 1: real models have more. Count with int "
    "and float of Python, or in int64 and float64."
)
BORROWED = Cause("Write it yourself: the library's is what yours is compared with.")
Case = tuple[str, tuple[Any, ...]]


@dataclass(frozen=True)
class Raised:
    """An error that an answer raised in one case: its type, its text, the learner's line."""

    name: str
    text: str = field(compare=False)
    line: str = field(compare=False)

    @classmethod
    def of(cls, error: Exception) -> "Raised":
        """Return what is known about an error, as plain data."""
        return cls(type(error).__name__, str(error), own_line(error.__traceback__))


def as_it_is(value: Any, *_arguments: Any) -> Any:
    """Return the value: what `Cases` compares where nothing has to be made plain."""
    return value


def whole(number: Any, *_arguments: Any) -> Any:
    """Return a whole number of any kind as an int: an entry of an integer tensor is one, too.

    What is no number comes back as a text. Raises: CheckFailed for a float
    """
    if hasattr(number, "tolist"):  # of a tensor or an array
        number = number.tolist()
    if isinstance(number, float):
        raise failed(f"got {number!r}", A_FLOAT)
    try:
        return int(operator.index(number))
    except TypeError:
        return repr(number)


def real(number: Any, *_arguments: Any) -> Any:
    """Return a number of any kind as a float: a tensor of one number is one, too."""
    return float(number) if isinstance(number, Tensor) and number.numel() == 1 else number


def _alike(one: Any, other: Any) -> bool:
    """Return whether arguments are equal, the order of a dict's keys included."""
    if isinstance(one, dict) and isinstance(other, dict):
        keys_alike = list(one) == list(other)
        return keys_alike and all(_alike(one[key], other[key]) for key in one)
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    if isinstance(one, (tuple, list)) and type(one) is type(other):
        return len(one) == len(other) and all(map(_alike, one, other))
    return bool(one == other)


@dataclass(frozen=True, kw_only=True)
class Cases:
    """A check of a function that needs no ranks.

    `cases()` returns what to call the answer with, new at each call: a text that describes the case
    ("5 parameters of 24 bytes, 20 bytes a bucket"), and the arguments. `show(result, *arguments)`
    makes the result plain: numbers, texts, lists and dicts of them. It may raise
    `failed("need a list of ...", CAUSE)` for a result that cannot be read. Numbers are equal
    within `rtol`, the relative difference. `unit` follows them in the message. `look` is told
    where no known cause fits; `symptoms` are causes with a predicate of all values, shown in the
    order of the cases: `(lambda got, need: ..., CAUSE)`. `unchanged` is told where the arguments
    are no longer equal to new ones, `endless` where the answer runs MOST_LINES lines. The answer
    may not call a function of `library`, which would do the exercise's work.
    `drawn(random)` returns more cases for a student's own assignment, drawn from its `seed`.
    """

    cases: Callable[[], Sequence[Case]]
    success: str
    look: str
    show: Callable[..., Any] = as_it_is
    rtol: float = 1e-9
    unit: str = ""
    symptoms: tuple[tuple[Callable[[Sequence[Any], Sequence[Any]], bool], Cause], ...] = ()
    unchanged: Cause | None = None
    endless: Cause | None = None
    library: tuple[Callable[..., Any], ...] = ()
    drawn: Callable[[Random], Sequence[Case]] | None = None
    seed: str = ""

    def table(self) -> list[Case]:
        """Return the cases, new at each call; with a seed, also those that are drawn from it."""
        more = self.drawn(Random(self.seed)) if self.drawn and self.seed else ()
        return [*self.cases(), *more]

    def observe(self, answer: Callable[..., Any]) -> Iterator[Any]:
        """Call the answer for each case; yield the plain results, or what it raised."""
        for (_, arguments), (_, fresh) in zip(self.table(), self.table(), strict=True):
            result = self._result(answer, arguments)
            changed = self.unchanged and not _alike(arguments, fresh)
            yield failed("what you were given has changed", self.unchanged) if changed else result

    def _result(self, answer: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        try:
            is_watched = self.endless or self.library
            watch = watched(self.endless, self.library) if is_watched else nullcontext()
            with little_memory():
                with watch:
                    result = answer(*arguments)
                return None if result is None else self.show(result, *arguments)
        except (NotImplementedError, NotDone, NotJudged, MemoryError):
            raise
        except CheckFailed as error:
            return error
        except Exception as error:
            return Raised.of(error)

    def judge(self, observed: Iterable[Any], exercise: Exercise) -> str:
        """Compare with the right values; raise CheckFailed for the first case that differs."""
        return self.compare(list(observed), exercise.right_values(), exercise.wrong_values())

    def shares(self, observed: Sequence[Any], right: Sequence[Any]) -> dict[str, float]:
        """Return the share of the cases in which the value is right."""
        is_whole = len(observed) == len(right)
        equal = list(map(self._equal, observed, right)) if is_whole else [False]
        return {VALUE: sum(equal) / len(equal)}

    def compare(
        self, got: list[Any], need: list[Any], wrong: Iterable[tuple[Cause, list[Any]]]
    ) -> str:
        """Compare values with the right ones; `wrong` is pairs of a cause and what it leads to."""
        texts = [what for what, _ in self.table()]
        if len(need) != len(texts):
            raise CourseError(
                f"need the right values of {len(texts)} cases; the assignment's folder has "
                f"{len(need)}: they are of another version of the course. Try make lab there."
            )
        for what, wanted, found in zip(texts, need, got, strict=True):
            if isinstance(found, CheckFailed):
                raise CheckFailed(f"{what}: {found}", found.cause)
            if not self._equal(found, wanted):
                raise failed(self._seen(what, wanted, found), self._cause(got, need, wrong))
        return self.success

    def _seen(self, what: str, wanted: Any, found: Any) -> str:
        if isinstance(found, Raised):
            where = f" ({found.line})" if found.line else ""
            return f"{what}: your code raised {found.name}: {found.text}{where}"
        if isinstance(wanted, dict) and isinstance(found, dict):
            name, wanted, found = self._first_difference(wanted, found)
            what = f"{what}: {name}"
        while _is_long(wanted, found) and (pair := self._first_entry(wanted, found)):
            number, wanted, found = pair
            what = f"{what}: entry {number}"
        if isinstance(found, str) and not isinstance(wanted, str):
            found = repr(found)
        need, got = (self.unit if isinstance(one, Real) else "" for one in (wanted, found))
        words, seen = _cut(plain(wanted)), f"{_cut(plain(found))}{got}"
        if words == plain(found) and (off := apart(found, wanted)):
            seen += f", off by {off:.1g}: digits were lost"
        return f"{what}: need {words}{need}; got {seen}"

    def _first_difference(self, wanted: dict[Any, Any], found: dict[Any, Any]) -> tuple[Any, ...]:
        """Return the first key whose values differ, and both values."""
        keys = {**wanted, **found}
        pairs = ((key, wanted.get(key, "nothing"), found.get(key, "nothing")) for key in keys)
        return next(pair for pair in pairs if not self._equal(pair[2], pair[1]))

    def _first_entry(self, wanted: Sequence[Any], found: Sequence[Any]) -> tuple[Any, ...] | None:
        """Return the number of the first entry that differs, and both; None for other lengths."""
        if len(wanted) != len(found):
            return None
        pairs = enumerate(zip(wanted, found, strict=True))
        return next((n, a, b) for n, (a, b) in pairs if not self._equal(b, a))

    def _cause(
        self, got: list[Any], need: list[Any], wrong: Iterable[tuple[Cause, list[Any]]]
    ) -> Cause:
        for fits, cause in self.symptoms:
            if fits(got, need):
                return cause
        for cause, values in wrong:
            if all(map(self._equal, got, values)):
                return cause
        return NO_RESULT if all(value is None for value in got) else Cause(self.look)

    def _equal(self, found: Any, wanted: Any) -> bool:
        return alike(found, wanted, self.rtol)


def to_json(value: Any) -> Any:
    """Return what a check observed as plain JSON.

    Raises: TypeError for a value that is no plain data
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [to_json(each) for each in value]
    if isinstance(value, dict):
        return {"dict": [[to_json(key), to_json(each)] for key, each in value.items()]}
    if isinstance(value, Raised):
        return {"raised": [value.name, value.text, ""]}  # a line would show the answer's own
    if isinstance(value, CheckFailed):
        return {"failed": [str(value), value.cause and str(value.cause)]}
    if isinstance(value, Run):
        return {"run": [value.world_size, to_json(list(value.by_rank))]}
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return {"tensor": [dtype, list(value.shape), value.detach().flatten().tolist()]}
    raise TypeError(f"need plain data; got {type(value).__name__}.")


def values_of(exercise: Exercise) -> dict[str, Any]:
    """Return what `right_values` and `wrong_values` of an exercise yield, to be frozen as JSON."""
    wrong = [[cause.sentence, to_json(values)] for cause, values in exercise.wrong_values()]
    return {"right": to_json(exercise.right_values()), "wrong": wrong}


def from_json(data: Any) -> Any:
    """Return the value that `to_json` was given; tuples come back as lists, which are alike."""
    if isinstance(data, list):
        return [from_json(each) for each in data]
    if not isinstance(data, dict):
        return data
    ((kind, content),) = data.items()
    if kind == "dict":
        return {from_json(key): from_json(each) for key, each in content}
    if kind == "raised":
        return Raised(*content)
    if kind == "failed":
        return CheckFailed(content[0], content[1] and Cause(content[1]))
    if kind == "run":
        return Run(content[0], {}, from_json(content[1]))
    dtype, shape, numbers = content
    return torch.tensor(numbers, dtype=getattr(torch, dtype)).reshape(shape)


@contextmanager
def watched(endless: Cause | None, library: Sequence[Callable[..., Any]] = ()) -> Iterator[None]:
    """Raise CheckFailed once the block calls the library, or runs more than MOST_LINES lines."""
    numbers, before = count(1), sys.gettrace()
    codes = [one.__code__ for one in library if isinstance(one, FunctionType)]

    def trace(frame: FrameType, event: str, _argument: Any) -> Any:
        if endless and event == "line" and next(numbers) > MOST_LINES:
            raise failed(f"it has run {MOST_LINES:,} lines, and goes on", endless)
        if event == "call" and frame.f_code in codes:
            raise failed(f"it calls the course's own {frame.f_code.co_qualname}", BORROWED)
        return trace

    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def alike(found: Any, wanted: Any, rtol: float) -> bool:
    """Return whether plain values are equal, numbers within a relative difference."""
    if isinstance(wanted, bool) or isinstance(found, bool):
        return found is wanted
    if isinstance(wanted, Real) and isinstance(found, Real):
        return found == wanted or math.isclose(found, wanted, rel_tol=rtol)
    if isinstance(wanted, dict) and isinstance(found, dict):
        return found.keys() == wanted.keys() and all(
            alike(found[key], wanted[key], rtol) for key in wanted
        )
    if isinstance(wanted, list | tuple) and isinstance(found, list | tuple):
        return len(found) == len(wanted) and all(
            alike(one, other, rtol) for one, other in zip(found, wanted, strict=True)
        )
    return isinstance(found, type(wanted)) and bool(found == wanted)  # a str of NumPy is one


def _is_long(wanted: Any, found: Any) -> bool:
    """Return whether these are sequences whose text is longer than one reads."""
    are_lists = isinstance(wanted, list | tuple) and isinstance(found, list | tuple)
    return are_lists and max(len(plain(wanted)), len(plain(found))) > MOST_SHOWN


def _cut(text: str) -> str:
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]} ..."


def apart(found: Any, wanted: Any) -> float:
    """Return the largest difference between the numbers of two values; 0 where there are none."""
    if isinstance(found, Real) and isinstance(wanted, Real):
        return abs(float(found) - float(wanted))
    if isinstance(found, list | tuple) and isinstance(wanted, list | tuple):
        return max(map(apart, found, wanted), default=0.0)
    return 0.0


def plain(value: Any) -> str:
    """Format a value for a reader: `12.5`, `[1, 2]`, `4 3 | 2 1`."""
    if isinstance(value, bool) or value is None:
        return str(value)
    if isinstance(value, Real):
        return f"{value:,}" if isinstance(value, int) else f"{float(value):.6g}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(plain, value))}]"
    return value if isinstance(value, str) else repr(value)
