"""One job writes to a folder: it saves only if nobody else has saved there since it last looked.

So the second of two jobs is stopped by a sentence, without locks that a killed job leaves behind: a
job has looked when it has loaded, or saved itself. Notebook 14_checkpoint.
"""

from collections.abc import Mapping
from typing import Any

from course_lib.checkpoint.folder import Checkpoint, look, published
from course_lib.checkpoint.storage import Storage
from course_lib.core.errors import CourseError

# Of the process, as a job is one: by folder, the saves that it has read or written.
_SEEN: dict[str, set[str]] = {}


def note_seen(storage: Storage) -> None:
    """Note the checkpoints that are there: this job goes on from one of them."""
    _SEEN.setdefault(storage.path, set()).update(_saves(storage))


def note_ours(storage: Storage, save_id: str) -> None:
    """Note a save of our own."""
    _SEEN.setdefault(storage.path, set()).add(save_id)


def check_ours(storage: Storage, run: Mapping[str, Any]) -> None:
    """Check that the checkpoints in a folder are of this run, and none of another job is new.

    Cost:    reads the manifests
    Raises:  CourseError
    """
    for save_id, found in _saves(storage).items():
        if found.run != run:
            raise CourseError(
                f"save: need a folder of this run, {dict(run)!r:.80}; {found.path} is of "
                f"{found.run!r:.80}. Try another folder."
            )
        if save_id not in _SEEN.get(storage.path, ()):
            raise CourseError(
                f"save: need a folder to which only this job writes; {found.path} is of another "
                "one, or of one before. Try load(...) first, to go on from it, or another folder."
            )


def _saves(storage: Storage) -> dict[str, Checkpoint]:
    """Return the checkpoints in a folder by the id of their save."""
    found = (look(storage, name) for name in published(storage))
    return {one.manifest.save_id: one for one in found if isinstance(one, Checkpoint)}
