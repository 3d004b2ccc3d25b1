"""Our engine and PyTorch's pipeline schedules, in turns: gradients equal to the last bit."""

from dataclasses import replace

import pytest

from course_lib.core import MODELS
from course_lib.pipeline import schedules
from course_lib.pipeline.beside_frameworks import run_schedule

PLANS = {
    "Schedule1F1B": schedules.one_f_one_b(2, 4),
    "ScheduleInterleaved1F1B": schedules.interleaved(2, 4, 2),
    "ScheduleInterleavedZeroBubble": schedules.zero_bubble_h1(2, 4),
}


@pytest.mark.parametrize("name", PLANS)
def test_gradients_are_those_of_pytorchs_schedule_and_both_are_timed(pools, name):
    spec = replace(MODELS["tiny"], tied=False)
    for equal, seconds in pools(2).run(run_schedule, spec, name, PLANS[name], 4):
        assert equal
        assert list(seconds) == ["ours", "PyTorch's"]
        assert min(seconds.values()) > 0
