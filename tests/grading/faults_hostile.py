"""Every hostile answer of every kind; the tests of a change grade one of each.

`make faults` runs these.
"""

import pytest

from tests.grading.hostile_answers import GAINS, PAST, forge_nothing, gain_nothing
from tests.grading.hostile_class import all_of, graded_class
from tests.grading.hostile_runs import ENDS, are_ended, hand_in_all


def test_no_patch_and_no_reading_gains_a_point(split_class, tmp_path):
    gain_nothing(split_class, tmp_path / "grades", all_of(GAINS))


def test_no_forged_result_gains_a_point(small_class, tmp_path):
    forge_nothing(small_class, tmp_path / "grades", all_of(PAST))


@pytest.mark.parametrize("kind", ENDS)
def test_what_does_not_end_by_itself_is_ended(small_class, tmp_path, kind):
    hand_in_all(small_class, ENDS[kind])
    are_ended(graded_class(small_class, tmp_path / "grades", timeout_s=15), ENDS[kind])
