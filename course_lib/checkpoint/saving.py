"""Save: every rank writes its own shards to its own file, then rank 0 publishes the manifest.

A checkpoint exists if its manifest does. It is moved into place when all files are on the disk, so
a run that is killed at any moment leaves the checkpoints before, and this one whole or not at all.
Notebook 14_checkpoint.
"""

import secrets
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from course_lib.checkpoint.agree import from_all, from_first, rank_in
from course_lib.checkpoint.data_file import write_tensors
from course_lib.checkpoint.folder import (
    STEP,
    Checkpoint,
    Folder,
    check_sizes,
    look,
    name_of,
    published,
    remove_files,
    step_of,
)
from course_lib.checkpoint.local_state import LocalState, collect
from course_lib.checkpoint.manifest import (
    FORMAT,
    MANIFEST,
    Manifest,
    SavedFile,
    SavedPiece,
    SavedTensor,
)
from course_lib.checkpoint.ownership import check_ours, note_ours
from course_lib.checkpoint.pending import PendingSave, group_of_its_own, wait_for_pending
from course_lib.checkpoint.planning import Offer, merge_values, offer_of, own_pieces, plan
from course_lib.checkpoint.storage import Storage, storage_of
from course_lib.collectives.group import Group
from course_lib.core.errors import CourseError
from course_lib.core.plain_values import as_read_back


def save(
    state: Mapping[Any, Any],
    folder: Folder,
    *,
    step: int,
    group: Group = None,
    keep: int | None = None,
    run: Mapping[str, Any] | None = None,
) -> Checkpoint:
    """Save a state that all ranks hold in shards; every rank of the group calls it.

    A leaf of the nested mapping is a tensor (the same on all ranks), a Shard, a module, an engine,
    an optimizer beside its module, or a plain value. Of plain values under one name the lowest
    rank's is saved. Works in a single process without a process group, too.

    keep   this many whole checkpoints stay; older ones are removed after this one is published
    run    whose it is: a folder is of one run

    Checkpoints of later steps, which a run leaves that has resumed before them, are removed.

    Cost:    each byte of the state is written once, by one rank; three all_gather_objects of names
             and boxes
    Raises:  CourseError where it cannot be written, for a folder of another run, and where another
             job has saved since this one has; the checkpoints before stay
    """
    return Saving(state, folder, step, keep, run, group).write(group)


def save_async(
    state: Mapping[Any, Any],
    folder: Folder,
    *,
    step: int,
    group: Group = None,
    keep: int | None = None,
    run: Mapping[str, Any] | None = None,
) -> PendingSave:
    """Save as `save` does, but return as soon as the state is copied; a thread writes the copy.

    So the next step may change the state. One save is pending at a time: another waits for it. A
    process that ends normally waits for it, too; call `wait()` before destroy_process_group.

    Cost:    as `save`; besides, host memory for the bytes that this rank writes, and at the first
             call a process group of the thread's own, as its messages would be mixed with those of
             the next step
    Raises:  CourseError as `save`, here or in `.wait()`; and what a pending save has raised
    """
    start_s = time.perf_counter()
    saving = Saving(state, folder, step, keep, run, group)
    from_all(saving.stage, group)
    own = group_of_its_own(group)
    return PendingSave(lambda: saving.write(own), start_s)


class Saving:
    """One save: the ranks agree on who writes what; `stage` copies it, `write` writes it.

    Raises:  CourseError for tensors that the ranks do not cover exactly once
    """

    def __init__(
        self, state: Mapping[Any, Any], folder: Folder, step: int, keep: int | None,
        run: Mapping[str, Any] | None, group: Group,
    ) -> None:  # fmt: skip
        if step < 0 or (keep is not None and keep < 1):
            raise CourseError(f"save: need step >= 0 and keep >= 1; got {step} and {keep}.")
        self.storage, self.name, self.rank = storage_of(folder), name_of(step), rank_in(group)
        self.step, self.keep, self.run = step, keep, as_read_back(run or {})
        wait_for_pending()
        self.save_id = from_first(self._begin, group)
        local: list[LocalState] = []

        def offer() -> Offer:
            local.append(collect(state))
            return offer_of(local[0])

        offers = from_all(offer, group)
        self.values = merge_values([one.values for one in offers])
        self.plan = plan(offers)
        self.tensors = [x for *_, x in own_pieces(local[0].shards, self.plan, self.rank)]

    def _begin(self) -> str:
        check_ours(self.storage, self.run)
        return secrets.token_hex(8)

    def stage(self) -> None:
        """Copy what this rank writes to memory of its own, so that the next step cannot change it.

        Cost:    the bytes of this rank's part, in host memory
        """
        self.tensors = [tensor.to("cpu", copy=True) for tensor in self.tensors]

    def write(self, group: Group) -> Checkpoint:
        """Write this rank's file; when all are on the disk, let rank 0 publish the checkpoint.

        Raises:  CourseError on all ranks where one of them could not write
        """
        try:
            files = from_all(self._write_file, group)
            manifest = from_first(lambda: self._publish(files, len(files)), group)
        except BaseException:
            self._withdraw()
            raise
        return Checkpoint(self.storage, self.name, manifest)

    def _file_name(self, rank: int) -> str:
        return f"data-{self.save_id}-r{rank:05d}.safetensors"

    def _withdraw(self) -> None:
        """Remove this rank's file, unless the manifest that names it is published all the same."""
        with suppress(OSError):
            found = look(self.storage, self.name)
            if not (isinstance(found, Checkpoint) and found.manifest.save_id == self.save_id):
                self.storage.remove(f"{self.name}/{self._file_name(self.rank)}")

    def _write_file(self) -> SavedFile | None:
        if not self.tensors:
            return None
        name = f"{self.name}/{self._file_name(self.rank)}"
        try:
            with self.storage.open_write(name) as file:
                return SavedFile(*write_tensors(file, self.tensors))
        except OSError as problem:
            raise self._cannot_write(problem) from None

    def _publish(self, files: list[SavedFile | None], world_size: int) -> Manifest:
        """Write the manifest, if the folder is still ours; then remove older checkpoints."""
        manifest = Manifest(
            format=FORMAT,
            step=self.step,
            save_id=self.save_id,
            world_size=world_size,
            files={self._file_name(n): file for n, file in enumerate(files) if file},
            tensors=self._saved_tensors(),
            run=self.run,
            values=self.values,
        )
        try:
            with self.storage.alone():
                check_ours(self.storage, self.run)
                check_sizes(self.storage, self.name, manifest)
                self.storage.publish(f"{self.name}/{MANIFEST}", manifest.text())
                note_ours(self.storage, self.save_id)
                with suppress(OSError):  # the checkpoint is there, whatever else stays
                    clear(self.storage, manifest, self.keep)
        except OSError as problem:
            raise self._cannot_write(problem) from None
        return manifest

    def _saved_tensors(self) -> dict[str, SavedTensor]:
        found: dict[str, SavedTensor] = {}
        for names, (dtype, shape, places) in self.plan.items():
            pieces = tuple(
                SavedPiece(self._file_name(place.rank), str(place.key), box.offsets, box.sizes)
                for box, place in places.items()
            )
            found |= dict.fromkeys(names, SavedTensor(dtype, shape, pieces))
        return found

    def _cannot_write(self, problem: OSError) -> CourseError:
        return CourseError(
            f"save: need room and permission for a checkpoint in {self.storage.path}; got: "
            f"{problem.strerror or problem}. What was saved before is unchanged. Try another "
            "folder, or keep=1."
        )


def clear(storage: Storage, newest: Manifest, keep: int | None) -> None:
    """Remove later steps, what was never published, and all but the `keep` newest checkpoints.

    Files that no save has written stay. What cannot be removed is no reason to fail: the new
    checkpoint is there.
    """
    name = name_of(newest.step)
    with suppress(OSError):
        remove_files(storage, name, besides={MANIFEST, *newest.files})
    names = published(storage)
    whole = [one for one in names if one <= name and isinstance(look(storage, one), Checkpoint)]
    oldest = step_of(whole[keep - 1]) if keep and len(whole) > keep else 0
    for other in storage.list():
        stays = other in names and oldest <= step_of(other) <= newest.step
        if STEP.fullmatch(other) and other != name and not stays:
            with suppress(OSError):
                remove_files(storage, other)
