"""Answers that try to gain points which they did not earn: each gets what it earned.

Here is one of each kind; `make faults` tries them all.
"""

from tests.grading.hostile_answers import GAINS, PAST, forge_nothing, gain_nothing
from tests.grading.hostile_class import one_of_each


def test_no_patch_and_no_reading_gains_a_point(split_class, tmp_path):
    gain_nothing(split_class, tmp_path / "grades", one_of_each(GAINS))


def test_no_forged_result_gains_a_point(small_class, tmp_path):
    forge_nothing(small_class, tmp_path / "grades", one_of_each(PAST))
