"""What the tests of the sandbox share: a folder that others can reach, and each kind of sandbox."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from course_lib.grading.sandbox import RunLimits
from course_lib.grading.staged import may_use_uids
from tests.grading.sandbox.guests import GUESTS, NOBODY, Guest, leftovers


@pytest.fixture
def top() -> Iterator[Path]:
    """A folder that every user can reach (pytest's own can be reached by its user only)."""
    folder = Path(tempfile.mkdtemp(prefix="class-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def each_guest():
    """Every kind of sandbox as a parameter; of those without bubblewrap CI runs one."""
    for kind, root in GUESTS:
        is_sample = kind == "bubblewrap" or (kind, root) == ("namespaces", False)
        marks = () if is_sample else pytest.mark.nightly
        yield pytest.param((kind, root), id=f"{kind}-{'root' if root else 'user'}", marks=marks)


@pytest.fixture(params=list(each_guest()))
def guest(request, top) -> Iterator[Guest]:
    kind, root = request.param
    if root and not may_use_uids():
        pytest.skip("only root can do this")
    if kind == "bubblewrap" and shutil.which("bwrap") is None:
        pytest.skip("needs bubblewrap")
    for name in ("work", "out"):
        (top / name).mkdir()
        if may_use_uids() and not root:
            os.chown(top / name, NOBODY, NOBODY)
    before = leftovers()
    yield Guest(kind, root, top)
    assert leftovers() <= before, "a folder is left in the temp folder of this machine"


@pytest.fixture
def here(top) -> dict:
    for name in ("work", "out"):
        (top / name).mkdir()
    return {
        "work": top / "work",
        "out": top / "out",
        "read_only": {},
        "limits": RunLimits(),
        "env": {},
    }
