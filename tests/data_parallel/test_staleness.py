"""Staleness on paper: counted from an order, and the mean that the speeds promise."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from course_lib.data_parallel.cost import arrival_order, mean_staleness, staleness_of

orders = st.lists(st.integers(1, 4), max_size=30)
speeds = st.lists(st.floats(0.5, 8), min_size=1, max_size=5)


@given(orders)
def test_each_update_ages_whoever_is_under_way(order):
    expected = []
    for number, worker in enumerate(order):
        since = max((k + 1 for k in range(number) if order[k] == worker), default=0)
        expected.append(number - since)
    assert staleness_of(order) == expected


def test_equal_workers_take_turns():
    order = arrival_order([1.0, 1.0, 1.0], 9)
    assert order == [1, 2, 3] * 3
    assert staleness_of(order) == [0, 1, 2, 2, 2, 2, 2, 2, 2]


@given(speeds)
def test_the_simulation_finds_the_mean_of_the_formula(step_s):
    order = arrival_order(step_s, 4000)
    found = staleness_of(order)
    for worker in range(1, len(step_s) + 1):
        expected = pytest.approx(mean_staleness(step_s, worker), rel=0.05, abs=0.1)
        mine = [age for age, who in zip(found, order, strict=True) if who == worker]
        assert sum(mine) / len(mine) == expected
    assert sum(found) / len(found) == pytest.approx(len(step_s) - 1, rel=0.02, abs=0.02)


def test_a_straggler_is_as_stale_as_it_is_slow():
    assert mean_staleness([1.0, 1.0, 5.0], 3) == 10
    assert mean_staleness([1.0, 1.0, 5.0], 1) == pytest.approx(1.2)
