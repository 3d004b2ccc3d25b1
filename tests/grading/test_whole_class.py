"""A small class of all kinds, graded twice."""

from tests.grading.whole_class import graded_twice


def test_one_student_of_each_kind_has_the_same_grades_twice(small_class, tmp_path):
    graded_twice(small_class, tmp_path, each=1)
