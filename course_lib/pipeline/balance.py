"""Cut a row of things into contiguous parts whose slowest is as fast as it can be.

Layers into stages, so that no stage holds up the pipeline; tokens into pieces. Notebook
08_pipeline.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise

from course_lib.core.errors import CourseError


def balance_stages(layer_times: Sequence[float], num_stages: int) -> list[int]:
    """How many layers each stage gets, so that the slowest stage is as fast as it can be.

    Layers stay in order and no stage is empty. Put the embedding's time in front of the layers' and
    the head's behind. The answer is exact.

    Raises: CourseError if there are fewer layers than stages, or a time below 0
    """
    return balanced_cuts(layer_times, num_stages)[-1]


def balanced_cuts(times: Sequence[float], most: int) -> list[list[int]]:
    """The best cut into 1, 2, ... `most` contiguous parts, each as the number of things a part.

    Dynamic programming: the best cut of the first n things into k parts ends with a part behind the
    best cut of fewer things into k - 1.
    """
    if not 1 <= most <= len(times):
        raise CourseError(
            f"balanced_cuts: need 1 to {len(times)} parts, as none may be empty; got {most}. "
            "Try fewer stages or pieces."
        )
    if min(times) < 0:
        raise CourseError(f"balanced_cuts: need times >= 0; got {min(times)}.")
    until = list(accumulate(times, initial=0.0))  # [n]: the time of the first n things
    slowest = until
    last_begins = [[0] * len(until)]
    for num_before in range(1, most):
        slowest, begins = _one_more_part(until, slowest, num_before)
        last_begins.append(begins)
    return [_read_back(last_begins[:count], len(times)) for count in range(1, most + 1)]


def _one_more_part(
    until: Sequence[float], slowest: Sequence[float], num_before: int
) -> tuple[list[float], list[int]]:
    """The slowest part of the best cut of the first n things, and where its last part begins.

    A last part that begins later is faster, and those before it are slower: the best place is where
    the two meet, or one further. With more things that place only moves to the right.
    """
    best, begins = [0.0] * len(until), [0] * len(until)
    meet = num_before
    for end in range(num_before + 1, len(until)):
        while meet + 1 < end and slowest[meet + 1] <= until[end] - until[meet + 1]:
            meet += 1
        best[end], begins[end] = min(
            (max(slowest[place], until[end] - until[place]), place)
            for place in range(meet, min(meet + 2, end))
        )
    return best, begins


def _read_back(last_begins: Sequence[Sequence[int]], num_things: int) -> list[int]:
    """The number of things in each part, from where the last part of each cut begins."""
    ends = [num_things]
    for begins in reversed(last_begins):
        ends.append(begins[ends[-1]])
    return [after - before for before, after in pairwise(reversed(ends))]


def stage_times(layer_times: Sequence[float], num_layers: Sequence[int]) -> list[float]:
    """The time of each stage, when stage r has `num_layers[r]` of the layers."""
    ends = list(accumulate(num_layers, initial=0))
    return [sum(layer_times[before:after]) for before, after in pairwise(ends)]
