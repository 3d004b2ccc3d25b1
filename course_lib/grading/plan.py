"""The plan of a sandbox: what is bound where, which limits the kernel keeps, which environment.

The launcher carries it out, or bubblewrap does its first half.
"""

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from course_lib.grading.staged import StagedRoot
from course_lib.grading.watchdog import RunLimits, processes

LAUNCHER = Path(__file__).with_name("launcher.py")
HOME = "/home/learner"
SCRATCH = ("/out", "/tmp", "/dev/shm", HOME)
PRIVATE = ("HOME", "IPYTHONDIR", "TMPDIR")  # folders that the environment names
INNER_UID = 1000  # in a user namespace, where it is this user outside
MORE_THREADS = 50  # the watchdog, which says why, comes before the limit of the kernel
FROM_ETC = ("alternatives", "hosts", "ld.so.cache", "localtime", "nsswitch.conf")
TOP_FOLDERS = ("bin", "lib", "lib32", "lib64", "libx32", "sbin")  # often links into /usr


def make_plan(
    kind: str, uid: int, bound: Mapping[Path, Path], limits: RunLimits, env: Mapping[str, str]
) -> dict[str, Any]:
    """Return what the launcher does: everything but the command and its channel."""
    tops = [Path("/", name) for name in TOP_FOLDERS]
    system = [Path("/usr"), *(top for top in tops if top.is_dir() and not top.is_symlink())]
    etc = [path for name in FROM_ETC if (path := Path("/etc", name)).exists()]
    same = [(path, path) for path in (*system, *etc, *python_folders())]
    own = 0 if uid else num_own_threads()
    programs = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"
    fixed = {"PATH": programs, "HOME": HOME, "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"}
    fixed |= {"IPYTHONDIR": f"{HOME}/.ipython", "TMPDIR": "/tmp", "USER": "learner"}
    return {
        "kind": kind,
        "uid": uid,
        "inner_uid": INNER_UID,
        "links": [(str(top), os.readlink(top)) for top in tops if top.is_symlink()],
        "read_only": [(str(path), str(inner)) for path, inner in (*same, *bound.items())],
        "scratch": [(place, limits.disk_bytes) for place in SCRATCH],
        "watched": SCRATCH,
        "rlimits": {
            "NPROC": limits.processes + MORE_THREADS + own,
            "FSIZE": limits.disk_bytes,
            "CORE": 0,
        },
        "folder": "/tmp",
        "env": {**fixed, **env},
    }


def in_stage(plan: Mapping[str, Any], staged: StagedRoot) -> dict[str, Any]:
    """Return what changes in a plan where inner paths are paths of a stage."""
    env = {name: staged.translated(value) for name, value in plan["env"].items()}
    return {
        "watched": [staged.path(place) for place in SCRATCH if place != "/dev/shm"],
        "folder": staged.path("/tmp"),
        "command": [staged.translated(word) for word in plan["command"]],
        "env": env | {name: staged.path(plan["env"][name]) for name in PRIVATE},
    }


def bubblewrap(plan: Mapping[str, Any]) -> list[str]:
    """Return bubblewrap's command line.

    As root, it keeps the rights that the launcher needs to take another uid. Otherwise a user
    namespace makes this user another one, which is the same outside.
    """
    spaces = ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"]
    kept = ("CAP_SETUID", "CAP_SETGID", "CAP_SYS_RESOURCE")
    rights = ["--cap-drop", "ALL", *(word for cap in kept for word in ("--cap-add", cap))]
    user = ["--unshare-user", "--uid", str(INNER_UID), "--gid", str(INNER_UID)]
    program = shutil.which("bwrap")
    if program is None:
        raise RuntimeError("sandbox: bubblewrap (the command bwrap) is not installed")
    words = [program, "--die-with-parent", "--clearenv", "--hostname", "localhost", *spaces]
    words += rights if plan["uid"] else user
    words += ["--proc", "/proc", "--dev", "/dev"]
    words += ["--dir", "/work"]
    for place, size in plan["scratch"]:
        words += ["--perms", "1777", "--size", str(size), "--tmpfs", place]
    for target, source in plan["links"]:
        words += ["--symlink", source, target]
    for source, inner in (*plan["read_only"], (str(LAUNCHER), "/launcher.py")):
        for above in [*Path(inner).parents][-2::-1]:  # otherwise only root may enter them
            words += ["--dir", str(above)]
        words += ["--ro-bind", source, inner]
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
    """Raise ValueError where another uid could not read one of these, or what is in it."""
    for top in paths:
        inside = top.rglob("*") if top not in python_folders() else ()
        for path in (top, *inside):
            needed = 0o005 if path.is_dir() else 0o004
            if not path.is_symlink() and path.stat().st_mode & needed != needed:
                raise ValueError(
                    f"sandbox: expected files that every user may read; got {path}. "
                    f"Try chmod -R a+rX {top}"
                )


def num_own_threads() -> int:
    """Return the threads of this user, which the kernel counts together with the sandbox's."""
    user, found = os.getuid(), 0
    for process in processes():
        try:
            found += process.num_threads * (os.stat(f"/proc/{process.pid}").st_uid == user)
        except OSError:  # it has ended
            continue
    return found
