"""What a run in a sandbox gets, what comes back from it, and whether there is a sandbox."""

import threading
import uuid

import pytest

from course_lib.core import CourseError
from course_tools.grading.bubblewrap import free_uid, may_use_uids
from course_tools.grading.sandbox import RunLimits, Sandbox, find_sandbox
from tests.grading.sandbox.guests import ROOT, running

MiB = 2**20


RESULTS = """
import os
os.chdir(os.environ["OUT"])
open("plain.json", "w").write("[1]")
os.symlink("/etc/passwd", "link")
os.mkfifo("fifo")
os.mkdir("folder")
open("folder/inner", "w").write("x")
open("two\\nlines", "w").write("x")
open(b"\\xff", "w").write("x")
open("unreadable", "w").write("x")
os.chmod("unreadable", 0)
"""


def test_only_plain_files_come_back(guest):
    ended = guest.act(RESULTS)
    assert (ended.how, ended.code, ended.told) == ("ended", 0, "")
    found = {path.name: path.read_text() for path in (guest.folder / "out").iterdir()}
    assert found.pop("unreadable", "x") == "x"  # root can read it
    assert found == {"plain.json": "[1]"}


@pytest.mark.parametrize("many", ["files", "bytes"])
def test_too_many_results_are_left_out(guest, many):
    num, size = (1200, 0) if many == "files" else (4, 15 * MiB)
    code = (
        "import os\n"
        + f"[open(os.environ['OUT'] + f'/{{n}}', 'wb').truncate({size}) for n in range({num})]"
    )
    assert guest.act(code, limits={"disk_bytes": 32 * MiB}).how == "disk"
    came = [path.stat().st_size for path in (guest.folder / "out").iterdir()]
    assert len(came) <= 1000
    assert sum(came) <= 32 * MiB


def test_the_submission_is_at_its_inner_path_and_the_environment_is_small(guest):
    (guest.folder / "work" / "notebook.txt").write_text("cells")
    code = (
        "import os, sys\nprint(open(sys.argv[1]).read(), sorted(os.environ))\n"
        "assert os.listdir(os.environ['HOME']) == []\n"
        "tmp = os.environ['TMPDIR']\n"  # Python itself may be installed below it
        "assert all(sys.prefix.startswith(f'{tmp}/{name}/') for name in os.listdir(tmp))\n"
        "assert os.getcwd() == os.path.realpath(os.environ['TMPDIR'])\n"
        "sys.exit(3)"
    )
    ended = guest.act(code, "/work/notebook.txt", env={"LC_ALL": "C"})
    known = "HOME IPYTHONDIR LANG LC_ALL OMP_NUM_THREADS OUT PATH TMPDIR USER"
    assert (ended.code, ended.told) == (3, f"cells {sorted(known.split())}\n")


RANKS = """
import os, sys
import torch
import torch.distributed as dist
import course_lib
from course_lib.ranks import Ranks

def total(rank):
    x = torch.tensor([10.0**rank])
    dist.all_reduce(x)
    return x.item()

if __name__ == "__main__":
    ranks = Ranks(2)
    print(ranks.run(total), course_lib.__file__, os.path.exists(sys.argv[1]))
    ranks.close()
"""


@pytest.mark.parametrize("guest", ["root" if may_use_uids() else "user"], indirect=True)
def test_two_ranks_communicate_inside(guest):
    (guest.folder / "work" / "lesson.py").write_text(RANKS)
    ended = guest.run(
        *("python", "/work/lesson.py", str(ROOT / "course_lib")),
        read_only={str(ROOT / "course_lib"): "/course/course_lib"},
        env={"PYTHONPATH": "/course"},
    )
    assert ended.told.splitlines()[-1:] == ["[11.0, 11.0] /course/course_lib/__init__.py False"]


def test_stop_ends_a_run_of_another_thread(here, until):
    sandbox, found = find_sandbox(), []
    mark = f"1{uuid.uuid4().int % 10**9}"
    thread = threading.Thread(target=lambda: found.append(sandbox.run(["sleep", mark], **here)))
    thread.start()
    until(lambda: running(mark), "the command runs")
    sandbox.stop()
    thread.join()
    assert (found[0].how, running(mark)) == ("killed", [])


def test_a_command_that_does_not_exist_is_its_own_failure(here):
    ended = find_sandbox().run(["no-such-command"], **here)
    assert (ended.code, ended.told) == (1, "no-such-command: No such file or directory\n")


@pytest.mark.parametrize(
    ("bwrap", "problem"),
    [
        ("", "the command bwrap is not installed"),
        ("echo bwrap: No permissions.", "could not be set up here (bwrap: No permissions)"),
    ],
)
def test_where_bubblewrap_cannot_work_one_sentence_says_so_unless_trusted(
    tmp_path, monkeypatch, bwrap, problem
):
    if bwrap:
        (tmp_path / "bwrap").write_text(f"#!/bin/sh\n{bwrap}\n")
        (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CourseError) as told:
        find_sandbox()
    assert f"{problem}. Try apt-get install bubblewrap" in str(told.value)
    assert "--trust" in str(told.value)
    assert find_sandbox(trust=True).trusts


def test_where_bubblewrap_works_it_is_taken_even_from_the_trusted(bubblewrap):
    assert not find_sandbox(trust=True).trusts


def test_what_could_not_be_right_is_refused(here):
    with pytest.raises(ValueError, match="expected wall_s above 0; got 0"):
        RunLimits(wall_s=0)
    (here["out"] / "old").touch()
    with pytest.raises(ValueError, match="expected an empty folder"):
        Sandbox().run(["true"], **here)
    (here["out"] / "old").unlink()
    (here["work"] / "link").symlink_to("/etc/shadow")
    with pytest.raises(ValueError, match=r"got a link, .*link\."):
        Sandbox().run(["true"], **here)


@pytest.mark.skipif(not may_use_uids(), reason="only root takes another uid")
def test_files_that_the_other_uid_cannot_read_are_named(here):
    (here["work"] / "private").write_text("x")
    (here["work"] / "private").chmod(0o600)
    with pytest.raises(CourseError, match=r"chmod -R a\+rX .*private"):
        find_sandbox().run(["true"], **here)


@pytest.mark.skipif(not may_use_uids(), reason="only root takes another uid")
def test_each_run_has_a_uid_of_its_own(monkeypatch):
    monkeypatch.setattr("course_tools.grading.bubblewrap.FREE_UIDS", range(20_000, 20_003))
    with free_uid() as first, free_uid() as second, free_uid() as third:
        assert {first, second, third} == {20_000, 20_001, 20_002}
