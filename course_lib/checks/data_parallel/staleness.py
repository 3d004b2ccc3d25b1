"""Exercise 5 of 05_data_parallel, with its planted mistakes: the staleness of each update."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from course_lib.checks.data_parallel import data_answers as planted
from course_lib.checks.exercise import Exercise, Mistake
from course_lib.checks.expect import expect_equal
from course_lib.data_parallel.cost import staleness_of

ORDERS: tuple[list[int], ...] = (
    [1, 2, 3, 1, 2, 3],
    [1, 1, 1],
    [2, 2, 2, 1, 2, 1],
    [3, 1, 1, 2, 1, 1, 3, 2],
    [],
)

LOOK = "Take one update: where did its worker pull last? Count the updates after that."


def check_staleness(answer: Callable[[Sequence[int]], Any]) -> str:
    """Check the updates between a worker's pull and its push, for any order of workers."""
    for order in ORDERS:
        right = staleness_of(order)
        causes = [
            (
                planted.own_counted(order),
                "One too many: a worker pulls after its own update, which is in what it gets.",
            ),
            (planted.never_pulls_again(order), "After each push a worker pulls again."),
            (
                planted.always_the_others(order),
                "w - 1 is the mean. Count how many updates really came in between.",
            ),
            (
                planted.different_others(order),
                "Count updates, not workers: a fast one makes several in between.",
            ),
            (
                planted.first_is_fresh(order),
                "A first push may be stale too: everyone pulled before the first update.",
            ),
            (planted.own_steps(order), "That counts a worker's own steps: count the others'."),
            (
                planted.all_earlier(order),
                "All updates of the others so far: count those since this worker's last pull.",
            ),
            (
                planted.until_the_next(order),
                "That looks ahead: what counts came before the update, since its worker's pull.",
            ),
            (
                planted.first_one_too_few(order),
                "A worker's first update misses one more: it pulled before update 0.",
            ),
            (
                planted.own_push_counted(order),
                "One too many after the first: a worker's own update is in what it pulls.",
            ),
        ]
        got = answer(list(order))
        got = got.tolist() if isinstance(got, torch.Tensor) else got
        got = list(got) if isinstance(got, tuple) else got
        expect_equal(got, right, where=f"order {order}", causes=causes, look=LOOK)
    return "Updates between pull and push, for any order."


STALENESS = Exercise(
    key="data_parallel-5",
    title="staleness",
    check=check_staleness,
    reference=staleness_of,
    mistakes=(
        Mistake("own counted", planted.own_counted, says="One too many"),
        Mistake("never pulls again", planted.never_pulls_again, says="a worker pulls again"),
        Mistake("always w - 1", planted.always_the_others, says="w - 1 is the mean"),
        Mistake("counts workers", planted.different_others, says="Count updates, not workers"),
        Mistake("first is fresh", planted.first_is_fresh, says="A first push may be stale too"),
        Mistake("all earlier ones", planted.all_earlier, says="since this worker's last pull"),
        Mistake("looks ahead", planted.until_the_next, says="That looks ahead"),
        Mistake("first one too few", planted.first_one_too_few, says="misses one more"),
        Mistake("own push counted", planted.own_push_counted, says="One too many after the first"),
        Mistake("never stale", lambda order: [0] * len(order), says="where did its worker pull"),
        Mistake("own steps", planted.own_steps, says="a worker's own steps"),
    ),
)
