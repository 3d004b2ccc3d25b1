"""A class of the toy assignment, whose cases are the same for everybody."""

from dataclasses import replace

import pytest

from course_lib.workbooks.assignment import read_assignment, write_assignment
from tests.grading.conftest import Class


@pytest.fixture
def toy(tmp_path) -> Class:
    made = Class(tmp_path)
    source = made.home / "source/toy.py"
    source.write_text(source.read_text().lstrip())
    parts = {"toy-1": {"value": 10}}
    settings = replace(read_assignment(made.home), seeded=False, parts=parts)
    write_assignment(settings, made.home)
    return made
