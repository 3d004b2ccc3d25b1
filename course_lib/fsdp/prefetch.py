"""FSDP's prefetch: the order of the units, recorded in one pass and used in the next.

Before a unit computes, `FSDP._use` waits for its all_gather and launches that of the unit which
followed it in the last pass: it overlaps with this unit's computation. Forward and backward have an
order each; the first pass only records. Notebook 10_fsdp.
"""

from itertools import pairwise

from course_lib.fsdp.units import Unit


class UnitOrder:
    """The unit that follows each unit: recorded during a pass, used in the next one."""

    def __init__(self) -> None:
        self.following: dict[Unit, Unit] = {}
        self.visits: list[Unit] = []
        self.used: list[Unit] = []  # in the last pass, each once, by its first use

    def visit(self, unit: Unit) -> Unit | None:
        """Record the use of a unit; return the unit that followed it in the last pass, if any."""
        if self.visits and self.visits[-1] is unit:
            return None
        self.visits.append(unit)
        return self.following.get(unit)

    def end_pass(self) -> None:
        """Use the order of the pass that ends from now on."""
        if self.visits:
            self.following = dict(pairwise(self.visits))
            self.used = list(dict.fromkeys(self.visits))
        self.visits = []
