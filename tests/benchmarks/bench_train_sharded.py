"""The study of FSDP with the training command: `python -m tests.benchmarks.bench_train_sharded`.

A GPT of characters and a BERT of dialogues, with copies of the model, with shards of it and, where
they are installed, under the frameworks; on one rank and on two. It takes about 8 minutes on two
quiet cores. Sequences and steps are few, so what a step sends and its optimizer weigh more than in
the study, whose seconds stand below: compare ratios, not seconds.

"step" is the median without the first one, "epoch" that times as many steps as the data has, both
by the slowest rank; "of p = 1" is the epoch of two ranks in those of one. What a rank holds is
counted when backward has ended, the most of all ranks: by kind, or all its tensors where a
framework does not tell kinds. "peak" is what its process has grown by since there was no model.
Each row has ranks of its own, so that nothing of another run counts. "accuracy" is that of the last
step's hidden words. Without a network the texts are generated ones, whose few words make the BERT
smaller.
"""

import argparse
from contextlib import redirect_stdout
from dataclasses import replace
from statistics import median
from typing import Any

from course_lib.core.presets import ENCODERS, MODELS
from course_lib.core.records import RunRecord
from course_lib.core.specs import ModelSpec
from course_lib.core.units import format_bytes, format_seconds
from course_lib.cost.params import count_params
from course_lib.frameworks import missing
from course_lib.fsdp.beside_frameworks import STUDY
from course_lib.ranks import Ranks
from course_lib.train.config import TrainConfig
from course_lib.train.trainer import train

KINDS = ("params", "grads", "optim_state", "tensors", "peak")
HEADS = ("step", "epoch", "of p = 1", *KINDS, "loss", "accuracy")
OURS = ("single", "ddp", "zero1", "zero2", "zero3", "fsdp", "torch-fsdp")
FRAMEWORKS = {
    "deepspeed": ("deepspeed-1", "deepspeed-2", "deepspeed-3"),
    "accelerate": ("accelerate-fsdp",),
}
PUBLISHED = {"gpt2-char": "GPT-2", "bert-dialogues": "BERT"}


def epoch_of(records: list[RunRecord]) -> tuple[float, float]:
    """Seconds of a step, and of an epoch of such steps."""
    steps = [one.steps[1:] or one.steps for one in records]
    step_s = max(median(step["end_s"] - step["start_s"] for step in some) for some in steps)
    return step_s, step_s * records[0].run["steps_an_epoch"]


def row(name: str, p: int, records: list[RunRecord], one_rank_s: float | None) -> str:
    """One run in a line."""
    step_s, epoch_s = epoch_of(records)
    memory: list[dict[str, int]] = [one.run["memory"] for one in records]
    held = [max(one[kind] for one in memory) if kind in memory[0] else None for kind in KINDS]
    last: dict[str, Any] = records[0].steps[-1]
    cells = [
        *(format_seconds(step_s), format_seconds(epoch_s)),
        f"{epoch_s / one_rank_s:.2f}" if one_rank_s else "",
        *("" if size is None else format_bytes(size) for size in held),
        *(f"{last['loss']:.4f}", f"{last['accuracy']:.1%}" if "accuracy" in last else ""),
    ]
    return f"{name:17}{p:2}" + "".join(f"{cell:>12}" for cell in cells)


def study(config: TrainConfig, strategies: list[str], sizes: list[int]) -> None:
    """Print the table of one model, and what was published of such a one."""
    name = config.model.name
    print(
        f"{name}, {config.data}: {config.global_batch} sequences of {config.seq} a step, "
        f"{config.steps} steps\n{'':17} p" + "".join(f"{head:>12}" for head in HEADS)
    )
    for strategy in strategies:
        one_rank_s = None
        for p in sizes if strategy != "single" else [1]:
            with Ranks(p) as ranks, redirect_stdout(None):  # of texts that cannot be loaded
                records = ranks.run(train, replace(config, strategy=strategy))
            print(row(strategy, p, records, one_rank_s), flush=True)
            if p == 1:
                one_rank_s = epoch_of(records)[1]
    millions, one_s, two_s = STUDY[PUBLISHED[name]]
    run = records[0].run
    here = count_params(ModelSpec(**run["model"])) / 1e6
    print(f"here {here:.1f} M on CPUs, data: {run['data']}")
    print(
        f"published, {millions} M on GPUs: {one_s} s an epoch on one, {two_s} s on two = "
        f"{two_s / one_s:.2f}; accuracy around 50 %\n"
    )


def main() -> None:
    installed = [s for package, some in FRAMEWORKS.items() if not missing(package) for s in some]
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--global-batch", type=int, default=8)
    parser.add_argument("--seq", type=int, default=32)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--strategies", nargs="+", default=[*OURS, *installed])
    parser.add_argument("--models", nargs="+", choices=list(PUBLISHED), default=list(PUBLISHED))
    args = parser.parse_args()
    for name in args.models:
        masked = name in ENCODERS
        config = TrainConfig(
            model=(ENCODERS if masked else MODELS)[name],
            masked=masked,
            data="dialogues" if masked else "shakespeare",
            steps=args.steps,
            global_batch=args.global_batch,
            seq=args.seq,
            every=0,
        )
        study(config, args.strategies, args.ranks)


if __name__ == "__main__":
    main()
