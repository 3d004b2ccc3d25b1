"""Actions and schedules of a pipeline: the data structures, and what follows from them.

An action is one step of work of a stage on one micro-batch, such as its forward; a schedule is a
list of actions for each rank. From which rank an action receives, and to which it sends, follows
from the position of its layers in the model, and from the placement: the rank of each position.
Notebook 08_pipeline.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

from course_lib.core.errors import CourseError

LETTERS = {"forward": "F", "backward": "B", "backward_input": "I", "backward_weight": "W"}


class ScheduleError(CourseError, ValueError):
    """Error: a schedule that cannot be built, or that breaks a rule of schedules."""


class Action(NamedTuple):
    """Work of a stage on one micro-batch; with interleaving, in one of its model chunks.

    `kind` is forward, backward (the whole), or backward_input and backward_weight (its two parts,
    in papers also B and W, or dgrad and wgrad). The layers are in the order of `depth`: with p
    stages, chunk 0 of stages 0 to p - 1, then chunk 1 of stages 0 to p - 1, ... Rank r runs stage
    r; in a V (`v_placement`) it runs stage r of chunk 0, and stage p - 1 - r of chunk 1.
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


# --- placement: the rank of each model chunk, in the order of the layers


def loop_placement(num_ranks: int, num_model_chunks: int = 1) -> list[int]:
    """Return 0, 1, ..., p - 1 once for each model chunk: the layers go round the ranks."""
    return [*range(num_ranks)] * num_model_chunks


def v_placement(num_ranks: int) -> list[int]:
    """Return 0, 1, ..., p - 1, p - 1, ..., 1, 0: the layers go to the last rank and back.

    Rank r holds the chunks r and 2p - 1 - r, so rank 0 has both ends of the model.

    Source: Qi et al. 2024 (Zero bubble pipeline parallelism), section 6
    """
    return [*range(num_ranks), *reversed(range(num_ranks))]


def placement_of(schedule: Schedule) -> list[int]:
    """Return the rank of each model chunk, by depth: the one whose list has its actions."""
    placement = loop_placement(len(schedule), num_model_chunks_of(schedule))
    for rank, actions in enumerate(schedule):
        for stage, model_chunk in {(action.stage, action.model_chunk) for action in actions}:
            placement[model_chunk * len(schedule) + stage] = rank
    return placement


def depths_of(rank: int, placement: Sequence[int]) -> list[int]:
    """Return the positions of a rank's model chunks in the order of the layers."""
    return [depth for depth, holder in enumerate(placement) if holder == rank]


def source_of(
    action: Action, num_stages: int, placement: Sequence[int] | None = None
) -> int | None:
    """Return the rank whose output the action waits for; None at the ends of the model.

    A forward needs the output of the layers before it, a backward the gradient from the layers
    after it; a backward_weight needs no message. Without `placement`, rank r runs stage r.
    """
    step = {"forward": -1, "backward_weight": None}.get(action.kind, 1)
    return _rank_at(action, num_stages, placement, step)


def target_of(
    action: Action, num_stages: int, placement: Sequence[int] | None = None
) -> int | None:
    """Return the rank that receives the action's output; None at the ends of the model."""
    step = {"forward": 1, "backward_weight": None}.get(action.kind, -1)
    return _rank_at(action, num_stages, placement, step)


def _rank_at(
    action: Action, num_stages: int, placement: Sequence[int] | None, step: int | None
) -> int | None:
    """Return the rank so many depths from the action's layers; None outside the model."""
    placement = range(num_stages) if placement is None else placement
    if step is None or not 0 <= action.depth(num_stages) + step < len(placement):
        return None
    return placement[action.depth(num_stages) + step]


def sent_from_to(schedule: Schedule, sender: int, receiver: int) -> list[Action]:
    """Return the sender's actions whose output goes to the receiver, in the order of the sends.

    Without tags, messages between two ranks match by their order, so the receiver has to receive
    them in this order. All schedules of `schedules.py` also need them in this order; those in a V
    do not: they need a gradient of chunk 1 before a forward of chunk 0 that was sent earlier.
    """
    placement = placement_of(schedule)
    return [
        action
        for action in schedule[sender]
        if target_of(action, len(schedule), placement) == receiver
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


def read_schedule(text: str, placement: Sequence[int] | None = None) -> Schedule:
    """Return the schedule in the lines of `as_text`: `rank 0  F0 F1 B0 F2.1`.

    placement   the rank of each model chunk, such as `v_placement(p)`; None: the layers go round

    Raises: ScheduleError for a line or an action that is none
    """
    lines = [line.split() for line in text.splitlines() if line.strip()]
    schedule: Schedule = []
    for rank, words in enumerate(lines):
        if words[:2] != ["rank", str(rank)]:
            raise ScheduleError(f"need a line of rank {rank}; got {' '.join(words)[:40]!r}.")
        schedule.append([_read_action(label, rank, len(lines), placement) for label in words[2:]])
    return schedule


def _read_action(label: str, rank: int, p: int, placement: Sequence[int] | None) -> Action:
    found = re.fullmatch(r"([FBIW])(\d+)(?:\.(\d+))?", label)
    if not found:
        raise ScheduleError(
            f"rank {rank}: need an action such as F0, B2 or W1.1; got {label[:20]}."
        )
    chunk = int(found[3] or 0)
    depths = depths_of(rank, placement or loop_placement(p, chunk + 1))
    if chunk >= len(depths):
        raise ScheduleError(
            f"rank {rank}: need one of {len(depths)} model chunks; got {label[:20]}."
        )
    kind = next(kind for kind, letter in LETTERS.items() if letter == found[1])
    return Action(kind, depths[chunk] % p, int(found[2]), chunk)
