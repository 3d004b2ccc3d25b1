"""All ranks do the same: one's error is everyone's, and rank 0's answer is everyone's answer.

Without a process group, or in a dry world, there is one rank, and the same lines run. Notebook
14_checkpoint.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from course_lib.collectives.group import Group
from course_lib.core.errors import CourseError
from course_lib.ranks.world import is_dry

T = TypeVar("T")


def has_others() -> bool:
    """Return whether there are other ranks to agree with."""
    return dist.is_initialized() and not is_dry()


def rank_in(group: Group) -> int:
    """Return this process's rank in the group; 0 without one."""
    return dist.get_rank(group) if has_others() else 0


def size_of(group: Group) -> int:
    """Return the number of ranks in the group; 1 without one."""
    return dist.get_world_size(group) if has_others() else 1


def from_all(make: Callable[[], T], group: Group) -> list[T]:
    """Return what `make()` returns on each rank, on all ranks.

    Cost:    one all_gather_object
    Raises:  CourseError on all ranks if one of them has raised it
    """
    mine, broken = _attempt(make, group)
    answers: list[Any] = [mine]
    if has_others():
        answers = [None] * size_of(group)
        dist.all_gather_object(answers, mine, group=group)
    return _all_well(answers, broken)


def from_first(make: Callable[[], T], group: Group) -> T:
    """Return on all ranks what `make()` returns on the group's first one, which alone runs it.

    Cost:    one broadcast_object_list
    Raises:  CourseError on all ranks if it has raised one
    """
    mine, broken = _attempt(make, group) if rank_in(group) == 0 else (None, None)
    answers: list[Any] = [mine]
    if has_others():
        dist.broadcast_object_list(answers, group=group, group_src=0)
    return _all_well(answers, broken)[0]


def _attempt(make: Callable[[], T], group: Group) -> tuple[Any, Exception | None]:
    """Return (value, problem to tell the others), and an error that is this rank's own."""
    try:
        return (make(), None), None
    except CourseError as error:
        return (None, str(error)), None
    except Exception as error:
        return (None, f"rank {rank_in(group)}: {type(error).__name__}: {error}"), error


def _all_well(answers: list[Any], broken: Exception | None) -> list[Any]:
    if broken:
        raise broken
    for _, problem in answers:
        if problem is not None:
            raise CourseError(problem)
    return [value for value, _ in answers]
