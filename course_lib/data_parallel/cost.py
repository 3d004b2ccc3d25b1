"""Predict the staleness of asynchronous training from the seconds of each worker's step.

A worker pulls the weights, computes, and pushes its gradient. The staleness of that update is the
number of updates that other workers made in between. Notebook 05_data_parallel.
"""

import heapq
from collections.abc import Sequence
from statistics import mean


def staleness_of(order: Sequence[int]) -> list[int]:
    """Return the staleness of each update, given the worker of each update.

    A worker pulls right after its own update, and all workers pull before the first one.
    """
    pulled_at: dict[int, int] = {}
    found = []
    for number, worker in enumerate(order):
        found.append(number - pulled_at.get(worker, 0))
        pulled_at[worker] = number + 1
    return found


def arrival_order(step_s: Sequence[float], num_updates: int) -> list[int]:
    """Return the worker of each update, if worker i (from 1) takes step_s[i - 1] per step.

    Pushing and pulling take no time; of workers that finish together the lower number is first.
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
    """Return the mean staleness of one worker's updates.

    During one of its steps, every other worker makes mine_s / other_s updates. Over the updates of
    all w workers the mean is w - 1, whatever their speeds.
    """
    mine_s = step_s[worker - 1]
    return sum(mine_s / other_s for other_s in step_s) - 1  # without its own


def simulated_staleness(step_s: Sequence[float], worker: int, num_updates: int) -> float:
    """Return the mean staleness of one worker in the simulated order of so many updates."""
    order = arrival_order(step_s, num_updates)
    ages = zip(order, staleness_of(order), strict=True)
    return mean(age for who, age in ages if who == worker)
