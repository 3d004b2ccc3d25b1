"""Tools for the checks of 00_ranks: several calls, whose results are kept to the last."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from course_lib.checks.ddp.parts import watched_handles
from course_lib.checks.exercise import Cause
from course_lib.checks.expect import difference
from course_lib.checks.expectations import Demand
from course_lib.checks.on_ranks import Observed, Trouble, watch

KEEPS = Cause(
    "Keep nothing from one call to the next, no numbers and no buffer: make a new tensor in each."
)
ELSEWHERE = "of another call"  # stands for a wrong value that this call cannot lead to
STILL_THERE = Demand(
    lambda at: not at.seen.overwritten, "a later call changes what this one returned", KEEPS
)


def dropped(kind: str) -> Callable[[Trouble], bool]:
    """Return a predicate: whether the handle of a call of this kind was not kept."""
    return lambda trouble: any(post.kind == kind for _, post in trouble.dropped)


@dataclass
class Returned(Observed):
    """Observation of one of several calls.

    `never_waited` is the number of its all-reduces that were never waited for, `overwritten` says
    whether a later call has changed what this one returned.
    """

    never_waited: int = 0
    overwritten: bool = False


def watch_in_turn(
    answer: Callable[..., Any], arguments: Mapping[str, Sequence[Any]]
) -> dict[str, Returned]:
    """Watch `answer(x, ...)` once for each label, with its arguments; keep all that it returns."""
    results, seen = dict[str, Any](), dict[str, Returned]()
    for label, (x, *others) in arguments.items():

        def noted(*given: Any, label: str = label) -> Any:
            results[label] = answer(*given)
            return results[label]

        with watched_handles() as open_ones:
            one = watch(noted, x, *others, x=x)
        seen[label] = Returned(**vars(one), never_waited=len(open_ones))
    for label, one in seen.items():
        if isinstance(one.value, Tensor):
            one.overwritten = bool(difference(results[label], one.value)[0])
    return seen
