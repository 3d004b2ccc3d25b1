"""What the tests of the sandbox share: a folder that others can reach, and a guest of each kind."""

import functools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from course_tools.grading.bubblewrap import may_use_uids
from course_tools.grading.sandbox import RunLimits
from tests.grading.sandbox.guests import AS_NOBODY, NOBODY, Guest, leftovers


@pytest.fixture
def top() -> Iterator[Path]:
    """A folder that every user can reach (pytest's own can be reached by its user only)."""
    folder = Path(tempfile.mkdtemp(prefix="class-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@functools.cache
def nobody_may_isolate() -> bool:
    """May a plain user set up bubblewrap, where these tests are root's?"""
    words = [*AS_NOBODY, "bwrap", "--unshare-user", "--unshare-net", "--ro-bind", "/", "/", "true"]
    return subprocess.run(words, capture_output=True).returncode == 0


@pytest.fixture(params=["root", "user"])
def guest(request, top) -> Iterator[Guest]:
    """In bubblewrap, of a grader that is root or a plain user; "trusted": of a user, without it."""
    root, trusts = request.param == "root", request.param == "trusted"
    if root and not may_use_uids():
        pytest.skip("only root can do this")
    if not trusts:
        request.getfixturevalue("bubblewrap")
        if may_use_uids() and not root and not nobody_may_isolate():
            pytest.skip("no user namespaces for plain users here")
    for name in ("work", "out"):
        (top / name).mkdir()
        if may_use_uids() and not root:
            os.chown(top / name, NOBODY, NOBODY)
    before = leftovers()
    yield Guest(top, root, trusts)
    assert leftovers() <= before, "a folder is left in the temp folder of this machine"


@pytest.fixture
def here(top, bubblewrap) -> dict:
    for name in ("work", "out"):
        (top / name).mkdir()
    return {
        "work": top / "work",
        "out": top / "out",
        "read_only": {},
        "limits": RunLimits(),
        "env": {},
    }
