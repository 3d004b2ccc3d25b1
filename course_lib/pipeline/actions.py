"""What a pipeline schedule is made of, and what can be read off any schedule.

An action is what one stage does with one micro-batch; a schedule is a list of actions for each
rank. Which rank an action waits for, and whom it sends to, follows from where its layers lie.
Notebook 08_pipeline.
"""

from collections.abc import Sequence
from typing import NamedTuple

from course_lib.core.errors import CourseError

LETTERS = {"forward": "F", "backward": "B", "backward_input": "I", "backward_weight": "W"}


class ScheduleError(CourseError, ValueError):
    """A schedule that cannot be made, or that breaks a law of schedules."""


class Action(NamedTuple):
    """What a stage does with one micro-batch; with interleaving, in one of its model chunks.

    `kind` is forward, backward (the whole), backward_input or backward_weight (its halves). Rank r
    runs stage r. The layers lie in the order of `depth`: with p stages, chunk 0 of stages 0 to
    p - 1, then chunk 1 of stages 0 to p - 1, and so on.
    """

    kind: str
    stage: int
    micro_batch: int
    model_chunk: int = 0

    @property
    def label(self) -> str:
        """F3, B3, I3, W3; chunk 1 of the same micro-batch is F3.1."""
        chunk = f".{self.model_chunk}" if self.model_chunk else ""
        return f"{LETTERS.get(self.kind, self.kind)}{self.micro_batch}{chunk}"

    def depth(self, num_stages: int) -> int:
        """Where its layers lie in the model: 0 holds the embedding, the last one the loss."""
        return self.model_chunk * num_stages + self.stage


Schedule = list[list[Action]]


def num_model_chunks_of(schedule: Schedule) -> int:
    """How many model chunks each rank holds."""
    return 1 + max((action.model_chunk for actions in schedule for action in actions), default=0)


def source_of(action: Action, num_stages: int, num_model_chunks: int = 1) -> int | None:
    """The rank whose output the action waits for; None at the ends of the model.

    A forward takes the output of the layers before, a backward the gradient of those after; a
    backward_weight needs nothing from elsewhere.
    """
    depth = action.depth(num_stages)
    if action.kind == "forward":
        return (action.stage - 1) % num_stages if depth > 0 else None
    if action.kind == "backward_weight" or depth == num_stages * num_model_chunks - 1:
        return None
    return (action.stage + 1) % num_stages


def target_of(action: Action, num_stages: int, num_model_chunks: int = 1) -> int | None:
    """The rank that takes what the action puts out; None at the ends of the model."""
    depth = action.depth(num_stages)
    if action.kind == "forward":
        last = depth == num_stages * num_model_chunks - 1
        return None if last else (action.stage + 1) % num_stages
    if action.kind == "backward_weight" or depth == 0:
        return None
    return (action.stage - 1) % num_stages


def sent_from_to(schedule: Schedule, sender: int, receiver: int) -> list[Action]:
    """The sender's actions whose output goes to the receiver, in the order in which it leaves.

    Messages between two ranks match by their order where there are no tags: the receiver has to
    take them in this order. All schedules of `schedules.py` need them in this order too.
    """
    num_model_chunks = num_model_chunks_of(schedule)
    return [
        action
        for action in schedule[sender]
        if target_of(action, len(schedule), num_model_chunks) == receiver
    ]


def in_flight(actions: Sequence[Action]) -> list[int]:
    """How many micro-batches a rank holds activations of, after each of its actions.

    One comes with a forward and goes with the backward, or with its weight half. With model chunks
    each chunk of a micro-batch counts.
    """
    counts, held = [], 0
    for action in actions:
        held += {"forward": 1, "backward_input": 0}.get(action.kind, -1)
        counts.append(held)
    return counts


def as_text(schedule: Schedule) -> str:
    """The schedule as lines: `rank 0  F0 F1 B0 F2 B1 B2`."""
    return "\n".join(
        f"rank {rank}  " + " ".join(action.label for action in actions)
        for rank, actions in enumerate(schedule)
    )
