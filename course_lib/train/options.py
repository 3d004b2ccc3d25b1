"""The options of `python -m course_lib.train`: those of a run, and what the command alone has."""

from dataclasses import fields
from inspect import Parameter, Signature, signature
from typing import Annotated, Any, get_args

import typer

from course_lib.core.presets import ENCODERS, MODELS
from course_lib.train.config import TrainConfig
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
ModelOption = Annotated[
    str | None,
    typer.Option(
        help=f"A GPT: {', '.join(MODELS)}, or the path of a config.json. A BERT: "
        f"{', '.join(ENCODERS)}. Default: tiny."
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
MeshOption = Annotated[
    str | None,
    typer.Option(
        help="Sizes of the axes, such as dp=2,pp=2,tp=2: copies of the model (or shards of them, "
        "with zero1 to zero3 and fsdp), pipeline stages, ranks that split every layer, and "
        "cp=2: ranks that split every sequence. ep=2: of the ranks of dp and cp, how many share "
        "the experts of a layer. Without dp: as many copies as --ranks gives."
    ),
]
AxisOption = Annotated[int | None, typer.Option(hidden=True)]
DryRunOption = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        help="Train nothing: print what a rank would hold and send in a step, and the time that "
        "the planner predicts. For any number of ranks; no checkpoint is read or written.",
    ),
]
ClusterOption = Annotated[
    str, typer.Option(help="Of --dry-run: the planner's profile of a cluster, or its file.")
]
METAVARS = {"profile": "STEPS", "record_values": "FOLDER", "init": "FOLDER", "out": "FOLDER"}
UNSET = {"steps": None, "seq": None}  # what the command decides if they are not given


def with_settings(command: Any) -> Any:
    """Give a command, in the place of its `**settings`, an option for each setting of a run."""
    own = dict(signature(command).parameters)
    del own["settings"]
    found = list(own.values())
    for field in fields(TrainConfig):
        words = get_args(field.type)
        if field.name in own or len(words) < 2 or not words[1]:
            continue
        flag = [f"--{field.name.replace('_', '-')}"] * (field.default is False)
        default = UNSET.get(field.name, field.default)
        option = typer.Option(default, *flag, help=words[1], metavar=METAVARS.get(field.name))
        kind = words[0] | None if field.name in UNSET else words[0]
        found.append(Parameter(field.name, Parameter.KEYWORD_ONLY, default=option, annotation=kind))
    command.__signature__ = Signature(found)
    return command
