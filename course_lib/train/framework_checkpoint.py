"""Checkpoints in a framework's own format: a folder for each, and a note of which step it is.

The framework writes its files into a hidden folder. When all ranks are done, rank 0 adds the note
and gives the folder its name: one with a name is whole. Only the framework can read it, and only on
as many ranks.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from course_lib.checkpoint.agree import from_all, from_first
from course_lib.core.errors import CourseError

NOTE = "course.json"


@dataclass(frozen=True)
class OwnCheckpoint:
    """A framework's checkpoint: where, of which step, and of which run; `values` are plain."""

    path: str
    step: int
    run: dict[str, Any]
    values: dict[str, Any]


def save_own(
    state: Mapping[str, Any], folder: str, *, step: int, keep: int, run: dict[str, Any]
) -> None:
    """Let the engine in the state save itself, and remove all but `keep` checkpoints.

    Raises: CourseError on all ranks where it cannot be written
    """
    last = Path(folder, f"framework-{step:08}")
    hidden = last.with_name(f".{last.name}")
    values = {name: value for name, value in state.items() if name != "engine"}

    def begin() -> None:
        shutil.rmtree(hidden, ignore_errors=True)
        hidden.mkdir(parents=True)

    def publish() -> None:
        note = asdict(OwnCheckpoint("", step, run, values))
        (hidden / NOTE).write_text(json.dumps(note), encoding="utf-8")
        shutil.rmtree(last, ignore_errors=True)
        hidden.rename(last)
        for old in all_own(folder)[keep:]:
            shutil.rmtree(old.path)

    from_first(lambda: _told("save", begin), None)
    from_all(lambda: _told("save", lambda: state["engine"].save(str(hidden))), None)
    from_first(lambda: _told("save", publish), None)


def load_own(state: Mapping[str, Any], folder: str) -> OwnCheckpoint:
    """Let the engine in the state load the latest checkpoint, and return that.

    Raises: CourseError on all ranks where it cannot be read
    """
    found = from_first(lambda: all_own(folder)[0], None)
    from_all(lambda: _told("load", lambda: state["engine"].load(found.path)), None)
    return found


def all_own(folder: str) -> list[OwnCheckpoint]:
    """Return the checkpoints in a folder, the newest first."""
    found = []
    for path in sorted(Path(folder).glob(f"framework-*/{NOTE}"), reverse=True):
        note = json.loads(path.read_text(encoding="utf-8"))
        found.append(OwnCheckpoint(**note | {"path": str(path.parent)}))
    return found


def _told(what: str, act: Callable[[], object]) -> None:
    """Run it; an error of the file system, or of the framework that met one, is one sentence."""
    try:
        act()
    except CourseError:
        raise
    except Exception as problem:
        why = str(problem).strip().partition("\n")[0] or type(problem).__name__
        raise CourseError(
            f"{what}: need files that the framework can {'write' if what == 'save' else 'read'}; "
            f"got {why}. Try {'another --out' if what == 'save' else 'an older checkpoint'}."
        ) from problem
