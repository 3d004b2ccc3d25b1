"""The command-line options of `python -m course_lib.train`, with their help texts."""

from pathlib import Path
from typing import Annotated

import typer

from course_lib.context_parallel.layouts import LAYOUTS
from course_lib.train.config import (
    CHECKPOINT_FORMATS,
    CP_FORMS,
    LR_DECAYS,
    RECOMPUTED,
    SCHEDULES,
)
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
        + ". With -offload the optimizer is on the CPU. Default: single for one copy of the model, "
        "ddp for more."
    ),
]
RanksOption = Annotated[
    int | None, typer.Option(help="Ranks to start on this machine. Default: dp * pp * cp * tp.")
]
Init = Annotated[
    Path | None,
    typer.Option(
        help="Folder of a model of transformers (config.json and safetensors) to start from, "
        "instead of --model. The tokens of the data are the first ones of its vocabulary."
    ),
]
ModelOption = Annotated[
    str | None,
    typer.Option(
        help="A GPT: tiny (the default), small, moe-tiny, gpt2-char, study-10m, another preset, or "
        "the path of a config.json. A BERT: bert-tiny or bert-dialogues."
    ),
]
Layers = Annotated[int | None, typer.Option(help="Number of layers, instead of the preset's.")]
Hidden = Annotated[int | None, typer.Option(help="Hidden size, instead of the preset's.")]
Heads = Annotated[
    int | None, typer.Option(help="Number of attention heads, instead of the preset's.")
]
Vocab = Annotated[
    int | None, typer.Option(help="Number of different synthetic tokens, instead of the preset's.")
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
        help="Optimizer steps in total, including those before the checkpoint of --resume. "
        "Default: 100."
    ),
]
Epochs = Annotated[
    int | None, typer.Option(help="Instead of --steps: passes over all tokens of a text.")
]
GlobalBatch = Annotated[int, typer.Option(help="Sequences per step, all ranks together.")]
MicroBatch = Annotated[
    int | None,
    typer.Option(
        help="Sequences in one forward pass; the rest of a rank's share follows in more "
        "micro-batches. Default: the whole share at once, or with pp 2 * pp micro-batches."
    ),
]
MeshOption = Annotated[
    str | None,
    typer.Option(
        help="Sizes of the axes, such as dp=2,pp=2,tp=2: copies of the model (or shards of them, "
        "with zero1 to zero3 and fsdp), pipeline stages, ranks that split every layer, and "
        "cp=2: ranks that split every sequence. ep=2: of the ranks of dp and cp, how many share "
        "the experts of a layer. Without dp: as many copies as --ranks gives."
    ),
]
CpForm = Annotated[
    str | None,
    typer.Option(help=f"With cp: attention by {', '.join(CP_FORMS)}. Default: ring."),
]
CpLayout = Annotated[
    str | None,
    typer.Option(
        help=f"With cp: which tokens a rank has, {', '.join(LAYOUTS)}. Default: zigzag, where each "
        "has early and late ones."
    ),
]
AuxWeight = Annotated[
    float,
    typer.Option(help="With experts: weight of the auxiliary loss that evens their load; 0: none."),
]
BiasStep = Annotated[
    float,
    typer.Option(
        help="With experts whose router has sigmoids: how far a step moves each bias against the "
        "load; 0: not at all."
    ),
]
Tp = Annotated[int | None, typer.Option(hidden=True)]
Pp = Annotated[int | None, typer.Option(hidden=True)]
SequenceParallel = Annotated[
    bool, typer.Option("--sequence-parallel", help="With tp: also split norms and dropout.")
]
Recompute = Annotated[
    str | None,
    typer.Option(
        help=f"{' or '.join(RECOMPUTED)}: save only the input of each block, or all but its "
        "attention, and compute the rest again in backward."
    ),
]
ScheduleOption = Annotated[
    str | None, typer.Option(help=f"With pp: {', '.join(SCHEDULES)}. Default: 1f1b.")
]
ModelChunks = Annotated[
    int | None, typer.Option(help="Model chunks per rank of --schedule interleaved. Default: 2.")
]
Seq = Annotated[
    int | None,
    typer.Option(help="Tokens per sequence. Default: 64, or the model's maximum if that is less."),
]
Optimizer = Annotated[
    str,
    typer.Option(
        help="sgd, adamw, or muon for the matrices of the layers with adamw for the rest."
    ),
]
Lr = Annotated[float | None, typer.Option(help="Learning rate. Default: 0.1 for sgd, else 0.001.")]
Warmup = Annotated[
    int, typer.Option(help="Steps in which the learning rate grows linearly to --lr; 0: none.")
]
LrDecay = Annotated[
    str | None,
    typer.Option(
        help=f"{' or '.join(LR_DECAYS)}: the learning rate falls to 0, from the end of the warm-up "
        "to the last step. Default: it stays."
    ),
]
Momentum = Annotated[float | None, typer.Option(help="Momentum factor of sgd or muon, below 1.")]
ClipNorm = Annotated[
    float | None,
    typer.Option(help="Upper limit for the norm of the whole gradient, over all axes."),
]
DropoutOption = Annotated[float, typer.Option(help="Dropout probability.")]
Dtype = Annotated[str, typer.Option(help="float32, float64 or bfloat16.")]
Seed = Annotated[int, typer.Option(help="Determines the initial weights and the data.")]
ComputeDtype = Annotated[
    str | None, typer.Option(help="With fsdp: the dtype of gathers and computation, bfloat16.")
]
Reshard = Annotated[
    bool,
    typer.Option(
        help="With fsdp and torch-fsdp: free a block's gathered parameters after its forward. "
        "With fsdp and pp, --no-reshard keeps them, and whole gradients, for all micro-batches: "
        "each is gathered and reduced once a step."
    ),
]
BucketMib = Annotated[
    float, typer.Option(help="Bucket size in MiB, for ddp, torch-ddp and zero1 to zero3.")
]
Every = Annotated[int, typer.Option(help="Steps between two lines of output; 0: silent.")]
EvalEvery = Annotated[
    int,
    typer.Option(
        help="Steps between two validation losses, without dropout; 0: none. A text keeps its last "
        "tenth back for it."
    ),
]
EvalOnly = Annotated[
    bool,
    typer.Option("--eval-only", help="Only a validation loss: with --init, or with --resume."),
]
DryRunOption = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        help="Train nothing: print what a rank would hold and send in a step, and the time that "
        "the planner predicts. For any number of ranks; no checkpoint is read or written.",
    ),
]
ClusterOption = Annotated[
    str,
    typer.Option(
        "--cluster", help="Of --dry-run: the planner's profile of a cluster, or its file."
    ),
]
StopAtLoss = Annotated[
    float | None,
    typer.Option(help="With --eval-every: stop when a validation loss is at most this."),
]
OutOption = Annotated[
    Path | None, typer.Option(help="Folder for run records and checkpoints, such as runs/NAME.")
]
ProfiledSteps = Annotated[
    str | None,
    typer.Option(
        metavar="STEPS",
        help="Steps, such as 3 or 3-5, that PyTorch's profiler records on every rank: traces in "
        "--out, under profile.",
    ),
]
RecordValues = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="Record fingerprints of all activations, gradients and parameters of every step in a "
        "new folder, for course diff. For small models.",
    ),
]
SaveEvery = Annotated[int, typer.Option(help="Steps between two checkpoints; 0: none.")]
Keep = Annotated[int, typer.Option(help="Number of checkpoints to keep; older ones are removed.")]
AsyncSave = Annotated[
    bool, typer.Option("--async-save", help="Continue training while a checkpoint is written.")
]
CheckpointFormat = Annotated[
    str,
    typer.Option(help=f"{' or '.join(CHECKPOINT_FORMATS)} (torch.distributed.checkpoint)."),
]
Resume = Annotated[
    bool,
    typer.Option(
        "--resume",
        help="Continue from the latest whole checkpoint in --out. Ranks that torchrun or Slurm "
        "has restarted do this by themselves.",
    ),
]
