"""Whatever a submission does in its sandbox, this machine stays as it was."""

import json
import os
import shutil
import signal
import socket
import uuid
from pathlib import Path

import pytest

from course_tools.grading.bubblewrap import may_use_uids
from tests.grading.sandbox.guests import NOBODY, running

MiB = 2**20
limited = pytest.mark.parametrize("guest", ["root", "user", "trusted"], indirect=True)


PROBE = """
import ctypes, json, os, socket, sys
classmate, solved, course, inner, port, grader = sys.argv[1:]
done = []
def attempt(name, act):
    try:
        if act() is not False:
            done.append(name)
    except OSError:
        pass
attempt("read a classmate's file", lambda: open(classmate).read())
attempt("read a private file", lambda: open(solved).read())
attempt("write to the course", lambda: open(course, "a").write("x"))
attempt("write to the course inside", lambda: open(inner, "a").write("x"))
attempt("write beside it", lambda: open(os.path.dirname(inner) + "/new.py", "w"))
attempt("write to the submission", lambda: open(os.environ["WORK"] + "/new.txt", "w"))
attempt("connect", lambda: socket.create_connection(("127.0.0.1", int(port)), 5))
attempt("see processes", lambda: os.path.isdir(f"/proc/{grader}"))
attempt("signal the grader", lambda: os.kill(int(grader), 0))
seize = ctypes.CDLL(None).ptrace
seize.argtypes = [ctypes.c_ulong] * 4
attempt("trace the grader", lambda: seize(0x4206, int(grader), 0, 0) == 0)
attempt("trace pid 1", lambda: seize(0x4206, 1, 0, 0) == 0)
attempt("become root", lambda: os.setuid(0))
attempt("mount", lambda: ctypes.CDLL(None).mount(b"x", b"/tmp", b"tmpfs", 0, None) == 0)
attempt("change the kernel", lambda: open("/proc/sys/kernel/core_pattern", "w").write("|/tmp/x"))
attempt("read the grader's environment", lambda: "A_SECRET" in os.environ)
print(json.dumps([os.getuid(), done]))
"""


def test_a_submission_reaches_nothing_of_this_machine(guest, top):
    for name in ("classmate.py", "solved.py", "course/part.py"):
        path = top / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("its own")
        if may_use_uids() and not guest.root:
            os.chown(path, NOBODY, NOBODY)
            os.chown(path.parent, NOBODY, NOBODY)
    (top / "solved.py").chmod(0o600)
    files = [str(top / name) for name in ("classmate.py", "solved.py", "course/part.py")]
    with socket.create_server(("127.0.0.1", 0)) as server:
        words = [*files, "/course/part.py", str(server.getsockname()[1]), "GRADER"]
        inner = {"read_only": {str(top / "course"): "/course"}, "env": {"WORK": "/work"}}
        ended = guest.act(PROBE, *words, **inner)
    assert ended.how == "ended", ended.told
    uid, done = json.loads(ended.told)
    assert uid != 0
    assert set(done) <= {"trace pid 1"}  # which has no more rights than the command there
    assert [Path(path).read_text() for path in files] == ["its own"] * 3
    assert not any((top / "work").iterdir())


def test_a_submission_that_kills_its_parent_harms_itself_only(guest):
    code = "try: os.kill(os.getppid(), 9)\nexcept OSError: pass\ntime.sleep(1)"
    ended = guest.act(f"import os, time\n{code}")
    assert ended.how == "ended"


@limited
def test_a_fork_bomb_is_ended(guest):
    mark = uuid.uuid4().hex
    code = "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass"
    ended = guest.act(code, mark, limits={"processes": 30})
    assert ended.how == "processes"
    assert running(mark) == []


HOARDS = {
    "on the heap": "held = []\nwhile True: held.append(b'x' * 2**24)",
    "in unnamed files": "from os import *\nwhile True: write(memfd_create(''), bytes(2**24))",
    "in children": "import os, time\nfor n in range(16):\n"
    "  if os.fork() == 0:\n    held = b'x' * 2**25\n    time.sleep(600)\ntime.sleep(600)",
}


@limited
@pytest.mark.parametrize("hoard", HOARDS)
def test_a_submission_that_takes_too_much_memory_is_ended(guest, hoard):
    code = HOARDS[hoard].replace("while True:", "import time\nwhile not time.sleep(0.01):")
    assert guest.act(code, limits={"memory_bytes": 256 * MiB}).how == "memory"


def test_memory_that_processes_share_counts_once(guest):
    code = (
        "import os, time\nheld = b'x' * (100 * 2**20)\n"
        "pids = [os.fork() for _ in range(3)]\ntime.sleep(1.5)"
    )
    assert guest.act(code, limits={"memory_bytes": 300 * MiB}).how == "ended"


def test_memory_that_is_only_reserved_does_not_count(guest):
    code = "import mmap, time\nheld = mmap.mmap(-1, 50 * 2**30)\ntime.sleep(1)"
    assert guest.act(code, limits={"memory_bytes": 256 * MiB}).how == "ended"


def test_endless_output_is_ended_and_its_end_kept(guest):
    code = "n = 0\nwhile True:\n  n += 1\n  print(f'{n:099d}')"
    ended = guest.act(code, limits={"output_bytes": 64 * MiB})
    assert ended.how == "output"
    assert len(ended.told) == 4000
    assert int(ended.told.splitlines()[-2]) * 100 > 60 * MiB
    assert ended.grown_kib < 16 * 1024


@limited
def test_a_cell_that_ignores_signals_is_ended_in_time(guest):
    code = (
        "import signal\nfor n in range(1, 65):\n"
        "  try: signal.signal(n, signal.SIG_IGN)\n  except (OSError, ValueError): pass\n"
        "print('on', flush=True)\nwhile True: pass"
    )
    ended = guest.act(code, limits={"wall_s": 2})
    assert (ended.how, ended.told.strip()) == ("time", "on")


FILL = """
import os, sys
for n in range(1000):
    with open(f"{os.environ.get(sys.argv[1], sys.argv[1])}/{n}", "wb") as file:
        file.write(bytes(2**22))
"""


@pytest.mark.parametrize("place", ["TMPDIR", "HOME", "OUT", "/dev/shm"])
def test_no_place_takes_more_than_the_disk_limit(guest, place):
    before = shutil.disk_usage("/dev/shm").used
    ended = guest.act(FILL, place, limits={"disk_bytes": 32 * MiB})
    assert ended.code == 1
    assert "No space left" in ended.told
    assert shutil.disk_usage("/dev/shm").used <= before + 64 * MiB


def test_no_file_grows_beyond_the_disk_limit(guest):
    code = "import os\nopen(os.environ['TMPDIR'] + '/large', 'wb').truncate(2**30)"
    ended = guest.act(code, limits={"disk_bytes": 32 * MiB})
    assert ended.code == 1
    assert "File too large" in ended.told


@limited
@pytest.mark.parametrize("ends", ["by itself", "by the time limit"])
def test_nothing_outlives_the_run(guest, ends):
    mark = f"1{uuid.uuid4().int % 10**9}"
    stays = ends == "by the time limit"
    then = "sleep 600" if stays else "true"
    script = f"(setsid setsid sleep {mark} &) ; setsid sleep {mark} & {then}"
    ended = guest.run("sh", "-c", script, limits={"wall_s": 3 if stays else 300})
    assert ended.how == ("time" if stays else "ended")
    assert running(mark) == []


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL])
def test_nothing_outlives_the_grader(guest, until, sent):
    mark = f"1{uuid.uuid4().int % 10**9}"
    script = f"setsid sleep {mark} & sleep {mark}"
    grader = guest.start("sh", "-c", script)
    until(lambda: len(running(mark)) >= 2, "the command runs")
    grader.send_signal(sent)
    _, problem = grader.communicate()
    if sent == signal.SIGINT:
        assert "KeyboardInterrupt" in problem
        assert running(mark) == []
    until(lambda: running(mark) == [], "all has ended")
