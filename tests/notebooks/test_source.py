"""The source of a lesson: what is wrong in it is told with its line; solutions stand once."""

import pytest

from course_lib.checks.lesson_source import for_students, read_source, solved
from course_lib.checks.right_answer import code_cells
from course_lib.core import CourseError
from course_tools.authoring.source_rules import problems

OPENING = """\
# %% [markdown]
# # 00 Toy

"""
EXERCISE = '''\
# %% tags=["exercise"] exercise="toy-1"
def add(x, y):
    """The sum."""
    ### BEGIN SOLUTION: add the two
    return x + y
    ### END SOLUTION


'''
CHECK = """\
# %% tags=["check"] exercise="toy-1"
check("toy-1", add)
"""
GOOD = OPENING + EXERCISE + CHECK


def cells_of(tmp_path, text):
    path = tmp_path / "00_toy.py"
    path.write_text(text)
    return read_source(path)


def test_a_good_source_has_no_problems(tmp_path):
    assert problems(cells_of(tmp_path, GOOD), "toy") == []


def test_a_learner_gets_the_stub_and_nothing_for_instructors(tmp_path):
    secret = '# %% tags=["instructor-only"]\nprint("secret")\n'
    cells = for_students(cells_of(tmp_path, GOOD + secret))
    assert [cell.text for cell in cells] == [
        "# 00 Toy",
        'def add(x, y):\n    """The sum."""\n'
        '    raise NotImplementedError("exercise toy-1: add the two")',
        'check("toy-1", add)',
    ]


GUESSED = """\
# %% tags=["predict"]
guess_sum = predict("1 + 2")
### GUESS guess_sum.commit(4)

"""


def test_a_guess_is_a_statement_of_the_solved_notebook_alone(tmp_path):
    cells = cells_of(tmp_path, OPENING + GUESSED + EXERCISE + CHECK)
    assert problems(cells, "toy") == []
    assert cells[1].text == 'guess_sum = predict("1 + 2")\nguess_sum.commit(4)'
    student = for_students(cells)[1]
    assert student.text == 'guess_sum = predict("1 + 2")'
    assert student.guesses == ()


def test_the_right_answers_are_found_in_a_source_with_guesses(tmp_path):
    cells_of(tmp_path, OPENING + GUESSED + EXERCISE + CHECK)
    _, exercise, _ = code_cells(tmp_path / "00_toy.py")
    assert "return x + y" in solved(exercise)


@pytest.mark.parametrize(
    ("guess", "says"),
    [
        ("### GUESS guess.commit(4)", r"line 6: need `guess = predict\(...\)` above"),
        ("### GUESS guess_sum.commit(4", "line 6: need `### GUESS name.commit"),
        ("### GUESS guess_sum.commit((4)", "line 6: need `### GUESS name.commit"),
        ("### GUESS: guess_sum.commit(4)", "line 6: need `### GUESS name.commit"),
        ("# GUESS 4", "line 6: need `### GUESS name.commit"),
    ],
)
def test_a_guess_that_is_none_is_told_with_its_line(tmp_path, guess, says):
    text = OPENING + GUESSED.replace("### GUESS guess_sum.commit(4)", guess)
    with pytest.raises(CourseError, match=says):
        cells_of(tmp_path, text)
    with pytest.raises(CourseError, match="a guess stands outside of a code cell"):
        cells_of(tmp_path, text.replace('tags=["predict"]', ""))


def test_magics_and_tags_are_read(tmp_path):
    text = OPENING + '# %% tags=["picture"]\n# %%ranks\nx = 1\n'
    cell = cells_of(tmp_path, text)[1]
    assert (cell.text, cell.tags, cell.line) == ("%%ranks\nx = 1", ("picture",), 4)


@pytest.mark.parametrize(
    ("old", "new", "line", "says"),
    [
        ("# # 00 Toy", "# Toy", 1, "a title"),
        ('["exercise"]', '["exrcise"]', 4, "need tags out of predict, exercise"),
        ('exercise="toy-1"\ndef', 'exercise="toy-1" color="red"\ndef', 4, "got color"),
        ('exercise="toy-1"\ndef', 'exercise="ring-1"\ndef', 4, 'a key like exercise="toy-1"'),
        ('["exercise"] exercise', '["picture"] exercise', 4, "stands outside of a cell"),
        (": add the two", "", 7, "need a hint"),
        ("    ### END SOLUTION\n", "", 7, "has no END SOLUTION"),
        ("    ### BEGIN SOLUTION: add the two\n", "", 8, "have to come in pairs"),
        ("    ### BEGIN", "### BEGIN", 7, "it stands at the margin"),
        ("return x + y", "return x +", 8, "not Python"),
        ("add the two", "add " * 40, 4, "more than 100 characters"),
        (": add", " FROM course_lib.core.units:nothing: add", 7, "no function nothing"),
        (": add", " FROM course_lib.nowhere:nothing: add", 7, "no module course_lib.nowhere"),
        (": add", " FROM course_lib.core.units:format_rate: add", 7, "parameters bytes_per_s"),
        (CHECK, "", 4, "has no check cell"),
        (CHECK, CHECK + "\n" + CHECK, 15, "stands at line 12 already"),
        (CHECK, EXERCISE + CHECK, 12, "stands at line 4 already"),
        (EXERCISE, "", 4, "no such exercise stands before it"),
        ("check(", "print(", 12, "need the single line"),
        (": add", " FROM nowhere.at_all:nothing: add", 7, "no module nowhere.at_all"),
        (", add)", ", ad)", 12, "does not define it"),
        ('["check"]', '["check", "measured"]', 12, "neither exercise nor check"),
        ('["exercise"]', '["exercise", "measured"]', 4, "neither exercise nor check"),
        ("[markdown]", '[markdown] tags=["measured"]', 1, "neither exercise nor check"),
    ],
)
def test_what_is_wrong_is_told_with_its_line(tmp_path, old, new, line, says):
    assert old in GOOD
    found = problems(cells_of(tmp_path, GOOD.replace(old, new, 1)), "toy")
    assert any(at == line and says in what for at, what in found), found


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ("# %%\n" + "x = 1\n" * 16, "at most 15 lines in this cell; got 16"),
        ("# %%\nx = 1\n" * 58, "at most 60 cells in a lesson; got 61"),
        (("# %%\n" + "x = 1\n" * 13) * 20, "at most 250 code lines in a lesson; got 264"),
        (
            EXERCISE.replace("toy-1", "toy-2").replace('"""\n', '"""\n' + "    x = 1\n" * 23),
            "at most 25 lines in this cell; got 26",
        ),
    ],
)
def test_a_lesson_that_is_too_long_is_told(tmp_path, more, says):
    more += CHECK.replace("toy-1", "toy-2") if "toy-2" in more else ""
    found = problems(cells_of(tmp_path, GOOD + more), "toy")
    assert says in found[0][1]


def test_text_before_the_first_cell_is_told(tmp_path):
    with pytest.raises(CourseError, match="also the first one"):
        cells_of(tmp_path, "import os\n\n" + GOOD)


def test_a_solution_is_taken_from_the_library(tmp_path, monkeypatch):
    library = '''
def add(x, y):
    """What the library says."""
    # a comment stays
    total = x + y

    return total


class Sum:
    def add(self, x, y):
        return x - y
'''
    (tmp_path / "toy_library.py").write_text(library)
    monkeypatch.syspath_prepend(tmp_path)
    begin = "BEGIN SOLUTION FROM toy_library:add: add the two"
    text = GOOD.replace("BEGIN SOLUTION: add the two", begin).replace("    return x + y\n", "")
    cells = cells_of(tmp_path, text)
    assert problems(cells, "toy") == []
    assert solved(cells[1]) == (
        'def add(x, y):\n    """The sum."""\n    ### BEGIN SOLUTION\n    # a comment stays\n'
        "    total = x + y\n\n    return total\n    ### END SOLUTION"
    )
    assert "return total" not in for_students(cells)[1].text
    method = text.replace("toy_library:add", "toy_library:Sum.add").replace(
        "(x, y)", "(self, x, y)"
    )
    assert "return x - y" in solved(cells_of(tmp_path, method)[1])


def test_a_long_hint_wraps_as_ruff_would(tmp_path):
    hint = "send shard (rank - step) to the right, add what comes from the left"
    stub = for_students(cells_of(tmp_path, GOOD.replace("add the two", hint)))[1].text
    assert stub.endswith(f'    raise NotImplementedError(\n        "exercise toy-1: {hint}"\n    )')
