"""A learner's work outlives the move of the library: old imports are rewritten, none is lost."""

import ast
import shutil
from pathlib import Path

import pytest

from course_lib.checks.lesson_source import read_source
from course_lib.notebooks.build import student_notebook
from course_lib.notebooks.learner_work import filled_in, is_own, new_imports
from course_lib.notebooks.lessons import Lesson, read_notebook, write_notebook
from course_lib.notebooks.update import update
from tests.notebooks.test_update import git

ROOT = Path(__file__).resolve().parents[2]
# A learner's notebook of the version before the library was sorted into packages.
OLD_NOTEBOOK = ROOT / "tests" / "data" / "03_recompute_before.json"
WORK = (
    "    fn(x).backward(grad)\n    return x.grad",
    "    return min(peaks, key=peaks.get)",
    "(scale, num_good + 1)  # not done yet",
    "print(D(dp=2), held_over_time, ",
    "%%ranks 2\n",
    "this is no Python: from course_lib.saved import measure_saved",
    "My notes: the scale halves. `from course_lib.saved import x` stays.",
)


@pytest.fixture
def old_work(tmp_path):
    """A learner's course whose one notebook is of the version before, and the newest lesson."""
    folder = tmp_path / "teacher" / "notebooks"
    (folder / "source").mkdir(parents=True)
    lesson = Lesson("03_recompute", folder)
    shutil.copy(ROOT / "notebooks" / "source" / "03_recompute.py", lesson.source)
    shutil.copy(OLD_NOTEBOOK, lesson.student)
    git(folder.parent, "init", "-q", "-b", "main")
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "the version before")
    git(tmp_path, "clone", "-q", str(folder.parent), "learner")
    write_notebook(student_notebook(lesson, read_source(lesson.source)), lesson.student)
    git(folder, "commit", "-q", "-a", "-m", "the version now")
    return Lesson("03_recompute", tmp_path / "learner" / "notebooks")


def assert_brought_over(lesson: Lesson) -> None:
    """Every piece of the old work is there, and every import in it works."""
    old, new = read_notebook(OLD_NOTEBOOK), read_notebook(lesson.student)
    assert sorted(filled_in(new)) == ["recompute-1", "recompute-2", "recompute-5"]
    texts = [cell.source for cells in filled_in(new).values() for cell in cells]
    texts += [cell.source for cell in new.cells if is_own(cell) and cell.cell_type == "code"]
    for piece in WORK:
        assert sum(piece in cell.source for cell in old.cells) == 1
        assert sum(piece in cell.source for cell in new.cells) == 1
    assert sum(map(is_own, new.cells)) == sum(map(is_own, old.cells))
    assert sum(map(imports_of, texts)) == 9


def imports_of(text: str) -> int:
    """Run every import of a cell; return how many there are."""
    python = "\n".join(line for line in text.splitlines() if line.strip()[:1] not in ("%", "!"))
    try:
        nodes = [*ast.walk(ast.parse(python))]
    except SyntaxError:
        return 0
    found = [ast.unparse(node) for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    for statement in found:
        exec(statement, {})
    return len(found)


def test_old_imports_in_a_learners_cells_are_brought_over(old_work):
    told = update(old_work.folder)
    assert_brought_over(old_work)
    (sentence,) = (one for one in told if "have moved" in one)
    assert sentence.startswith(
        "03_recompute: parts of course_lib have moved, and the imports in 4 "
    )
    backups = (old_work.folder / ".backup").glob("*.ipynb")
    assert OLD_NOTEBOOK.read_bytes() in [path.read_bytes() for path in backups]


def test_imports_are_brought_over_without_anything_new_to_fetch(old_work):
    git(old_work.folder, "pull", "-q")
    shutil.copy(OLD_NOTEBOOK, old_work.student)
    told = update(old_work.folder)
    assert_brought_over(old_work)
    assert told[-1] == "The course is up to date."
    assert update(old_work.folder) == ["The course is up to date."]


BROUGHT = [
    (
        "from course_lib.saved import measure_saved as m",
        "from course_lib.memory.saved_tensors import measure_saved as m",
    ),
    (
        "from course_lib.flat_rows import FlatRow",
        "from course_lib.zero.flat_param import FlatParam as FlatRow",
    ),
    ("import course_lib.zero_lab as lab", "import course_lib.zero.lab as lab"),
    ("from course_lib import zero_lab", "from course_lib.zero import lab as zero_lab"),
    (
        "import os, course_lib.saved\ncourse_lib.saved.measure_saved(f)",
        "import os\nimport course_lib.memory.saved_tensors\n"
        "course_lib.memory.saved_tensors.measure_saved(f)",
    ),
    (
        "if a:\n    from course_lib.buckets import (  # both\n        group_alike,  # one\n"
        "        make_buckets as cut,\n    )  # end",
        "if a:\n    # both\n    # one\n"
        "    from course_lib.collectives.coalesced import group_alike\n"
        "    from course_lib.ddp.buckets import make_buckets as cut  # end",
    ),
    (
        "s = 'é'; from course_lib.cost import bubbles, network; t = 1",
        "s = 'é'; from course_lib.pipeline import cost as bubbles; "
        "from course_lib.cost import network; t = 1",
    ),
    (
        "%%ranks 2\n!pip list\nx = %time 1\nfrom course_lib.turns import in_turns",
        "%%ranks 2\n!pip list\nx = %time 1\n"
        "from course_lib.ranks.timing import time_interleaved as in_turns",
    ),
]
LEFT_ALONE = [
    "no Python: from course_lib.saved import measure_saved",
    "text = '''\nfrom course_lib.saved import measure_saved\n'''",
    "from course_lib.zero import ZeRO1  # still there",
    "from other.saved import measure_saved",
    "%%bash\necho from course_lib.saved import measure_saved",
    "",
]


@pytest.mark.parametrize(("old", "new"), BROUGHT)
def test_an_old_import_is_rewritten_and_what_is_below_it_still_runs(old, new):
    assert new_imports(old) == new
    assert new_imports(new) == new


@pytest.mark.parametrize("text", LEFT_ALONE)
def test_what_is_no_old_import_is_left_alone(text):
    assert new_imports(text) == text
