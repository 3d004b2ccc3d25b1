"""Metrics of a training run for its record and summary: losses of all ranks, times, memory."""

import math
import statistics
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.core.errors import CourseError
from course_lib.core.records import RunRecord
from course_lib.core.units import format_bytes, format_seconds
from course_lib.ranks.recorder import current_recorder
from course_lib.ranks.resources import ResourceMonitor
from course_lib.train.progress import Progress

LOOK, LOOK_S = 10, 10.0  # steps or seconds until the ranks look at their losses together
KEEP_STEPS = 3  # the record holds the events of the last ones


class Metrics:
    """The run record of this rank, and the sums that need the losses of all ranks.

    num_copies   ranks that report: each its loss, times its share, times num_copies
    lr           the learning rate, for the sentence about a loss that is not a number

    is_unread   whether nobody reads what a rank prints, as in `... | head`: all ranks then end
    """

    def __init__(self, record: RunRecord, num_copies: int, lr: float | None) -> None:
        self.record, self.num_copies, self.lr = record, num_copies, lr
        self._open: list[Tensor] = []  # this rank's part, of steps that are not summed up
        self._since: list[tuple[float, float, float]] = []  # what nobody was told yet
        self._marks: list[int] = []
        self.monitor, self.is_unread = ResourceMonitor(), False
        self._look_every = 1  # until the first look has told all ranks how long a step takes

    def step_done(self, found: Tensor, **step: Any) -> None:
        """Record a step; `found` is the result of the step's gradient pass."""
        self._open.append(found)
        self.record.steps.append(step | self.monitor.read())

    @property
    def is_due(self) -> bool:
        """Whether it is time for a look, on all ranks alike."""
        return len(self._open) >= self._look_every

    def sum_losses(self, *, is_unread: bool = False) -> tuple[float, float | None]:
        """Sum the last steps' losses over all ranks; return their mean since the last call.

        And the accuracy, if any.

        Raises: CourseError as `look`
        """
        self.look(is_unread=is_unread)
        loss, right, asked = zip(*self._since, strict=True)
        self._since.clear()
        return statistics.fmean(loss), sum(right) / sum(asked) if any(asked) else None

    def look(self, *, is_unread: bool = False) -> None:
        """Sum the losses of the steps since the last look over all ranks, into the record.

        Raises: CourseError for a loss that is not a number, on all ranks alike
        """
        took = [step["end_s"] - step["start_s"] for step in self.record.steps[-len(self._open) :]]
        first = self._open[0].new_tensor([float(is_unread), statistics.fmean(took), 0])
        own = torch.stack([first, *self._open])
        found = own.clone()  # [1 + steps, 3]
        dist.all_reduce(found)
        self._open.clear()
        self.is_unread = bool(found[0, 0])
        step_s = found[0, 1].item() / dist.get_world_size()
        self._look_every = max(1, min(LOOK, int(LOOK_S / step_s)))
        rows = [(loss / self.num_copies, right, asked) for loss, right, asked in found[1:].tolist()]
        for step, row, mine in zip(self.record.steps[-len(rows) :], rows, own[1:], strict=True):
            loss, right, asked = row
            step["loss"] = loss
            if asked:
                step["accuracy"] = right / asked
            if not math.isfinite(loss):
                self._refuse(step["step"], loss, is_mine=not mine.isfinite().all())
        self._since += rows

    def _refuse(self, step: int, loss: float, *, is_mine: bool) -> NoReturn:
        by_rank = [False] * dist.get_world_size()
        dist.all_gather_object(by_rank, is_mine)
        ranks = [str(rank) for rank, is_bad in enumerate(by_rank) if is_bad]
        where = (
            f"first on rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}" if ranks else "in the sum"
        )
        raise CourseError(
            f"step {step}: need a loss that is a number; got {loss}, {where}. "
            f"Try an --lr below {self.lr}."
        )

    def forget_old_events(self) -> None:
        """Keep the events of the last steps only, so that long runs do not fill the memory."""
        recorder = current_recorder()
        if recorder is None:
            return
        self._marks.append(len(recorder.events))
        if len(self._marks) > KEEP_STEPS:
            old = self._marks[-KEEP_STEPS]
            del recorder.events[:old]
            self._marks = [mark - old for mark in self._marks[-KEEP_STEPS:]]

    def note_memory(self, held_bytes: dict[str, int]) -> None:
        """Record this rank's bytes by kind when the last backward has ended, and the peak so far.

        peak   of tensors on a GPU; on the CPU, how much the process has grown
        """
        peak = max(self.monitor.peak_bytes(), sum(held_bytes.values()))
        self.record.run["memory"] = {**held_bytes, "peak": peak}

    def close(self, progress: Progress, zero_s: float) -> None:
        """Complete the record."""
        if self._open:
            self.look()
        self.record.run["progress"] = asdict(progress)
        if (per_epoch := self.record.run["steps_an_epoch"]) and self.record.steps:
            self.record.run["epoch_s"] = per_epoch * self._mean_s()
        if recorder := current_recorder():
            self.record.events = [
                replace(event, start_s=event.start_s - zero_s, end_s=event.end_s - zero_s)
                for event in recorder.events
            ]

    def write(self, folder: str, first: int) -> None:
        """Write the record; a run that resumed from step `first` gets a file name of its own."""
        name = f"rank{self.record.rank}" + (f"-from{first}" if first else "")
        self.record.write(Path(folder) / f"{name}.jsonl")

    def summary(self, progress: Progress, tokens_per_s: float) -> str:
        """Return the run in a few lines, with its result in the last one."""
        steps, run = self.record.steps, self.record.run
        if not steps:
            return f"Nothing to do: step {progress.step} of {run['steps']} is done."
        median_s = statistics.median(step["end_s"] - step["start_s"] for step in steps)
        told = f"{progress.step} steps, {progress.tokens:,} tokens, loss {steps[-1]['loss']:.4f}"
        if "accuracy" in steps[-1]:
            told += f", accuracy {steps[-1]['accuracy']:.1%}"
        told += f"; median step {median_s * 1e3:.1f} ms, {tokens_per_s:,.0f} tokens/s"
        held = [f"{kind} {format_bytes(size)}" for kind, size in run["memory"].items()]
        lines = [f"rank {self.record.rank} holds {', '.join(held)}"]
        if per_epoch := run["steps_an_epoch"]:
            lines.append(f"an epoch of {per_epoch} steps takes {format_seconds(run['epoch_s'])}")
        return "\n".join([*lines, told])

    def _mean_s(self) -> float:
        return statistics.fmean(step["end_s"] - step["start_s"] for step in self.record.steps)
