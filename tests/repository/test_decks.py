"""A deck shows an idea, not the solution of its lesson's exercises."""

import re
from functools import cache
from pathlib import Path

import pytest

from course_lib.checks.lesson_source import solved, stub
from course_lib.checks.right_answer import code_cells

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / "notebooks" / "source").glob("[0-9]*.py"))
EXERCISES = [
    pytest.param(path, cell, id=cell.exercise)
    for path in SOURCES
    for cell in code_cells(path)
    if cell.is_exercise
]
SHORTEST = 12  # characters of a line that may tell something
MOST = 1 / 3  # of a solution's lines; one line, a call that the text names, is always allowed


def packed(text: str) -> str:
    """The text without white space and comments."""
    return re.sub(r"\s+", "", re.sub(r"#.*", "", text))


@cache
def given() -> set[str]:
    """The lines that the learners' notebooks show."""
    cells = [cell for path in SOURCES for cell in code_cells(path)]
    texts = [stub(cell) if cell.is_exercise else cell.text for cell in cells]
    return {packed(line) for text in texts for line in text.splitlines()}


def lines_of(cell) -> list[str]:
    """The lines of a solution that neither the stub nor another cell shows."""
    own = [packed(line) for line in solved(cell).splitlines()]
    return [line for line in own if len(line) >= SHORTEST and line not in given()]


def shown_by(deck: str, cell) -> list[str]:
    """The lines of a solution that a deck shows."""
    return [line for line in lines_of(cell) if line in packed(deck)]


def gives_away(deck: str, cell) -> bool:
    return len(shown_by(deck, cell)) > max(1, MOST * len(lines_of(cell)))


@pytest.mark.parametrize(("path", "cell"), EXERCISES)
def test_a_deck_does_not_give_a_solution_away(path, cell):
    deck = (ROOT / "slides" / f"{path.stem}.md").read_text()
    assert not gives_away(deck, cell), f"{path.stem}.md shows {shown_by(deck, cell)}"
    if len(lines_of(cell)) > 1:
        assert gives_away(f"{deck}\n```python\n{solved(cell)}\n```\n", cell)
