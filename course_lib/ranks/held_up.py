"""Tell a thread that sleeps from one that a busy machine keeps waiting for a core (on Linux)."""

from contextlib import suppress
from pathlib import Path
from threading import get_native_id


def waited_for_core_s() -> float:
    """Return for how long this process's main thread has waited for a core; 0 where unknown."""
    with suppress(OSError, ValueError, IndexError):
        return int(Path("/proc/self/schedstat").read_text().split()[1]) / 1e9
    return 0.0


def is_ready(thread: Path = Path("/proc/self")) -> bool:
    """Return whether a thread runs, or would if it had a core or its page of memory."""
    with suppress(OSError, IndexError):
        return thread.joinpath("stat").read_text().rpartition(")")[2].split()[0] in "RD"
    return False


def others_are_ready() -> bool:
    """Return whether another thread of this process runs, or would if it had a core."""
    threads = Path("/proc/self/task").glob("*")
    return any(is_ready(one) for one in threads if one.name != str(get_native_id()))
