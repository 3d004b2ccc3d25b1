"""The roofline: its two sides meet at the ridge point, and counts are those of plain loops."""

import pytest

from course_lib.core import CourseError
from course_lib.cost.hardware import DEVICES
from course_lib.cost.roofline import (
    Roof,
    add_intensity,
    data_parallel_tokens,
    fsdp_tokens,
    matmul_intensity,
    roof_of,
)

ROOF = Roof(name="made up", flop_per_s=100.0, bytes_per_s=10.0)


def test_the_two_sides_meet_at_the_ridge_point():
    assert ROOF.ridge == 10
    assert [ROOF.attainable(x) for x in (0.5, 5, 10, 20)] == [5, 50, 100, 100]
    assert [ROOF.bound(x) for x in (9.9, 10, 11)] == ["memory", "compute", "compute"]


@pytest.mark.parametrize(("m", "k", "n", "number_bytes"), [(1, 3, 5, 2), (7, 4, 9, 4)])
def test_a_product_counts_as_a_loop_does(m, k, n, number_bytes):
    flop = sum(2 for _ in range(m) for _ in range(n) for _ in range(k))
    moved = number_bytes * (m * k + k * n + m * n)
    assert matmul_intensity(m, k, n, number_bytes) == pytest.approx(flop / moved)


def test_few_tokens_have_an_intensity_of_their_number_and_squares_of_a_third_of_their_width():
    assert matmul_intensity(4, 10**6, 10**6) == pytest.approx(4, rel=1e-4)
    assert matmul_intensity(900, 900, 900) == pytest.approx(300)
    assert add_intensity(2) == pytest.approx(1 / 6)


def test_the_ridge_points_are_those_of_the_data_sheets():
    found = {name: roof_of(DEVICES[name]).ridge for name in ("a100-80", "h100", "h200", "b200")}
    assert found == pytest.approx(
        {"a100-80": 312e12 / 2039e9, "h100": 295.4, "h200": 206.1, "b200": 281.25}, rel=1e-3
    )


@pytest.mark.parametrize("p", [2, 3, 8])
def test_at_the_tokens_of_equality_sending_takes_as_long_as_computing(p):
    num_params, flop_per_s, bytes_per_s = 1e9, 4e14, 5e10
    tokens = data_parallel_tokens(p, flop_per_s, bytes_per_s)
    backward_s = 4 * num_params * tokens / flop_per_s
    all_reduce_s = 2 * (p - 1) / p * 2 * num_params / bytes_per_s
    assert backward_s == pytest.approx(all_reduce_s)
    tokens = fsdp_tokens(p, flop_per_s, bytes_per_s)
    forward_s = 2 * num_params * tokens / flop_per_s
    assert forward_s == pytest.approx((p - 1) / p * 2 * num_params / bytes_per_s)


def test_fp32_gradients_need_twice_the_tokens():
    assert data_parallel_tokens(8, 1e12, 1e9, grad_bytes=4) == 2 * data_parallel_tokens(
        8, 1e12, 1e9
    )


@pytest.mark.parametrize(("flop_per_s", "bytes_per_s"), [(0, 1), (1, 0), (-1, 1)])
def test_a_roof_needs_positive_rates(flop_per_s, bytes_per_s):
    with pytest.raises(CourseError, match="Roof x: expected a positive peak and bandwidth"):
        Roof(name="x", flop_per_s=flop_per_s, bytes_per_s=bytes_per_s)
