"""The formulas of checkpoints: published optima, simulated runs, and what they say about saving."""

import pytest

from course_lib.checkpoint import cost
from course_lib.core import CourseError

MIN = 60.0


@pytest.mark.parametrize(("mtbf_min", "best_min"), [(1440, 117), (360, 57), (15, 9.1)])
def test_dalys_estimate_is_the_published_one(mtbf_min, best_min):
    """Saves of 5 minutes: Daly 2006, captions of figures 3 to 5."""
    found = cost.best_interval_daly(5 * MIN, mtbf_min * MIN) / MIN
    assert found == pytest.approx(best_min, rel=0.006)


@pytest.mark.parametrize("mtbf_s", [900.0, 21_600.0, 86_400.0])
def test_dalys_interval_is_nearly_the_best_and_youngs_never_better(mtbf_s):
    def overhead(interval_s):
        return cost.expected_overhead(interval_s, 300, mtbf_s, 600)

    best_s = cost.best_interval_daly(300, mtbf_s)
    assert overhead(best_s) <= min(overhead(best_s * factor) for factor in (0.9, 1.1))
    assert overhead(best_s) <= overhead(cost.best_interval_young(300, mtbf_s))


def test_beyond_two_mtbf_the_interval_is_the_mtbf():
    assert cost.best_interval_daly(300, 100) == 100


@pytest.mark.parametrize(("interval_s", "mtbf_s"), [(60, 600), (600, 600), (300, 6000)])
def test_a_simulated_run_has_the_expected_overhead(interval_s, mtbf_s):
    need = cost.expected_overhead(interval_s, 10, mtbf_s, 30)
    found = cost.simulated_overhead(interval_s, 10, mtbf_s, 30, num_intervals=20_000)
    assert found == pytest.approx(need, rel=0.05)


def test_four_writers_are_four_times_as_fast_until_the_storage_is_full():
    assert cost.save_s_sharded(1e9, 1, 1e8) == 4 * cost.save_s_sharded(1e9, 4, 1e8)
    assert cost.save_s_sharded(1e9, 4, 1e8, storage_bytes_per_s=2e8) == 5
    through = cost.save_s_through_one(1e9, 4, 1e9, 1e8)
    assert through == pytest.approx(10 + 0.75)


def test_bytes_and_failures_scale():
    assert cost.bytes_of_checkpoint(10) == 120
    assert cost.extra_s(1000, 300, 2.0) == 6.0
    assert cost.mtbf_of(cost.DAY_S, 24) == 3600


def test_an_interval_without_length_is_told():
    with pytest.raises(CourseError, match="need an interval above 0 s; got 0"):
        cost.expected_overhead(0, 1, 100)
    with pytest.raises(CourseError, match="need save_s >= 0 and mtbf_s > 0"):
        cost.best_interval_young(1, 0)
