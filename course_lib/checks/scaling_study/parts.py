"""A check for the exercises of 13_scaling_study: answers of several numbers, each judged by itself.

So an answer that is wrong in one number is told about that number alone, by its name.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from random import Random
from typing import Any

from course_lib.checks.cases import Case, Cases, alike
from course_lib.checks.exercise import Cause, CheckFailed, Exercise, failed
from course_lib.checks.parts import VALUE

CHANGED = Cause(
    "What your function is given belongs to the caller, who needs it again: make lists of your own."
)


@dataclass(frozen=True)
class Part:
    """One number of an answer, as in Cases."""

    look: str
    unit: str = ""
    rtol: float = 1e-9


def numbers(result: Any, names: Sequence[str], cause: Cause) -> dict[str, Any]:
    """Return the numbers in a tuple by their names. Raises: CheckFailed for anything else"""
    is_alike = isinstance(result, tuple | list) and len(result) == len(names)
    if not is_alike or any(isinstance(one, bool) or not isinstance(one, Real) for one in result):
        raise failed(f"got {result!r}", cause)
    return dict(zip(names, result, strict=True))


@dataclass(frozen=True, kw_only=True)
class Parts:
    """A check like `Cases`, whose results `show` turns into a dictionary with the names of `parts`.

    Each part is judged in all cases before the next one is, and the cause is that of the planted
    answer that is wrong in this part alike, and right in those before it. `unchanged`, `drawn` and
    `seed` are as in Cases.
    """

    cases: Callable[[], Sequence[Case]]
    show: Callable[..., dict[str, Any]]
    parts: Mapping[str, Part]
    success: str
    unchanged: Cause | None = None
    drawn: Callable[[Random], Sequence[Case]] | None = None
    seed: str = ""

    def observe(self, answer: Callable[..., Any]) -> Iterator[Any]:
        """Call the answer for each case; yield its parts, or what it raised."""
        return self._cases().observe(answer)

    def judge(self, observed: Iterable[Any], exercise: Exercise) -> str:
        """Compare each part with the right one; raise CheckFailed for the first that differs."""
        got, need = list(observed), exercise.right_values()
        for (what, _), one in zip(self._cases().table(), got, strict=True):
            if isinstance(one, CheckFailed):
                raise CheckFailed(f"{what}: {one}", one.cause)
        wrong = list(exercise.wrong_values())
        for name in self.parts:
            found, right, only = _parts(name, got), _parts(name, need), self._only(name)
            of_part = [(cause, _parts(name, values)) for cause, values in wrong]
            only.compare(found, right, of_part)
            pairs = zip(wrong, of_part, strict=True)
            wrong = [one for one, (_, values) in pairs if alike(values, right, only.rtol)]
        return self.success

    def shares(self, observed: Sequence[Any], right: Sequence[Any]) -> dict[str, float]:
        """Return for each part the share of the cases in which it is right."""
        names = {name: (_parts(name, observed), _parts(name, right)) for name in self.parts}
        return {name: self._only(name).shares(*both)[VALUE] for name, both in names.items()}

    def _cases(self) -> Cases:
        """Return the table, with which an answer is observed."""
        return Cases(
            cases=self.cases,
            show=self.show,
            drawn=self.drawn,
            seed=self.seed,
            unchanged=self.unchanged,
            look="",
            success="",
        )

    def _only(self, name: str) -> Cases:
        """Return the check of one part."""
        part, table = self.parts[name], self._cases().table
        return Cases(
            cases=lambda: [(f"{what}, {name}", arguments) for what, arguments in table()],
            rtol=part.rtol,
            unit=part.unit,
            look=part.look,
            success="",
        )


def _parts(name: str, values: Sequence[Any]) -> list[Any]:
    """Return one part of each value; what an answer raised stays as it is."""
    return [one[name] if isinstance(one, dict) else one for one in values]
