"""Measure checkpoints on real ranks: their time, what async saving hides, and what a kill costs.

`train` is a training that saves, may be killed, and goes on from what it finds. `measure_saves`
times both ways to save on an emulated link and emulated disks; `measure_overlap` records steps
beside a synchronous and an asynchronous save. Notebook 14_checkpoint.
"""

import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.checkpoint import latest, load, rng_state, save, save_async, saving, set_rng_state
from course_lib.checkpoint.dcp import save_dcp
from course_lib.core import MODELS, Event
from course_lib.core.shards import Box, Shard
from course_lib.ddp import DDP
from course_lib.fsdp import FSDP
from course_lib.models import GPT, next_tokens, token_batch, token_loss
from course_lib.ranks import Ranks, record, span
from course_lib.ranks.timing import from_zero
from course_lib.zero import ZeRO3

SPEC = replace(MODELS["tiny"], num_layers=2)
STRATEGIES = ("ddp", "fsdp", "zero3")
LEARNING_RATE = 1e-2


@dataclass(frozen=True)
class Kill:
    """A rank's end by SIGKILL: before a step, or in the middle of the save that follows it."""

    rank: int
    step: int
    while_saving: bool = False


def train(
    rank: int,
    folder: str,
    num_steps: int,
    *,
    every: int = 5,
    strategy: str = "fsdp",
    kill: Kill | None = None,
    step_s: float = 0.0,
) -> dict[int, float]:
    """Train to `num_steps`, from the latest checkpoint on if there is one; return losses by step.

    every    steps between checkpoints
    step_s   what a step takes at least: time to press a button
    """
    torch.manual_seed(0)
    state, step_on = _built(strategy)
    state |= {"rng": {rank: rng_state()}}
    first = 0
    if latest(folder):
        found = load(state, folder)
        first = found.step
        set_rng_state(found.values["rng"][str(rank % found.manifest.world_size)])
    losses = {}
    for step in range(first, num_steps):
        if kill and not kill.while_saving and (kill.rank, kill.step) == (rank, step):
            os.kill(os.getpid(), signal.SIGKILL)
        losses[step] = step_on(_part(step, rank))
        time.sleep(step_s)
        if (step + 1) % every == 0:
            if kill and kill.while_saving and (kill.rank, kill.step) == (rank, step):
                saving.write_tensors = _die_writing
            save(state | {"rng": {rank: rng_state()}}, folder, step=step + 1, keep=2)
    return losses


def _built(strategy: str) -> tuple[dict[str, Any], Callable[[tuple[Tensor, Tensor]], float]]:
    """Return the state of a new training, and a function that takes a step and returns its loss."""
    model: Any
    if strategy == "zero3":
        model = ZeRO3(GPT(SPEC), torch.optim.AdamW, lr=LEARNING_RATE)
        optimizer: Any = model.optimizer
    else:
        model = {"ddp": DDP, "fsdp": FSDP}[strategy](GPT(SPEC))
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)

    def step_on(batch: tuple[Tensor, Tensor]) -> float:
        loss = token_loss(model(batch[0]), batch[1])
        loss.backward()
        if strategy != "fsdp":
            model.finish()
        optimizer.step()
        model.zero_grad()
        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        return mean.item()

    return {"model": model, "optimizer": optimizer}, step_on


def _part(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Return a rank's part of batch `step`, of which all ranks together have 4 samples."""
    inputs, targets = next_tokens(token_batch(step, batch=4, seq=8, vocab=SPEC.vocab))
    return inputs[rank :: dist.get_world_size()], targets[rank :: dist.get_world_size()]


def _die_writing(file: BinaryIO, tensors: Sequence[Tensor]) -> Any:
    file.write(b"a part of the data")
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)


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
    """Events of rank 0, and the seconds for which a save kept it, wrote, and was hidden."""

    events: list[Event]
    blocked_s: float
    write_s: float
    hidden_s: float


def measure_overlap(
    rank: int, num_bytes: int, *, asynchronous: bool, num_steps: int = 12, step_s: float = 0.02
) -> Overlap:
    """Take steps that sleep, as a processor beside a computing GPU does, and save after the third.

    The save is real: this rank's shard of `num_bytes`, to a temporary folder of the machine.
    """
    state = {"weights": _own_rows(rank, num_bytes)}
    with TemporaryDirectory() as own:
        places: list[Any] = [own]
        dist.broadcast_object_list(places)
        save_async(state, places[0], step=0).wait()  # makes the process group of the thread
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
                            pending = save_async(state, places[0], step=1)
                        else:
                            save(state, places[0], step=1)
                    blocked_s = time.perf_counter() - began_s
        if pending:
            pending.wait()
        dist.barrier()
    kept = [one for one in log.events if one.kind in ("forward", "backward") or one.label == "save"]
    if pending:
        wrote = Event(rank=rank, kind="write", start_s=began_s + blocked_s,
                      end_s=began_s + blocked_s + pending.write_s, label="write")  # fmt: skip
        kept.append(wrote)
    write_s, hidden_s = (pending.write_s, pending.hidden_s) if pending else (blocked_s, 0.0)
    return Overlap([one.since(start_s) for one in kept], blocked_s, write_s, hidden_s)


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
    state, stopped_s, count = {"weights": _own_rows(rank, mb * 10**6)}, 0.0, 0
    with TemporaryDirectory() as own:
        places: list[Any] = [own]
        dist.broadcast_object_list(places)
        for step in range(1, num_steps + 1):
            time.sleep(step_s)
            if every and step % every == 0:
                start_s = time.perf_counter()
                save(state, places[0], step=step, keep=1)
                stopped_s, count = stopped_s + time.perf_counter() - start_s, count + 1
        dist.barrier()
    return stopped_s, count


# --- the real thing


@dataclass(frozen=True)
class WrittenFormat:
    """One way to save the same state: bytes written, number of files, seconds."""

    num_bytes: int
    num_files: int
    save_s: float


def beside_dcp(rank: int, folder: str) -> dict[str, WrittenFormat]:
    """Save the same state with ours and with PyTorch's, twice each; return the faster saves."""
    state, step_on = _built("fsdp")
    step_on(_part(0, rank))
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
