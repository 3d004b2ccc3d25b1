"""The settings of a training run, `python -m course_lib.train`, and the checks they must pass.

Every mistake that can be found before a run starts is reported here, in one sentence.
"""

import difflib
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from course_lib.context_parallel.layouts import LAYOUTS
from course_lib.core.errors import CourseError, MeshError, ShapeError
from course_lib.core.parallelism import Parallelism
from course_lib.core.plain_values import as_read_back
from course_lib.core.specs import ModelSpec, spec_fields
from course_lib.core.units import format_bytes
from course_lib.cost.params import count_params
from course_lib.train.rules import COMPUTE_DTYPES, check_fits, check_split, profiled_steps

if TYPE_CHECKING:  # imported where it is used: `--help` should not wait for torch
    from course_lib.pipeline.actions import Schedule

LR = {"sgd": 0.1, "adamw": 1e-3, "muon": 1e-3}  # what works for the small models
COPIES = {"sgd": 2, "adamw": 4, "muon": 3}  # parameters, gradients, optimizer state
SHARE_ALL = {"zero3", "fsdp", "torch-fsdp", "deepspeed-3", "accelerate-fsdp"}
SHARE_ALL |= {"lightning-fsdp", "accelerate-deepspeed", "zero3-offload", "deepspeed-3-offload"}
DTYPES = {"float32": 4, "float64": 8, "bfloat16": 2}
SOURCES = ("synthetic", "shakespeare", "dialogues")
CHECKPOINTS = "checkpoints"  # the folder in `out`
CHECKPOINT_FORMATS = ("course", "dcp")
RECOMPUTED = ("full", "selective")
LR_DECAYS = ("cosine", "linear")
SCHEDULES = ("naive", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v")
RESTART_COUNTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
CP_FORMS = ("ring", "ulysses", "all_gather")
V_SCHEDULES = ("zb-v", "dualpipe-v")  # the first rank holds the first and the last layers


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The settings of a training run; `global_batch = micro_batch * num_micro_batches * dp`.

    init          folder of a model of transformers whose weights training starts from; None: random
    masked        the model is a BERT, which predicts masked tokens; False: a GPT
    epochs        passes over all tokens of the data; None: `steps` decides
    tp, pp, cp    ranks that split every layer, pipeline stages, ranks that split every sequence;
                  dp = ranks / (tp * pp * cp)
    cp_form       of attention over cp: "ring", "ulysses" or "all_gather"; None: ring
    cp_layout     of a sequence over cp: "contiguous", "zigzag" or "striped"; None: zigzag
    ep            of the ranks of dp and cp, how many share the experts of a layer
    aux_weight    weight of the auxiliary loss that keeps the load of the experts even
    bias_step     how far a step moves the bias of each expert against the load; 0: not at all
    schedule      of the pipeline; None: 1f1b if there are stages
    model_chunks  per rank, for the interleaved schedule; None: 2, as the schedules in a V have
    recompute     in backward: "full": every block, "selective": its attention; None: nothing
    micro_batch   sequences in one forward pass; None: the rank's whole share, or with pp 2 * pp
                  parts of it, of which the first get one sequence more if that is not even
    warmup        steps in which the learning rate grows linearly, from lr / warmup to lr
    lr_decay      "cosine" or "linear": from the warm-up's end to 0 after `steps`; None: no decay
    momentum      the momentum factor of sgd and muon; None: 0 of sgd, 0.95 of muon
    clip_norm     upper limit for the norm of the gradient; None: no limit
    reshard       of fsdp and torch-fsdp: free a block between its forward and its backward
    compute_dtype of fsdp: the dtype of gathers and computation; None: dtype
    data          "synthetic", "shakespeare", "dialogues" or the path of a text file
    every         steps between two lines of output; 0: none
    eval_every    steps between two validation losses; 0: none
    eval_only     one validation loss, and no training
    stop_at_loss  the run ends when a validation loss is at most this; None: after all steps
    out           folder for run records and checkpoints; None: nothing is written
    profile       steps that PyTorch's profiler records on every rank: "3", "3-5"; None: none
    save_every    steps between two checkpoints; 0: none
    keep          checkpoints that stay; older ones are removed
    async_save    write a checkpoint while the training goes on
    record_values folder for fingerprints of all activations, gradients and parameters; None: none

    Raises: CourseError for what cannot be trained
    """

    model: ModelSpec
    init: str | None = None
    masked: bool = False
    strategy: str = "single"
    steps: int = 100
    epochs: int | None = None
    global_batch: int = 16
    micro_batch: int | None = None
    tp: int = 1
    pp: int = 1
    cp: int = 1
    cp_form: str | None = None
    cp_layout: str | None = None
    ep: int = 1
    aux_weight: float = 0.0
    bias_step: float = 0.0
    schedule: str | None = None
    model_chunks: int | None = None
    sequence_parallel: bool = False
    recompute: str | None = None
    seq: int = 64
    optimizer: str = "adamw"
    lr: float | None = None
    warmup: int = 0
    lr_decay: str | None = None
    momentum: float | None = None
    clip_norm: float | None = None
    dropout: float = 0.0
    dtype: str = "float32"
    compute_dtype: str | None = None
    reshard: bool = True
    seed: int = 0
    data: str = "synthetic"
    bucket_mib: float = 25.0
    every: int = 10
    eval_every: int = 0
    eval_only: bool = False
    stop_at_loss: float | None = None
    out: str | None = None
    profile: str | None = None
    save_every: int = 0
    keep: int = 2
    async_save: bool = False
    checkpoint_format: str = "course"
    resume: bool = False
    record_values: str | None = None

    def __post_init__(self) -> None:
        one_of("optimizer", self.optimizer, tuple(LR))
        one_of("dtype", self.dtype, tuple(DTYPES))
        one_of("checkpoint-format", self.checkpoint_format, CHECKPOINT_FORMATS)
        if self.compute_dtype is not None:
            one_of("compute-dtype", self.compute_dtype, COMPUTE_DTYPES)
        if self.lr is None:
            object.__setattr__(self, "lr", LR[self.optimizer])
        for name in ("steps", "global_batch", "seq", "micro_batch", "lr", "bucket_mib", "keep"):
            positive(name, getattr(self, name))
        for name in ("tp", "pp", "cp", "ep", "model_chunks", "epochs", "clip_norm", "momentum"):
            positive(name, getattr(self, name))
        positive("stop_at_loss", self.stop_at_loss)
        self._fill_in_schedule()
        self._fill_in_context()
        if self.recompute is not None:
            one_of("recompute", self.recompute, RECOMPUTED)
        if self.lr_decay is not None:
            one_of("lr-decay", self.lr_decay, LR_DECAYS)
        for name in ("every", "eval_every", "save_every", "seed", "dropout", "warmup"):
            positive(name, getattr(self, name), or_zero=True)
        for name in ("aux_weight", "bias_step"):
            positive(name, getattr(self, name), or_zero=True)
        if self.seed >= 2**63:
            raise CourseError(f"--seed: need a number below 2**63; got {self.seed}.")
        if self.dropout >= 1:
            raise CourseError(f"--dropout: need a probability below 1; got {self.dropout}.")
        if self.seq > self.model.max_seq:
            raise ShapeError(
                f"--seq: need at most the {self.model.max_seq} tokens of model {self.model.name}; "
                f"got {self.seq}. Try --seq {self.model.max_seq}."
            )
        if self.out is None and (self.save_every or self.resume):
            raise CourseError("--save-every, --resume: need a folder. Try --out runs/NAME.")
        check_split(self)
        check_fits(self)
        profiled_steps(self)

    def _fill_in_schedule(self) -> None:
        if self.schedule is None and self.pp > 1:
            object.__setattr__(self, "schedule", "1f1b")
        if self.schedule is not None:
            one_of("schedule", self.schedule, SCHEDULES)
        if self.schedule == "interleaved" and self.model_chunks is None:
            object.__setattr__(self, "model_chunks", 2)

    def _fill_in_context(self) -> None:
        for name, known, usual in (("form", CP_FORMS, "ring"), ("layout", LAYOUTS, "zigzag")):
            given = getattr(self, f"cp_{name}")
            if given is not None:
                one_of(f"cp-{name}", given, known)
                if self.cp == 1:
                    raise MeshError(
                        f"--cp-{name}: need cp of 2 or more; got {given} and 1. Try --mesh cp=2."
                    )
            elif self.cp > 1:
                object.__setattr__(self, f"cp_{name}", usual)

    @property
    def num_model_chunks(self) -> int:
        """The number of model chunks on each rank."""
        return 2 if self.schedule in V_SCHEDULES else self.model_chunks or 1

    @property
    def uses_framework(self) -> bool:
        """Whether a framework trains the model, and keeps its state to itself."""
        return self.strategy.startswith(("deepspeed", "accelerate", "lightning", "megatron"))

    @property
    def checkpoints(self) -> Path | None:
        """The folder of the checkpoints, whether it exists or not; None without `out`."""
        return Path(self.out) / CHECKPOINTS if self.out else None

    def lr_at(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        if step < self.warmup:
            return float(self.lr or 0) * (step + 1) / self.warmup
        done = (step - self.warmup) / max(self.steps - self.warmup, 1)
        left = {"linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}
        return float(self.lr or 0) * left.get(self.lr_decay or "", 1.0)

    def num_micro_batches(self, dp: int) -> int:
        """Return the number of micro-batches of each of the dp copies of the model in a step.

        Raises: ShapeError for a batch that they cannot share
        """
        if self.global_batch < dp:
            raise ShapeError(
                f"--global-batch: need a sequence for each of dp = {dp} copies of the model; got "
                f"{self.global_batch}. Try --global-batch {dp}."
            )
        if self.micro_batch is None:
            return min(2 * self.pp, self.global_batch // dp) if self.pp > 1 else 1
        together = self.micro_batch * dp
        if self.global_batch % together:
            near = max(round(self.global_batch / together), 1) * together
            raise ShapeError(
                f"--micro-batch: need --global-batch divisible by micro_batch * dp; got "
                f"{self.global_batch} and {self.micro_batch} * {dp}. Try --global-batch {near}."
            )
        return self.global_batch // together

    def parallelism(self, num_ranks: int) -> Parallelism:
        """Return how that many ranks split data, tensors and layers.

        Raises: MeshError if they make no whole number of copies of the model
        """
        tp, pp, cp = self.tp, self.pp, self.cp
        if num_ranks % (together := tp * pp * cp):
            near = max(round(num_ranks / together), 1) * together
            raise MeshError(
                f"--mesh: need a number of ranks divisible by tp * pp * cp; got {num_ranks} and "
                f"{tp} * {pp} * {cp}. Try --ranks {near}."
            )
        dp, sequence_parallel = num_ranks // together, self.sequence_parallel
        if dp * cp % self.ep:
            raise MeshError(
                "--mesh: need ep as a divisor of dp * cp, whose ranks it reuses; got "
                f"{self.ep} and {dp} * {cp}. Try ep={math.gcd(dp * cp, self.ep)}."
            )
        axes = {"dp": dp, "tp": tp, "pp": pp, "cp": cp, "ep": self.ep}
        return Parallelism(**axes, sequence_parallel=sequence_parallel)

    def check_ranks(self, num_ranks: int) -> None:
        """Check that this many ranks can train the run together. Raises: MeshError or ShapeError"""
        dp = self.parallelism(num_ranks).dp
        if self.strategy == "single" and dp * self.cp > 1:
            raise MeshError(
                f"--strategy single: need one copy of the model, dp * cp = 1; got {num_ranks} "
                f"ranks, dp = {dp} and cp = {self.cp}. Try --strategy ddp."
            )
        num_micro_batches = self.num_micro_batches(dp)
        if self.pp > 1:
            schedule_of(self, num_micro_batches)

    def check_memory(self, num_ranks: int) -> None:
        """Check that this machine has the memory for that many ranks. Raises: CourseError"""
        params_bytes = count_params(self.model) * DTYPES[self.dtype]  # whole, before it is split
        state_bytes = params_bytes * COPIES[self.optimizer]
        shares = num_ranks if self.strategy in SHARE_ALL else self.tp * self.pp
        need = num_ranks * max(state_bytes // shares, params_bytes)
        there = psutil.virtual_memory().total
        if need > there:
            raise CourseError(
                f"model {self.model.name}: need {format_bytes(need)} for parameters, gradients and "
                f"optimizer of {num_ranks} rank{'s' * (num_ranks > 1)}; this machine has "
                f"{format_bytes(there)}. Try --model tiny."
            )

    def identity(self, model: ModelSpec, data: str) -> dict[str, Any]:
        """Return the settings on which the results depend: a resumed run must keep them."""
        spec = as_read_back({**asdict(model), "name": ""})  # as a checkpoint has it
        names = ["optimizer", "lr", "dropout", "dtype", "seed", "seq", "global_batch"]
        names += ["aux_weight", "bias_step"] * (model.experts is not None)
        names += ["clip_norm", "compute_dtype", "momentum", "warmup", "lr_decay"]
        names += ["steps"] * (self.lr_decay is not None)
        names += ["strategy", "tp", "pp", "schedule", "model_chunks"] * self.uses_framework
        return {"model": spec, "data": data, **{name: getattr(self, name) for name in names}}

    def plain(self, model: ModelSpec, data: str, dp: int) -> dict[str, Any]:
        """Return the settings as plain values, for the run record."""
        counts = {"dp": dp, "num_micro_batches": self.num_micro_batches(dp)}
        return {**asdict(self), "model": spec_fields(model), "data": data, **counts}


def was_restarted() -> bool:
    """Return whether torchrun or Slurm has started this process again."""
    return any(int(os.environ.get(name) or 0) for name in RESTART_COUNTS)


def one_of(name: str, word: str, words: Sequence[str]) -> None:
    """Check that the word is one of the words. Raises: CourseError"""
    if word not in words:
        near = difflib.get_close_matches(word.lower(), words, n=1)
        hint = f" Try {near[0]}." if near else ""
        raise CourseError(f"--{name}: need one of {', '.join(words)}; got {word!r}.{hint}")


def positive(name: str, number: float | None, *, or_zero: bool = False) -> None:
    """Check that the number is above 0 (or is 0); None passes. Raises: CourseError"""
    if number is not None and not (number > 0 or (or_zero and number == 0)):
        need = "0 or more" if or_zero else "more than 0"
        raise CourseError(f"--{name.replace('_', '-')}: need {need}; got {number}.")


def schedule_of(config: TrainConfig, num_micro_batches: int) -> "Schedule":
    """Return the pipeline schedule of a run with stages.

    Raises: ScheduleError for a number of micro-batches that it cannot take
    """
    from course_lib.pipeline import schedules, v_schedules
    from course_lib.pipeline.actions import ScheduleError

    makers: tuple[Callable[..., Schedule], ...] = (
        schedules.naive,
        schedules.gpipe,
        schedules.one_f_one_b,
        schedules.interleaved,
        schedules.zero_bubble_h1,
        v_schedules.zero_bubble_v,
        v_schedules.dual_pipe_v,
    )
    make = dict(zip(SCHEDULES, makers, strict=True))[str(config.schedule)]
    chunks = [config.model_chunks] if config.schedule == "interleaved" else []
    try:
        return make(config.pp, num_micro_batches, *chunks)
    except ScheduleError as error:
        need = str(error).partition(": ")[2]
        where = "(num_micro_batches = global_batch / (micro_batch * dp))"
        raise ScheduleError(f"--schedule {config.schedule}: {need} {where}") from error
