"""The command-line options of `python -m course_lib.train`, with their help texts."""

from pathlib import Path
from typing import Annotated

import typer

from course_lib.train.config import SCHEDULES
from course_lib.train.strategies import COPIES, FRAMEWORKS, SHARDS

StrategyOption = Annotated[
    str | None,
    typer.Option(
        help="Whole copies of the model: "
        + ", ".join(COPIES)
        + ". Shards of it: "
        + ", ".join(SHARDS)
        + ". Frameworks: "
        + ", ".join(FRAMEWORKS)
        + ". With -offload the optimizer is on the CPU. Without --strategy: single for one copy of "
        "the model, ddp for more."
    ),
]
RanksOption = Annotated[int | None, typer.Option(help="Ranks to start here; tp * pp without it.")]
ModelOption = Annotated[
    str,
    typer.Option(
        help="A GPT: tiny, small, gpt2-char, study-10m, another preset, or the path of a "
        "config.json. A BERT: bert-tiny or bert-dialogues."
    ),
]
Layers = Annotated[int | None, typer.Option(help="Layers, instead of the preset's.")]
Hidden = Annotated[int | None, typer.Option(help="Width, instead of the preset's.")]
Heads = Annotated[int | None, typer.Option(help="Attention heads, instead of the preset's.")]
Vocab = Annotated[
    int | None, typer.Option(help="How many synthetic tokens there are, instead of the preset's.")
]
Data = Annotated[
    str,
    typer.Option(
        help="synthetic, shakespeare or, for a BERT, dialogues (both downloaded once), or the path "
        "of a text file."
    ),
]
StepsOption = Annotated[
    int | None,
    typer.Option(
        help="Optimizer steps in all, also when it goes on from a checkpoint; 100 without it."
    ),
]
Epochs = Annotated[
    int | None, typer.Option(help="Instead of --steps: how often to read as much as a text holds.")
]
GlobalBatch = Annotated[int, typer.Option(help="Sequences in a step, all ranks together.")]
MicroBatch = Annotated[
    int | None,
    typer.Option(
        help="Sequences in one forward pass; the rest of a rank's share is accumulated, or with "
        "--pp follows through the stages (without it: 2 * pp micro-batches)."
    ),
]
Tp = Annotated[int, typer.Option(help="Ranks that share every layer (tensor parallel).")]
SequenceParallel = Annotated[
    bool, typer.Option("--sequence-parallel", help="With --tp, norms and dropout are shared too.")
]
Pp = Annotated[int, typer.Option(help="Stages of layers, a rank each (pipeline parallel).")]
ScheduleOption = Annotated[
    str | None, typer.Option(help=f"With --pp: {', '.join(SCHEDULES)}. Without it: 1f1b.")
]
ModelChunks = Annotated[
    int | None, typer.Option(help="Model chunks a rank of --schedule interleaved; 2 without it.")
]
Seq = Annotated[
    int | None,
    typer.Option(help="Tokens in a sequence; without it 64, or as many as the model takes."),
]
Optimizer = Annotated[str, typer.Option(help="sgd or adamw.")]
Lr = Annotated[
    float | None, typer.Option(help="Learning rate; without it 0.001 for adamw and 0.1 for sgd.")
]
Warmup = Annotated[
    int, typer.Option(help="Steps in which the learning rate grows to --lr; 0: none.")
]
Momentum = Annotated[
    float | None, typer.Option(help="With sgd: how much of the last update comes again, below 1.")
]
ClipNorm = Annotated[
    float | None, typer.Option(help="The most that the norm of the whole gradient may be.")
]
DropoutOption = Annotated[float, typer.Option(help="Probability that a number is dropped.")]
Dtype = Annotated[str, typer.Option(help="float32, float64 or bfloat16.")]
Seed = Annotated[int, typer.Option(help="Decides the first weights and the data.")]
ComputeDtype = Annotated[
    str | None, typer.Option(help="With fsdp: bfloat16 is gathered and computed in.")
]
Reshard = Annotated[
    bool,
    typer.Option(help="With fsdp and torch-fsdp: free a block between forward and backward."),
]
BucketMib = Annotated[
    float, typer.Option(help="Size of a bucket of ddp, torch-ddp and zero1 to zero3.")
]
Every = Annotated[int, typer.Option(help="Steps between two lines of output; 0: silent.")]
OutOption = Annotated[
    Path | None, typer.Option(help="Folder for run records and the checkpoint, such as runs/NAME.")
]
SaveEvery = Annotated[int, typer.Option(help="Steps between two checkpoints; 0: none.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on from the checkpoint in --out.")]
