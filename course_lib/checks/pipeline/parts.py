"""Tools of the checks of 08_pipeline: a learner's schedule as lists of actions."""

from collections.abc import Collection
from typing import Any

from course_lib.checks.exercise import Cause, failed
from course_lib.pipeline.actions import Action, Schedule

ACTIONS = Cause("Return for each rank a list of `Action`s, as in the text.")
KIND = Cause('The kinds are "forward" and "backward".')
STAGE = Cause("Rank r runs stage r: an Action's second entry is r.")
UNDER_WAY = Cause(
    "A send may read its tensor until wait() on its handle returns: wait first, or send a copy."
)
NO_HANDLE = Cause(
    "Only isend, irecv and a collective with async_op=True return a handle: no other call needs "
    "wait()."
)


def read_schedule(schedule: Any, kinds: Collection[str], kind_cause: Cause = KIND) -> Schedule:
    """Return a schedule as lists of actions.

    Raises: CheckFailed for what is none, and for an action of another kind
    """
    try:
        ranks = [list(actions) for actions in schedule]
    except TypeError:
        raise failed(f"got {str(schedule)[:80]}", ACTIONS) from None
    if other := [each for actions in ranks for each in actions if not isinstance(each, Action)]:
        raise failed(f"got {other[0]!r} for an action", ACTIONS)
    for rank, actions in enumerate(ranks):
        for action in actions:
            if action.kind not in kinds:
                raise failed(f"rank {rank} has an action of the kind {action.kind!r}", kind_cause)
    return ranks


def demand_own_stages(schedule: Schedule) -> None:
    """Check that each rank runs its own stage. Raises: CheckFailed"""
    for rank, actions in enumerate(schedule):
        for action in actions:
            if action.stage != rank:
                raise failed(f"rank {rank} has {action}", STAGE)
