"""The plan of a run: what bubblewrap binds where, and the environment, uid and limits inside."""

import os
import pwd
import secrets
import shutil
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from course_lib.core import CourseError
from course_tools.grading.watchdog import RunLimits, processes

LAUNCHER = Path(__file__).with_name("launcher.py")
HOME = "/home/learner"
SCRATCH = ("/out", "/tmp", "/dev/shm", HOME)
INNER_UID = 1000  # in a user namespace, where it is this user outside
FREE_UIDS = range(20_000, 60_000)  # inside what a container usually has
MORE_THREADS = 50  # the watchdog, which says why, comes before the limit of the kernel
FROM_ETC = ("alternatives", "hosts", "ld.so.cache", "localtime", "nsswitch.conf")
TOP_FOLDERS = ("bin", "lib", "lib32", "lib64", "libx32", "sbin")  # often links into /usr


def make_plan(
    uid: int,
    limits: RunLimits,
    env: Mapping[str, str],
    *,
    watched: Sequence[str] = SCRATCH,
    home: str = HOME,
    tmp: str = "/tmp",
) -> dict[str, Any]:
    """Return what the launcher does: everything but the command and its channel."""
    own = 0 if uid else num_own_threads()
    programs = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"
    fixed = {"PATH": programs, "HOME": home, "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"}
    fixed |= {"IPYTHONDIR": f"{home}/.ipython", "TMPDIR": tmp, "USER": "learner"}
    return {
        "uid": uid,
        "watched": watched,
        "rlimits": {
            "NPROC": limits.processes + MORE_THREADS + own,
            "FSIZE": limits.disk_bytes,
            "CORE": 0,
        },
        "folder": tmp,
        "env": {**fixed, **env},
    }


def bubblewrap(uid: int, bound: Mapping[Path, Path], limits: RunLimits) -> list[str]:
    """Return bubblewrap's command line, with {path: inner path} of what is read-only inside.

    As root, it keeps the rights that the launcher needs to take another uid. Otherwise a user
    namespace makes this user another one, which is the same outside.
    """
    spaces = ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"]
    kept = ("CAP_SETUID", "CAP_SETGID", "CAP_SYS_RESOURCE")
    rights = ["--cap-drop", "ALL", *(word for cap in kept for word in ("--cap-add", cap))]
    user = ["--unshare-user", "--uid", str(INNER_UID), "--gid", str(INNER_UID)]
    program = shutil.which("bwrap")
    if program is None:
        raise RuntimeError("the command bwrap is not installed")
    words = [program, "--die-with-parent", "--clearenv", "--hostname", "localhost", *spaces]
    words += rights if uid else user
    words += ["--proc", "/proc", "--dev", "/dev"]
    words += ["--dir", "/work"]
    for place in SCRATCH:
        words += ["--perms", "1777", "--size", str(limits.disk_bytes), "--tmpfs", place]
    tops = [Path("/", name) for name in TOP_FOLDERS]
    for top in tops:
        words += ["--symlink", os.readlink(top), str(top)] if top.is_symlink() else []
    system = [Path("/usr"), *(top for top in tops if top.is_dir() and not top.is_symlink())]
    etc = [path for name in FROM_ETC if (path := Path("/etc", name)).exists()]
    same = [(path, path) for path in (*system, *etc, *python_folders())]
    for source, inner in (*same, *bound.items(), (LAUNCHER, Path("/launcher.py"))):
        for above in [*inner.parents][-2::-1]:  # otherwise only root may enter them
            words += ["--dir", str(above)]
        words += ["--ro-bind", str(source), str(inner)]
    words += ["--remount-ro", "/dev", "--remount-ro", "/"]
    return words


def python_folders() -> list[Path]:
    """Return the folders that this Python needs: its environment, and what that was made from."""
    named = [Path(sys.prefix), Path(sys.base_prefix)]
    folders = dict.fromkeys([*named, *(path.resolve() for path in named)])
    return [path for path in folders if not path.is_relative_to("/usr")]


def entries(work: Path) -> dict[Path, Path]:
    """Return {entry: inner path} of what lies in `work`.

    The entries, not the folder: so that nothing is hidden where Python lies below a folder /work.
    """
    found = {path: Path("/work", path.name) for path in sorted(work.iterdir())}
    for path in found:
        if path.is_symlink():
            raise ValueError(f"sandbox: expected files and folders in {work}; got a link, {path}.")
    return found


def require_readable(paths: Sequence[Path]) -> None:
    """Raise CourseError where another uid could not read one of these, or what is in it."""
    for top in paths:
        inside = top.rglob("*") if top not in python_folders() else ()
        for path in (top, *inside):
            needed = 0o005 if path.is_dir() else 0o004
            if not path.is_symlink() and path.stat().st_mode & needed != needed:
                raise CourseError(
                    f"sandbox: expected files that every user may read; got {path}. "
                    f"Try chmod -R a+rX {top}"
                )


def may_use_uids() -> bool:
    """Is this root, and root of a user namespace that has other users?"""
    rows = [row.split() for row in Path("/proc/self/uid_map").read_text().splitlines()]
    mapped = (range(int(first), int(first) + int(size)) for first, _, size in rows)
    first, last = FREE_UIDS[0], FREE_UIDS[-1]
    return os.geteuid() == 0 and any(first in uids and last in uids for uids in mapped)


@contextmanager
def free_uid() -> Iterator[int]:
    """Lend a uid that no user of this machine and no other run has; 0 where there is none."""
    if not may_use_uids():
        yield 0
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as lock:
        while not lock.getsockname():
            uid = secrets.choice(FREE_UIDS)
            try:
                pwd.getpwuid(uid)
            except KeyError:
                with suppress(OSError):  # lent to another run: the name is free when that has ended
                    lock.bind(f"\0course-grading-uid-{uid}")
        yield uid


def num_own_threads() -> int:
    """Return the threads of this user, which the kernel counts together with the sandbox's."""
    user, found = os.getuid(), 0
    for process in processes():
        try:
            found += process.num_threads * (os.stat(f"/proc/{process.pid}").st_uid == user)
        except OSError:  # it has ended
            continue
    return found
