"""One run of a scaling study: the model, the batch and the parallelism.

A run that is planned and a run that was recorded are the same thing, so a study knows what it has.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from course_lib.core.built import check_built
from course_lib.core.errors import CourseError, ShapeError
from course_lib.core.files import read_json
from course_lib.core.parallelism import Parallelism
from course_lib.core.plain_values import build
from course_lib.core.records import RunRecord
from course_lib.core.specs import ModelSpec, spec_fields
from course_lib.core.units import KIB, MIB
from course_lib.cost.params import count_params
from course_lib.train.config import DTYPES, TrainConfig

RECORDED: tuple[str, ...] = (
    "strategy",
    "tp",
    "pp",
    "global_batch",
    "num_micro_batches",
    "seq",
    "bucket_mib",
    "dtype",
    "steps",
    "warmup",
)
LEAST = {
    "ranks": 1,
    "tp": 1,
    "pp": 1,
    "global_batch": 1,
    "num_micro_batches": 1,
    "seq": 1,
    "steps": 1,
    "warmup": 0,
}
MOST, MOST_PARAMS = 10**6, 10**13  # what is beyond them is a spoilt file
NAME = r"[A-Za-z0-9][A-Za-z0-9 ._+()-]{0,60}"  # as a folder may be called
ZERO_STAGES = {"zero1": 1, "zero2": 2, "zero3": 3, "fsdp": 3, "torch-fsdp": 3}
OFFLOAD = "-offload"  # the end of a strategy's name: the optimizer is on the host


@dataclass(frozen=True, kw_only=True)
class StudyRun:
    """A run of the training loop, by all that its speed, its memory and its losses depend on.

    strategy           of the training script; tp and pp split a copy of the model besides
    global_batch       sequences in a step, all ranks together: the same under every strategy
    num_micro_batches  of each copy of the model
    warmup             steps in which the learning rate grows

    Raises: ShapeError for a batch that cannot be cut evenly; MeshError; CourseError for a number
        that no run has
    """

    spec: ModelSpec
    strategy: str = "single"
    ranks: int = 1
    tp: int = 1
    pp: int = 1
    global_batch: int
    num_micro_batches: int = 1
    seq: int
    bucket_mib: float = 25.0
    dtype: str = "float32"
    steps: int
    warmup: int = 0

    def __post_init__(self) -> None:
        for name, least in LEAST.items():
            self._need(name, least <= getattr(self, name) <= MOST, f"{least} to {MOST:,}")
        for words in (self.strategy, self.spec.name):
            self._need("strategy and spec.name", re.fullmatch(NAME, words), "a short name each")
        self._need("dtype", self.dtype in DTYPES, " or ".join(DTYPES))
        self._need("bucket_mib", self.bucket_mib * MIB >= KIB, "at least 1 KiB")
        self._need("spec", count_params(self.spec) <= MOST_PARAMS, f"{MOST_PARAMS:.0e} parameters")
        self._need("spec", self.spec.experts is None, "a dense model, as predictions count")
        check_built(self.spec, "StudyRun")  # what the training loop trains, and predictions count
        self.parallelism.check(self.spec)
        parts = self.parallelism.dp * self.num_micro_batches
        if self.ranks != self.parallelism.world_size or self.global_batch % parts:
            raise ShapeError(
                "StudyRun: need ranks = dp * tp * pp, and global_batch divisible by dp * "
                f"micro-batches; got {self.ranks} ranks, tp {self.tp}, pp {self.pp}, and "
                f"{self.global_batch} sequences for {parts} parts."
            )

    def _need(self, name: str, is_right: object, need: str) -> None:
        if not is_right:
            raise CourseError(f"StudyRun, {name}: need {need}; got {repr(self)[:300]}.")

    @property
    def parallelism(self) -> Parallelism:
        """The sizes of its parallel axes."""
        return Parallelism(
            dp=self.ranks // (self.tp * self.pp),
            tp=self.tp,
            pp=self.pp,
            zero=ZERO_STAGES.get(self.strategy.removesuffix(OFFLOAD), 0),
        )

    @property
    def offload(self) -> bool:
        """Whether the optimizer's state is on the host."""
        return self.strategy.endswith(OFFLOAD)

    @property
    def micro_batch(self) -> int:
        """Sequences in one forward pass."""
        return self.global_batch // (self.parallelism.dp * self.num_micro_batches)

    @property
    def tokens_a_step(self) -> int:
        """Tokens in a step, all ranks together."""
        return self.global_batch * self.seq

    @property
    def work(self) -> tuple[Any, ...]:
        """The settings that runs must share to be compared."""
        accumulated = self.num_micro_batches if self.pp == 1 else 1
        return self.spec, self.global_batch, self.seq, self.dtype, accumulated, self.warmup

    @property
    def label(self) -> str:
        """The strategy in a word or two: `single`, `ddp`, `tp`, `pp`, `ddp tp2`."""
        axes = {"tp": self.tp, "pp": self.pp}
        split = [name for name, size in axes.items() if size > 1]
        dp = self.parallelism.dp
        if split and dp == 1:
            return " ".join(split)
        return " ".join([self.strategy] + [f"{name}{axes[name]}" for name in split])

    @property
    def name(self) -> str:
        """Its path in the study's folder: strategy, model, and what distinguishes the runs."""
        words = [f"r{self.ranks}", f"batch{self.global_batch}", f"seq{self.seq}"]
        words += [f"m{self.num_micro_batches}"] if self.num_micro_batches > 1 else []
        words += [f"bucket{self.bucket_mib:g}"] if self.bucket_mib != 25 else []
        words += [f"warmup{self.warmup}"] if self.warmup else []
        return f"{self.label.replace(' ', '-')}/{self.spec.name}/{'-'.join(words)}"

    def config(self, out: str) -> TrainConfig:
        """Return the training settings; records go into the folder `out`."""
        given = {name: getattr(self, name) for name in RECORDED if name != "num_micro_batches"}
        return TrainConfig(model=self.spec, micro_batch=self.micro_batch, every=0, out=out, **given)

    def plain(self) -> dict[str, Any]:
        """All fields as plain values; `read_run` rebuilds the run from them."""
        fields = {name: getattr(self, name) for name in RECORDED}
        return {"spec": spec_fields(self.spec), "ranks": self.ranks, **fields}


def read_run(plain: Mapping[str, Any]) -> StudyRun:
    """Rebuild the run that `plain` described. Raises: CourseError for values that are no run's"""
    return build(StudyRun, plain, "run")


def run_of(record: RunRecord) -> StudyRun:
    """Return the run that a record of the training script belongs to."""
    run = record.run
    return read_run(
        {
            "spec": run["model"],
            "ranks": record.world_size,
            **{name: run[name] for name in RECORDED},
        }
    )


@dataclass(frozen=True, kw_only=True)
class ListedRun:
    """One task of a job array: its run, and the folder of its records."""

    out: str
    run: StudyRun


def read_list(path: str | Path) -> list[ListedRun]:
    """Return the runs of a job array, by task. Raises: CourseError for a file that has none"""
    return build(list[ListedRun], read_json(path, "a list of runs"), os.fspath(path))
