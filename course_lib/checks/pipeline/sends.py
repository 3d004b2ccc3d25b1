"""Watch what an answer does to a message while its send is under way."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch import Tensor

from course_lib.checks.exercise import Cause
from course_lib.checks.expectations import Demand
from course_lib.ranks.process_group import TracedGroup
from course_lib.ranks.work_handle import TrackedWork

UNDER_WAY = Cause(
    "A send may read its tensor until wait() on its handle returns: wait first, or send a copy."
)
NO_HANDLE = Cause(
    "Only isend, irecv and a collective with async_op=True return a handle: no other call needs "
    "wait()."
)

NOT_CHANGED_UNDER_WAY = Demand(
    lambda at: not at.seen.sends_changed,
    lambda at: (
        f"a tensor of shape {at.seen.sends_changed[0]} was changed before its isend had "
        "been waited for"
    ),
    UNDER_WAY,
)


@contextmanager
def watched_sends() -> Iterator[list[list[int]]]:
    """Yield the shapes of messages whose numbers changed between their isend and its wait."""
    send, wait, changed = TracedGroup.send, TrackedWork.wait, list[list[int]]()

    def sending(group: TracedGroup, tensors: list[Tensor], *to: Any) -> TrackedWork:
        before = _numbers(tensors[0])
        work: Any = send(group, tensors, *to)
        work.message = tensors[0], before  # as long as the handle, which holds the tensor anyway
        return work

    def waiting(work: Any, *args: Any, **kwargs: Any) -> bool:
        if message := vars(work).pop("message", None):
            tensor, before = message
            if _numbers(tensor) != before:
                changed.append(list(tensor.shape))
        return wait(work, *args, **kwargs)

    with patch.object(TracedGroup, "send", sending), patch.object(TrackedWork, "wait", waiting):
        yield changed


def _numbers(tensor: Tensor) -> str:
    """Return the numbers as text: two that are nan are equal."""
    return str(tensor.detach().tolist())
