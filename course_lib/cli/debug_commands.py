"""The commands for a run that is wrong, slow or stuck: `diff`, `hang`, `why`, `links`."""

from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from course_lib.core.errors import CourseError
from course_lib.core.files import check_result_path, write_result
from course_lib.core.plain_text import printable
from course_lib.core.units import GB, format_seconds

if TYPE_CHECKING:  # imported where they are used: `course --help` should not wait for them
    from course_lib.core.records import RunRecord
    from course_lib.debugging.time_report import TimeReport
    from course_lib.planner import PredictedStep

PICTURES = (".png", ".pdf", ".svg")
ValuesArgument = Annotated[
    Path, typer.Argument(metavar="RUN_A", help="A folder of recorded values.")
]
OtherArgument = Annotated[
    Path | None,
    typer.Argument(
        metavar="RUN_B", help="That of another run. Default: compare the copies within RUN_A."
    ),
]
Dumps = Annotated[
    Path, typer.Argument(metavar="DUMP_FOLDER", help="A folder with one dump for each rank.")
]
RecordedRun = Annotated[
    Path, typer.Argument(metavar="RUN", help="A run's folder, with a record of every rank.")
]
ClusterName = Annotated[
    str,
    typer.Option(
        "--cluster",
        help="Whose speed to predict with, as in course plan. Default: laptop for a run on CPUs.",
    ),
]
NcclTests = Annotated[
    Path | None,
    typer.Argument(metavar="FILE", help="What nccl-tests has printed. Default: measure here."),
]
LinkRanks = Annotated[int, typer.Option("--ranks", help="Ranks to measure between.")]
LinkRate = Annotated[
    float | None,
    typer.Option("--link", min=0, metavar="GB/S", help="The link's bandwidth, to compare with."),
]
Tolerance = Annotated[
    float | None,
    typer.Option(
        min=0,
        help="Largest relative difference that counts as none. Default: none for runs on the same "
        "mesh; between meshes 1e-9 for float64, 1e-4 for float32.",
    ),
]
PictureOption = Annotated[
    Path | None, typer.Option("--picture", metavar="FILE", help="Also draw it: a PNG, PDF or SVG.")
]

PARTS = {  # of a predicted step, as `TimeReport` has them
    "computing": ("compute_s", "launch_s", "optimizer_s"),
    "messages and waiting": ("tp_s", "ep_s", "bubble_s", "pp_s", "dp_s"),
}


def add_debug_commands(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command()(diff)
    app.command()(hang)
    app.command()(why)
    app.command()(links)


def diff(
    run: ValuesArgument,
    other: OtherArgument = None,
    tolerance: Tolerance = None,
    picture: PictureOption = None,
) -> None:
    """Find where two recorded runs differ first: step, operation or parameter, and rank.

    \b
    python -m course_lib.train --steps 3 --dtype float64 --record-values runs/one
    python -m course_lib.train --steps 3 --dtype float64 --mesh tp=2 --record-values runs/tp
    course diff runs/tp runs/one

    The exit code is 1 if they differ.
    """
    from course_lib.debugging.comparing import compare_copies, compare_runs

    if picture and picture.suffix not in PICTURES:
        raise CourseError(f"--picture: need a name that ends in .png, .pdf or .svg; got {picture}.")
    check_result_path(picture)
    if other is None:
        found = compare_copies(run, tolerance=tolerance or 0.0)
    else:
        found = compare_runs(run, other, tolerance=tolerance)
    print(found)
    if picture:
        from course_lib.debugging.pictures import where_runs_differ

        content = BytesIO()
        where_runs_differ(found)[0].savefig(content, format=picture.suffix[1:], dpi=150)
        write_result(picture, content.getvalue())
    raise typer.Exit(1 if found.first else 0)


def hang(folder: Dumps) -> None:
    """Say from the dumps of PyTorch's flight recorder which rank is behind, in which collective.

    \b
    export TORCH_FR_BUFFER_SIZE=2000 TORCH_NCCL_DUMP_ON_TIMEOUT=1
    export TORCH_FR_DUMP_TEMP_FILE=$PWD/dumps/nccl_trace_rank_
    course hang dumps
    """
    from course_lib.debugging.flight_recorder import read_dumps
    from course_lib.debugging.hang_report import hang_report

    print(printable(hang_report(read_dumps(folder))))


def why(run: RecordedRun, cluster: ClusterName = "") -> None:
    """Say where the time of a recorded run went, beside its prediction, and which rank is late.

    \b
    python -m course_lib.train --ranks 2 --strategy ddp --out runs/ddp
    course why runs/ddp
    """
    from course_lib.core.records import read_runs
    from course_lib.debugging.time_report import time_report

    report = time_report(run)
    print("\n".join(report.lines()))
    record = next(one for one in read_runs(run) if one.rank == 0)
    if not cluster and record.machine.get("usable_gpus"):
        print("No prediction: name the cluster, as in --cluster hf-h100.")
        return
    try:
        step = _predicted(record, cluster or "laptop")
    except CourseError as error:
        print(f"No prediction: {error}")
        return
    print(f"\nPredicted for {step.cluster.name}: {step.bound}")
    for line in _beside(step, report):
        print(line)


def _predicted(record: "RunRecord", cluster: str) -> "PredictedStep":
    """Return the predicted step of a run of course_lib.train. Raises: CourseError for another"""
    from course_lib.core.parallelism import Parallelism
    from course_lib.core.plain_values import build
    from course_lib.core.specs import ModelSpec
    from course_lib.planner import Plan, find_cluster, predict

    run = record.run
    if missing := {"model", "dp", "tp", "pp", "strategy", "seq", "num_micro_batches"} - {*run}:
        raise CourseError(f"need a run of course_lib.train; its record has no {min(missing)}.")
    stage = next((int(n) for n in "123" if run["strategy"].startswith(f"zero{n}")), 0)
    zero = 3 if "fsdp" in run["strategy"] else stage
    axes = Parallelism(
        dp=run["dp"],
        tp=run["tp"],
        pp=run["pp"],
        zero=zero,
        sequence_parallel=bool(run.get("sequence_parallel")),
    )
    per_rank = -(-run["global_batch"] // run["dp"])
    plan = Plan(
        parallelism=axes,
        micro_batch=-(-per_rank // run["num_micro_batches"]),
        num_micro_batches=run["num_micro_batches"],
        seq=run["seq"],
        precision="bf16" if run.get("dtype") == "bfloat16" else "fp32",
    )
    nodes = find_cluster(cluster)
    nodes = nodes.with_nodes(-(-plan.world_size // nodes.gpus_per_node))
    return predict(build(ModelSpec, run["model"], "model"), nodes, plan)


def _beside(step: "PredictedStep", report: "TimeReport") -> Iterator[str]:
    """Yield each part of the step, predicted and measured on the slowest rank."""
    own = report.slowest
    measured = {"computing": own.compute_s, "messages and waiting": own.wait_s + own.transfer_s}
    measured |= {"in no event": own.other_s, "step": own.step_s}
    predicted = {part: sum(step.seconds[n] for n in names) for part, names in PARTS.items()}
    predicted |= {"in no event": 0.0, "step": step.step_s}
    yield f"{'':<22}{'predicted':>11}{f'rank {own.rank}':>11}{'more':>11}"
    for part, seconds in measured.items():
        more = seconds - predicted[part]
        cells = (predicted[part], seconds, more)
        yield f"{part:<22}" + "".join(f"{format_seconds(one):>11}" for one in cells)
    worst = max([*measured][:-1], key=lambda part: measured[part] - predicted[part])
    if measured[worst] > predicted[worst]:
        yield f"The largest part of what the prediction lacks: {worst}."


def links(file: NcclTests = None, ranks: LinkRanks = 2, link: LinkRate = None) -> None:
    """Show the bus bandwidth of a collective by size: of nccl-tests' output, or measured here.

    \b
    all_reduce_perf -b 8 -e 8G -f 2 -g 8 > links.txt
    course links links.txt --link 450
    """
    from course_lib.debugging.link_report import measure_all_reduce, read_nccl_tests

    found = read_nccl_tests(file) if file else measure_all_reduce(ranks)
    print("\n".join(found.lines(link * GB if link else None)))
