"""A few students, graded twice; their exercises need no ranks, which take most of the time."""

from tests.grading.whole_class import graded_twice

FEW = ("right", "by-parts", "late", "again", "hand")
KEYS = ("toy-1", "toy-2")


def test_a_few_students_have_the_same_grades_twice(small_class, tmp_path):
    graded_twice(small_class, tmp_path, FEW, each=1, keys=KEYS)
