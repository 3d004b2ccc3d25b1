"""The exam questions: each number is what the course computes, each mistake one that it finds."""

import ast
import re
from collections import Counter
from dataclasses import dataclass
from itertools import count
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from course_lib.accumulation import split_micro_batches
from course_lib.checks.exercise import CheckFailed, find_exercise
from course_lib.pipeline import Action
from course_lib.tensor_parallel import copy_to_region, reduce_from_region
from course_lib.workbooks.lessons import all_lessons
from tests.terminal import ROOT
from tools.exam_paper import paper, papers

EXAM = (ROOT / "docs/exam.md").read_text()
KINDS = {"calculation", "explanation", "find the mistake"}
HEADING = re.compile(r"^### (\d+) .+ \(lesson (\d\d[a-z]?), ([a-z ]+), (\d+) points\)$")
GIVEN = (torch, dist, nn, F, count, Action)
GIVEN += (split_micro_batches, copy_to_region, reduce_from_region)


@dataclass(frozen=True)
class Question:
    """A question of the page."""

    number: int
    lesson: str
    kind: str
    points: int
    asked: str
    answer: str

    def blocks(self, word: str) -> list[tuple[str, str]]:
        """What stands behind the word, and the Python, of each of its blocks."""
        both = self.asked + self.answer
        return re.findall(rf"^```python {word}([^\n]*)\n(.*?)^```", both, re.DOTALL | re.MULTILINE)


def questions() -> list[Question]:
    found = []
    for part in re.split(r"^(?=### )", EXAM.partition("## How the")[0], flags=re.MULTILINE)[1:]:
        line, _, text = part.partition("\n")
        match = HEADING.match(line)
        assert match, line
        number, lesson, kind, points = match.groups()
        text = re.split(r"^## ", text, flags=re.MULTILINE)[0]
        asked, mark, answer = text.partition("**Answer.**")
        assert mark, line
        found.append(Question(int(number), lesson, kind, int(points), asked, answer))
    return found


ASKED = questions()
COMPUTED = [one for one in ASKED if one.blocks("kit")]
MISTAKES = [one for one in ASKED if one.kind == "find the mistake"]


def computed(block: str) -> list[tuple[object, str]]:
    """Run a block of the page; return each value that a comment states, and the comment."""
    imports = re.search(r"^```python imports\n(.*?)^```", EXAM, re.DOTALL | re.MULTILINE)
    assert imports
    names: dict[str, object] = {}
    exec(imports[1], names)
    found = []
    for node in ast.parse(block).body:
        code = ast.unparse(node)
        if isinstance(node, ast.Expr):
            stated = block.splitlines()[node.end_lineno - 1].rpartition("  # ")[2]
            found.append((eval(code, names), stated))
        else:
            exec(code, names)
    return found


def program(code: str) -> object:
    """The function or class that a block defines."""
    names: dict[str, object] = {}
    for one in GIVEN:
        short = {"functional": "F", "distributed": "dist"}
        name = one.__name__.rpartition(".")[2] if isinstance(one, ModuleType) else one.__name__
        names[short.get(name, name)] = one
    exec(code, names)
    return names[ast.parse(code).body[0].name]


def test_the_questions_are_numbered_and_cover_every_lesson():
    assert [one.number for one in ASKED] == list(range(1, len(ASKED) + 1))
    assert len(ASKED) >= 20
    lessons = {lesson.name.partition("_")[0] for lesson in all_lessons(ROOT / "notebooks")}
    assert {one.lesson for one in ASKED} == lessons
    assert {one.kind for one in ASKED} == KINDS


@pytest.mark.parametrize("one", ASKED, ids=lambda one: str(one.number))
def test_the_points_of_the_parts_are_those_of_the_question(one):
    prose = " ".join(re.sub(r"```.*?```", "", one.answer, flags=re.DOTALL).split())
    parts = re.findall(r"\((\d+)(?: points?)?\)", prose)
    assert sum(map(int, parts)) == one.points or prose.startswith("One point each")


@pytest.mark.parametrize("one", COMPUTED, ids=lambda one: str(one.number))
def test_the_answer_is_what_the_course_computes(one):
    for _, block in one.blocks("kit"):
        values = computed(block)
        assert values
        for value, stated in values:
            if isinstance(value, int | float):
                digits = len(stated.partition(".")[2])
                assert f"{value:.{digits}f}" == stated, block
            else:
                assert re.sub(r"[\[\]']", "", str(value)) == stated
            bold = re.findall(r"\*\*([^*]+)\*\*", one.answer)
            assert stated in bold


def test_every_calculation_is_computed():
    assert [one for one in ASKED if one.kind == "calculation"] == COMPUTED


@pytest.mark.parametrize("one", MISTAKES, ids=lambda one: str(one.number))
def test_the_wrong_program_fails_its_check_and_the_right_one_passes(one):
    ((key, wrong),), ((same, right),) = one.blocks("wrong"), one.blocks("right")
    assert key == same
    exercise = find_exercise(key.strip())
    with pytest.raises(CheckFailed):
        exercise.verdict(program(wrong))
    assert exercise.verdict(program(right))


def test_the_papers_add_up():
    points = {one.number: one.points for one in ASKED}
    of = {one.number: one.lesson for one in ASKED}
    rows = re.findall(r"^\| [^|]+ \| (\d\d) to (\d\d) \| ([\d, ]+) \| (\d+) \|$", EXAM, re.M)
    assert len(rows) == 4
    for first, last, numbers, total in rows:
        chosen = [int(number) for number in numbers.split(", ")]
        assert max(Counter(chosen).values()) == 1
        assert sum(points[number] for number in chosen) == int(total)
        assert all(first <= of[number] <= last for number in chosen)
        if (first, last) == ("01", "12"):  # the final of six weeks leaves no lesson out
            assert {of[number][:2] for number in chosen} == {f"{n:02}" for n in range(1, 13)}


def test_a_paper_has_its_questions_and_no_answer():
    for name, numbers in papers(EXAM).items():
        printed = paper(name, EXAM)
        titles = re.findall(r"^## (\d+) .+ \((\d+) points\)$", printed, re.MULTILINE)
        points = [one.points for number in numbers for one in ASKED if one.number == number]
        assert [(int(place), int(of)) for place, of in titles] == [*enumerate(points, start=1)]
        assert f"{sum(points)} points" in printed
        assert "Answer" not in printed
        assert "```python " not in printed
        for one in ASKED:
            assert one.answer[:40] not in printed
            asked = one.asked.strip().splitlines()[0]
            assert (asked in printed) == (one.number in numbers) or "question" in asked


def test_an_unknown_paper_is_answered_with_those_that_there_are():
    with pytest.raises(
        SystemExit, match=r"need one of short, after a workshop, midterm.*got 'last'"
    ):
        paper("last", EXAM)


def test_a_question_that_builds_on_another_one_needs_it():
    page = EXAM.replace("| 1, 2, 3, 5,", "| 1, 3, 5,")
    with pytest.raises(SystemExit, match="question 3 of 'midterm' needs question 2: add it"):
        paper("midterm", page)


def test_the_page_says_whom_it_is_for():
    assert EXAM.splitlines()[2].startswith("**For instructors only.**")
