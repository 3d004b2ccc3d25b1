"""The training loop: one for every strategy, any number of ranks, a notebook or torchrun.

    ranks.run(train, TrainConfig(model=find_model("tiny"), strategy="ddp"))

Every copy of the model reads its part of the same stream of batches; all ranks with a part of the
copy read the same data. A loss is weighted by its share of the whole batch times the number of
copies, since `finish()` averages over them: so uneven shares and any number of micro-batches give
the step of one rank with the whole batch.
"""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.accumulation.accumulation import by_tokens, split_micro_batches
from course_lib.core.records import RunRecord
from course_lib.models import BERT, GPT
from course_lib.models.data import mixed_seed
from course_lib.ranks.launch import common_zero_s
from course_lib.ranks.machine import describe_machine
from course_lib.ranks.recorder import current_recorder, span
from course_lib.ranks.world import rank_device
from course_lib.tensor_parallel.state import finish_gradients
from course_lib.train.checkpoint import (
    check_identity,
    forget_records,
    from_rank_0,
    read,
    save,
)
from course_lib.train.config import V_SCHEDULES, TrainConfig, one_of
from course_lib.train.data import Batch, open_data, steps_of_an_epoch
from course_lib.train.forward_backward import make_pass
from course_lib.train.mesh import TrainMesh
from course_lib.train.metrics import Metrics
from course_lib.train.model_part import ModelPart
from course_lib.train.optimizers import PlainAdapter
from course_lib.train.progress import Progress, ProgressBar
from course_lib.train.strategies import STRATEGIES


def train(rank: int, config: TrainConfig) -> RunRecord:
    """Train as `config` says; return this rank's run record. Every rank calls it.

    Raises: CourseError for what cannot be trained, and for a loss that is not a number any more
    """
    return Trainer(rank, config).run()


class Trainer:
    """One run on this rank: its model and optimizer, its progress, and the loop.

    `model` is this rank's part of the whole one, `wrapped` the strategy's wrapper of it, and
    `adapter` holds the optimizer.
    """

    def __init__(self, rank: int, config: TrainConfig) -> None:
        one_of("strategy", config.strategy, tuple(STRATEGIES))
        self.rank, self.device, world_size = rank, rank_device(), dist.get_world_size()
        config.check_ranks(world_size)
        loss_stage = 0 if config.schedule in V_SCHEDULES else config.pp - 1
        self.mesh = TrainMesh(config.parallelism(world_size), self.device, loss_stage)
        self.dp = self.mesh.parallelism.dp
        self.data = from_rank_0(lambda: open_data(config))
        per_epoch = steps_of_an_epoch(self.data, config)
        if config.epochs and per_epoch:
            config = replace(config, steps=config.epochs * per_epoch)
        self.config, self.spec = config, replace(config.model, vocab=self.data.vocab)
        self.identity = config.identity(self.spec, self.data.identity)
        run = config.plain(self.spec, self.data.identity, self.dp) | {"steps_an_epoch": per_epoch}
        self.record = RunRecord(rank, world_size, run)
        self.metrics = Metrics(self.record, self.dp, config.lr)
        self.part = ModelPart(self._whole_model(), config, self.mesh)
        self.model = self.part.module
        self.wrapped = STRATEGIES[config.strategy](self.model, config, self.mesh.group("dp"))
        self.adapter = self.wrapped.adapter or PlainAdapter(self.part, config)
        self.progress = Progress()
        from_rank_0(config.check_files)
        if config.resume:
            self._load()
        if config.out:
            from_rank_0(lambda: forget_records(Path(str(config.out)), self.progress.step))
        self._pass = make_pass(self.part, self.wrapped, config, self.mesh)
        self._first = self.progress.step

    def _whole_model(self) -> GPT | BERT:
        torch.manual_seed(self.config.seed)
        kind: type[GPT] | type[BERT] = BERT if self.config.masked else GPT
        model = kind(self.spec, dropout=self.config.dropout)
        return model.to(self.device, getattr(torch, self.config.dtype))

    def run(self) -> RunRecord:
        """Train up to `config.steps`; write the record, and checkpoints if they are asked for."""
        self.record.machine = describe_machine()
        self._zero_s = common_zero_s()
        if recorder := current_recorder():
            recorder.events.clear()  # what it took to get ready
        every = self.config.every if self.rank == 0 else 0
        with ProgressBar(self.progress, self.config.steps, every) as bar:
            while not self._is_done():
                self._step()
                bar.step()
                if self._is_time(self.config.every):
                    bar.loss(*self.metrics.sum_losses())
                if self._is_time(self.config.save_every) and not self._is_done():
                    self.save()
            self.save()
        if every:
            print(self.metrics.summary(self.progress, bar.tokens_per_s()), flush=True)
        return self.record

    def _step(self) -> None:
        n, config = self.progress.step, self.config
        self.metrics.forget_old_events()
        start_s = time.perf_counter()
        draws = self.rank // config.tp  # for dropout: the ranks of a tp group draw alike
        torch.manual_seed(mixed_seed(mixed_seed(config.seed, n), draws))
        batch = self.data.batch(n, batch=config.global_batch, seq=config.seq, seed=config.seed)
        self.adapter.zero_grad()
        found = self._gradients(batch)
        with span("optimizer"):
            if config.clip_norm:
                self.adapter.clip(config.clip_norm)
            for group in self.adapter.optimizer.param_groups if self.adapter.optimizer else ():
                group["lr"] = config.lr_at(n)
            self.adapter.step()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.progress.step_done(config.global_batch * config.seq)
        num_tokens = len(self._part(batch[0])) * config.seq * self.mesh.reports
        times = {"start_s": start_s - self._zero_s, "end_s": time.perf_counter() - self._zero_s}
        self.metrics.step_done(found, step=n, num_tokens=num_tokens, **times)

    def _gradients(self, batch: Batch) -> Tensor:
        """Compute the whole batch's gradient; return the loss sums of `make_pass`."""
        count = self.config.num_micro_batches(self.dp)
        part = tuple(self._part(tensor).to(self.device) for tensor in batch)
        micro_batches = split_micro_batches(part, count)
        shares = [by_tokens(asked, batch[1]) * self.dp for _, asked in micro_batches]
        found = self._pass(micro_batches, shares)
        if self.progress.step + 1 == self.config.steps:
            self.metrics.note_memory(self.adapter.state_bytes())
        self.wrapped.finish()
        if self.config.sequence_parallel:
            finish_gradients(self.model)
        return found * self.mesh.reports

    def _part(self, whole: Tensor) -> Tensor:
        """Return this copy's part of a batch."""
        return whole.tensor_split(self.dp)[self.mesh.number("dp")]

    def _is_done(self) -> bool:
        return self.progress.step >= self.config.steps

    def _is_time(self, every: int) -> bool:
        return bool(every) and self.progress.step % every == 0

    # -- the folder -------------------------------------------------------------------------

    def save(self) -> None:
        """Write this rank's record and, on rank 0, a checkpoint if the run keeps them."""
        self.metrics.close(self.progress, self._zero_s)
        if self.config.out is None:
            return
        self.metrics.write(self.config.out, self._first)
        if self.config.save_every and self.config.checkpoint:
            dist.barrier()  # a checkpoint is no further than the record of any rank
            whole = self.adapter.gather()
            if whole:
                save(self.config.checkpoint, self.identity, self.progress, whole)

    def _load(self) -> None:
        path = self.config.checkpoint
        state = from_rank_0(lambda: self._read_checkpoint(path))
        self.adapter.load(state)
        self.progress = Progress(**state["progress"])

    def _read_checkpoint(self, path: Path | None) -> dict[str, Any]:
        state = read(path or Path())
        check_identity(path or Path(), state["identity"], self.identity)
        return state
