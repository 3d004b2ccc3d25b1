"""Run without namespaces: copies of the files in a folder of this run, under a uid if possible.

There are no inner paths here, so that /work, /out and the others become paths of this folder,
wherever the command or its environment names them.
"""

import os
import pwd
import re
import secrets
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

FREE_UIDS = range(20_000, 60_000)  # inside what a container usually has
SHARED_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm")  # of this machine: everybody may write there


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


@dataclass(frozen=True)
class StagedRoot:
    """The folder of one run, its uid (0: no uid of its own), and the inner paths it stands for."""

    folder: Path
    uid: int
    inner: tuple[str, ...]  # first folders of the inner paths

    def path(self, inner: Path | str) -> str:
        """Return where an inner path lies on this machine."""
        return f"{self.folder}{inner}"

    def translated(self, text: str) -> str:
        """Return a word of the command, or a value of its environment, with paths as they are."""
        names = "|".join(map(re.escape, self.inner))
        return re.sub(rf"(?<![^:=])(?=/({names})(/|:|$))", str(self.folder), text)

    def used_bytes(self) -> int:
        """Return what this run has on the disk, in shared folders, too."""
        places = [str(self.folder), *self.strewn()]
        told = subprocess.run(["du", "-sxcB1", *places], capture_output=True, text=True).stdout
        return int(told.split()[-2]) if told else 0

    def strewn(self) -> Iterator[str]:
        """Yield what the uid of this run owns in folders where everybody may write."""
        for place in SHARED_FOLDERS if self.uid else ():
            with suppress(OSError):
                for entry in os.scandir(place):
                    with suppress(OSError):
                        if entry.stat(follow_symlinks=False).st_uid == self.uid:
                            yield entry.path


@contextmanager
def stage(uid: int, read_only: Mapping[Path, Path]) -> Iterator[StagedRoot]:
    """Copy files and folders to a new folder that is removed at the end: {source: inner path}."""
    folder = Path(tempfile.mkdtemp(prefix="sandbox-"))
    firsts = {inner.parts[1] for inner in read_only.values()} | {"work", "out"}
    staged = StagedRoot(folder, uid, tuple(sorted(firsts)))
    try:
        folder.chmod(0o711)
        (folder / "work").mkdir()
        for source, inner in read_only.items():
            copy(source, Path(staged.path(inner)))
        for name in ("out", "tmp", "home/learner"):
            place = folder / name
            place.mkdir(parents=True, exist_ok=True)
            if uid:
                os.chown(place, uid, uid)
        yield staged
    finally:  # rm, since a folder may be nested deeper than Python's own functions go
        subprocess.run(["rm", "-rf", "--", str(folder), *staged.strewn()], check=True)


def copy(source: Path, target: Path) -> None:
    """Copy a file or folder, readable for everybody."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target, symlinks=True)
    else:
        shutil.copyfile(source, target)
    subprocess.run(["chmod", "-R", "a+rX", str(target)], check=True)
