"""A class of thirty, graded twice. `make faults` runs it; the tests grade a class of ten."""

from tests.grading.whole_class import graded_twice


def test_thirty_students_have_the_same_grades_twice(small_class, tmp_path):
    graded_twice(small_class, tmp_path, each=3)
