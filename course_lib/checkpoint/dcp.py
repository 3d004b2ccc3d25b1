"""The same state in PyTorch's own format, torch.distributed.checkpoint (DCP).

Two planners tell DCP which boxes of which tensors a rank holds, so that any strategy can load what
any other has saved. Plain `dcp.load` reads what `save_dcp` writes, and `load_dcp` what plain
`dcp.save` has written. A checkpoint is written beside its place and renamed when it is whole.
Notebook 14_checkpoint.
"""

import json
import re
import secrets
import shutil
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.checkpoint.metadata import Metadata

from course_lib.checkpoint.agree import from_all, from_first, rank_in
from course_lib.checkpoint.dcp_metadata import ABOUT, METADATA, metas, num_bytes_of, read_metadata
from course_lib.checkpoint.dcp_planners import BoxLoadPlanner, BoxSavePlanner, SafeReader
from course_lib.checkpoint.folder import Broken, Folder, step_of
from course_lib.checkpoint.loading import make_ready
from course_lib.checkpoint.local_state import (
    LocalState,
    check_groups,
    collect,
    finish_load,
    optimizers_kept,
    put_value,
)
from course_lib.checkpoint.planning import merge_values, offer_of, plan
from course_lib.checkpoint.storage import LocalStorage, storage_of, sync_folder
from course_lib.collectives.group import Group
from course_lib.core.errors import CourseError
from course_lib.core.files import read_json, whole_file
from course_lib.core.plain_values import as_read_back, build

NAME = re.compile(r"dcp-[0-9]{8,18}")


@dataclass(frozen=True)
class DcpCheckpoint:
    """A published checkpoint in DCP's format: its metadata can be read, and its files are there.

    step, run   as `save_dcp` was told; 0 and nothing where plain `dcp.save` has written it
    values      the plain values, where it has been loaded
    """

    path: str
    step: int
    run: Mapping[str, Any]
    num_bytes: int
    values: Mapping[str, Any]


@dataclass(frozen=True)
class _About:
    """The notes of `save_dcp` beside DCP's files."""

    step: int
    run: dict[str, Any]


def save_dcp(
    state: Mapping[Any, Any],
    folder: Folder,
    *,
    step: int,
    group: Group = None,
    keep: int | None = None,
    run: Mapping[str, Any] | None = None,
) -> DcpCheckpoint:
    """Save a state as `save` does, in the format of torch.distributed.checkpoint.

    Tied names are written once each, as DCP does it. The folder is on a disk that all ranks see.

    Cost:    each byte of the state is written once; three all_gather_objects, and DCP's own
    Raises:  CourseError where it cannot be written, and for a folder of another run
    """
    about = _About(step, as_read_back(run or {}))
    path = from_first(lambda: _place(folder, about, keep), group)
    found = list[LocalState]()
    from_all(lambda: found.append(collect(state)), group)
    write_dcp(found[0], path, about.step, about.run, group)
    from_first(lambda: _clear(path, keep), group)
    return _look(path)


def write_dcp(
    local: LocalState, path: Path, step: int, run: Mapping[str, Any], group: Group = None
) -> None:
    """Write all ranks' shards to `path`, a folder in DCP's format, whole or not at all.

    Raises:  CourseError where it cannot be written, or the shards do not cover the tensors once
    """
    beside = path.with_name(f".{path.name}.{from_first(lambda: secrets.token_hex(4), group)}.tmp")
    offers = from_all(lambda: offer_of(local), group)
    values = merge_values([one.values for one in offers])
    planner = BoxSavePlanner(local.shards, values, plan(offers), rank_in(group))
    about = json.dumps({"step": step, "run": dict(run)}, indent=1, sort_keys=True)
    try:
        with _one_sentence("save_dcp", path):
            writer = torch_dcp.FileSystemWriter(beside)
            torch_dcp.save({}, storage_writer=writer, planner=planner, process_group=group)
        from_first(lambda: _publish(beside, path, about), group)
    finally:
        if rank_in(group) == 0:
            shutil.rmtree(beside, ignore_errors=True)


def load_dcp(
    state: Mapping[Any, Any], folder: Folder, *, step: int | None = None, group: Group = None
) -> DcpCheckpoint:
    """Fill a state in place, as `load` does, from a checkpoint in DCP's format.

    folder   of `save_dcp`, or the one checkpoint that plain `dcp.save` has written
    step     which one; None: the newest whole one

    Cost:    each rank reads the saved chunks that its boxes intersect; DCP has no hashes
    Raises:  CourseError where nothing whole is there, or it is of another model
    """
    found = from_first(lambda: _choose(folder, step), group)
    read = list[Metadata]()
    from_all(lambda: read.append(read_metadata(Path(found.path))), group)
    saved = metas(read[0])
    with optimizers_kept(state):
        local = make_ready(state, saved, found.path, group)
        planner = BoxLoadPlanner(local.shards)
        with _one_sentence("load_dcp", Path(found.path)), torch.no_grad():
            reader = SafeReader(found.path, read[0])
            torch_dcp.load({}, storage_reader=reader, planner=planner, process_group=group)
        values = _nested(planner.values, read[0].planner_data or {})
        from_all(lambda: check_groups(state, values), group)
        from_all(lambda: finish_load(state, values, saved), group)
    return replace(found, values=values)


def all_dcp(folder: Folder) -> list[DcpCheckpoint | Broken]:
    """Return the checkpoints of a folder that are in DCP's format, the newest first."""
    storage = storage_of(folder)
    names = sorted((one for one in storage.list() if NAME.fullmatch(one)), key=step_of)
    found = list[DcpCheckpoint | Broken]()
    for name in reversed(names if isinstance(storage, LocalStorage) else ()):
        path = Path(storage.path, name)
        try:
            found.append(_look(path))
        except CourseError as problem:
            found.append(Broken(str(path), step_of(name), str(problem)))
    return found


@contextmanager
def _one_sentence(where: str, path: Path) -> Iterator[None]:
    """Raise a CourseError for what went wrong on any rank; DCP tells it to all of them."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            yield
    except torch_dcp.CheckpointException as problem:
        rank, (first, _) = next(iter(problem.failures.items()))
        why = f"{type(first).__name__}: {first}".splitlines()[0][:160]
        raise CourseError(
            f"rank {rank}, {where}: need {path.parent} to be read and written, and whole files; "
            f"got {why}. Try an older checkpoint, or another folder."
        ) from None


def _nested(flat: Mapping[str, Any], paths: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """Return values as they were nested in the state."""
    nested: dict[str, Any] = {}
    for name, value in flat.items():
        put_value(nested, [*map(str, paths.get(name, (name,)))], value)
    return nested


def _place(folder: Folder, about: _About, keep: int | None) -> Path:
    """Return where a checkpoint is to be; check that the folder is this run's."""
    storage = storage_of(folder)
    if not isinstance(storage, LocalStorage):
        raise CourseError(
            f"save_dcp: need a folder on a disk that all ranks see; got {storage.path}. "
            "Try save(...), which writes to URLs."
        )
    if about.step < 0 or (keep is not None and keep < 1):
        raise CourseError(f"save_dcp: need step >= 0 and keep >= 1; got {about.step} and {keep}.")
    for one in all_dcp(folder):
        if isinstance(one, DcpCheckpoint) and one.run != about.run:
            raise CourseError(
                f"save_dcp: need a folder of this run, {about.run!r:.80}; {one.path} is of "
                f"{one.run!r:.80}. Try another folder."
            )
    return Path(storage.path, f"dcp-{about.step:08d}")


def _publish(beside: Path, path: Path, about: str) -> None:
    """Move a checkpoint to its place; one that was there before goes."""
    try:
        with whole_file(beside / ABOUT, sync=True) as file:
            file.write(about.encode())
        sync_folder(beside)
        if path.exists():
            path.rename(beside / "before")
        try:
            beside.rename(path)
        except OSError:
            if (beside / "before").exists():
                (beside / "before").rename(path)
            raise
        sync_folder(path.parent)
        shutil.rmtree(path / "before", ignore_errors=True)
    except OSError as problem:
        raise CourseError(
            f"save_dcp: need to write {path}; got: {problem.strerror}. Try another folder."
        ) from None


def _clear(path: Path, keep: int | None) -> None:
    """Remove later steps, all but the `keep` newest, and what killed processes have left."""
    found = [one for one in all_dcp(path.parent) if isinstance(one, DcpCheckpoint)]
    past = [Path(one.path) for one in found if one.step <= step_of(path.name)]
    later = [Path(one.path) for one in found if one.step > step_of(path.name)]
    left = path.parent.glob(".dcp-*.tmp")
    for one in (*later, *(past[keep:] if keep else ()), *left):
        with suppress(OSError):
            (one / METADATA).unlink(missing_ok=True)  # a half checkpoint is none
            shutil.rmtree(one)


def _look(path: Path) -> DcpCheckpoint:
    """Return the checkpoint at `path`, if it is whole. Raises: CourseError"""
    num_bytes = num_bytes_of(path, read_metadata(path))
    about = _About(0, {})
    if (path / ABOUT).exists():
        about = build(_About, read_json(path / ABOUT, "what save_dcp notes"), str(path / ABOUT))
    return DcpCheckpoint(str(path), about.step, about.run, num_bytes, {})


def _choose(folder: Folder, step: int | None) -> DcpCheckpoint:
    """Return the checkpoint to load. Raises: CourseError"""
    path = Path(storage_of(folder).path)
    if (path / METADATA).exists():
        return _look(path)
    for one in all_dcp(folder):
        if step in (None, one.step) and isinstance(one, DcpCheckpoint):
            return one
        if step in (None, one.step) and isinstance(one, Broken):
            print(f"load_dcp: passed over a damaged checkpoint: {one.why}", file=sys.stderr)
    raise CourseError(
        f"load_dcp: need a whole checkpoint{'' if step is None else f' of step {step}'} in "
        f"{folder}; got none. Try another folder, or start from the seed."
    )
