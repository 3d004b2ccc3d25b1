"""The runs of a scaling study: model x strategy x world size, for laptops and for clusters.

Within a model the global batch, the tokens and the number of steps stay the same, so that only the
strategy and the number of ranks differ. The study of convergence is about what happens if the batch
grows with the ranks instead. Lesson 13_scaling_study.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from course_lib.core.errors import CourseError
from course_lib.core.presets import find_model
from course_lib.scaling_study.study_run import StudyRun

WORLD_SIZES = (1, 2, 4)
ACCUMULATED = 4  # micro-batches of a step in the ZeRO set
SHORT = 4  # steps of warm-up, in place of 100
BUCKETS_MIB = (1.0, 5.0, 100.0)  # besides the 25 of all other runs
SIZES = {  # tokens in a sequence, sequences in a step; in the ZeRO set always 16
    "study-10m": (128, 16),
    "study-100m": (512, 16),
    "study-300m": (1024, 8),
    "study-500m": (1024, 8),
    "study-1b": (1024, 4),
}
ZERO_BATCH, ZERO_SEQ = 16, {"study-1b": 512}
ZERO = ("zero1", "zero2", "zero3")


@dataclass(frozen=True, kw_only=True)
class Study:
    """A named list of runs, without repetition."""

    name: str
    runs: tuple[StudyRun, ...]

    def only(
        self, models: Sequence[str] = (), strategies: Sequence[str] = (), ranks: Sequence[int] = ()
    ) -> "Study":
        """Return the part with these models, strategies and world sizes; empty: all of them.

        The runs of one rank stay: the others are compared with them.
        Raises: CourseError for a word that no run has
        """
        known: list[tuple[str, Sequence[Any], set[Any]]] = [
            ("model", models, {run.spec.name for run in self.runs}),
            ("strategy", strategies, {run.label for run in self.runs}),
            ("ranks", ranks, {run.ranks for run in self.runs}),
        ]
        for name, words, has in known:
            if unknown := set(words) - has:
                raise CourseError(
                    f"--{name}: need one of {', '.join(map(str, sorted(has)))}; got "
                    f"{', '.join(map(str, sorted(unknown)))}."
                )
        kept = [
            run
            for run in self.runs
            if (not models or run.spec.name in models)
            and (not strategies or run.label in strategies or run.ranks == 1)
            and (not ranks or run.ranks in ranks or run.ranks == 1)
        ]
        return replace(self, runs=tuple(kept))


def find_study(name: str) -> Study:
    """Return the study of that name. Raises: CourseError that lists the names"""
    if name not in STUDIES:
        raise CourseError(f"study: need {' or '.join(STUDIES)}; got {name!r}.")
    return Study(name=name, runs=tuple(dict.fromkeys(STUDIES[name]())))


def laptop() -> Iterator[StudyRun]:
    """Return the laptop study: small models on 1 to 4 ranks, some minutes on two cores."""
    tiny = partial(StudyRun, spec=find_model("tiny"), global_batch=16, seq=64, steps=12)
    yield tiny()
    yield tiny(strategy="ddp", ranks=2)
    small = partial(StudyRun, spec=find_model("small"), global_batch=16, seq=64, steps=12)
    yield from _base_set(small())
    yield small(strategy="torch-ddp", ranks=2)
    yield small(strategy="ddp", ranks=2, bucket_mib=1.0)
    alone = small(num_micro_batches=ACCUMULATED)
    yield alone
    for strategy in ZERO:  # buckets that are small beside the model, as they are beside large ones
        yield from _copies(replace(alone, bucket_mib=1.0), strategy)


def cluster() -> Iterator[StudyRun]:
    """Return the cluster study: models from 10 million to a billion parameters, 1 to 4 GPUs."""
    for name, (seq, batch) in SIZES.items():
        dtype = "float32" if name == "study-10m" else "bfloat16"
        alone = StudyRun(spec=find_model(name), global_batch=batch, seq=seq, dtype=dtype, steps=200)
        yield from _base_set(alone)
        yield from _copies(alone, "torch-ddp")
        accumulated = replace(
            alone,
            global_batch=ZERO_BATCH,
            seq=ZERO_SEQ.get(name, seq),
            num_micro_batches=ACCUMULATED,
        )
        yield accumulated
        for strategy in (*ZERO, "torch-fsdp", "zero3-offload"):
            yield from _copies(accumulated, strategy)
        if name == "study-100m":
            largest = replace(alone, strategy="ddp", ranks=WORLD_SIZES[-1])
            yield from (replace(largest, bucket_mib=size) for size in BUCKETS_MIB)


def convergence() -> Iterator[StudyRun]:
    """Return the convergence study: the batch grows with the copies, then less warm-up."""
    alone = StudyRun(spec=find_model("tiny"), global_batch=8, seq=64, steps=150, warmup=100)
    yield alone
    yield replace(alone, ranks=2, tp=2)
    for p in WORLD_SIZES[1:]:
        yield replace(alone, strategy="ddp", ranks=p, global_batch=8 * p)
    yield replace(alone, strategy="ddp", ranks=p, global_batch=8 * p, warmup=SHORT)
    yield replace(alone, warmup=SHORT)  # the shorter warm-up alone


STUDIES = {"laptop": laptop, "cluster": cluster, "convergence": convergence}


def _base_set(alone: StudyRun) -> Iterator[StudyRun]:
    """Return one rank, DP, TP, and PP with p and with 4 p micro-batches."""
    yield alone
    yield from _copies(alone, "ddp")
    yield from (replace(alone, ranks=p, tp=p) for p in WORLD_SIZES[1:])
    for p in WORLD_SIZES[1:]:
        for wanted in (p, 4 * p):
            m = min(wanted, alone.global_batch)  # a sequence is not cut
            yield replace(alone, ranks=p, pp=p, num_micro_batches=m)


def _copies(alone: StudyRun, strategy: str) -> Iterator[StudyRun]:
    yield from (replace(alone, strategy=strategy, ranks=p) for p in WORLD_SIZES[1:])
