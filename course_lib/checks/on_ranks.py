"""Judge an answer that runs on ranks: what it computes, calls, sends, keeps, and when.

    OnRanks(observe=train, worlds=(3, 2, 4, 1), expect=(
        Numbers("grads", mean_of, causes=[(SUMMED, lambda at: mean_of(at) * at.world_size)]),
        Calls(bucket_bytes), Demand(lambda at: not at.seen.never_waited, NOT_ALL_WAITED)))

`observe` is a function of the check that runs on each rank and calls the learner's answer. It
returns plain data, which the expectations then judge in turn, in any process.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor

from course_lib.checks.exercise import Cause, CheckFailed, Exercise, NotDone, failed
from course_lib.checks.expect import SYMPTOMS, difference, on_ranks
from course_lib.core import COMMUNICATION_KINDS, Event
from course_lib.ranks import RankError, Ranks, record

WORLDS = (3, 2, 4, 1)  # three ranks first: on two, wrong answers look alike


# --- what is observed


@dataclass(frozen=True)
class Trouble:
    """What went wrong on the ranks, as plain data: see RankError."""

    kind: str
    failures: Mapping[int, tuple[str, str]]
    waits: Sequence[Any]
    dropped: Sequence[Any]
    text: str

    def says(self, pattern: str) -> bool:
        """Return whether the pattern is found in what the ranks raised; an empty one always is."""
        return not pattern or any(
            re.search(pattern, f"{name}: {text}") for name, text in self.failures.values()
        )


@dataclass(frozen=True)
class Run:
    """One run on one world: what each rank observed, by label; or the trouble it had."""

    world_size: int
    options: Mapping[str, Any]
    by_rank: Sequence[Mapping[str, Any]] = ()
    trouble: Trouble | None = None


@dataclass
class Observed:
    """What `watch` noted about one call of an answer, on one rank.

    `value` is a copy of what it returned, `changed` and `aliased` name the inputs that it wrote to
    and whose memory it returned, `held_bytes` is what the returned tensor keeps alive.
    """

    value: Any
    events: list[Event] = field(default_factory=list)
    changed: tuple[str, ...] = ()
    aliased: tuple[str, ...] = ()
    held_bytes: int = 0

    @property
    def calls(self) -> list[Event]:
        """The communication calls, in the order in which they started."""
        return calls_of(self.events)


def watch(answer: Callable[..., Any], *arguments: Any, **inputs: Tensor) -> Observed:
    """Call `answer(*arguments)` on a rank; note its calls and what it did to the named inputs."""
    before = {name: tensor.detach().clone() for name, tensor in inputs.items()}
    with record() as log:
        value = answer(*arguments)
    seen = Observed(copied(value), list(log.events))
    seen.changed = tuple(n for n, old in before.items() if not torch.equal(inputs[n], old))
    if isinstance(value, Tensor):
        memory = value.untyped_storage().data_ptr()
        seen.held_bytes = value.untyped_storage().nbytes()
        seen.aliased = tuple(
            n for n, t in inputs.items() if memory and t.untyped_storage().data_ptr() == memory
        )
    return seen


def copied(value: Any) -> Any:
    """Return a copy of the tensors in lists, tuples and dicts; everything else as it is."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, list | tuple):
        return [copied(each) for each in value]
    return {k: copied(v) for k, v in value.items()} if isinstance(value, dict) else value


def calls_of(events: Iterable[Event]) -> list[Event]:
    """Return the communication calls among events, in the order in which they started."""
    calls = (event for event in events if event.kind in COMMUNICATION_KINDS)
    return sorted(calls, key=lambda event: event.start_s)


# --- the check


@dataclass(frozen=True, kw_only=True)
class OnRanks:
    """A check of an answer that runs on ranks.

    `observe(rank, answer, **options)` returns what it saw by label ("step 1"); `runs(world_size)`
    gives the options of the runs on a world. Each expectation is called with an `At`, and raises
    CheckFailed: they judge label by label, rank by rank. `trouble` has the causes of ranks that
    hang, raise or disagree: (kind, a pattern in what they raised or a predicate of the `Trouble`,
    the cause).
    """

    observe_on_rank: Callable[..., Mapping[str, Any]]
    expect: Sequence[Callable[["At"], None]]
    success: str
    worlds: Sequence[int] = WORLDS
    runs: Callable[[int], Sequence[Mapping[str, Any]]] = lambda _world_size: ({},)
    trouble: Sequence[tuple[str, str | Callable[[Trouble], bool], Cause]] = ()

    def observe(self, answer: Any) -> Iterator[Run]:
        """Run the answer on each world in turn; yield what the ranks observed, run by run."""
        for world_size in self.worlds:
            with Ranks(world_size) as ranks:
                for options in self.runs(world_size):
                    yield self._run(ranks, answer, options)

    def _run(self, ranks: Ranks, answer: Any, options: Mapping[str, Any]) -> Run:
        try:
            by_rank = ranks.run(self.observe_on_rank, answer, **options)
        except RankError as error:
            trouble = Trouble(
                error.kind, error.failures, error.waits, error.report.dropped, str(error)
            )
            return Run(ranks.world_size, options, trouble=trouble)
        return Run(ranks.world_size, options, by_rank)

    def judge(self, observed: Iterable[Run], exercise: Exercise) -> str:
        """Demand every expectation of every run; return the line of success."""
        del exercise  # the expectations hold the right numbers
        for run in observed:
            if run.trouble:
                raise self._told(run.trouble, run.world_size)
            for number, label in enumerate(run.by_rank[0]):
                for rank in range(run.world_size):
                    for expectation in self.expect:
                        expectation(At(run, rank, label, number))
        return self.success

    def _told(self, trouble: Trouble, world_size: int) -> CheckFailed | NotDone:
        """Translate trouble into what it means for an answer, with the ranks' own report below."""
        for name, text in trouble.failures.values():
            if name == "NotImplementedError":
                return NotDone(text)
        cause = next((c for kind, fits, c in self.trouble if _fits(trouble, kind, fits)), None)
        cause = cause and cause.of(p=world_size)
        seen = f"{on_ranks(world_size)}, {SYMPTOMS[trouble.kind]} {cause or ''}".rstrip()
        return CheckFailed(f"{seen}\n{trouble.text}", cause)


def _fits(trouble: Trouble, kind: str, fits: str | Callable[[Trouble], bool]) -> bool:
    if trouble.kind != kind:
        return False
    return trouble.says(fits) if isinstance(fits, str) else fits(trouble)


# --- expectations


@dataclass(frozen=True)
class At:
    """Where an expectation looks: at what one rank observed under one label of one run."""

    run: Run
    rank: int
    label: str
    number: int = 0

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return self.run.world_size

    @property
    def options(self) -> Mapping[str, Any]:
        """What the run was started with."""
        return self.run.options

    @property
    def seen(self) -> Any:
        """What this rank observed."""
        return self.run.by_rank[self.rank][self.label]

    @property
    def everyone(self) -> list["At"]:
        """The same label on every rank."""
        return [At(self.run, rank, self.label, self.number) for rank in range(self.world_size)]

    @property
    def where(self) -> str:
        """Format the place: `rank 1 of 3, step 2`."""
        return f"rank {self.rank} of {self.world_size}" + (f", {self.label}" if self.label else "")

    def fail(self, what: str, cause: Cause | None = None, **values: Any) -> NoReturn:
        """Raise CheckFailed: where, what was seen, and the cause with its values filled in."""
        raise failed(f"{self.where}: {what}", cause, p=self.world_size, rank=self.rank, **values)


CALLERS = Cause("It belongs to the caller: work on a clone.")
Value = str | Callable[[At], Any]
SHAPE = Cause("Compare the shapes before the numbers: print .shape of what you return.")
DTYPE = Cause("Keep the dtype of what you were given: nothing else is wrong yet.")
DIGITS_LOST = Cause("Digits were lost on the way: compute in the dtype of what you were given.")
LENGTH = Cause("Count them: one is missing, or one is too many.")
NO_RESULT = Cause("Does your function return its result?")


def read(at: At, value: Value) -> Any:
    """Return what an expectation is about: an attribute of what was seen, or a function of At."""
    return getattr(at.seen, value) if isinstance(value, str) else value(at)


@dataclass(frozen=True)
class Numbers:
    """Demand numbers: a tensor, or a list of them whose items are called `names(at)`.

    Type, shape, dtype and device are judged before the numbers. Each cause comes with the wrong
    value that it leads to, a function of At; one that fits
    on every rank goes before one that fits on this rank only. Where the first difference is in an
    item of a list, causes are compared in that item. `predicates` are functions of (At, the item,
    its number) that are asked before the causes; `otherwise` after them. `look` is told last.
    """

    value: Value
    right: Callable[[At], Any]
    causes: Sequence[tuple[Cause, Callable[[At], Any]]] = ()
    what: str = ""
    rtol: float = 0.0
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
        kind, words = difference(got, need, self.rtol)
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
        return not difference(got, value, self.rtol)[0]


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
        """Raise CheckFailed where an input was written to, or is returned itself."""
        if at.seen.changed:
            at.fail(f"{' and '.join(at.seen.changed)} has changed", self.cause)
