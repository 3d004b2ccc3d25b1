"""Run an answer on ranks; what they show, or the trouble they had, is plain data to judge."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from course_lib.checks.exercise import Cause, CheckFailed, NotJudged
from course_lib.checks.expect import SYMPTOMS, on_ranks
from course_lib.checks.limits import COMPUTING_S, Endless, at_most, little_memory
from course_lib.core import COMMUNICATION_KINDS, Event
from course_lib.ranks import RankError, Ranks

ENDLESS = Cause("Does a loop never end? The line below is where it was.")
TWO_DTYPES = Cause(
    "Two dtypes meet in one call: keep that of what you were given, and make buffers with "
    "empty_like or new_empty."
)
DTYPE = Cause("Keep the dtype of what you were given: make buffers with empty_like or new_empty.")
OF_DTYPES = "dtype|TensorOptions|output type"  # what PyTorch and gloo say of two dtypes
IN_STEP = "in the watched step: "  # begins the note of an error
WORLDS = (3, 2, 4, 1)  # three ranks first: on two, wrong answers look alike


@dataclass(frozen=True)
class Trouble:
    """Failure of a run on the ranks, as plain data: see RankError.

    `failures` are the name and the text of what each rank raised, `step` is the watched step in
    which one did, if there was one.
    """

    kind: str
    failures: Mapping[int, tuple[str, str]]
    text: str
    step: str = ""

    def says(self, pattern: str) -> bool:
        """Return whether the pattern is found in what the ranks raised."""
        told = (f"{name}: {text}" for name, text in self.failures.values())
        return any(re.search(pattern, each) for each in told)


@dataclass(frozen=True)
class Run:
    """One run on one world: the facets of each step on each rank; or the trouble it had."""

    world_size: int
    options: Mapping[str, Any]
    by_rank: Sequence[Mapping[str, Any]] = ()
    trouble: Trouble | None = None


def copied(value: Any) -> Any:
    """Return a copy of the tensors in lists, tuples and dicts; everything else as it is."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, list | tuple):
        return [copied(each) for each in value]
    if isinstance(value, dict):
        return {key: copied(each) for key, each in value.items()}
    return value


def calls_of(events: Iterable[Event]) -> list[Event]:
    """Return the communication calls among events, in the order in which they started."""
    calls = (event for event in events if event.kind in COMMUNICATION_KINDS)
    return sorted(calls, key=lambda event: event.start_s)


def run_on(
    ranks: Ranks, observe: Callable[..., Any], answer: Any, options: Mapping[str, Any]
) -> Run:
    """Call `observe(rank, answer, **options)` on each rank; return what they saw, or their trouble.

    Raises: NotJudged where the ranks were stopped
    """
    try:
        by_rank = ranks.run(_limited, COMPUTING_S, observe, answer, options)
    except RankError as error:
        if error.kind == "stopped":
            where = on_ranks(ranks.world_size)
            raise NotJudged(f"{where}, it had not ended.\n{error}") from None
        step = next(filter(None, map(_step_of, error.tracebacks.values())), "")
        trouble = Trouble(error.kind, error.failures, str(error), step)
        return Run(ranks.world_size, options, trouble=trouble)
    return Run(ranks.world_size, options, by_rank)


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
