"""The study of FSDP with the training command: `python -m tests.benchmarks.bench_train_sharded`.

A GPT of characters and a BERT of dialogues, with copies of the model and with shards of it, on one
rank and on two. "step" is the median, "epoch" what as many tokens as the data has would take at the
mean, both by the slowest rank. What a rank holds is counted when backward has ended; "peak" is what
its process has grown by since there was no model. Each row has ranks of its own, so that nothing of
another run counts. "accuracy" is that of the last step's hidden words.
"""

import argparse
from dataclasses import replace
from statistics import median
from typing import Any

from course_lib.core.presets import ENCODERS, MODELS
from course_lib.core.records import RunRecord
from course_lib.core.units import format_bytes, format_seconds
from course_lib.ranks import Ranks
from course_lib.training.config import TrainConfig
from course_lib.training.loop import train

KINDS = ("params", "grads", "optim_state", "peak")


def row(name: str, p: int, records: list[RunRecord]) -> str:
    """One run in a line."""
    step_s = max(median(s["end_s"] - s["start_s"] for s in one.steps) for one in records)
    epoch_s = max(one.run.get("epoch_s", 0.0) for one in records)
    memory: list[dict[str, int]] = [one.run["memory"] for one in records]
    held = [max(one.get(kind, 0) for one in memory) for kind in KINDS]
    last: dict[str, Any] = records[0].steps[-1]
    found = [f"{last['loss']:.3f}", f"{last['accuracy']:.1%}" if "accuracy" in last else ""]
    cells = [format_seconds(step_s), format_seconds(epoch_s), *map(format_bytes, held), *found]
    return f"{name:12}{p:3}" + "".join(f"{cell:>12}" for cell in cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--global-batch", type=int, default=8)
    parser.add_argument("--seq", type=int, default=64)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--strategies", nargs="+", default=["ddp", "zero3", "fsdp", "torch-fsdp"])
    parser.add_argument("--models", nargs="+", default=["gpt2-char", "bert-dialogues"])
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
        print(f"{name}, {config.data}: {args.global_batch} sequences of {args.seq} a step")
        heads = ("step", "epoch", *KINDS, "loss", "accuracy")
        print(f"{'':12}{'p':>3}" + "".join(f"{head:>12}" for head in heads))
        for p in args.ranks:
            for strategy in args.strategies:
                with Ranks(p) as ranks:
                    records = ranks.run(train, replace(config, strategy=strategy))
                print(row(strategy, p, records), flush=True)


if __name__ == "__main__":
    main()
