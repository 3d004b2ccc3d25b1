"""The training loop: one for every strategy, on one rank and on many, in a notebook or torchrun.

    ranks.run(train, TrainConfig(model=find_model("tiny"), strategy="ddp"))

Every copy of the model reads its part of the same stream of batches; all ranks that hold a part of
the copy read it together. A loss counts for its part of the whole batch, times the number of
copies, since `finish()` leaves the mean over them: so uneven parts and any number of micro-batches
give the step of one rank with the whole batch.
"""

import math
import statistics
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.accumulation import split_micro_batches
from course_lib.core.errors import CourseError
from course_lib.core.records import RunRecord
from course_lib.models import GPT
from course_lib.models.data import mixed_seed
from course_lib.models.text import Synthetic, Text, load_shakespeare, read_text
from course_lib.ranks.launch import common_zero_s
from course_lib.ranks.machine import describe_machine
from course_lib.ranks.recorder import current_recorder, span
from course_lib.ranks.world import rank_device
from course_lib.tensor_parallel import finish_gradients
from course_lib.training.axes import Axes
from course_lib.training.bar import Teller, download_bar
from course_lib.training.config import TrainConfig, one_of
from course_lib.training.parts import Parts
from course_lib.training.passes import make_pass
from course_lib.training.state import (
    Progress,
    check_identity,
    forget_records,
    from_rank_0,
    read,
    save,
)
from course_lib.training.strategies import STRATEGIES

OPTIMIZERS = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}
DTYPES = {"float32": torch.float32, "float64": torch.float64}
KEEP_STEPS = 3  # the record holds the events of the last ones


def train(rank: int, config: TrainConfig) -> RunRecord:
    """Train as `config` says; return this rank's run record. Every rank calls it.

    Raises: CourseError for what cannot be trained, and for a loss that is not a number any more
    """
    return Trainer(rank, config).run()


def open_data(config: TrainConfig) -> Text | Synthetic:
    """The stream of tokens that a run reads."""
    if config.data == "synthetic":
        return Synthetic(config.model.vocab)
    if config.data == "shakespeare":
        with download_bar("shakespeare") as tell:
            text = load_shakespeare(print, tell=tell)
    else:
        text = read_text(config.data)
    text.batch(0, batch=1, seq=config.seq)  # a text that is too short is told now
    return text


class Trainer:
    """A run on this rank: its model and optimizer, where it is, and the loop.

    `model` is what this rank holds of the GPT, `wrapped` what the strategy made of it.
    """

    def __init__(self, rank: int, config: TrainConfig) -> None:
        one_of("strategy", config.strategy, tuple(STRATEGIES))
        self.rank, self.config, self.device = rank, config, rank_device()
        world_size = dist.get_world_size()
        config.check_ranks(world_size)
        self.axes = Axes(config.degrees(world_size), self.device)
        self.dp = self.axes.degrees.dp
        self.data = from_rank_0(lambda: open_data(config))
        self.spec = replace(config.model, vocab=self.data.vocab)
        self.identity = config.identity(self.spec, self.data.identity)
        self.parts = Parts(self._whole_model(), config, self.axes)
        self.model = self.parts.module
        self.optimizer = OPTIMIZERS[config.optimizer](self.model.parameters(), lr=config.lr)
        self.progress = Progress()
        from_rank_0(config.check_files)
        if config.resume:
            self._load()
        if config.out:
            from_rank_0(lambda: forget_records(Path(str(config.out)), self.progress.step))
        self.wrapped = STRATEGIES[config.strategy](self.model, config, self.axes.group("dp"))
        self._pass = make_pass(self.parts, self.wrapped, config, self.axes)
        run = config.plain(self.spec, self.data.identity, self.dp)
        self.record = RunRecord(rank, world_size, run)
        self._first = self.progress.step
        self._open_losses: list[Tensor] = []  # this rank's part, of steps that are not summed up

    def _whole_model(self) -> GPT:
        torch.manual_seed(self.config.seed)
        model = GPT(self.spec, dropout=self.config.dropout)
        return model.to(self.device, DTYPES[self.config.dtype])

    def run(self) -> RunRecord:
        """Train up to `config.steps`; write the record, and checkpoints if they are asked for."""
        self.record.machine = describe_machine()
        self._zero_s = common_zero_s()
        if recorder := current_recorder():
            recorder.events.clear()  # what it took to get ready
        self._marks: list[int] = []
        every = self.config.every if self.rank == 0 else 0
        with Teller(self.progress, self.config.steps, every) as tell:
            while not self._is_done():
                self._step()
                tell.step()
                if self._is_time(self.config.every):
                    tell.loss(self._sum_losses())
                if self._is_time(self.config.save_every) and not self._is_done():
                    self.save()
            self.save()
        if every:
            print(self._summary(tell), flush=True)
        return self.record

    # -- one step ---------------------------------------------------------------------------

    def _step(self) -> None:
        n, config = self.progress.step, self.config
        self._forget_old_events()
        start_s = time.perf_counter()
        draws = self.rank // config.tp  # for dropout: the ranks of a tp group draw alike
        torch.manual_seed(mixed_seed(mixed_seed(config.seed, n), draws))
        tokens = self.data.batch(n, batch=config.global_batch, seq=config.seq, seed=config.seed)
        part = tokens.tensor_split(self.dp)[self.axes.number("dp")].to(self.device)
        self.optimizer.zero_grad()
        self._open_losses.append(self._gradients(part))
        with span("optimizer"):
            self.optimizer.step()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.progress.step_done(config.global_batch * config.seq)
        step = {"step": n, "num_tokens": len(part) * config.seq * self.axes.reports}
        times = {"start_s": start_s - self._zero_s, "end_s": time.perf_counter() - self._zero_s}
        self.record.steps.append({**step, **times})

    def _gradients(self, part: Tensor) -> Tensor:
        """Leave the whole batch's gradient in every `param.grad`; return this rank's loss share."""
        micro_batches = split_micro_batches(part, self.config.num_micro_batches(self.dp))
        shares = [len(one) / self.config.global_batch * self.dp for one in micro_batches]
        loss = self._pass(micro_batches, shares)
        self.wrapped.finish()
        if self.config.sequence_parallel:
            finish_gradients(self.model)
        return loss.double() * self.axes.reports

    # -- losses and records -----------------------------------------------------------------

    def _sum_losses(self) -> float:
        """Learn the losses of the last steps from all ranks, in one call; return their mean."""
        losses = torch.stack(self._open_losses)
        dist.all_reduce(losses)
        values = (losses / self.dp).tolist()
        self._open_losses.clear()
        for step, loss in zip(self.record.steps[-len(values) :], values, strict=True):
            step["loss"] = loss
            if not math.isfinite(loss):
                raise CourseError(
                    f"step {step['step']}: need a loss that is a number; got {loss}. "
                    f"Try an --lr below {self.config.lr}."
                )
        return statistics.fmean(values)

    def _forget_old_events(self) -> None:
        """Keep the events of the last steps only: long runs must not fill the memory."""
        recorder = current_recorder()
        if recorder is None:
            return
        self._marks.append(len(recorder.events))
        if len(self._marks) > KEEP_STEPS:
            old = self._marks[-KEEP_STEPS]
            del recorder.events[:old]
            self._marks = [mark - old for mark in self._marks[-KEEP_STEPS:]]

    def _is_done(self) -> bool:
        return self.progress.step >= self.config.steps

    def _is_time(self, every: int) -> bool:
        return bool(every) and self.progress.step % every == 0

    def _summary(self, tell: Teller) -> str:
        steps = self.record.steps
        if not steps:
            return f"Nothing to do: step {self.progress.step} of {self.config.steps} is done."
        median_s = statistics.median(step["end_s"] - step["start_s"] for step in steps)
        return (
            f"{self.progress.step} steps, {self.progress.tokens:,} tokens, "
            f"loss {steps[-1]['loss']:.4f}; median step {median_s * 1e3:.1f} ms, "
            f"{tell.tokens_per_s():,.0f} tokens/s"
        )

    # -- the folder -------------------------------------------------------------------------

    def save(self) -> None:
        """Write this rank's record; on rank 0, where checkpoints are asked for, one of those."""
        if self._open_losses:
            self._sum_losses()
        self.record.run["progress"] = asdict(self.progress)
        recorder = current_recorder()
        if recorder is not None:
            zero_s = self._zero_s
            self.record.events = [
                replace(event, start_s=event.start_s - zero_s, end_s=event.end_s - zero_s)
                for event in recorder.events
            ]
        if self.config.out is None:
            return
        name = f"rank{self.rank}" + (f"-from{self._first}" if self._first else "")
        self.record.write(Path(self.config.out) / f"{name}.jsonl")
        if self.config.save_every and self.config.checkpoint:
            whole = self.parts.gather(self.optimizer)
            if whole:
                save(self.config.checkpoint, self.identity, self.progress, whole)

    def _load(self) -> None:
        path = self.config.checkpoint
        state = from_rank_0(lambda: self._read_checkpoint(path))
        self.parts.load(state, self.optimizer)
        self.progress = Progress(**state["progress"])

    def _read_checkpoint(self, path: Path | None) -> dict[str, Any]:
        state = read(path or Path())
        check_identity(path or Path(), state["identity"], self.identity)
        return state
