"""A class of thirty, of all kinds, graded twice. `make faults` runs it; tests grade a few."""

import pytest

from tests.grading.whole_class import KINDS, graded_twice


@pytest.mark.timeout(3600)
def test_thirty_students_have_the_same_grades_twice(small_class, tmp_path):
    graded_twice(small_class, tmp_path, KINDS, each=3)
