"""The pictures of lesson 02 show what its text says, and its published numbers are in the table."""

import math

import pytest

from course_lib.accumulation.pictures import (
    SPLIT_OVER_4,
    WHOLE,
    part_times,
    peak_by_parts,
    published_times,
    without_division,
)


def test_published_times_are_those_of_the_text():
    assert published_times(WHOLE) == ([16, 32], [1.0, pytest.approx(1.02, abs=5e-3)])
    counts, times = published_times(SPLIT_OVER_4)
    assert [256 // (4 * count) for count in counts] == [16, 8, 4, 2, 1]  # sequences at a time
    assert times == sorted(times)
    assert times[-2:] == pytest.approx([1.40, 2.44], abs=5e-3)


def test_measured_and_published_times_stand_in_one_picture():
    figure, alt = part_times([1, 2, 4], [[1.0, 1.0], [1.2, 1.1], [1.3, 1.4]])
    assert figure.axes[0].get_xscale() == "log"
    assert any("Ultra-Scale Playbook" in text.get_text() for text in figure.texts)
    assert "1.35 times as long in 4 parts" in alt
    assert "2.4 times" in alt


def test_the_peak_is_told_in_mib_and_its_distance_from_the_formula_in_bytes():
    _, alt = peak_by_parts([1, 16], [68 * 2**20, 4 * 2**20 + 7], [68 * 2**20, 4 * 2**20])
    assert "In 16 micro-batches the peak is 4.0 MiB instead of 68 MiB" in alt
    assert alt.endswith("differ by up to 7 bytes")


def test_a_loss_that_is_not_a_number_is_a_cross_and_no_value():
    nan, flat = math.nan, [3.0, 2.0, 1.0]
    figure, alt = without_division(flat, [3.0, 1e7, nan], flat, [3.0, 2.0, 1.00002])
    above, below = figure.axes
    crosses = [line for line in above.lines if line.get_marker() == "x" and len(line.get_xdata())]
    assert [list(line.get_xdata()) for line in crosses] == [[2]]
    assert list(below.lines[0].get_ydata()) == pytest.approx([0, 0, 20])
    assert alt.endswith("at most 20·10⁻⁶")
