"""The result of a proof on a GPU: a number, its prediction, and the bounds that it must respect."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any


class NeedsGPUError(Exception):
    """The proof cannot run here; the message completes the sentence "it needs …"."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One measured number beside its prediction; the bounds `low` and `high` make it a proof.

    low, high   the least and the most that `measured` may be; without both it is a measurement,
                which is recorded and proves nothing
    """

    what: str
    measured: float
    predicted: float | None = None
    unit: str = ""
    low: float | None = None
    high: float | None = None

    @property
    def is_bounded(self) -> bool:
        """Whether the number could have failed."""
        return self.low is not None or self.high is not None

    @property
    def holds(self) -> bool:
        """Whether the number lies within its bounds; nan does not."""
        low = self.measured if self.low is None else self.low
        high = self.measured if self.high is None else self.high
        return low <= self.measured <= high

    def __str__(self) -> str:
        predicted = "" if self.predicted is None else f", predicted {self.predicted:.4g}"
        needs = [f"at least {self.low:.4g}"] if self.low is not None and not self.holds else []
        needs += [f"at most {self.high:.4g}"] if self.high is not None and not self.holds else []
        need = f" (need {' and '.join(needs)})" if needs else ""
        return f"{self.what}: {self.measured:.4g} {self.unit}".rstrip() + predicted + need

    def as_dict(self) -> dict[str, Any]:
        """Return the fields and what follows from them, for the record."""
        derived = {"holds": self.holds, "is_bounded": self.is_bounded, "text": str(self)}
        return {**asdict(self), **derived}


def equals(what: str, found: str, expected: str) -> Finding:
    """Return the finding that a word is the expected one: 1 where it is, 0 where it is not."""
    text = f"{what} is {found}, expected {expected} (1: yes)"
    return Finding(what=text, measured=float(found == expected), low=1.0)


@dataclass(frozen=True, kw_only=True)
class Proof:
    """A proof: `run(rehearsal)` yields findings; a rehearsal has sizes that suit a CPU.

    limit_s    time limit on a GPU; a proof that exceeds it is stopped
    on_cpu     it can be rehearsed without a GPU
    """

    name: str
    run: Callable[[bool], Iterator[Finding]]
    limit_s: float = 60.0
    on_cpu: bool = True
