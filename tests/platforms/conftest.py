"""A class of the toy assignment, whose cases are the same for everybody."""

import pytest

from tests.grading.conftest import Class


@pytest.fixture
def toy(tmp_path) -> Class:
    made = Class(tmp_path)
    source = made.home / "source/toy.py"
    source.write_text(source.read_text().lstrip())
    parts = {"toy-1": {"value": 10}}
    made.settle(seeded=False, parts=parts)
    return made
