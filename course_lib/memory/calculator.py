"""Memory calculator: does a training run fit? Setup in, accounting of its bytes and FLOP out.

A setup is model, GPU, recipe, batch and parallelism. It is also a line of text, the options of
`course memory`, such as `--model llama-8b --gpu h100 --dp 8 --zero 2`, so that it can be shared.
Notebook 01_memory.
"""

import difflib
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from course_lib.core.errors import CourseError
from course_lib.core.layers import layer_kinds
from course_lib.core.parallelism import Parallelism
from course_lib.core.presets import MODELS, find_model
from course_lib.core.recipes import find_recipe
from course_lib.core.records import Ledger
from course_lib.core.specs import ModelSpec
from course_lib.cost.flops import mfu, six_n_d, train_step_flop
from course_lib.cost.hardware import Device, find_device
from course_lib.cost.params import active_params, count_params, layers_params, params_on_rank
from course_lib.hub.config import read_config
from course_lib.memory.formulas import activations, kv_cache, step_ledger

KINDS = ("params", "grads", "optim_state", "activations")
SWITCHES = ("unfused", "dropout", "sequence_parallel")


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Configuration of a training run on one kind of GPU; the fields are command-line options.

    model          a preset, or the path of a config.json
    batch          sequences per micro-batch; a step of a rank has `micro_batches` of them
    unfused        attention without a fused kernel: scores and softmax are saved
    ep, expert_tp  ranks that divide the experts, and that split each of them; 0: tp
    step_time_s    measured seconds per step, for the MFU; 0 if unknown

    Raises: CourseError for values that do not go together
    """

    model: str = "llama-8b"
    gpu: str = "h100"
    recipe: str = "bf16"
    batch: int = 1
    seq: int = 4096
    micro_batches: int = 1
    recompute: str = "none"
    unfused: bool = False
    dropout: bool = False
    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    zero: int = 0
    sequence_parallel: bool = False
    ep: int = 1
    expert_tp: int = 0
    step_time_s: float = 0.0

    def __post_init__(self) -> None:
        if self.micro_batches < 1 or not self.step_time_s >= 0:
            raise CourseError(
                "setup: need micro_batches of at least 1 and step_time_s of 0 or more; got "
                f"{self.micro_batches} and {self.step_time_s}."
            )
        if self.spec.positions == "learned" and self.seq > self.spec.max_seq:
            raise CourseError(
                f"setup: need seq of at most {self.spec.max_seq}, the learned positions of "
                f"{self.spec.name}; got {self.seq}. Try --seq {self.spec.max_seq}."
            )
        self.ledger(num_steps=1)  # raises for values that do not go together

    @cached_property
    def spec(self) -> ModelSpec:
        """Sizes of the model."""
        if Path(self.model).suffix == ".json":
            return read_config(self.model)
        return find_model(self.model)

    @cached_property
    def device(self) -> Device:
        """Memory and peak rates of the GPU."""
        return find_device(self.gpu)

    @cached_property
    def parallelism(self) -> Parallelism:
        """Sizes of the parallel axes."""
        return Parallelism(
            dp=self.dp,
            tp=self.tp,
            pp=self.pp,
            cp=self.cp,
            zero=self.zero,
            sequence_parallel=self.sequence_parallel,
            ep=self.ep,
            expert_tp=self.expert_tp or None,
        )

    def ledger(self, *, stage: int = 0, num_steps: int = 2) -> Ledger:
        """Return the memory of a rank of a pipeline stage through its first steps."""
        return step_ledger(
            self.spec,
            self.batch,
            self.seq,
            recipe=self.recipe,
            recompute=self.recompute,
            flash=not self.unfused,
            dropout=self.dropout,
            parallelism=self.parallelism,
            stage=stage,
            num_micro_batches=min(self.micro_batches, self.pp + 1),  # more repeat the same peak
            num_steps=num_steps,
            flop_per_s=0.4 * self.device.peak(),
        )

    @cached_property
    def fullest(self) -> Ledger:
        """Ledger of the rank with the highest peak.

        It is on the first stage, which has most micro-batches in flight, or the last, which has
        the logits; where layers differ, on any.
        """
        return self.ledger(stage=self.fullest_stage)

    @cached_property
    def fullest_stage(self) -> int:
        """Pipeline stage of the rank with the highest peak."""
        return max(sorted(self._stages), key=lambda stage: self.ledger(stage=stage).peak_bytes())

    @property
    def _stages(self) -> set[int]:
        return set(range(self.pp)) if len(layer_kinds(self.spec)) > 1 else {0, self.pp - 1}

    @property
    def peak_bytes(self) -> int:
        """Peak bytes of the fullest rank."""
        return self.fullest.peak_bytes()

    @property
    def fits(self) -> bool:
        """True if the peak is at most the GPU's memory."""
        return self.peak_bytes <= self.device.memory_bytes

    def largest_batch(self) -> int:
        """Return the largest micro-batch that fits, in sequences; 0 if not even one fits.

        Bytes at each time of a ledger are linear in the batch, so two batches determine them.
        """
        limit, most = self.device.memory_bytes, []
        one, two = replace(self, batch=1), replace(self, batch=2)
        for stage in self._stages:
            lines = zip(*(setup.ledger(stage=stage).totals() for setup in (one, two)), strict=True)
            most += [(limit - at_1) // (at_2 - at_1) + 1 for at_1, at_2 in lines if at_2 > at_1]
            most.append(0 if one.ledger(stage=stage).peak_bytes() > limit else min(most))
        return max(0, min(most))

    def with_more_ranks(self) -> "Setup | None":
        """Return the first of these setups that fits; None if none does.

        ZeRO over dp, 2 dp, 4 dp, ... up to 1,024 dp ranks, stage 3, or stage 1 in a pipeline; then
        the same with full recomputation.
        """
        zero = max(self.zero, 3 if self.pp == 1 else 1)
        for recompute in (self.recompute, "full"):
            for doublings in range(11):
                more = replace(self, dp=self.dp * 2**doublings, zero=zero, recompute=recompute)
                if more.fits:
                    return more
        return None

    @property
    def global_batch(self) -> int:
        """Sequences in one optimizer step of all ranks."""
        return self.batch * self.micro_batches * self.dp

    def step_flop(self) -> int:
        """Return the model FLOP of one step of all ranks, without recomputation."""
        return train_step_flop(self.spec, self.global_batch, self.seq)

    def mfu(self) -> float:
        """Return the model FLOP utilization at `step_time_s`; 0 if that is unknown."""
        if not self.step_time_s:
            return 0.0
        peak = self.device.peak("fp32" if self.recipe == "fp32" else "bf16")
        world_size = self.parallelism.world_size
        return mfu(self.step_flop(), self.step_time_s, peak, world_size=world_size)

    def text(self) -> str:
        """Return the setup as one line of options, which `read_setup` reads back."""
        words = []
        for name, value in changed(self).items():
            words.append("--" + name.replace("_", "-"))
            words += [] if value is True else [shlex.quote(str(value))]
        return " ".join(words)

    def held_params(self) -> dict[str, int]:
        """Return the parameters that the fullest rank keeps, by what divides them.

        The keys are those of `layers_params`, and "ends" for the embedding and the output layer.
        With ZeRO stage 3 only the rank's shard counts.
        """
        axes, stage = self.parallelism, self.fullest_stage
        held = layers_params(self.spec, axes, stage)
        held["ends"] = params_on_rank(self.spec, axes, stage) - sum(held.values())
        if axes.zero < 3:
            return held
        ranks = {"experts": axes.expert_zero_ranks}
        return {part: -(-num // ranks.get(part, axes.zero_ranks)) for part, num in held.items()}

    def accounting(self) -> dict[str, Any]:
        """Return all derived numbers of the setup, ready for JSON."""
        ledger = self.fullest
        by_kind, at = ledger.bytes_by_kind, ledger.totals().index(ledger.peak_bytes())
        kept = activations(
            self.spec,
            self.batch,
            self.seq,
            recompute=self.recompute,
            flash=not self.unfused,
            dropout=self.dropout,
            number_bytes=find_recipe(self.recipe).activation_bytes,
            parallelism=self.parallelism,
            stage=self.fullest_stage,
            num_micro_batches=self.micro_batches,
        )
        num_params, active = count_params(self.spec), active_params(self.spec)
        return {
            "setup": self.text(),
            "model": self.spec.name,
            "num_params": num_params,
            "active_params": active,
            "params_on_rank": self.held_params(),
            "stage": self.fullest_stage,
            "kv_cache_bytes": kv_cache(self.spec, self.seq),
            "world_size": self.parallelism.world_size,
            "peak_bytes": {kind: by_kind[kind][at] for kind in KINDS},
            "most_bytes": {kind: max(by_kind[kind]) for kind in KINDS},
            "total_bytes": ledger.peak_bytes(),
            "limit_bytes": self.device.memory_bytes,
            "fits": self.fits,
            "largest_batch": self.largest_batch(),
            "activation_bytes": kept,
            "global_batch": self.global_batch,
            "tokens_a_step": self.global_batch * self.seq,
            "step_flop": self.step_flop(),
            "six_n_d_flop": six_n_d(active, self.global_batch * self.seq),
            "mfu": self.mfu(),
        }


def changed(setup: Setup) -> dict[str, Any]:
    """Return the fields of a setup that differ from the default; always with model and GPU."""
    fields = Setup.__dataclass_fields__
    return {
        name: getattr(setup, name)
        for name in fields
        if name in ("model", "gpu") or getattr(setup, name) != fields[name].default
    }


def read_setup(text: str | Sequence[str]) -> Setup:
    """Parse a setup from a line of options, or from its words.

    Raises: CourseError for an unknown option, or a value of the wrong kind
    """
    words = shlex.split(text.removeprefix("course memory")) if isinstance(text, str) else [*text]
    words = [part for word in words for part in _parts(word)]
    given: dict[str, str | bool] = {}
    while words:
        name = words.pop(0)
        field = name.removeprefix("--").replace("-", "_")
        if not name.startswith("--") or field not in Setup.__dataclass_fields__:
            near = difflib.get_close_matches(field, Setup.__dataclass_fields__, n=1)
            hint = f" Try --{near[0].replace('_', '-')}." if near else ""
            if name.endswith(".json") or name in MODELS:
                hint = f" Try --model {shlex.quote(name)}."
            raise CourseError(f"setup: need options such as --model; got {name!r}.{hint}")
        if field in SWITCHES:
            given[field] = True
        elif not words or words[0].startswith("--"):
            raise CourseError(f"setup: need a value after {name}; got none.")
        else:
            given[field] = words.pop(0)
    return Setup(**_typed(given))


def _parts(word: str) -> list[str]:
    """Split `--name=value`."""
    return word.split("=", 1) if word.startswith("--") else [word]


def _typed(given: Mapping[str, str | bool]) -> dict[str, Any]:
    """Convert the values to the types of their fields."""
    typed: dict[str, Any] = {}
    for name, value in given.items():
        kind: Callable[[Any], Any] = type(vars(Setup)[name])
        try:
            typed[name] = kind(value)
        except ValueError:
            what = "a whole number" if kind is int else "a number"
            option = name.replace("_", "-")
            raise CourseError(f"setup: need {what} for --{option}; got {value!r}.") from None
    return typed
