"""Load balancing: partition items into contiguous parts so that the slowest is as fast as possible.

Layers into stages, because the slowest stage sets the pace of the pipeline; or the tokens of a
sequence into pieces. Notebook 08_pipeline.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise

from course_lib.core.errors import CourseError


def balance_stages(layer_times: Sequence[float], num_stages: int) -> list[int]:
    """Return the number of layers of each stage that makes the slowest stage as fast as possible.

    Layers stay in order and no stage is empty. Put the embedding's time before the layers' times
    and the head's after them. The answer is optimal.

    Raises: CourseError if there are fewer layers than stages, or a time below 0
    """
    return balanced_cuts(layer_times, num_stages)[-1]


def balanced_cuts(times: Sequence[float], most: int) -> list[list[int]]:
    """Return the best cut into 1, 2, ... `most` contiguous parts, each as a list of part sizes.

    Dynamic programming: the best cut of the first n items into k parts is the best cut of fewer
    items into k - 1 parts, and one more part.

    Raises: CourseError if `most` is not 1 to the number of items, or a time is below 0
    """
    if not 1 <= most <= len(times):
        raise CourseError(
            f"balanced_cuts: need 1 to {len(times)} parts, as none may be empty; got {most}. "
            "Try fewer stages or pieces."
        )
    if min(times) < 0:
        raise CourseError(f"balanced_cuts: need times >= 0; got {min(times)}.")
    until = list(accumulate(times, initial=0.0))  # [n]: the time of the first n items
    slowest = until
    last_begins = [[0] * len(until)]
    for num_before in range(1, most):
        slowest, begins = _one_more_part(until, slowest, num_before)
        last_begins.append(begins)
    return [_read_back(last_begins[:count], len(times)) for count in range(1, most + 1)]


def _one_more_part(
    until: Sequence[float], slowest: Sequence[float], num_before: int
) -> tuple[list[float], list[int]]:
    """Return, for the first n items, the slowest part of the best cut and the last part's start.

    The later the last part starts, the shorter it is and the longer are those before it: the best
    start is where the two times cross, or one further. As n grows, it only moves to the right.
    """
    best, begins = [0.0] * len(until), [0] * len(until)
    meet = num_before
    for end in range(num_before + 1, len(until)):
        while meet + 1 < end and slowest[meet + 1] <= until[end] - until[meet + 1]:
            meet += 1
        best[end], begins[end] = min(
            (max(slowest[start], until[end] - until[start]), start)
            for start in range(meet, min(meet + 2, end))
        )
    return best, begins


def _read_back(last_begins: Sequence[Sequence[int]], num_items: int) -> list[int]:
    """Return the number of items in each part, from where the last part of each cut starts."""
    ends = [num_items]
    for begins in reversed(last_begins):
        ends.append(begins[ends[-1]])
    return [after - before for before, after in pairwise(reversed(ends))]


def stage_times(layer_times: Sequence[float], num_layers: Sequence[int]) -> list[float]:
    """Return the time of each stage, when stage r has `num_layers[r]` of the layers."""
    ends = list(accumulate(num_layers, initial=0))
    return [sum(layer_times[before:after]) for before, after in pairwise(ends)]
