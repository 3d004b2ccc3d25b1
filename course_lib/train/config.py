"""The settings of a training run, `python -m course_lib.train`, and the checks they must pass.

Every mistake that can be found before a run starts is reported here, in one sentence.
"""

import math
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import psutil

from course_lib.context_parallel.layouts import LAYOUTS
from course_lib.core.errors import CourseError, MeshError, ShapeError
from course_lib.core.parallelism import Parallelism
from course_lib.core.plain_values import as_read_back
from course_lib.core.specs import ModelSpec, spec_fields
from course_lib.core.units import format_bytes
from course_lib.cost.params import count_params
from course_lib.train.rules import COMPUTE_DTYPES, above_0, among, check_rules, not_below_0

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

    An annotation has the help text of the setting as an option, and the checks of its value.

    masked       the model is a BERT, which predicts masked tokens; False: a GPT
    strategy     a name of `strategies.STRATEGIES`
    tp, pp, cp   ranks that split every layer, pipeline stages, ranks that split every sequence;
                 dp = ranks / (tp * pp * cp)
    ep           of the ranks of dp and cp, how many share the experts of a layer

    Raises: CourseError for what cannot be trained
    """

    model: ModelSpec
    masked: bool = False
    strategy: str = "single"
    tp: Annotated[int, "", above_0] = 1
    pp: Annotated[int, "", above_0] = 1
    cp: Annotated[int, "", above_0] = 1
    ep: Annotated[int, "", above_0] = 1
    init: Annotated[
        str | None,
        "Folder of a model of transformers (config.json and safetensors) to start from, instead of "
        "--model. The tokens of the data are the first ones of its vocabulary.",
    ] = None
    data: Annotated[
        str,
        "synthetic, shakespeare or, for a BERT, dialogues (both downloaded once), or the path of a "
        "text file.",
    ] = "synthetic"
    steps: Annotated[
        int,
        "Optimizer steps in total, including those before the checkpoint of --resume. Default: "
        "100.",
        above_0,
    ] = 100
    epochs: Annotated[
        int | None, "Instead of --steps: passes over all tokens of a text.", above_0
    ] = None
    global_batch: Annotated[int, "Sequences per step, all ranks together.", above_0] = 16
    micro_batch: Annotated[
        int | None,
        "Sequences in one forward pass; the rest of a rank's share follows in more micro-batches. "
        "Default: the whole share at once, or with pp 2 * pp micro-batches, of which the first get "
        "one sequence more if that is not even.",
        above_0,
    ] = None
    cp_form: Annotated[
        str | None,
        f"With cp: attention by {', '.join(CP_FORMS)}. Default: ring.",
        among(CP_FORMS),
    ] = None
    cp_layout: Annotated[
        str | None,
        f"With cp: which tokens a rank has, {', '.join(LAYOUTS)}. Default: zigzag, where each has "
        "early and late ones.",
        among(LAYOUTS),
    ] = None
    aux_weight: Annotated[
        float,
        "With experts: weight of the auxiliary loss that evens their load; 0: none.",
        not_below_0,
    ] = 0.0
    bias_step: Annotated[
        float,
        "With experts whose router has sigmoids: how far a step moves each bias against the load; "
        "0: not at all.",
        not_below_0,
    ] = 0.0
    sequence_parallel: Annotated[bool, "With tp: also split norms and dropout."] = False
    recompute: Annotated[
        str | None,
        f"{' or '.join(RECOMPUTED)}: save only the input of each block, or all but its attention, "
        "and compute the rest again in backward.",
        among(RECOMPUTED),
    ] = None
    schedule: Annotated[
        str | None, f"With pp: {', '.join(SCHEDULES)}. Default: 1f1b.", among(SCHEDULES)
    ] = None
    model_chunks: Annotated[
        int | None, "Model chunks per rank of --schedule interleaved. Default: 2.", above_0
    ] = None
    seq: Annotated[
        int, "Tokens per sequence. Default: 64, or the model's maximum if that is less.", above_0
    ] = 64
    optimizer: Annotated[
        str,
        "sgd, adamw, or muon for the matrices of the layers with adamw for the rest.",
        among(tuple(LR)),
    ] = "adamw"
    lr: Annotated[float | None, "Learning rate. Default: 0.1 for sgd, else 0.001.", above_0] = None
    warmup: Annotated[
        int, "Steps in which the learning rate grows linearly to --lr; 0: none.", not_below_0
    ] = 0
    lr_decay: Annotated[
        str | None,
        f"{' or '.join(LR_DECAYS)}: the learning rate falls to 0, from the end of the warm-up to "
        "the last step. Default: it stays.",
        among(LR_DECAYS),
    ] = None
    momentum: Annotated[
        float | None, "Momentum factor of sgd or muon, below 1. Default: 0, of muon 0.95.", above_0
    ] = None
    clip_norm: Annotated[
        float | None, "Upper limit for the norm of the whole gradient, over all axes.", above_0
    ] = None
    dropout: Annotated[float, "Dropout probability.", not_below_0] = 0.0
    dtype: Annotated[str, "float32, float64 or bfloat16.", among(tuple(DTYPES))] = "float32"
    compute_dtype: Annotated[
        str | None,
        "With fsdp: the dtype of gathers and computation, bfloat16.",
        among(COMPUTE_DTYPES),
    ] = None
    reshard: Annotated[
        bool,
        "With fsdp and torch-fsdp: free a block's gathered parameters after its forward. With fsdp "
        "and pp, --no-reshard keeps them, and whole gradients, for all micro-batches: each is "
        "gathered and reduced once a step.",
    ] = True
    seed: Annotated[int, "Determines the initial weights and the data.", not_below_0] = 0
    bucket_mib: Annotated[
        float, "Bucket size in MiB, for ddp, torch-ddp and zero1 to zero3.", above_0
    ] = 25.0
    every: Annotated[int, "Steps between two lines of output; 0: silent.", not_below_0] = 10
    eval_every: Annotated[
        int,
        "Steps between two validation losses, without dropout; 0: none. A text keeps its last "
        "tenth back for it.",
        not_below_0,
    ] = 0
    eval_only: Annotated[bool, "Only a validation loss: with --init, or with --resume."] = False
    stop_at_loss: Annotated[
        float | None, "With --eval-every: stop when a validation loss is at most this.", above_0
    ] = None
    out: Annotated[str | None, "Folder for run records and checkpoints, such as runs/NAME."] = None
    profile: Annotated[
        str | None,
        "Steps, such as 3 or 3-5, that PyTorch's profiler records on every rank: traces in --out, "
        "under profile.",
    ] = None
    save_every: Annotated[int, "Steps between two checkpoints; 0: none.", not_below_0] = 0
    keep: Annotated[int, "Number of checkpoints to keep; older ones are removed.", above_0] = 2
    async_save: Annotated[bool, "Continue training while a checkpoint is written."] = False
    checkpoint_format: Annotated[
        str,
        f"{' or '.join(CHECKPOINT_FORMATS)} (torch.distributed.checkpoint).",
        among(CHECKPOINT_FORMATS),
    ] = "course"
    resume: Annotated[
        bool,
        "Continue from the latest whole checkpoint in --out. Ranks that torchrun or Slurm has "
        "restarted do this by themselves.",
    ] = False
    record_values: Annotated[
        str | None,
        "Record fingerprints of all activations, gradients and parameters of every step in a new "
        "folder, for course diff. For small models.",
    ] = None

    def __post_init__(self) -> None:
        for field in fields(self):
            for check in getattr(field.type, "__metadata__", ("",))[1:]:
                check(field.name, getattr(self, field.name))
        self._fill_in("lr", LR[self.optimizer])
        if self.pp > 1:
            self._fill_in("schedule", "1f1b")
        if self.schedule == "interleaved":
            self._fill_in("model_chunks", 2)
        for name, usual in {"cp_form": "ring", "cp_layout": "zigzag"}.items():
            given = getattr(self, name)
            if self.cp > 1:
                self._fill_in(name, usual)
            elif given is not None:
                raise MeshError(
                    f"--{name.replace('_', '-')}: need cp of 2 or more; got {given} and 1. Try "
                    "--mesh cp=2."
                )
        check_rules(self)

    def _fill_in(self, name: str, usual: Any) -> None:
        if getattr(self, name) is None:
            object.__setattr__(self, name, usual)

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
