"""Every engine on one model, in one table: `python -m tests.benchmarks.bench_engines`.

The same GPT, batches and optimizer (SGD with momentum, float32) under every strategy of the
training command: ours, PyTorch's, Accelerate's, Lightning's, DeepSpeed's, Megatron-Core's. It takes
about a minute on two quiet cores; the table is Markdown, as docs/engines.md shows it.

loss       the largest difference from one process in any step, relative
step       the median without the first, by the slowest rank; a CPU's, with gloo
calls      collectives and messages of rank 0 in the last step
sent       what these calls carry over the links, by rank 0
"""

import argparse
from contextlib import redirect_stdout
from dataclasses import replace
from statistics import median
from typing import Any

from course_lib.core.presets import find_model
from course_lib.core.records import COMMUNICATION_KINDS, Event, RunRecord
from course_lib.core.units import format_bytes, format_seconds
from course_lib.cost.params import count_params
from course_lib.cost.traffic import sent_bytes
from course_lib.frameworks import missing
from course_lib.frameworks.engine import PACKAGES
from course_lib.ranks import Ranks
from course_lib.train.config import TrainConfig
from course_lib.train.strategies import STRATEGIES
from course_lib.train.trainer import train

SPLIT: dict[str, dict[str, Any]] = {
    "tp=2": {"tp": 2},
    "megatron, tp=2": {"strategy": "megatron", "tp": 2},
    "pp=2, 1F1B": {"pp": 2},
    "megatron, pp=2, 1F1B": {"strategy": "megatron", "pp": 2},
    "pp=2, interleaved": {"pp": 2, "schedule": "interleaved"},
    "megatron, pp=2, interleaved": {
        "strategy": "megatron",
        "pp": 2,
        "schedule": "interleaved",
        "model_chunks": 2,
    },
}


def ways() -> dict[str, dict[str, Any]]:
    """Options of the runs by name; without the engines that are not installed."""
    found = {name: {"strategy": name} for name in STRATEGIES if name not in ("single", "megatron")}
    found |= {"megatron, dp=2": {"strategy": "megatron"}, **SPLIT}
    return {name: options for name, options in found.items() if not _missing(name)}


def _missing(name: str) -> str | None:
    first = name.split("-")[0].split(",")[0]
    module = next((one for one in PACKAGES if one.startswith(first)), None)
    return missing(module) if module else None


def last_calls(record: RunRecord) -> list[Event]:
    """Collectives and messages of the last step, with others."""
    start_s = record.steps[-1]["start_s"]
    return [
        event
        for event in record.events
        if event.kind in COMMUNICATION_KINDS and len(event.group) > 1 and event.start_s >= start_s
    ]


def row(name: str, records: list[RunRecord], expected: list[float]) -> str:
    """One run as a row of the table."""
    losses = [step["loss"] for step in records[0].steps]
    off = max(abs(one - other) / other for one, other in zip(losses, expected, strict=True))
    step_s = max(
        median(step["end_s"] - step["start_s"] for step in record.steps[1:]) for record in records
    )
    calls = last_calls(records[0])
    sent = sum(sent_bytes([call], len(call.group)) for call in calls)
    cells = (name, f"{off:.0e}", format_seconds(step_s), str(len(calls)), format_bytes(round(sent)))
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", default="small")
    parser.add_argument("--steps", type=int, default=6)
    args = parser.parse_args()
    config = TrainConfig(
        model=replace(find_model(args.model), num_layers=4),
        steps=args.steps,
        global_batch=8,
        seq=32,
        optimizer="sgd",
        momentum=0.9,
        bucket_mib=1,
        every=0,
    )
    with Ranks(1) as ranks:
        alone = ranks.run(train, config)
    expected = [step["loss"] for step in alone[0].steps]
    print(
        f"{count_params(config.model):,} parameters, 2 ranks, 8 sequences of 32, {args.steps} steps"
    )
    print("\n| engine | loss | step | calls | sent |\n|---|---|---|---|---|")
    print(row("one process", alone, expected))
    for name, options in ways().items():
        with Ranks(2) as ranks, redirect_stdout(None):
            records = ranks.run(train, replace(config, **options))
        print(row(name, records, expected), flush=True)


if __name__ == "__main__":
    main()
