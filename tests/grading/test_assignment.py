"""An assignment: its settings, its source composed from lessons, exercises and cases of its own."""

import builtins
import dis
import re
import types
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import torch

from course_lib.checks import right_answer
from course_lib.checks.cases import Raised, from_json, to_json
from course_lib.checks.exercise import Cause, CheckFailed, exercises_of, find_exercise
from course_lib.checks.lesson_source import read_source, solved
from course_lib.checks.right_answer import at_work_in
from course_lib.core import CourseError
from course_lib.workbooks.assignment import (
    Assignment,
    demand_exercises,
    due_time,
    hidden_exercises,
    read_assignment,
    to_toml,
    write_assignment,
)
from course_lib.workbooks.lessons import all_lessons
from course_tools.authoring.source_rules import problems
from course_tools.grading.compose import buildable, chosen, compose

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
WORDS = tuple(lesson.name for lesson in all_lessons(NOTEBOOKS))

PACKED_CELLS = '''
# %% [markdown]
# ## How many bytes
#
# Bytes of `count` numbers of `num_bits` bits, in whole bytes. One line.


# %% tags=["exercise"] exercise="hw1-1"
def packed_bytes(count, num_bits):
    """Bytes of the numbers, packed."""
    ### BEGIN SOLUTION: round up, in whole numbers
    return -(-count * num_bits // 8)
    ### END SOLUTION


# %% tags=["check"] exercise="hw1-1"
check("hw1-1", packed_bytes)
'''
PACKED = '''
"""Exercise 1 of hw1: packed bytes."""

from course_lib.checks.cases import Case, Cases, whole
from course_lib.checks.edits import Edit, Own
from course_lib.checks.exercise import Cause, Exercise

RULE = "-(-count * num_bits // 8)"
DOWN = Cause("Rounded down: the last bits need a byte, too.")
BITS = Cause("Those are bits: a byte has eight.")


def _described(pairs) -> list[Case]:
    return [(f"{count} numbers of {bits} bits", (count, bits)) for count, bits in pairs]


def _drawn(random) -> list[Case]:
    return _described([(random.randint(10, 99), random.randint(1, 7)) for _ in range(4)])


def _in_bits(count, num_bits):
    return count * num_bits


PACKED = Exercise(
    key="hw1-1",
    title="packed bytes",
    check=Cases(
        cases=lambda: _described([(1, 8), (3, 3), (7, 4)]),
        drawn=_drawn,
        show=whole,
        look="Try one by hand.",
        success="Whole bytes.",
    ),
    wrong=(Edit(RULE, "count * num_bits // 8", DOWN), Own(_in_bits, BITS)),
)
'''
OWN_EXERCISES = '''
"""The checks of the exercises that only hw1 has."""

from course_lib.checks.hw1.packed import PACKED

EXERCISES = (PACKED,)
'''
HIDDEN = '''
"""Cases that only the grading has."""

from course_lib.checks.cases import Cases, whole

HIDDEN = {
    "hw1-1": Cases(
        cases=lambda: [("no numbers", (0, 5)), ("many", (10**9, 3))],
        show=whole,
        look="Think of no numbers at all.",
        success="Also none, also many.",
    )
}
'''


def write_own(folder: Path, hidden: str = HIDDEN) -> None:
    """Fill in the exercise of its own that `compose` has begun in an assignment's folder."""
    source = folder / "source" / "hw1.py"
    begun = source.read_text().partition("\n# %% [markdown]\n# ### Exercise 1: FILL IN")[0]
    source.write_text(begun.rstrip() + "\n" + PACKED_CELLS)
    (folder / "checks" / "hw1_1.py").unlink()
    (folder / "checks" / "packed.py").write_text(PACKED.lstrip())
    (folder / "checks" / "__init__.py").write_text(OWN_EXERCISES.lstrip())
    (folder / "hidden.py").write_text(hidden.lstrip())


def assignment(*keys: str, **values: object) -> Assignment:
    pairs = tuple((key, 2.5) for key in keys)
    return Assignment(**{"name": "hw1", "title": "Rings", "items": pairs, **values})


@pytest.fixture
def own(tmp_path) -> Path:
    """The folder of an assignment with one exercise, which only it has."""
    folder = tmp_path / "hw1"
    compose(assignment("hw1-1"), [], folder, own=True)
    write_own(folder)
    return folder


# --- settings


def test_settings_come_back_as_they_were(tmp_path):
    due = datetime(2026, 12, 1, 18, tzinfo=UTC) + timedelta(minutes=1)
    values = {"title": 'A "title" \\ é 🙂', "due": due, "seeded": True, "kit": "0.1"}
    made = assignment("ranks-1", "ddp-2", student="ann.b@x", **values)
    write_assignment(made, tmp_path)
    assert read_assignment(tmp_path) == made
    assert list(made.points) == ["ranks-1", "ddp-2"]
    assert sum(made.points.values()) == 5


def test_a_due_time_has_a_time_zone():
    assert due_time("2026-12-01T18:00").tzinfo is not None
    assert due_time("2026-12-01T18:00+05:00").isoformat() == "2026-12-01T18:00:00+05:00"
    with pytest.raises(CourseError, match="2026-12-01T18:00; got 'soon'"):
        due_time("soon")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('name = "hw1"', ""),
        ('name = "hw1"', 'name = "../hw1"'),
        ('name = "hw1"', "name = 3"),
        ("seeded = false", "seeded = 1"),
        ("items = [", "items = 3\nmore = ["),
        ("points = 2.5", "points = -1"),
        ("points = 2.5", "points = nan"),
        ("points = 2.5", "points = true"),
        ('key = "ddp-2"', 'key = "ranks-1"'),
        ('key = "ddp-2"', 'key = "=ddp"'),
        ("items = [", "items = [["),
        ('title = "Rings"', 'title = "\\u001b[2J"'),
        ('title = "Rings"', 'due = "soon"'),
    ],
)
def test_spoilt_settings_are_one_sentence(old, new, tmp_path):
    text = to_toml(assignment("ranks-1", "ddp-2"))
    assert old in text
    (tmp_path / "assignment.toml").write_text(text.replace(old, new, 1))
    with pytest.raises(CourseError, match=r"assignment\.toml: "):
        read_assignment(tmp_path)


# --- composed from lessons


def test_a_lesson_alone_means_all_its_exercises():
    found = chosen(["04:collectives-3,collectives-1", "06_ddp"], NOTEBOOKS)
    keys = ["collectives-3", "collectives-1", *(f"ddp-{number}" for number in range(1, 7))]
    assert [key for _, key in found] == keys


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["nowhere"], "need a lesson"),
        (["06_ddp:ddp-9"], "ddp-1, ddp-2.*got 'ddp-9'"),
        (["06_ddp", "06:ddp-1"], "ddp-1 twice"),
    ],
)
def test_what_is_no_exercise_is_one_sentence(words, says):
    with pytest.raises(CourseError, match=says):
        chosen(words, NOTEBOOKS)


def globals_of(code: types.CodeType) -> set[str]:
    """The global names that code reads, also in the functions in it."""
    names = {i.argval for i in dis.get_instructions(code) if i.opname == "LOAD_GLOBAL"}
    inner = (each for each in code.co_consts if isinstance(each, types.CodeType))
    return names.union(*map(globals_of, inner))


@pytest.mark.parametrize("word", WORDS)
def test_an_exercise_brings_all_that_its_solution_uses(word, tmp_path):
    """Each exercise of a lesson stands alone: every name in its solution is defined above it."""
    for lesson, key in chosen([word], NOTEBOOKS):
        folder = tmp_path / key
        compose(assignment(key), [(lesson, key)], folder, own=False)
        cells = read_source(buildable(folder).source)
        assert problems(cells, "") == []
        assert not any(re.match(r"## \d+ (Exercise )?\d", cell.text) for cell in cells)
        names: dict[str, object] = {"__name__": "__main__"}
        for cell in cells:
            if cell.kind == "code" and not cell.is_exercise_check:
                text = solved(cell) if cell.is_exercise else cell.text
                code = compile(text, key, "exec")
                exec(code, names)
        assert globals_of(code) <= names.keys() | vars(builtins).keys()


def test_a_solution_in_the_library_stays_there(tmp_path):
    exercise = chosen(["05:data_parallel-5"], NOTEBOOKS)
    compose(assignment("data_parallel-5"), exercise, tmp_path / "hw1", own=False)
    assert "BEGIN SOLUTION FROM course_lib." in (tmp_path / "hw1/source/hw1.py").read_text()


def test_an_assignment_is_never_written_over(own):
    before = (own / "source" / "hw1.py").read_text()
    with pytest.raises(CourseError, match="is an assignment already"):
        compose(assignment("hw1-1"), [], own, own=True)
    assert (own / "source" / "hw1.py").read_text() == before


def test_the_name_of_a_lesson_is_taken(tmp_path):
    with pytest.raises(CourseError, match="that no lesson has"):
        compose(assignment("ddp-1", name="ddp"), [], tmp_path / "ddp", own=True)


def test_settings_and_source_have_the_same_exercises(own):
    write_assignment(assignment("hw1-1", "hw1-2"), own)
    with pytest.raises(
        CourseError, match=r"need the exercises of hw1\.py.*hw1-1; got hw1-1, hw1-2"
    ):
        buildable(own)


# --- exercises and cases of its own


def test_own_exercises_are_found_in_the_folder_and_only_there(own, monkeypatch):
    assert exercises_of("hw1") == ()
    monkeypatch.chdir(own)
    exercise = find_exercise("hw1-1")
    assert exercise.verdict(exercise.right) == "Whole bytes."
    for wrong in exercise.wrong:
        with pytest.raises(CheckFailed) as failed:
            exercise.verdict(wrong.answer(exercise))
        assert failed.value.cause == wrong.cause


def test_two_assignments_of_one_name_have_their_own_checks(own, tmp_path):
    other = tmp_path / "other"
    compose(assignment("hw1-1"), [], other, own=True)
    write_own(other)
    checks = other / "checks" / "packed.py"
    checks.write_text(checks.read_text().replace("Whole bytes.", "Others."))
    for folder, says in ((own, "Whole bytes."), (other, "Others."), (own, "Whole bytes.")):
        with at_work_in(folder):
            exercise = find_exercise("hw1-1")
            assert exercise.verdict(exercise.right) == says


def test_an_exercise_without_a_check_is_told(own):
    with at_work_in(own), pytest.raises(CourseError, match=r"need a check of hw1-2, ddp-9; found"):
        demand_exercises(assignment("hw1-1", "hw1-2", "ddp-9"))


def test_hidden_cases_judge_what_the_check_does_not(own):
    def only_these(count, num_bits):
        return {(1, 8): 1, (3, 3): 2, (7, 4): 4}.get((count, num_bits), 7)

    with at_work_in(own):
        hidden = hidden_exercises(own)["hw1-1"]
        assert find_exercise("hw1-1").verdict(only_these)
        assert hidden.verdict(hidden.right) == "Also none, also many."
        with pytest.raises(CheckFailed, match="no numbers: need 0; got 7"):
            hidden.verdict(only_these)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("HIDDEN = 3", "need HIDDEN = "),
        ("HIDDEN = {'ddp-9': 1}", "hw1-1; got 'ddp-9'"),
        ("HIDDEN = {'hw1-1': 1}", "need Cases or ByExample for hw1-1; got 1"),
        ("1 / 0", "ZeroDivisionError"),
        ("def", "SyntaxError"),
    ],
)
def test_spoilt_hidden_cases_are_one_sentence(text, says, own):
    (own / "hidden.py").write_text(text)
    with at_work_in(own), pytest.raises(CourseError, match=says):
        hidden_exercises(own)


# --- a student's own cases

DRAWN = (
    *("memory-1", "memory-4", "memory-5", "speed-1", "speed-2", "ddp-1", "ddp-3"),
    *("scaling_study-1", "scaling_study-2"),
)


def texts(exercise) -> list[str]:
    return [text for text, _ in exercise.check.table()]


@pytest.mark.parametrize("key", ["memory-1", "memory-4", "ddp-1", "ddp-3"])
def test_each_student_has_further_cases_the_same_ones_each_time(key):
    plain = find_exercise(key)
    ann, again, bob = (plain.seeded(f"hw1 {name}") for name in ("ann", "ann", "bob"))
    assert texts(ann) == texts(again)
    assert texts(ann) != texts(bob)
    assert texts(ann)[: len(texts(plain))] == texts(plain)
    assert len(texts(ann)) > len(texts(plain))


@pytest.mark.parametrize("key", DRAWN)
def test_own_cases_change_no_verdict_and_no_cause(key):
    for student in ("ann", "bob"):
        exercise = find_exercise(key).seeded(f"hw1 {student}")
        assert exercise.verdict(exercise.right)
        for wrong in exercise.wrong:
            with pytest.raises(CheckFailed) as failed:
                exercise.verdict(wrong.answer(exercise))
            assert failed.value.cause == wrong.cause, wrong.name


def test_an_answer_that_knows_the_table_fails_a_students_own_cases():
    plain = find_exercise("ddp-3")
    ann = plain.seeded("hw1 ann")
    pairs = zip(plain.check.table(), plain.right_values(), strict=True)
    known = {repr(arguments): value for (_, arguments), value in pairs}

    def by_heart(*arguments):
        return known.get(repr(arguments), 0.0)

    assert plain.verdict(by_heart)
    with pytest.raises(CheckFailed, match="got 0"):
        ann.verdict(by_heart)


def test_the_folder_says_whose_cases_a_notebook_has(own, monkeypatch):
    monkeypatch.chdir(own)
    assert len(texts(find_exercise("hw1-1"))) == 3
    write_assignment(assignment("hw1-1", seeded=True, student="ann"), own)
    ann = find_exercise("hw1-1")
    assert len(texts(ann)) == 7
    seed = assignment("hw1-1", seeded=True).seed("ann")
    assert texts(ann) == texts(replace(ann, check=replace(ann.check, seed="")).seeded(seed))


def test_a_spoilt_file_in_the_folder_is_one_sentence(own, monkeypatch):
    monkeypatch.chdir(own)
    (own / "values.json").write_text('{"hw1-1": 3}')
    with pytest.raises(CourseError, match="Unzip the assignment again"):
        find_exercise("hw1-1").right_values()
    (own / "assignment.toml").write_text("name = ")
    with pytest.raises(CourseError, match="Unzip the assignment again"):
        find_exercise("hw1-1")


# --- values in the place of answers


def test_observed_values_cross_as_json(own):
    import json

    tensors = [torch.zeros(2, 0), torch.tensor([1.5, -0.1], dtype=torch.bfloat16), torch.tensor(7)]
    values = [None, True, 2**70, 0.1, "x", [1, [2]], {1: "a", "b": {}}, Raised("E", "t", "line 3")]
    back = from_json(json.loads(json.dumps(to_json([*values, *tensors]))))
    assert back[: len(values)] == values
    for new, old in zip(back[len(values) :], tensors, strict=True):
        assert (new.dtype, new.shape) == (old.dtype, old.shape)
        assert torch.equal(new, old)
    failed = from_json(to_json(CheckFailed("what", Cause("why"))))
    assert (str(failed), failed.cause) == ("what", Cause("why"))
    with pytest.raises(TypeError, match="object"):
        to_json(object())


def test_frozen_values_take_the_place_of_the_source(own, monkeypatch):
    import json

    from course_tools.grading.release import freeze

    with at_work_in(own):
        values = freeze(assignment("hw1-1", "ddp-3"), "")
        price = find_exercise("ddp-3").right
    (own / "values.json").write_text(json.dumps(values))
    monkeypatch.delattr(right_answer, "solved_cell")  # as where there is no source
    monkeypatch.chdir(own)
    with pytest.raises(CheckFailed, match="Rounded down: the last bits need a byte"):
        find_exercise("hw1-1").verdict(lambda count, num_bits: count * num_bits // 8)
    assert find_exercise("ddp-3").verdict(price)
    with pytest.raises(CheckFailed, match="That is without any overlap"):
        find_exercise("ddp-3").verdict(lambda f, b, a: f + sum(b) + sum(a))
    values["ddp-3"]["right"].pop()
    (own / "values.json").write_text(json.dumps(values))
    with pytest.raises(CourseError, match="another version of the course"):
        find_exercise("ddp-3").verdict(price)
