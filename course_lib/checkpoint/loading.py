"""Load: each rank reads the boxes it holds, wherever the ranks that saved them had theirs.

Resharding needs no communication: a box wanted is put together from the saved boxes it intersects.
A checkpoint is hashed whole, by all ranks together, before any of it is copied. Notebook
14_checkpoint.
"""

import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from course_lib.checkpoint.agree import from_all, from_first, rank_in, size_of
from course_lib.checkpoint.folder import (
    Broken,
    Checkpoint,
    Folder,
    Reader,
    look,
    published,
    step_of,
)
from course_lib.checkpoint.local_state import (
    LocalState,
    WholeTensor,
    check_groups,
    collect,
    finish_load,
    is_master,
    make_room,
    optimizers_kept,
)
from course_lib.checkpoint.ownership import note_seen
from course_lib.checkpoint.pending import wait_for_pending
from course_lib.checkpoint.storage import Storage, storage_of
from course_lib.collectives.group import Group
from course_lib.core.errors import CourseError


def load(
    state: Mapping[Any, Any], folder: Folder, *, step: int | None = None, group: Group = None
) -> Checkpoint:
    """Fill a state in place from a checkpoint; every rank of the group calls it.

    The state has the form that `save` takes, at any number of ranks and with any strategy. Tensors,
    modules and optimizers are filled; plain values are in `.values` of what is returned.

    step   which one; None: the newest whole one. A damaged one is passed over, with a sentence on
           stderr

    Cost:    each data file is hashed by one rank, then each rank reads the rows it needs; five
             all_gather_objects of names and verdicts
    Raises:  CourseError where nothing whole is there, or it is of another model. All ranks load the
             same checkpoint, or none does. Where reading it breaks off, the model may be filled in
             part: load again before it is used
    """
    wait_for_pending()
    found = _choose(folder, step, group)
    with optimizers_kept(state):
        _fill(state, found, group)
    return found


def _fill(state: Mapping[Any, Any], found: Checkpoint, group: Group) -> None:
    """Look at names and shapes on all ranks; then copy everything into the state."""
    saved = found.manifest.metas()
    from_all(lambda: check_groups(state, found.values), group)
    local = make_ready(state, saved, found.path, group)
    with Reader(found) as reader:
        from_all(lambda: _copy(reader, local), group)
    from_all(lambda: finish_load(state, found.values, saved), group)


def make_ready(
    state: Mapping[Any, Any], saved: Mapping[str, WholeTensor], path: str, group: Group
) -> LocalState:
    """Return this rank's shards, to be filled from the saved tensors of a checkpoint at `path`.

    Optimizer state that was saved is allocated.

    Raises:  CourseError on all ranks for a checkpoint of another model
    """
    mine = list[LocalState]()

    def look_at_state() -> tuple[dict[str, WholeTensor], list[str]]:
        make_room(state, saved)
        local = collect(state)
        local.shards = {
            name: shard
            for name, shard in local.shards.items()
            if name in saved or not is_master(name)
        }
        mine.append(local)
        rounded = tuple(local.optimizers)
        metas = {
            name: replace(meta, dtype=saved[name].dtype)
            if name in saved and name.startswith(rounded)
            else meta
            for name, meta in local.metas().items()
        }
        return metas, local.complete

    wanted = from_all(look_at_state, group)
    _check_names(
        path,
        saved,
        {name: meta for metas, _ in wanted for name, meta in metas.items()},
        tuple(start for _, complete in wanted for start in complete),
    )
    return mine[0]


def _choose(folder: Folder, step: int | None, group: Group) -> Checkpoint:
    """Return the newest checkpoint that all ranks together have found to be whole."""
    storage = storage_of(folder)
    for name in from_first(lambda: _candidates(storage, step), group):
        one = from_first(partial(_look_at, storage, name), group)
        damage = one.why if isinstance(one, Broken) else _damage(one, group)
        if isinstance(one, Checkpoint) and damage is None:
            return one
        if step is not None:
            raise CourseError(str(damage))
        if rank_in(group) == 0:
            print(f"load: passed over a damaged checkpoint: {damage}", file=sys.stderr)
    raise CourseError(
        f"load: need a whole checkpoint{'' if step is None else f' of step {step}'} in {folder}; "
        "got none. Try another folder, or start from the seed."
    )


def _candidates(storage: Storage, step: int | None) -> list[str]:
    note_seen(storage)
    return [name for name in published(storage) if step in (None, step_of(name))]


def _look_at(storage: Storage, name: str) -> Checkpoint | Broken:
    """Return a checkpoint, or why it is none. Raises: CourseError where it cannot be read"""
    found = look(storage, name)
    if isinstance(found, Broken) and found.unread:
        raise CourseError(found.why)
    return found


def _damage(one: Checkpoint, group: Group) -> str | None:
    """Return what all ranks together have found to be damaged: each hashes a part of the files.

    Raises: CourseError on all ranks for a file that cannot be read
    """

    def hash_files() -> str | None:
        mine = sorted(one.manifest.files)[rank_in(group) :: size_of(group)]
        return next(filter(None, map(one.damage_of, mine)), None)

    return next(filter(None, from_all(hash_files, group)), None)


def _check_names(
    path: str,
    saved: Mapping[str, WholeTensor],
    wanted: Mapping[str, WholeTensor],
    complete: tuple[str, ...],
) -> None:
    """Check that the checkpoint has the tensors of the state, and of its models no others."""
    for name, meta in wanted.items():
        if saved.get(name) != meta:
            got = f"{saved[name].dtype} {list(saved[name].shape)}" if name in saved else "none"
            raise CourseError(
                f"load: need the checkpoint of this model, with {name} of {meta.dtype} "
                f"{list(meta.shape)}; {path} has {got}. Try the model that it was saved with."
            )
    for name in sorted(saved.keys() - wanted.keys()):
        if name.startswith(complete) and not is_master(name):
            raise CourseError(
                f"load: need the checkpoint of this model; {path} has {name}, too, which the "
                "model has not. Try the model that it was saved with."
            )


@torch.no_grad()
def _copy(reader: Reader, local: LocalState) -> None:
    filled: set[int] = set()
    for name, shard in local.shards.items():
        if id(shard) not in filled:
            for box, tensor in shard.pieces:
                reader.fill(name, box, tensor)
            filled.add(id(shard))
