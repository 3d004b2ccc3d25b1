"""Run one command of somebody else's in isolation from this machine.

    sandbox = find_sandbox()
    ended = sandbox.run(["python", "-m", "course_lib.grading.inside"], work=..., out=..., ...)

Inside, the submission lies at /work, what shall come back goes to /out, and nothing else of this
machine can be seen but Python and what the caller adds. bubblewrap does it where it is installed;
otherwise namespaces of the kernel, set up by the launcher; otherwise only another uid, and limits.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from course_lib.grading.plan import (
    LAUNCHER,
    bubblewrap,
    entries,
    in_stage,
    make_plan,
    python_folders,
    require_readable,
)
from course_lib.grading.returned import copy_plain_files
from course_lib.grading.staged import free_uid, may_use_uids, stage
from course_lib.grading.watchdog import RunLimits, Watchdog, end

WARNINGS = {
    "bubblewrap": "",
    "namespaces": "",
    "other uid": "Weaker than bubblewrap: each submission runs under a uid of its own, with limits "
    "and a folder of its own, but it can use the network, reach every server on this machine, "
    "read every file that all users may read, see other processes, and fill shared memory that "
    "belongs to no process. Try installing bubblewrap, or allowing user namespaces.",
    "same uid": "Much weaker than bubblewrap: each submission runs as you. It can read and change "
    "all your files (solved notebooks and other submissions, too), end your processes (the grader, "
    "too) and outlive it, and use the network. Try installing bubblewrap, or allowing user "
    "namespaces; otherwise grade only submissions that you trust.",
}


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
    """A way to run commands in isolation; `find_sandbox` returns the best that works here.

    warning says what this kind does not protect; it is empty where it protects everything.
    """

    kind: str
    stopped: threading.Event = field(default_factory=threading.Event, repr=False)

    @property
    def warning(self) -> str:
        return WARNINGS[self.kind]

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

        Inside, `work` is /work, and {path: inner path} of `read_only` is there: everything
        read-only. /tmp (the current folder), HOME, /dev/shm and /out are empty and limited. The
        plain files that are then in /out come to the folder `out`, which has to be empty; what is
        no plain file is left out.
        Raises: ValueError where `out` is not empty, or where `work` has links or cannot be read by
        everybody (as root, the command gets another uid); RuntimeError where the sandbox
        cannot be set up. On Ctrl-C, everything has ended before KeyboardInterrupt is raised.
        """
        if any(out.iterdir()):
            raise ValueError(f"sandbox: expected an empty folder for results; got {out}.")
        bound = {**entries(work), **read_only}
        with ExitStack() as stack:
            uid = stack.enter_context(free_uid())
            staged = None
            if "uid" in self.kind:
                staged = stack.enter_context(stage(uid, bound))
            elif uid:
                require_readable([*bound, *python_folders()])
            ours, theirs = map(stack.enter_context, map(closing, socket.socketpair()))
            plan = make_plan(self.kind, uid, bound, limits, env)
            plan |= {"channel": theirs.fileno(), "command": list(command)}
            if staged:
                plan |= in_stage(plan, staged)
            process = stack.enter_context(started(self.kind, plan, theirs))
            theirs.close()
            disk = staged.used_bytes if staged else None
            watchdog = Watchdog(process, ours, limits, disk, self.stopped.is_set)
            return self.followed(watchdog, out)

    def followed(self, watchdog: Watchdog, out: Path) -> Ended:
        """Wait for the end of a run, make it complete, and bring back what it left."""
        process, limits = watchdog.process, watchdog.limits
        try:
            how = watchdog.watch()
        finally:
            end(process, self.kind)
        told = watchdog.last_words()
        if how == "ended" and not watchdog.folders:
            raise RuntimeError(f"sandbox: {self.kind} could not be set up here: {told.strip()}")
        copied = all(copy_plain_files(fd, out, limits.disk_bytes) for fd in watchdog.folders[:1])
        for folder in watchdog.folders:
            os.close(folder)
        code = process.returncode if process.returncode >= 0 else 128 - process.returncode
        if how == "ended" and code == 128 + signal.SIGKILL:
            how = "killed"
        return Ended(how if copied else "disk", code, told)


def started(kind: str, plan: Mapping[str, Any], channel: socket.socket) -> subprocess.Popen:
    """Start the launcher of a plan, with one pipe for all its output."""
    python = [sys.executable, "-I", "-S"]
    words = [*python, str(LAUNCHER), json.dumps(plan)]
    if kind == "bubblewrap":
        words = [*bubblewrap(plan), "--", *python, "/launcher.py", json.dumps(plan)]
    return subprocess.Popen(
        words,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={},
        cwd="/",
        start_new_session=True,  # Ctrl-C is for the grader, which ends it all
        pass_fds=[channel.fileno()],
    )


def find_sandbox(kind: str = "") -> Sandbox:
    """Return the strongest sandbox that works on this machine, or the one of this kind.

    Kinds, strongest first: "bubblewrap", "namespaces", "other uid" (root only), "same uid" (never
    as root).
    Raises: ValueError for an unknown kind; RuntimeError where it does not work here.
    """
    if kind and kind not in WARNINGS:
        raise ValueError(f"sandbox: expected a kind of {', '.join(WARNINGS)}; got {kind!r}.")
    weak = {"same uid" if may_use_uids() else "other uid"}
    problems = []
    for name in [kind] if kind else [name for name in WARNINGS if name not in weak]:
        try:
            if name in weak:
                raise RuntimeError(f"{name!r} is not for this user")
            return tried(Sandbox(name))
        except (OSError, RuntimeError) as error:
            problems.append(str(error))
    raise RuntimeError(f"sandbox: none works here: {'; '.join(problems)}")


def tried(sandbox: Sandbox) -> Sandbox:
    """Return this sandbox after a first command has run in it; RuntimeError where none does."""
    with tempfile.TemporaryDirectory() as name:
        work, out = Path(name, "work"), Path(name, "out")
        work.mkdir()
        out.mkdir()
        ended = sandbox.run(
            ["true"], work=work, out=out, read_only={}, limits=RunLimits(wall_s=60), env={}
        )
    if (ended.how, ended.code) != ("ended", 0):
        raise RuntimeError(f"sandbox: {sandbox.kind} does not work here: {ended}")
    return sandbox
