"""Judge an answer that runs on ranks: observe it there, then hold what was seen to expectations.

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

from torch import Tensor

from course_lib.checks.exercise import Cause, CheckFailed, Exercise, NotDone, NotJudged, failed
from course_lib.checks.expect import SYMPTOMS, on_ranks
from course_lib.checks.limits import COMPUTING_S, Endless, at_most, little_memory
from course_lib.core import COMMUNICATION_KINDS, Event
from course_lib.ranks import RankError, Ranks, record

ENDLESS = Cause("Does a loop never end? The line below is where it was.")
TWO_DTYPES = Cause(
    "Two dtypes meet in one call: keep that of what you were given, and make buffers with "
    "empty_like or new_empty."
)
DTYPE = Cause("Keep the dtype of what you were given: make buffers with empty_like or new_empty.")
OF_DTYPES = "dtype|TensorOptions|output type"  # what PyTorch and gloo say of two dtypes
IN_STEP = "in the watched step: "  # begins the note of an error
WORLDS = (3, 2, 4, 1)  # three ranks first: on two, wrong answers look alike


# --- what is observed


@dataclass(frozen=True)
class Trouble:
    """Failure of a run on the ranks, as plain data: see RankError.

    `returned` are the ranks that had returned, `mismatched` the kinds of the calls that disagree;
    `step` is the watched step in which a rank raised, if there was one.
    """

    kind: str
    failures: Mapping[int, tuple[str, str]]
    waits: Sequence[Any]
    dropped: Sequence[Any]
    text: str
    returned: Sequence[int] = ()
    mismatched: Sequence[str] = ()
    step: str = ""

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
    """Observation of `watch` about one call of an answer, on one rank.

    `value` is a copy of what it returned, `at_the_end` what had become of that at the end of the
    run: another call may have written to it. `changed` and `aliased` name the inputs that it wrote
    to and whose memory it returned, `held_bytes` is what the returned tensor keeps alive.
    """

    value: Any
    at_the_end: Any = None
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
    seen = Observed(copied(value), _detached(value), list(log.events))
    seen.changed = tuple(n for n, old in before.items() if not _same(inputs[n], old))
    if isinstance(value, Tensor):
        memory = value.untyped_storage().data_ptr()
        seen.held_bytes = value.untyped_storage().nbytes()
        seen.aliased = tuple(
            n for n, t in inputs.items() if memory and t.untyped_storage().data_ptr() == memory
        )
    return seen


def _same(tensor: Tensor, old: Tensor) -> bool:
    """Return whether a tensor still holds the same numbers; nan is nan."""
    if (tensor.shape, tensor.dtype) != (old.shape, old.dtype):
        return False
    return bool(((tensor == old) | ((tensor != tensor) & (old != old))).all())


def copied(value: Any) -> Any:
    """Return a copy of the tensors in lists, tuples and dicts; everything else as it is."""
    return _each_tensor(value, lambda tensor: tensor.detach().clone())


def _detached(value: Any) -> Any:
    """Return the tensors themselves, without their graphs."""
    return _each_tensor(value, Tensor.detach)


def _each_tensor(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, list | tuple):
        return [_each_tensor(each, change) for each in value]
    if isinstance(value, dict):
        return {key: _each_tensor(each, change) for key, each in value.items()}
    return value


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
                    yield self.run_on(ranks, answer, options)

    def run_on(self, ranks: Ranks, answer: Any, options: Mapping[str, Any]) -> Run:
        """Run the answer once on these ranks; return what they observed, or their trouble."""
        try:
            by_rank = ranks.run(_limited, COMPUTING_S, self.observe_on_rank, answer, options)
        except RankError as error:
            if error.kind == "stopped":
                where = on_ranks(ranks.world_size)
                raise NotJudged(f"{where}, it had not ended.\n{error}") from None
            trouble = Trouble(
                error.kind,
                error.failures,
                error.waits,
                error.report.dropped,
                str(error),
                error.report.returned,
                [post.kind for _, post in error.report.mismatch],
                next(filter(None, map(_step_of, error.tracebacks.values())), ""),
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
        causes = [*self.trouble, ("raised", OF_DTYPES, TWO_DTYPES)]
        if trouble.kind == "raised" and trouble.says(OF_DTYPES):
            causes = [one for one in causes if "dtype" in str(one[1])]
        fitting = (c for kind, fits, c in causes if _fits(trouble, kind, fits))
        return told(trouble, world_size, next(fitting, None))


def told(trouble: Trouble, world_size: int, cause: Cause | None) -> CheckFailed:
    """Return the error that says what happened on the ranks and its cause; below, their report."""
    is_endless = trouble.says(f"{Endless.__name__}|^MemoryError")
    cause = ENDLESS if is_endless else cause
    cause = cause and cause.of(p=world_size)
    symptom = SYMPTOMS["endless" if trouble.says(Endless.__name__) else trouble.kind]
    where = ", ".join(filter(None, (on_ranks(world_size), trouble.step)))
    seen = f"{where}, {symptom} {cause or ''}".rstrip()
    return CheckFailed(f"{seen}\n{trouble.text}", cause)


def _step_of(trace: str) -> str:
    """Return the watched step that a traceback ends with the name of."""
    last = trace.rstrip().rpartition("\n")[2]
    return last.removeprefix(IN_STEP) if last.startswith(IN_STEP) else ""


def _limited(
    rank: int,
    limit_s: float,
    observe: Callable[..., Any],
    answer: Any,
    options: Mapping[str, Any],
) -> Any:
    """Observe the answer on this rank, which may compute for `limit_s`."""
    with at_most(limit_s, computing=True), little_memory():
        return observe(rank, answer, **options)


def _fits(trouble: Trouble, kind: str, fits: str | Callable[[Trouble], bool]) -> bool:
    if trouble.kind != kind:
        return False
    return trouble.says(fits) if isinstance(fits, str) else fits(trouble)


@dataclass(frozen=True)
class At:
    """Observation that an expectation judges: one rank, one label, one run."""

    run: Run
    rank: int
    label: str
    number: int = 0

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.run.world_size

    @property
    def options(self) -> Mapping[str, Any]:
        """Options that the run was started with."""
        return self.run.options

    @property
    def seen(self) -> Any:
        """The observations of this rank."""
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
