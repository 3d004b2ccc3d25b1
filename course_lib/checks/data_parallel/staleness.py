"""Exercise 5 of 05_data_parallel: the staleness of each update."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from course_lib.checks.cases import Case, Cases
from course_lib.checks.edits import Edit, Own
from course_lib.checks.exercise import Cause, Exercise, failed

ORDERS: tuple[list[int], ...] = (
    [1, 2, 3, 1, 2, 3],
    [1, 1, 1],
    [2, 2, 2, 1, 2, 1],
    [3, 1, 1, 2, 1, 1, 3, 2],
    [1, 2, 2, 2, 2, 2, 2, 2, 2, 2, 1],
    [5, 7, 6, 4, 4, 7, 5, 6],
    [30, 8],
    [],
    [1, 2, 3, 1, 2, 3],  # the first one again
)
CALLERS = Cause("The order is the caller's: read it, and take nothing out (or work on a copy).")
LEFT_OVER = Cause(
    "The same order gives another result in a later call: something is left over from the earlier "
    "ones. A default such as pulled_at={} is made once for all calls: make it inside the function."
)
NO_NUMBERS = Cause("Return a list of whole numbers, one for each update.")


def _cases() -> list[Case]:
    return [(f"order {order}", ([*order],)) for order in ORDERS]


def _numbers(found: Any, _order: list[int]) -> list[int]:
    """Return the numbers as a list; a tensor, an array and a tuple will do."""
    found = found.tolist() if isinstance(found, torch.Tensor | np.ndarray) else found
    if not isinstance(found, list | tuple):
        raise failed(f"got {type(found).__name__}", NO_NUMBERS)
    return list(found)


def _workers_between(order: Sequence[int]) -> list[int]:
    found = []
    for number, worker in enumerate(order):
        before = [*order[:number]][::-1]
        found.append(len({*before[: before.index(worker) if worker in before else number]}))
    return found


AGE, PULLS = "number - pulled_at.get(worker, 0)", "pulled_at[worker] = number + 1"

STALENESS = Exercise(
    key="data_parallel-5",
    title="staleness",
    library=("course_lib.data_parallel.cost:staleness_of",),
    check=Cases(
        cases=_cases,
        show=_numbers,
        symptoms=((lambda got, _need: got[0] != got[-1], LEFT_OVER),),
        unchanged=CALLERS,
        look="Take one update: where did its worker pull last? Count the updates after that.",
        success="Updates between pull and push, for 8 orders.",
    ),
    wrong=(
        Edit(
            AGE,
            "number - pulled_at.get(worker, 0) + 1",
            Cause("One too many: a worker pulls after its own update, which is in what it gets."),
        ),
        Edit(
            "staleness_of(order",
            "staleness_of(order, pulled_at={}",
            LEFT_OVER,
            also=(("pulled_at: dict[int, int] = {}", "pass"),),
        ),
        Edit(
            "for number, worker in enumerate(order):",
            "for number in range(len(order)):\n    worker = order.pop(0)",
            CALLERS,
        ),
        Edit(PULLS, "pass", Cause("After each push a worker pulls again.")),
        Edit(
            AGE,
            "len(set(order)) - 1",
            Cause("w - 1 is the mean. Count how many updates really came in between."),
        ),
        Own(
            _workers_between,
            Cause("Count updates, not workers: a fast one makes several in between."),
        ),
        Edit(
            "(worker, 0)",
            "(worker, number)",
            Cause("A first push may be stale too: everyone pulled before the first update."),
        ),
        Edit(
            AGE,
            "list(order[:number]).count(worker)",
            Cause("That counts a worker's own steps: count the others'."),
        ),
        Edit(
            "number + 1",
            "number",
            Cause("One too many after the first: a worker's own update is in what it pulls."),
        ),
        Edit(
            "pulled_at: dict[int, int] = {}",
            "pulled_at = [0] * 4",
            Cause("There may be more than 3 workers, of any numbers: keep the pulls in a dict."),
            also=((".get(worker, 0)", "[worker]"),),
        ),
    ),
)
