"""Tools for the checks of 13_scaling_study: answers that are dictionaries, and why one is wrong.

A wrong answer differs from the right one in one name, and a rule for that name tells what went
wrong: the first rule that fits every case is told.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from course_lib.checks.exercise import CheckFailed, Mistake

Rule = Callable[..., float]


@dataclass(frozen=True)
class Wrong:
    """A planted mistake: the wrong value for the number `key`, and its meaning."""

    name: str
    key: str
    rule: Rule
    says: str

    def planted(self, right: Callable[..., Mapping[str, float]]) -> Mistake:
        """Return the right answer with this one number wrong."""

        def answer(*case: Any) -> dict[str, float]:
            return {**right(*case), self.key: self.rule(*case)}

        return Mistake(self.name, answer, self.says[:40])


def expect_numbers(
    got: Sequence[Any],
    cases: Mapping[str, tuple[Any, ...]],
    right: Callable[..., Mapping[str, float]],
    wrongs: Sequence[Wrong],
) -> None:
    """Demand that every case has all numbers, under their names."""
    wanted = [right(*case) for case in cases.values()]
    for key in wanted[0]:
        for name, found, numbers in zip(cases, got, wanted, strict=True):
            value = _number(name, key, found, numbers)
            if not near(value, numbers[key]):
                says = _why(key, [one.get(key) for one in got], list(cases.values()), wrongs)
                raise CheckFailed(
                    f"{name}, {key}: need {numbers[key]:g}; got {value:g}. {says}".rstrip()
                )


def _number(name: str, key: str, found: Any, wanted: Mapping[str, float]) -> float:
    if found is None:
        raise CheckFailed(f"{name}: got None. Does your function return its result?")
    if not isinstance(found, Mapping) or key not in found:
        raise CheckFailed(f"{name}: need a dictionary with {', '.join(wanted)}; got {found!r}.")
    value = found[key]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise CheckFailed(f"{name}, {key}: need a number; got {value!r}.")
    return float(value)


def _why(
    key: str, values: Sequence[Any], cases: Sequence[tuple[Any, ...]], wrongs: Sequence[Wrong]
) -> str:
    """Return the sentence of the first mistake that fits every case; None where none does."""
    for wrong in wrongs:
        told = zip(values, cases, strict=True)
        if wrong.key == key and all(near(value, wrong.rule(*case)) for value, case in told):
            return wrong.says
    return ""


def shown(value: Any) -> str:
    """Format an answer for a message: a number without its rounding."""
    return f"{value:.6g}" if isinstance(value, float) else repr(value)


def near(value: Any, wanted: float, rel: float = 1e-6) -> bool:
    """Return whether they are equal but for rounding."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isclose(value, wanted, rel_tol=rel, abs_tol=1e-12)
