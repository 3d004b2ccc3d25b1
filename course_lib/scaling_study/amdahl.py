"""Predict a run on more ranks from two runs: what is fixed, and what the ranks share.

T_p = fixed_s + shared_s / p, with the same global batch on all p (strong scaling). Messages whose
time hardly depends on p are fixed, and so is what every rank repeats. Lesson 13_scaling_study.
"""

import math
from dataclasses import dataclass

from course_lib.core.errors import CourseError


@dataclass(frozen=True, kw_only=True)
class StrongScaling:
    """The step of a fixed batch: `fixed_s` on any number of ranks, `shared_s` divided by them.

    Source: Amdahl 1967, in the form of two measured times
    """

    fixed_s: float
    shared_s: float

    @classmethod
    def of(cls, one_s: float, ranks: int, many_s: float) -> "StrongScaling":
        """Return the split that explains a step of `one_s` on one rank and `many_s` on `ranks`.

        Raises: CourseError below 2 ranks, or for seconds that are not above 0
        """
        if ranks < 2 or not (one_s > 0 and many_s > 0):
            raise CourseError(
                f"StrongScaling.of: need seconds above 0, and 2 ranks or more; got {one_s:g} s, "
                f"{many_s:g} s and {ranks}. Try StrongScaling.of(2.0, 2, 1.25)."
            )
        shared_s = (one_s - many_s) / (1 - 1 / ranks)
        return cls(fixed_s=one_s - shared_s, shared_s=shared_s)

    def step_s(self, ranks: int) -> float:
        """Return the seconds of a step on this many ranks."""
        return self.fixed_s + self.shared_s / ranks

    def efficiency_percent(self, ranks: int) -> float:
        """Return T_1 / (p T_p) in per cent."""
        return self.step_s(1) / (ranks * self.step_s(ranks)) * 100

    def most_ranks(self, percent: float) -> float:
        """Return the most ranks with at least this efficiency; infinity where nothing is fixed."""
        if self.fixed_s <= 0:
            return math.inf
        return math.floor((self.step_s(1) * 100 / percent - self.shared_s) / self.fixed_s)
