"""Which tests run: what each tier proves of the planted mistakes, and what a change reaches."""

import re
import subprocess
from pathlib import Path

import pytest

from tests.checks.test_planted_mistakes import EXERCISES, planted
from tests.import_graph import Reached, changed_files
from tests.selection import PATTERNS, ROOT

FILES = {
    "tests/conftest.py": (
        "from course_lib.tool import Tool\n\n\ndef make():\n    return Tool()\n\n\n"
        "def tool():\n    return make()\n"
    ),
    "tests/a/conftest.py": "",
    "tests/a/test_a.py": "from course_lib.a import A\nfrom course_lib import gone\n",
    "tests/a/test_b.py": "def test_b(tool):\n    from course_lib.a.b import B\n",
    "tests/c/test_c.py": 'COMMAND = "python -m course_lib.c"\nTABLE = "rows.csv"\n',
    "course_lib/__init__.py": "",
    "course_lib/a/__init__.py": "from course_lib.a.a import A\nfrom course_lib.a.b import B\n",
    "course_lib/a/a.py": "class A: ...\n",
    "course_lib/a/b.py": "from course_lib.core import words\n\n\nclass B: ...\n",
    "course_lib/core/words.py": "",
    "course_lib/c.py": "import course_lib.a.a\n",
    "course_lib/tool.py": "class Tool: ...\n",
    "notebooks/source/00_a.py": "%%time\nfrom course_lib.a import B\n",
}


@pytest.fixture
def tree(tmp_path) -> Path:
    """A small course with its tests."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("changed", "tests", "lesson"),
    [
        ("course_lib/a/a.py", "a c", False),  # not b: a name that a package offers is one file
        ("course_lib/a/b.py", "b", True),
        ("course_lib/core/words.py", "b", True),
        ("course_lib/c.py", "c", False),  # named in a command
        ("course_lib/tool.py", "b", False),  # through a fixture
        ("data/rows.csv", "c", False),
        ("data/other.csv", "a b c", False),  # who knows what reads it
        ("README.md", "", False),
        ("tools/build.py", "a b c", False),
        ("course_lib/a/__init__.py", "a", True),
        ("course_lib/gone.py", "a", False),
        ("tests/a/conftest.py", "a b", False),
        ("tests/a/test_a.py", "a", False),
        ("tests/conftest.py", "a b c", True),
        ("notebooks/source/00_a.py", "", True),
    ],
)
def test_a_change_reaches_what_depends_on_it(tree, changed, tests, lesson):
    reached = Reached(tree, {changed})
    found = [
        path.stem[-1] for path in sorted(tree.glob("tests/*/test_*.py")) if reached.by_test(path)
    ]
    assert " ".join(found) == tests
    assert reached.by_name("notebooks/source/00_a.py") == lesson


def test_what_has_changed_is_what_git_says(tree):
    def git(*words):
        subprocess.run(
            ["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], cwd=tree, check=True
        )

    git("init", "-q", "-b", "main")
    git("add", "-A")
    git("commit", "-q", "-m", "one")
    assert changed_files(tree, "1") == set()
    (tree / "course_lib/c.py").write_text("")
    (tree / "new.py").write_text("")
    assert changed_files(tree, "1") == {"course_lib/c.py", "new.py"}
    git("commit", "-q", "-a", "-m", "two")
    assert changed_files(tree, "HEAD~1") == {"course_lib/c.py", "new.py"}
    with pytest.raises(ValueError, match="need 1 or a commit; got nothing"):
        changed_files(tree, "nothing")


def test_some_mistakes_of_each_exercise_are_proven_in_ci_and_all_nightly():
    every = [one.values for one in planted()]
    at_once = [one.values for one in planted() if "nightly" not in {m.name for m in one.marks}]
    assert len(every) == sum(len(one.wrong) for one in EXERCISES)
    for one in EXERCISES:
        causes = [wrong.cause for exercise, wrong in at_once if exercise is one]
        assert len(causes) == len(set(causes))
        assert len(causes) >= min(3, len({wrong.cause for wrong in one.wrong}))


@pytest.mark.parametrize("pattern", [one for tier in PATTERNS.values() for one in tier])
def test_what_waits_for_another_tier_is_there(pattern):
    file, _, test = pattern.partition("::")
    paths = (ROOT / "tests").glob(file if "/" in file else "*/test_*.py")
    words = re.findall(r"\w+", test if "/" in file else file)
    name = max(words, key=len, default="")  # nothing where a whole file waits
    assert any(name in path.read_text() for path in paths)
