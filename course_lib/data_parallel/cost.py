"""On paper: in which order workers reach an asynchronous server, and how stale that makes them.

A worker pulls the weights, computes, and pushes its gradient; its staleness is the number of
updates that others made in between. Notebook 05_data_parallel.
"""

import heapq
from collections.abc import Sequence


def staleness_of(order: Sequence[int]) -> list[int]:
    """The staleness of each update, from the worker of each update.

    A worker pulls right after its own update, and all have pulled before the first one.
    """
    pulled_at: dict[int, int] = {}
    found = []
    for number, worker in enumerate(order):
        found.append(number - pulled_at.get(worker, 0))
        pulled_at[worker] = number + 1
    return found


def arrival_order(step_s: Sequence[float], num_updates: int) -> list[int]:
    """Who makes each update, if worker i (from 1) takes step_s[i - 1] a step; ties in order.

    Pushing and pulling take no time.
    """
    arrivals = [(seconds, worker) for worker, seconds in enumerate(step_s, start=1)]
    heapq.heapify(arrivals)
    order = []
    for _ in range(num_updates):
        now_s, worker = arrivals[0]
        order.append(worker)
        heapq.heapreplace(arrivals, (now_s + step_s[worker - 1], worker))
    return order


def mean_staleness(step_s: Sequence[float], worker: int) -> float:
    """What the updates of one worker miss on average: every other one's steps in one of its own.

    Over all updates the mean is w - 1, whatever the speeds.
    """
    mine_s = step_s[worker - 1]
    return sum(mine_s / other_s for other_s in step_s) - 1
