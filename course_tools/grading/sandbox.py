"""Run one command of somebody else's in isolation from this machine.

    sandbox = find_sandbox()
    ended = sandbox.run(["python", "-m", "course_tools.grading.inside"], work=..., out=..., ...)

bubblewrap does it: inside, the submission lies at /work, what shall come back goes to /out, and
nothing else of this machine can be seen but Python and what the caller adds. Where it cannot work,
whoever grades may trust the submissions: then they run as this user, within limits only.
"""

import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from course_lib.core import CourseError
from course_tools.grading.bubblewrap import (
    LAUNCHER,
    bubblewrap,
    entries,
    free_uid,
    make_plan,
    python_folders,
    require_readable,
)
from course_tools.grading.watchdog import RunLimits, Watchdog, end

MOST_FILES = 1000  # that a run may leave
NEEDED = (
    "course grade: need bubblewrap, which keeps submissions away from this machine and from the "
    "solutions; {problem}. Try apt-get install bubblewrap, or allow user namespaces "
    "(docs/instructor.md, section 6), or --trust if you trust everybody who handed in."
)
WARNING = (
    "No isolation: each submission runs as you, and can read and change your files, solutions and "
    "grades, and use the network; only its time, memory and processes are limited."
)


@dataclass(frozen=True)
class Ended:
    """The end of a run, its exit status, and the last 4,000 characters that it printed.

    how is "ended" (by itself), "time", "memory", "processes", "output" or "disk" (the limit that
    it passed), or "killed" (by `stop`, or by the kernel where memory ran out). code is 128 + n
    where signal n ended it. told may contain any character: see course_lib.core.plain_text.
    """

    how: str
    code: int
    told: str


@dataclass(frozen=True)
class Sandbox:
    """A way to run commands: in bubblewrap or, where it `trusts` them, without isolation."""

    trusts: bool = False
    stopped: threading.Event = field(default_factory=threading.Event, repr=False)

    def at(self, path: Path, inner: str) -> str:
        """Return where a command finds what is `path` here and `inner` in bubblewrap."""
        return str(path) if self.trusts else inner

    def stop(self) -> None:
        """End every run at once, also those of other threads; later ones end at once, too."""
        self.stopped.set()

    def run(
        self,
        command: Sequence[str],
        *,
        work: Path,
        out: Path,
        read_only: Mapping[Path, Path],
        limits: RunLimits,
        env: Mapping[str, str],
    ) -> Ended:
        """Run a command, and return when it and all that it started have ended.

        In bubblewrap, `work` is /work, and {path: inner path} of `read_only` is there: everything
        read-only. /tmp (the current folder), HOME, /dev/shm and /out are empty and limited. The
        plain files that are then in /out come to the folder `out`, which has to be empty; what is
        no plain file is left out. Without isolation, everything lies where it is (see `at`), and
        the current folder and HOME are folders of this run.
        Raises: ValueError where `out` is not empty or `work` has links; CourseError where not
        everybody may read it (as root, the command gets another uid); RuntimeError where
        bubblewrap cannot work. On Ctrl-C, all has ended before KeyboardInterrupt is raised.
        """
        if any(out.iterdir()):
            raise ValueError(f"sandbox: expected an empty folder for results; got {out}.")
        with ExitStack() as stack:
            around, mark = list[str](), ""
            if self.trusts:
                mark = stack.enter_context(
                    tempfile.TemporaryDirectory(prefix="sandbox-", ignore_cleanup_errors=True)
                )
                plan = make_plan(0, limits, env, watched=[str(out)], home=mark, tmp=mark)
            else:
                uid = stack.enter_context(free_uid())
                bound = {**entries(work), **read_only}
                if uid:
                    require_readable([*bound, *python_folders()])
                plan, around = make_plan(uid, limits, env), bubblewrap(uid, bound, limits)
            ours, theirs = map(stack.enter_context, map(closing, socket.socketpair()))
            plan |= {"channel": theirs.fileno(), "command": list(command)}
            process = stack.enter_context(started(around, plan, theirs))
            theirs.close()
            return self.followed(Watchdog(process, ours, limits, mark, self.stopped.is_set), out)

    def followed(self, watchdog: Watchdog, out: Path) -> Ended:
        """Wait for the end of a run, make it complete, and bring back what it left."""
        process, limits = watchdog.process, watchdog.limits
        try:
            how = watchdog.watch()
        finally:
            end(process, watchdog.mark)
        told = watchdog.last_words()
        if how == "ended" and not watchdog.folders:
            why = told.strip().rpartition("\n")[2].rstrip(".")
            raise RuntimeError(f"the sandbox could not be set up here ({why})")
        left = [] if self.trusts else watchdog.folders[:1]
        copied = all(copy_plain_files(fd, out, limits.disk_bytes) for fd in left)
        for folder in watchdog.folders:
            os.close(folder)
        code = process.returncode if process.returncode >= 0 else 128 - process.returncode
        if how == "ended" and code == 128 + signal.SIGKILL:
            how = "killed"
        return Ended(how if copied else "disk", code, told)


def started(
    around: Sequence[str], plan: Mapping[str, Any], channel: socket.socket
) -> subprocess.Popen:
    """Start the launcher of a plan, with one pipe for all its output; `around` it, bubblewrap."""
    launcher = "/launcher.py" if around else str(LAUNCHER)
    words = [sys.executable, "-I", "-S", launcher, json.dumps(plan)]
    return subprocess.Popen(
        [*around, "--", *words] if around else words,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={},
        cwd="/",
        start_new_session=True,  # Ctrl-C is for the grader, which ends it all
        pass_fds=[channel.fileno()],
    )


def find_sandbox(*, trust: bool = False) -> Sandbox:
    """Return the sandbox of bubblewrap, after a first command has run in it.

    Where bubblewrap cannot work, `trust` returns the one without isolation.
    Raises: CourseError where it cannot work, and not `trust`
    """
    sandbox, limits = Sandbox(), RunLimits(wall_s=60)
    try:
        with tempfile.TemporaryDirectory() as name:
            work, out = Path(name, "work"), Path(name, "out")
            work.mkdir()
            out.mkdir()
            ended = sandbox.run(["true"], work=work, out=out, read_only={}, limits=limits, env={})
        if (ended.how, ended.code) == ("ended", 0):
            return sandbox
        problem = f"a first command did not end well in it ({ended})"
    except (OSError, RuntimeError) as error:
        problem = str(error)
    if trust:
        return Sandbox(trusts=True)
    raise CourseError(NEEDED.format(problem=problem))


def copy_plain_files(folder: int, out: Path, most_bytes: int) -> bool:
    """Copy the plain files of an open folder; False where some are left out as too many or large.

    Every process of the run has ended, so the folder no longer changes, but may contain anything.
    Links, folders, FIFOs, devices, files without read permission and names with control characters
    are left out silently.
    """
    left, found = most_bytes, 0
    for name in sorted(os.listdir(folder)):
        if not name.isprintable():  # bytes that are no UTF-8 count as not printable
            continue
        try:
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            fd = os.open(name, flags, dir_fd=folder)
        except OSError:  # a link, or not readable
            continue
        about = os.fstat(fd)
        if not stat.S_ISREG(about.st_mode):
            os.close(fd)
            continue
        with open(fd, "rb") as source:
            found += 1
            left -= about.st_size
            if left < 0 or found > MOST_FILES:
                return False
            with (out / name).open("xb") as target:
                shutil.copyfileobj(source, target)
    return True
