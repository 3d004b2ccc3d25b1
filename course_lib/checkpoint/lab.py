"""Measure checkpoints on real ranks: their time, what async saving hides, and what a kill costs.

`die_in_save` kills a rank of any training in the middle of a save. `measure_saves` times both ways
to save on an emulated link and emulated disks; `measure_overlap` records steps beside a synchronous
and an asynchronous save. Notebook 14_checkpoint.
"""

import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.checkpoint import save, save_async, saving
from course_lib.checkpoint.dcp import save_dcp
from course_lib.core import MODELS, Event
from course_lib.core.shards import Box, Shard
from course_lib.fsdp import FSDP
from course_lib.models import GPT, next_tokens, token_batch, token_loss
from course_lib.ranks import Ranks, record, span
from course_lib.ranks.timing import from_zero


def die_in_save(rank: int, victim: int, number: int, train: Callable[..., Any], *args: Any) -> Any:
    """Return `train(rank, *args)`; rank `victim` dies by SIGKILL in the middle of a save.

    number   of the save, from 1 on
    """
    write, numbers = saving.write_tensors, count(1)

    def write_or_die(file: BinaryIO, tensors: Sequence[Tensor]) -> tuple[int, str]:
        if next(numbers) == number:
            file.write(b"a part of the data")
            file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        return write(file, tensors)

    if rank == victim:
        saving.write_tensors = write_or_die
    try:
        return train(rank, *args)
    finally:
        saving.write_tensors = write


# --- through rank 0, or every rank its shard


def measure_saves(ranks: Ranks, num_bytes: int, disk_bytes_per_s: float) -> dict[str, list[Event]]:
    """Return the events of saves of `num_bytes` through rank 0, and by every rank.

    The link is that of the ranks; a disk is emulated: writing sleeps, and uses no processor.
    """
    return {
        name: from_zero(e for events in ranks.run(way, num_bytes, disk_bytes_per_s) for e in events)
        for name, way in (("through rank 0", _through_one), ("every rank", _every_rank))
    }


def duration_s(events: Iterable[Event]) -> float:
    """Return when the last event ends."""
    return max(event.end_s for event in events)


def _through_one(rank: int, num_bytes: int, disk_bytes_per_s: float) -> list[Event]:
    shard = _shard_of(num_bytes)
    parts = [torch.empty_like(shard) for _ in range(dist.get_world_size())] if rank == 0 else None
    dist.barrier()
    with record() as log:
        dist.gather(shard, parts)
        if parts:
            _write(sum(part.nbytes for part in parts), disk_bytes_per_s)
    return log.events


def _every_rank(rank: int, num_bytes: int, disk_bytes_per_s: float) -> list[Event]:
    shard = _shard_of(num_bytes)
    dist.barrier()
    with record() as log:
        _write(shard.nbytes, disk_bytes_per_s)
    return log.events


def _shard_of(num_bytes: int) -> Tensor:
    return torch.ones(num_bytes // dist.get_world_size() // 4)


def _write(num_bytes: int, disk_bytes_per_s: float) -> None:
    with span("write", "write", num_bytes):
        time.sleep(num_bytes / disk_bytes_per_s)


# --- at once, or while training goes on


@dataclass(frozen=True)
class Overlap:
    """Events of a rank, and the seconds for which a save kept it."""

    events: list[Event]
    blocked_s: float


def measure_overlap(
    rank: int, num_bytes: int, *, asynchronous: bool, num_steps: int = 12, step_s: float = 0.02
) -> Overlap:
    """Take steps that sleep, as a processor beside a computing GPU does, and save after the third.

    The save is real: this rank's shard of `num_bytes`, to a temporary folder of the machine.
    """
    state = {"weights": _own_rows(rank, num_bytes)}
    with _shared_folder() as folder:
        save_async(state, folder, step=0).wait()  # makes the process group of the thread
        dist.barrier()
        with record() as log:
            start_s = time.perf_counter()
            pending, blocked_s = None, 0.0
            for step in range(num_steps):
                _sleep_a_step(step, step_s)
                if step == 2:
                    began_s = time.perf_counter()
                    with span("wait", "save"):
                        if asynchronous:
                            pending = save_async(state, folder, step=1)
                        else:
                            save(state, folder, step=1)
                    blocked_s = time.perf_counter() - began_s
        if pending:
            pending.wait()
    kept = [one for one in log.events if one.kind in ("forward", "backward") or one.label == "save"]
    if pending:
        wrote = Event(rank=rank, kind="write", start_s=began_s + blocked_s,
                      end_s=began_s + blocked_s + pending.write_s, label="write")  # fmt: skip
        kept.append(wrote)
    return Overlap([one.since(start_s) for one in kept], blocked_s)


@contextmanager
def _shared_folder() -> Iterator[str]:
    """Make a folder for all ranks of this machine; it goes when all of them are done with it."""
    with TemporaryDirectory() as own:
        places: list[Any] = [own]
        dist.broadcast_object_list(places)
        yield places[0]
        dist.barrier()


def _own_rows(rank: int, num_bytes: int) -> Shard:
    """Return this rank's rows of a matrix, as a Shard."""
    p, columns = dist.get_world_size(), 1024
    rows = num_bytes // 4 // columns // p
    mine = torch.full((rows, columns), float(rank))
    return Shard((rows * p, columns), [(Box((rank * rows, 0), (rows, columns)), mine)])


def _sleep_a_step(step: int, step_s: float) -> None:
    for kind, share in (("forward", 1 / 3), ("backward", 2 / 3)):
        with span(kind, f"{kind[0].upper()}{step}"):
            time.sleep(step_s * share)


# --- the interval


def extra_time(
    rank: int, every: int, *, num_steps: int = 1000, step_s: float = 0.001, mb: int = 4
) -> tuple[float, int]:
    """Return the seconds for which checkpoints stop a run of short steps, and their number.

    Every rank writes its shard of `mb` MB after each `every` steps.
    """
    state, stopped_s, num_saves = {"weights": _own_rows(rank, mb * 10**6)}, 0.0, 0
    with _shared_folder() as folder:
        for step in range(1, num_steps + 1):
            time.sleep(step_s)
            if every and step % every == 0:
                start_s = time.perf_counter()
                save(state, folder, step=step, keep=1)
                stopped_s, num_saves = stopped_s + time.perf_counter() - start_s, num_saves + 1
    return stopped_s, num_saves


# --- the real thing


@dataclass(frozen=True)
class WrittenFormat:
    """One way to save the same state: bytes written, number of files, seconds."""

    num_bytes: int
    num_files: int
    save_s: float


def beside_dcp(rank: int, folder: str) -> dict[str, WrittenFormat]:
    """Save the same state with ours and with PyTorch's, twice each; return the faster saves."""
    torch.manual_seed(0)
    spec = MODELS["tiny"]
    model = FSDP(GPT(spec))
    optimizer = torch.optim.AdamW(model.parameters())
    inputs, targets = next_tokens(token_batch(rank, batch=1, seq=8, vocab=spec.vocab))
    token_loss(model(inputs), targets).backward()
    optimizer.step()  # now there are its moments
    state = {"model": model, "optimizer": optimizer}
    ways: Mapping[str, Callable[..., Any]] = {
        "ours": save,
        "DCP, through our `save_dcp`": save_dcp,
    }
    found = {}
    for name, way in ways.items():
        own = f"{folder}/{name.split(',')[0]}"
        seconds = []
        for step in range(2):
            dist.barrier()
            start_s = time.perf_counter()
            way(state, own, step=step, keep=1)
            seconds.append(time.perf_counter() - start_s)
        files = [one for one in Path(own).rglob("*") if one.is_file()]
        found[name] = WrittenFormat(
            sum(one.stat().st_size for one in files), len(files), min(seconds)
        )
    return found
