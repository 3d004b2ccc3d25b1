"""Which tests run, and in which order: the hooks of pytest that tests/conftest.py takes from here.

A test without a mark is quick: `make test` runs it. Tests in `LIVE` and those marked
`ci` start real things, or are long; `make test-all`, what CI runs, has them too. Those marked
`nightly` are the long proofs of what the others sample, and one rare case more: `make test-nightly`
runs everything. tests/tiers.toml gives both marks to tests by their names.
`make test CHANGED=1` runs what the files that have changed can break, of the first two kinds; the
mark `reaches(module or file)` says what a test depends on besides its imports, nightly ones too.
"""

import re
import tomllib
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from tests.import_graph import Reached, changed_files

ROOT = Path(__file__).resolve().parents[1]
LIVE = (
    *("lab", "setup", "cluster", "cluster_exercises", "frameworks", "train", "grading", "site"),
    *("repository/test_readme.py", "repository/test_instructor_guide.py", "gpu"),
    *("notebooks/test_grading.py", "notebooks/test_plain_nbval.py", "notebooks/test_build.py"),
    *("ranks/test_survival.py", "checkpoint/test_kill_sample.py", "checks/test_authoring.py"),
    *("display/test_explorers.py", "tensor_parallel/test_overlap.py"),
)
PATTERNS = tomllib.loads((ROOT / "tests/tiers.toml").read_text())
TIERS = {"quick": ("ci", "nightly"), "ci": ("nightly",), "all": ()}  # what each leaves out
IN_SANDBOXES = (
    *("test_hostile_acts.py", "test_sandbox.py", "test_hostile_runs.py", "test_hostile_answers.py"),
    *("test_class_run.py", "test_grade_command.py", "test_instructor_guide.py"),
)
# The longest first: begun last, they would keep one worker busy and the others idle.
LONGEST = (
    *IN_SANDBOXES,
    *("test_slides.py", "test_site.py", "test_notebooks.py", "test_readme.py"),
    *("test_planted_mistakes.py", "test_lab_lessons.py"),
    *("test_train.py", "test_sharded.py", "test_tensor_parallel.py", "test_frameworks.py"),
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--tier", choices=list(TIERS), default="ci", help="which tests: default ci")
    parser.addoption("--changed", metavar="BASE", default="", help="only what changes since reach")


def pytest_configure(config: pytest.Config) -> None:
    for line in ("ci", "nightly", "reaches(module_or_file)"):
        config.addinivalue_line("markers", f"{line}: see tests/selection.py")


def is_live(path: Path) -> bool:
    return any(path.is_relative_to(ROOT / "tests" / name) for name in LIVE)


def is_quick(config: pytest.Config) -> bool:
    """Whether only quick tests were asked for, and none by its path."""
    named = config.args_source == pytest.Config.ArgsSource.ARGS
    return config.option.tier == "quick" and not config.option.changed and not named


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import nothing of the files that are left out as a whole."""
    return True if is_quick(config) and is_live(collection_path) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out other tiers, or what the changed files do not reach; begin with the longest."""
    for item in items:
        name = item.nodeid.removeprefix("tests/")
        for tier, patterns in PATTERNS.items():
            if any(fnmatchcase(name, pattern) for pattern in patterns):
                item.add_marker(tier)
    tier = "quick" if is_quick(config) else "all" if config.option.tier == "all" else "ci"
    left_out = [item for item in items if any(map(item.get_closest_marker, TIERS[tier]))]
    if config.option.changed:
        try:
            reached = Reached(ROOT, changed_files(ROOT, config.option.changed))
        except ValueError as problem:
            raise pytest.UsageError(str(problem)) from None
        left_out = [item for item in items if not is_reached(item, reached)]
    gone = set(left_out)
    config.hook.pytest_deselected(items=left_out)
    rank = {name: number for number, name in enumerate(LONGEST)}
    kept = [item for item in items if item not in gone]
    items[:] = sorted(kept, key=lambda item: rank.get(item.path.name, len(LONGEST)))


def is_reached(item: pytest.Item, reached: Reached) -> bool:
    """Whether a change can break this test; a nightly one runs only where its mark says so."""
    named = [name for mark in item.iter_markers("reaches") for name in mark.args]
    if any(map(reached.by_name, named)):
        return True
    return reached.by_test(item.path) and not item.get_closest_marker("nightly")


class ByGroup(LoadScopeScheduling):
    """Give a worker a whole group at a time: what its tests make once, they make once.

    A group is a file; of the longest files a part: a lesson's notebook, which all its tests look
    at, an exercise's planted mistakes, a command of the README. All tests that grade in a sandbox
    are one: they look at what is left on the machine.
    """

    def _split_scope(self, nodeid: str) -> str:
        file, _, test = nodeid.partition("::")
        name = file.rpartition("/")[2]
        lesson = re.search(r"\[([a-z_]+)-\d", test)
        if name in ("test_notebooks.py", "test_readme.py"):
            return f"{file} {test[test.find('[') :] if name == 'test_notebooks.py' else test}"
        if name in ("test_planted_mistakes.py", "test_corpus.py") and lesson:
            return f"{file} {lesson[1]}"
        return "sandboxes" if name in IN_SANDBOXES else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ByGroup:
    return ByGroup(config, log)
