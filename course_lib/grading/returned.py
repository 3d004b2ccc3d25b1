"""Bring back what a run left in its output folder: plain files within the limit, and nothing else.

Every process of the run has ended, so the folder no longer changes. It still may contain anything.
"""

import os
import shutil
import stat
from pathlib import Path

MOST_FILES = 1000


def copy_plain_files(folder: int, out: Path, most_bytes: int) -> bool:
    """Copy the plain files of an open folder; False where some are left out as too many or large.

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
