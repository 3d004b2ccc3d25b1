"""Actions and schedules of a pipeline: the data structures, and what follows from them.

An action is one step of work of a stage on one micro-batch, such as its forward; a schedule is a
list of actions for each rank. From which rank an action receives, and to which it sends, follows
from the position of its layers in the model. Notebook 08_pipeline.
"""

from collections.abc import Sequence
from typing import NamedTuple

from course_lib.core.errors import CourseError

LETTERS = {"forward": "F", "backward": "B", "backward_input": "I", "backward_weight": "W"}


class ScheduleError(CourseError, ValueError):
    """Error: a schedule that cannot be built, or that breaks a rule of schedules."""


class Action(NamedTuple):
    """Work of a stage on one micro-batch; with interleaving, in one of its model chunks.

    `kind` is forward, backward (the whole), or backward_input and backward_weight (its two parts,
    in papers also B and W, or dgrad and wgrad). Rank r runs stage r. The layers are in the order
    of `depth`: with p stages, chunk 0 of stages 0 to p - 1, then chunk 1 of stages 0 to p - 1, ...
    """

    kind: str
    stage: int
    micro_batch: int
    model_chunk: int = 0

    @property
    def label(self) -> str:
        """Short name: F3, B3, I3, W3; chunk 1 of the same micro-batch is F3.1."""
        chunk = f".{self.model_chunk}" if self.model_chunk else ""
        return f"{LETTERS.get(self.kind, self.kind)}{self.micro_batch}{chunk}"

    def depth(self, num_stages: int) -> int:
        """Return the position of its layers in the model, 0 being the chunk with the embedding."""
        return self.model_chunk * num_stages + self.stage


Schedule = list[list[Action]]


def num_model_chunks_of(schedule: Schedule) -> int:
    """Return the number of model chunks on each rank."""
    return 1 + max((action.model_chunk for actions in schedule for action in actions), default=0)


def source_of(action: Action, num_stages: int, num_model_chunks: int = 1) -> int | None:
    """Return the rank whose output the action waits for; None at the ends of the model.

    A forward needs the output of the layers before it, a backward the gradient from the layers
    after it; a backward_weight needs no message.
    """
    depth = action.depth(num_stages)
    if action.kind == "forward":
        return (action.stage - 1) % num_stages if depth > 0 else None
    if action.kind == "backward_weight" or depth == num_stages * num_model_chunks - 1:
        return None
    return (action.stage + 1) % num_stages


def target_of(action: Action, num_stages: int, num_model_chunks: int = 1) -> int | None:
    """Return the rank that receives the action's output; None at the ends of the model."""
    depth = action.depth(num_stages)
    if action.kind == "forward":
        last = depth == num_stages * num_model_chunks - 1
        return None if last else (action.stage + 1) % num_stages
    if action.kind == "backward_weight" or depth == 0:
        return None
    return (action.stage - 1) % num_stages


def sent_from_to(schedule: Schedule, sender: int, receiver: int) -> list[Action]:
    """Return the sender's actions whose output goes to the receiver, in the order of the sends.

    Without tags, messages between two ranks match by their order, so the receiver has to receive
    them in this order. All schedules of `schedules.py` also need them in this order.
    """
    num_model_chunks = num_model_chunks_of(schedule)
    return [
        action
        for action in schedule[sender]
        if target_of(action, len(schedule), num_model_chunks) == receiver
    ]


def in_flight(actions: Sequence[Action]) -> list[int]:
    """Return the number of micro-batches in flight on a rank after each of its actions.

    A micro-batch is in flight from its forward until its backward, or its backward_weight: so long
    the rank holds its activations. With several model chunks, each chunk of it counts.
    """
    counts, count = [], 0
    for action in actions:
        count += {"forward": 1, "backward_input": 0}.get(action.kind, -1)
        counts.append(count)
    return counts


def as_text(schedule: Schedule) -> str:
    """Return the schedule as lines of text: `rank 0  F0 F1 B0 F2 B1 B2`."""
    return "\n".join(
        f"rank {rank}  " + " ".join(action.label for action in actions)
        for rank, actions in enumerate(schedule)
    )
