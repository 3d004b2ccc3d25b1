"""Expectations of an answer on ranks: its numbers, its calls and their bytes, its memory.

An expectation is called with an `At` (course_lib.checks.on_ranks): what one rank observed under one
label. It raises CheckFailed where it is not met, with the cause that explains what was seen.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from course_lib.checks.exercise import Cause
from course_lib.checks.expect import difference
from course_lib.checks.on_ranks import At

CALLERS = Cause("It belongs to the caller: work on a clone.")
Value = str | Callable[[At], Any]
SHAPE = Cause("Compare the shapes before the numbers: print .shape of what you return.")
DTYPE = Cause("Keep the dtype of what you were given: nothing else is wrong yet.")
KEEPS = Cause(
    "The first call was right; keep nothing for the next one, no numbers and no buffer: every call "
    "returns new tensors."
)
DIGITS_LOST = Cause("Something on the way had fewer digits: use the dtype of what you were given.")
LENGTH = Cause("Count them: one is missing, or one is too many.")
NO_RESULT = Cause("Does your function return its result?")


def read(at: At, value: Value) -> Any:
    """Return what an expectation is about: an attribute of what was seen, or a function of At."""
    return getattr(at.seen, value) if isinstance(value, str) else value(at)


@dataclass(frozen=True)
class Numbers:
    """Demand numbers: a tensor, or a list of them whose items are called `names(at)`.

    Type, shape, dtype and device are judged before the numbers; these may differ by `rtol`, the
    relative difference that rounding explains (a number, or a function of At). Each cause comes
    with the wrong value that it leads to, a function of At; one that fits on every rank goes before
    one that fits on this rank only. Where the first difference is in an item of a list, causes are
    compared in that item. `predicates` are functions of (At, the item, its number) that are asked
    before the causes; `otherwise` after them. `look` is told last.
    """

    value: Value
    right: Callable[[At], Any]
    causes: Sequence[tuple[Cause, Callable[[At], Any]]] = ()
    what: str = ""
    rtol: float | Callable[[At], float] = 0.0
    look: Cause | Callable[[At], Cause] | None = None
    names: Callable[[At], Sequence[str]] | None = None
    shape: Cause = SHAPE
    dtype: Cause = DTYPE
    predicates: Sequence[tuple[Callable[..., bool], Cause]] = ()
    otherwise: Sequence[tuple[Callable[..., bool], Cause]] = ()

    def __call__(self, at: At) -> None:
        """Raise CheckFailed at the first difference."""
        got, need = read(at, self.value), self.right(at)
        if not isinstance(need, list):
            self._compare(at, got, need, None)
            return
        if not isinstance(got, list) or len(got) != len(need):
            count = len(got) if isinstance(got, list) else "something else"
            at.fail(f"need a list of {len(need)} {self.what or 'tensors'}; got {count}", LENGTH)
        for item in range(len(need)):
            self._compare(at, got[item], need[item], item)

    def _compare(self, at: At, got: Any, need: Any, item: int | None) -> None:
        kind, words = difference(got, need, self._rtol(at))
        if kind:
            name = "" if item is None else f"{self.names(at)[item] if self.names else item}: "
            what = f" {self.what}" if self.what and kind != "none" else ""
            words = words.replace("need ", f"need{what} ", 1) if what else words
            at.fail(f"{name}{words}", self._cause(at, kind, got, item))

    def _cause(self, at: At, kind: str, got: Any, item: int | None) -> Cause | None:
        for fits, cause in self.predicates:
            if _holds(fits, at, got, item):
                return cause
        here = [(c, wrong) for c, wrong in self.causes if self._leads_to(wrong, at, item)]
        for cause, wrong in here:
            if all(self._leads_to(wrong, other, item) for other in at.everyone):
                return cause
        known = {"none": NO_RESULT, "shape": self.shape, "dtype": self.dtype, "digits": DIGITS_LOST}
        if here or kind in known:
            return here[0][0] if here else known[kind]
        for fits, cause in self.otherwise:
            if _holds(fits, at, got, item):
                return cause
        return self.look(at) if callable(self.look) else self.look

    def _leads_to(self, wrong: Callable[[At], Any], at: At, item: int | None) -> bool:
        """Return whether this wrong value is what the rank got."""
        try:
            got, value = read(at, self.value), wrong(at)
            got, value = (x if item is None else x[item] for x in (got, value))
        except (IndexError, TypeError):
            return False
        return not difference(got, value, self._rtol(at))[0]

    def _rtol(self, at: At) -> float:
        return self.rtol(at) if callable(self.rtol) else self.rtol


def _holds(fits: Callable[..., bool], *seen: Any) -> bool:
    """Return whether a predicate holds; one that cannot tell says no."""
    try:
        return bool(fits(*seen))
    except (TypeError, ValueError, RuntimeError, IndexError, AttributeError):
        return False


@dataclass(frozen=True)
class Demand:
    """Demand that something holds; `says` is what was seen where it does not."""

    holds: Callable[[At], bool]
    says: str | Callable[[At], str]
    cause: Cause

    def __call__(self, at: At) -> None:
        """Raise CheckFailed where it does not hold."""
        if not self.holds(at):
            at.fail(self.says if isinstance(self.says, str) else self.says(at), self.cause)


@dataclass(frozen=True)
class Calls:
    """Demand the communication calls: `right(at)` lists their (kind, bytes) in order.

    Each symptom is a predicate of (the bytes of the calls, those that are needed) and its cause.
    """

    right: Callable[[At], Sequence[tuple[str, int]]]
    other_kind: Cause
    symptoms: Sequence[tuple[Callable[[list[int], list[int]], bool], Cause]] = ()
    look: Cause | None = None
    value: Value = "calls"

    def __call__(self, at: At) -> None:
        """Raise CheckFailed where a call is missing, too many, of another kind or size."""
        need, calls = self.right(at), read(at, self.value)
        kinds = {kind for kind, _ in need}
        other = next((call for call in calls if call.kind not in kinds), None)
        if other and need:
            at.fail(f"calls {other.kind}; need {' and '.join(sorted(kinds))}", self.other_kind)
        got = [(call.kind, call.num_bytes) for call in calls]
        if got != list(need):
            sizes = [num_bytes for _, num_bytes in got], [num_bytes for _, num_bytes in need]
            cause = next((c for fits, c in self.symptoms if fits(*sizes)), self.look)
            at.fail(f"calls {_listed(got)}; need {_listed(need)}", cause)


def _listed(calls: Sequence[tuple[str, int]]) -> str:
    """Format calls: `all_reduce of 40, 16 bytes`."""
    by_kind: dict[str, list[str]] = {}
    for kind, num_bytes in calls:
        by_kind.setdefault(kind, []).append(str(num_bytes))
    words = (f"{kind} of {', '.join(sizes)} bytes" for kind, sizes in by_kind.items())
    return " and ".join(words) or "nothing"


@dataclass(frozen=True)
class Traffic:
    """Demand that a rank sends no more messages and bytes than the budget in the text."""

    cause: Cause
    max_messages: Callable[[At], int] | None = None
    max_bytes: Callable[[At], int] | None = None
    value: Value = "events"

    def __call__(self, at: At) -> None:
        """Raise CheckFailed where a rank sends more."""
        sizes = [event.num_bytes for event in read(at, self.value) if event.kind == "send"]
        budgets = (self.max_messages, len(sizes), "messages"), (self.max_bytes, sum(sizes), "bytes")
        for budget, got, unit in budgets:
            if budget and got > budget(at):
                at.fail(f"sends {got} {unit}; the budget is {budget(at)}", self.cause)


@dataclass(frozen=True)
class OnlyKinds:
    """Demand that the ranks communicate with calls of these kinds only."""

    kinds: tuple[str, ...]
    cause: Cause
    value: Value = "calls"

    def __call__(self, at: At) -> None:
        """Raise CheckFailed at the first call of another kind."""
        for call in read(at, self.value):
            if call.kind not in self.kinds:
                need = " and ".join(self.kinds) or "no communication"
                at.fail(f"calls {call.kind}; this exercise is for {need}", self.cause)


@dataclass(frozen=True)
class Bytes:
    """Demand that something takes at most so many bytes."""

    value: Value
    at_most: Callable[[At], int]
    cause: Cause
    what: str = "it keeps"

    def __call__(self, at: At) -> None:
        """Raise CheckFailed where there are more."""
        got, most = read(at, self.value), self.at_most(at)
        if got > most:
            at.fail(f"{self.what} {got} bytes; need at most {most}", self.cause)


@dataclass(frozen=True)
class Untouched:
    """Demand that the caller's tensors still hold what they held: see `Observed.changed`."""

    cause: Cause = CALLERS

    def __call__(self, at: At) -> None:
        """Raise CheckFailed where an input was written to."""
        if at.seen.changed:
            at.fail(f"{' and '.join(at.seen.changed)} has changed", self.cause)


@dataclass(frozen=True)
class Lasting:
    """Demand that what a call returned is left as it was by the calls that follow it."""

    cause: Cause = KEEPS

    def __call__(self, at: At) -> None:
        """Raise CheckFailed where it has other numbers at the end of the run."""
        pairs = zip(_flat(at.seen.at_the_end), _flat(at.seen.value), strict=True)
        if any(difference(now, before)[0] for now, before in pairs):
            at.fail("what this call returned has changed by the end", self.cause)


def _flat(value: Any) -> list[Any]:
    """Return the values in lists and dicts, one after another."""
    if isinstance(value, dict):
        value = list(value.values())
    return [x for each in value for x in _flat(each)] if isinstance(value, list) else [value]
