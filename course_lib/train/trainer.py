"""The training loop: one for every strategy, any number of ranks, a notebook or torchrun.

    ranks.run(train, TrainConfig(model=find_model("tiny"), strategy="ddp"))

Every copy of the model reads its part of the same stream of batches; all ranks with a part of the
copy read the same data, and those of cp some tokens of each sequence. A loss is weighted by its
share of the whole batch times the number of ranks over which `finish()` averages: so uneven shares
and any number of micro-batches give the step of one rank with the whole batch.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.accumulation.accumulation import by_tokens, split_micro_batches
from course_lib.checkpoint.agree import from_all, from_first
from course_lib.core.errors import CourseError
from course_lib.core.records import RunRecord
from course_lib.core.specs import ModelSpec
from course_lib.debugging.recording import ValueRecording
from course_lib.expert_parallel import expert_groups, parallelize_experts
from course_lib.hub.loading import load_hugging_face
from course_lib.mesh.model_part import apply_methods
from course_lib.models import BERT, GPT
from course_lib.models.data import mixed_seed
from course_lib.ranks.launch import common_zero_s
from course_lib.ranks.machine import describe_machine
from course_lib.ranks.recorder import current_recorder, span
from course_lib.ranks.world import is_dry, rank_device
from course_lib.recompute.activations import recompute_full, recompute_selective
from course_lib.train.checkpoint import LOCK_S, RunCheckpoints, forget_records, lock_folder
from course_lib.train.config import V_SCHEDULES, TrainConfig, was_restarted
from course_lib.train.data import Batch, open_data, steps_of_an_epoch
from course_lib.train.evaluation import validation_loss
from course_lib.train.experts import RoutedLayers
from course_lib.train.forward_backward import make_passes
from course_lib.train.mesh import ORDER, TrainMesh, placement_of
from course_lib.train.metrics import Metrics
from course_lib.train.optimizers import PartAdapter
from course_lib.train.preemption import Preemption
from course_lib.train.profiler import StepProfiler
from course_lib.train.progress import Progress, ProgressBar
from course_lib.train.rules import check_profiled_steps, one_of, profiled_steps
from course_lib.train.run_folder import check_files
from course_lib.train.strategies import STRATEGIES, over_tokens, scheduler_note

RECOMPUTE = {"full": recompute_full, "selective": recompute_selective}


def train(rank: int, config: TrainConfig) -> RunRecord:
    """Train as `config` says; return this rank's run record. Every rank calls it.

    Raises: CourseError for what cannot be trained, and for a loss that is not a number any more
    """
    return Trainer(rank, config).run()


class Trainer:
    """One run on this rank: its model and optimizer, its progress, and the loop.

    `model` is this rank's part of the whole one, `wrapped` the strategy's wrapper of it, and
    `adapter` holds the optimizer.

    order        of the mesh's axes, outermost first
    num_layers   of the stages, as in `split_model`; None: by their FLOP
    """

    def __init__(
        self,
        rank: int,
        config: TrainConfig,
        *,
        order: Sequence[str] = ORDER,
        num_layers: Sequence[int] | None = None,
    ) -> None:
        one_of("strategy", config.strategy, tuple(STRATEGIES))
        self.rank, self.device, world_size = rank, rank_device(), dist.get_world_size()
        config.check_ranks(world_size)
        loss_stage = 0 if config.schedule in V_SCHEDULES else config.pp - 1
        layout = config.cp_layout or "contiguous"
        self.mesh = TrainMesh(config.parallelism(world_size), loss_stage, layout, order)
        self.dp = self.mesh.size("dp")
        self.data, self._held_out = from_first(lambda: open_data(config), None)
        per_epoch = steps_of_an_epoch(self.data, config)
        if config.epochs and per_epoch:
            config = replace(config, steps=config.epochs * per_epoch)
        self.config, self.spec = config, self._spec(config)
        run = config.plain(self.spec, self.data.identity, self.dp) | {"steps_an_epoch": per_epoch}
        self.record = RunRecord(rank, world_size, run)
        self.metrics = Metrics(self.record, self.mesh.num_copies, config.lr)
        whole = self._whole_model()
        self.routed = RoutedLayers(whole)
        self.part = apply_methods(
            whole,
            self.mesh,
            lambda module, group: STRATEGIES[config.strategy](module, config, group),
            over_cp=partial(over_tokens, config=config),
            over_ep=self._over_ep(),
            splits=config.strategy != "megatron",
            sequence_parallel=config.sequence_parallel,
            recompute=RECOMPUTE.get(config.recompute or ""),
            num_layers=num_layers,
            placement=placement_of(config),
        )
        self.model, self.wrapped = self.part.module, self.part.wrapped
        self.routed.keep(self.model)
        self.adapter = (self.wrapped.adapter or PartAdapter)(self.part, self.mesh, config)
        self.progress, self._zero_s = Progress(), 0.0
        self._open_folder()
        self._pass, self._losses = make_passes(self.part, config, self.mesh)
        self._first = self.progress.step
        self.recording: ValueRecording | None = None
        if config.record_values:
            from_all(self._open_recording, None)

    def _over_ep(self) -> Callable[[GPT], object] | None:
        """Return what divides the experts; None where every rank has all of them."""
        if self.config.ep == 1:
            return None
        return partial(parallelize_experts, group=expert_groups(self.mesh, self.config.ep))

    def _spec(self, config: TrainConfig) -> ModelSpec:
        """Return the model with the vocabulary of the data. Raises: CourseError for a read one"""
        if not config.init:
            return replace(config.model, vocab=self.data.vocab)
        if self.data.vocab > config.model.vocab:
            raise CourseError(
                f"--init: need data with at most the {config.model.vocab} tokens of the model; got "
                f"{self.data.vocab}. Try --data synthetic."
            )
        return config.model

    def _whole_model(self) -> GPT | BERT:
        torch.manual_seed(self.config.seed)
        kind: type[GPT] | type[BERT] = BERT if self.config.masked else GPT
        with self.device if self.device.type == "meta" else nullcontext():
            model = kind(self.spec, dropout=self.config.dropout)
        if self.config.init and not is_dry():
            model.load_state_dict(load_hugging_face(Path(self.config.init))[1])
        return model.to(self.device, getattr(torch, self.config.dtype))

    def run(self) -> RunRecord:
        """Train up to `config.steps`; write the record, and checkpoints if they are asked for."""
        self.record.machine = describe_machine()
        self._zero_s = common_zero_s()
        if recorder := current_recorder():
            recorder.events.clear()  # what it took to get ready
        every = self.config.every if self.rank == 0 else 0
        with (
            self._lock,
            self._preemption as preemption,
            self._profiler as profiler,
            closing(self.recording) if self.recording else nullcontext(),
            ProgressBar(self.progress, self.config.steps, every) as bar,
        ):
            if self.config.eval_only:
                self._evaluate(bar)
                return self.record
            if every and (told := scheduler_note(self.config, self.record.world_size)):
                bar.say(told)
            is_over = self.is_done or preemption.is_agreed
            while not is_over:
                preemption.ask()
                self.metrics.forget_old_events()
                with profiler.step(self.progress.step):
                    self.step()
                bar.step()
                if self._is_time(self.config.every):
                    bar.loss(*self.metrics.sum_losses(is_unread=bar.is_unread))
                elif self.metrics.is_due:
                    self.metrics.look()
                if self._is_time(self.config.eval_every):
                    self._evaluate(bar)
                preemption.agree()
                is_over = self.is_done or preemption.is_agreed or self.metrics.is_unread
                if self._is_time(self.config.save_every) and not is_over:
                    self.save()
            self.save()
            self.checkpoints.wait()
        if every and self.is_done:
            bar.say(self.metrics.summary(self.progress, bar.tokens_per_s()))
        return self.record

    def _evaluate(self, bar: ProgressBar) -> None:
        """Record the validation loss, and tell it."""
        config, mesh = self.config, self.mesh
        loss = validation_loss(self._held_out, self.part, self._losses, config, mesh)
        self.record.run.setdefault("validation", []).append([self.progress.step, loss])
        self.progress.validation_loss = loss
        if config.every and self.rank == 0:
            stops = f", at most {config.stop_at_loss}: the run stops" * self._is_low
            bar.say(f"step {self.progress.step}  validation loss {loss:.4f}{stops}")

    def step(self) -> Tensor:
        """Train on the next batch; return what this rank knows of its three sums (`Passes`)."""
        n, config = self.progress.step, self.config
        start_s = time.perf_counter()
        torch.manual_seed(mixed_seed(mixed_seed(config.seed, n), self._draws()))
        batch = self.data.batch(n, batch=config.global_batch, seq=config.seq, seed=config.seed)
        self.adapter.zero_grad()
        for group in self.adapter.optimizer.param_groups:  # now: a framework's backward may step
            group["lr"] = config.lr_at(n)
        found = self._gradients(batch)
        with span("optimizer"):
            norm = self.adapter.clip(config.clip_norm) if config.clip_norm else None
            self.adapter.step()
        if self.recording:
            self.recording.step_done()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.progress.step_done(config.global_batch * config.seq)
        num_tokens = self.mesh.part_of(batch[0]).numel() * self.mesh.reports
        times = {"start_s": start_s - self._zero_s, "end_s": time.perf_counter() - self._zero_s}
        more: dict[str, Any] = times if norm is None else times | {"grad_norm": norm}
        if loads := self.routed.end(self.mesh.copies, config.bias_step):
            more |= {"tokens_per_expert": loads}
        told = found if self.mesh.reports else torch.zeros_like(found)
        self.metrics.step_done(told, step=n, num_tokens=num_tokens, **more)
        return found

    def _gradients(self, batch: Batch) -> Tensor:
        """Compute the whole batch's gradient; return its three sums (`Passes`)."""
        count = self.config.num_micro_batches(self.dp)
        own = tuple(self.mesh.part_of(tensor) for tensor in batch)
        micro_batches, copies = split_micro_batches(own, count), self.mesh.num_copies
        shares = [by_tokens(asked, batch[1]) * copies for _, asked in micro_batches]
        micro_batches = [tuple(x.to(self.device) for x in part) for part in micro_batches]
        self.routed.begin(self.config.aux_weight, shares)
        found = self._pass(micro_batches, shares)
        after = self.progress.step + 1
        may_stop = self.config.stop_at_loss and after % self.config.eval_every == 0
        if after == self.config.steps or may_stop:
            self.metrics.note_memory(self.adapter.state_bytes())
        if self.recording and self.mesh.num_copies == 1 and not self.wrapped.reduces_in_backward:
            self.recording.gradients(self.adapter.grad_shards(), local=True)
        self.wrapped.finish()
        self.adapter.finish()
        if self.recording:
            self.recording.gradients(self.adapter.grad_shards())
        return found

    def _draws(self) -> int:
        """Return this rank's stream of dropout masks: the ranks of a tp group draw alike."""
        draws = 0
        for axis in ("pp", "dp", "cp"):  # whatever the order of the mesh is
            draws = draws * self.mesh.size(axis) + self.mesh.index(axis)
        return draws

    @property
    def is_done(self) -> bool:
        """Whether all steps are done, or the loss is low enough; not so after a preemption."""
        return self.progress.step >= self.config.steps or self._is_low

    @property
    def _is_low(self) -> bool:
        """Whether the last validation loss, which is the same on all ranks, ends the run."""
        found, enough = self.progress.validation_loss, self.config.stop_at_loss
        return found is not None and enough is not None and found <= enough

    def _is_time(self, every: int) -> bool:
        return bool(every) and self.progress.step % every == 0

    # -- the folder -------------------------------------------------------------------------

    def _open_folder(self) -> None:
        """Keep other runs out of the folder, and load the latest checkpoint to resume from."""
        config, self._lock = self.config, ExitStack()
        self._preemption = Preemption(bool(config.save_every))
        identity = config.identity(self.spec, self.data.identity)
        if config.uses_framework:
            identity["ranks"] = self.record.world_size  # each has files of its own
        self.checkpoints = RunCheckpoints(config, identity)
        restarted = self._restarted = any(from_all(was_restarted, None))  # others may be new
        from_first(lambda: check_files(config, restarted), None)
        folder, has_folder = Path(config.out or ""), config.out is not None
        if has_folder:
            from_first(lambda: self._hold(lock_folder(folder, LOCK_S * restarted)), None)
        if has_folder and (config.resume or restarted):
            with self._preemption:
                self.progress = self.checkpoints.load(self.adapter.state())
        self._profiler = self._make_profiler(restarted)
        if has_folder:
            from_first(lambda: forget_records(folder, self.progress.step), None)

    def _make_profiler(self, restarted: bool) -> StepProfiler:
        """Return the profiler. Raises: CourseError where it has no step or no place to write to"""
        config, first = self.config, self.progress.step
        if config.resume and not restarted:  # what is started again has the same options
            check_profiled_steps(config, first)
        profiler = StepProfiler(profiled_steps(config), config.out, self.rank, first)
        if config.profile:
            from_all(profiler.check_path, None)
        return profiler

    def _open_recording(self) -> None:
        """Begin to record values. Raises: CourseError for a folder that has some"""
        mesh = self.mesh
        self.recording = ValueRecording(
            self.model,
            str(self.config.record_values),
            model=self.adapter.state()["model"],
            axes={axis: (mesh.index(axis), mesh.size(axis)) for axis in mesh.mesh.sizes},
            first_step=self.progress.step,
            restarted=self._restarted,
        )

    def _hold(self, lock: BinaryIO) -> None:
        self._lock.enter_context(lock)

    def save(self) -> None:
        """Write this rank's record and, if the run keeps checkpoints, its part of one."""
        self.metrics.close(self.progress, self._zero_s)
        if self.config.out is None:
            return
        self.metrics.write(self.config.out, self._first)
        if self.config.save_every:
            dist.barrier()  # a checkpoint is no further than the record of any rank
            self.checkpoints.save(self.adapter.state(), self.progress)
