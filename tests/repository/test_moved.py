"""Old import paths say where things have moved, and every place they name exists."""

import importlib
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from course_lib.moved import moves, new_module, new_place
from course_lib.notebooks.learner_work import new_imports

ROOT = Path(__file__).resolve().parents[2]
BY_UPDATE = " In your notebooks, `course update` does it for you."
# What the notebooks, slides and job scripts of the version before the move imported.
BEFORE = (ROOT / "tests" / "data" / "imports_before.txt").read_text().splitlines()
SAID = [
    (
        "from course_lib.flat_rows import FlatRow",
        "course_lib.flat_rows has moved: import FlatParam from course_lib.zero.flat_param.",
    ),
    (
        "from course_lib import zero_lab",
        "course_lib.zero_lab has moved: import lab from course_lib.zero.",
    ),
    (
        "import course_lib.saved",
        "course_lib.saved has moved: import course_lib.memory.saved_tensors.",
    ),
    (
        "import course_lib.saved as saved",
        "course_lib.saved has moved: import course_lib.memory.saved_tensors.",
    ),
    (
        "from course_lib.display import show, graph",
        "course_lib.display.graph has moved: import graph from course_lib.accumulation.pictures.",
    ),
    (
        "from course_lib.display.matrices import Matrix, matrices",
        "course_lib.display.matrices has moved: "
        "import Matrix, matrices from course_lib.tensor_parallel.pictures.",
    ),
    (
        "from course_lib.buckets import make_buckets, group_alike",
        "course_lib.buckets has moved: import make_buckets from course_lib.ddp.buckets "
        "and group_alike from course_lib.collectives.coalesced.",
    ),
    (
        "from course_lib.study.plan import find_study",
        "course_lib.study.plan has moved: import find_study from course_lib.scaling_study.plan.",
    ),
    (
        "from course_lib.cost import network, bubbles",
        "course_lib.cost.bubbles has moved: import cost from course_lib.pipeline.",
    ),
    (
        "import importlib; importlib.import_module('course_lib.core.degrees')",
        "course_lib.core.degrees has moved: import course_lib.core.parallelism.",
    ),
]


@pytest.mark.parametrize("new", sorted(set(moves()[0].values())))
def test_every_new_module_is_there(new):
    assert importlib.import_module(new).__name__ == new


@pytest.mark.parametrize(("old", "new"), moves()[1].items(), ids=lambda place: ".".join(place))
def test_every_new_name_is_there(old, new):
    module, name = new
    assert hasattr(importlib.import_module(module), name)
    assert new_place(*old) == new


def test_nothing_of_today_counts_as_moved():
    files = [path.relative_to(ROOT) for path in (ROOT / "course_lib").rglob("*.py")]
    today = {".".join(path.with_suffix("").parts).removesuffix(".__init__") for path in files}
    assert {module for module in today if new_module(module)} == set()


@pytest.mark.parametrize(("statement", "said"), SAID)
def test_an_old_import_says_where_it_has_moved(statement, said):
    with pytest.raises(ImportError) as raised:
        exec(statement, {})
    assert str(raised.value) == said + BY_UPDATE


@pytest.mark.parametrize("statement", ["import course_lib.no", "from course_lib.cost import no"])
def test_what_never_was_gets_pythons_own_words(statement):
    with pytest.raises(ImportError, match=r"No module named|cannot import name"):
        exec(statement, {})
    assert importlib.util.find_spec("course_lib.no") is None


@pytest.mark.parametrize(
    ("old", "new"),
    [("study.element", "scaling_study.array_element"), ("training.start", "train.launcher")],
)
def test_an_old_job_script_says_what_to_run(old, new):
    command = [sys.executable, "-m", f"course_lib.{old}"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 1
    assert f"course_lib.{old} has moved: run `python -m course_lib.{new}`." in ran.stderr
    assert "Traceback" not in ran.stderr


@pytest.mark.parametrize("statement", BEFORE)
def test_what_the_version_before_imported_is_still_found(statement):
    brought = new_imports(statement)
    assert brought != statement
    names: dict[str, object] = {}
    exec(brought, names)
    bound = statement.rpartition("import ")[2].split(", ")
    assert {one.split(" as ")[-1] for one in bound} <= set(names)


def test_importing_the_course_loads_nothing_heavy():
    text = "import sys, course_lib; print(*sys.modules)"
    ran = subprocess.run([sys.executable, "-c", text], cwd=ROOT, capture_output=True, text=True)
    loaded = set(ran.stdout.split())
    assert {name for name in loaded if name.startswith("course_lib")} == {
        "course_lib",
        "course_lib.moved",
    }
    assert not loaded & {"ast", "dis", "inspect", "torch", "nbformat"}
