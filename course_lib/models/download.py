"""Download of a file from the web: checked by size and SHA-256, cached, whole or not at all.

The part that arrived before a connection broke stays in `NAME.part`; the next attempt resumes from
it. A file in the cache is checked each time it is used, and downloaded again if it has changed.
"""

import hashlib
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from course_lib.core.errors import CourseError

Tell = Callable[[int, int], None]  # bytes so far, bytes in all

TRIES = 3
PAUSE_S = 0.5  # before the second try, twice as long before the third
TIMEOUT_S = 10.0
CHUNK_BYTES = 2**16


@dataclass(frozen=True, kw_only=True)
class WebFile:
    """A file on the web: the addresses that serve it, its size in bytes and its SHA-256."""

    name: str
    urls: tuple[str, ...]
    num_bytes: int
    sha256: str

    def problem(self, path: Path) -> str | None:
        """Describe what is wrong with the file at `path`; None if nothing is."""
        if not path.is_file():
            return "it is not there"
        if path.stat().st_size != self.num_bytes:
            return f"it has {path.stat().st_size} bytes instead of {self.num_bytes}"
        found = hashlib.sha256(path.read_bytes()).hexdigest()
        return None if found == self.sha256 else f"its SHA-256 begins with {found[:12]}"


def cache_folder() -> Path:
    """Return the folder of downloaded files: COURSE_CACHE, or one in the user's own cache."""
    if own := os.environ.get("COURSE_CACHE"):
        return Path(own)
    above = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(above) / "distributed-training-course"


def fetch(file: WebFile, *, folder: Path | None = None, tell: Tell = lambda *_: None) -> Path:
    """Return the path of the file in the cache; download it if it is missing or damaged.

    Each address is tried up to 3 times and resumes where the last attempt broke off; one that
    cannot be found, or does not have the file, is tried once.

    Raises: CourseError that says why the file cannot be downloaded
    """
    path = (folder or cache_folder()) / file.name
    reason = "there is no place"
    try:
        if file.problem(path) is None:
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
        for url in file.urls:
            problem = _from_address(file, url, path, tell)
            if problem is None:
                return path
            reason = problem
    except OSError as problem:
        reason = f"{path.parent} cannot be written ({problem.strerror})"
    raise CourseError(f"{file.name}: need a download; {reason}.")


def _from_address(file: WebFile, url: str, path: Path, tell: Tell) -> str | None:
    """Download from one address; return None when the file is whole, else why it is not."""
    part, where, reason = path.with_name(path.name + ".part"), urlsplit(url).netloc, ""
    for attempt in range(TRIES):
        time.sleep(attempt * PAUSE_S)
        try:
            _download(file, url, part, tell)
        except HTTPError as problem:
            part.unlink(missing_ok=True)  # 416: what is there does not fit what is offered
            reason = f"{where} answers {problem.code}"
            if problem.code in (401, 403, 404, 410):
                break
        except (URLError, HTTPException, TimeoutError, ConnectionError) as problem:
            cause = getattr(problem, "reason", problem)
            reason = f"no connection to {where} ({getattr(cause, 'strerror', None) or cause})"
            if isinstance(cause, socket.gaierror):
                break
        else:
            wrong = file.problem(part)
            if wrong is None:
                part.replace(path)  # whole or not at all
                return None
            reason = f"what {where} sends is another file: {wrong}"
            if part.stat().st_size >= file.num_bytes:
                part.unlink()  # nothing to go on from
    return reason


def _download(file: WebFile, url: str, part: Path, tell: Tell) -> None:
    """Append what is missing to `part`; start again where a server sends only whole files."""
    there = part.stat().st_size if part.is_file() else 0
    if there >= file.num_bytes:
        there = 0
    request = Request(url, headers={"Range": f"bytes={there}-"} if there else {})
    with urlopen(request, timeout=TIMEOUT_S) as answer:
        goes_on = there and answer.status == 206
        there = there if goes_on else 0
        with part.open("ab" if goes_on else "wb") as out:
            while chunk := answer.read(CHUNK_BYTES):
                out.write(chunk)
                there += len(chunk)
                if there > file.num_bytes:
                    return  # another file: no need to load all of it
                tell(there, file.num_bytes)
