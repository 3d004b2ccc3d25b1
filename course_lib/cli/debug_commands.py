"""The commands for a run that is wrong, slow or stuck: `diff`, `hang` and `why`."""

from io import BytesIO
from pathlib import Path
from typing import Annotated

import typer

from course_lib.core.errors import CourseError
from course_lib.core.files import check_result_path, write_result
from course_lib.core.plain_text import printable

PICTURES = (".png", ".pdf", ".svg")
Run = Annotated[Path, typer.Argument(metavar="RUN_A", help="A folder of recorded values.")]
Other = Annotated[
    Path | None,
    typer.Argument(
        metavar="RUN_B", help="That of another run. Default: compare the copies within RUN_A."
    ),
]
Dumps = Annotated[
    Path, typer.Argument(metavar="DUMP_FOLDER", help="A folder with one dump for each rank.")
]
Tolerance = Annotated[
    float | None,
    typer.Option(
        min=0,
        help="Largest relative difference that counts as none. Default: none for runs on the same "
        "mesh; between meshes 1e-9 for float64, 1e-4 for float32.",
    ),
]
Picture = Annotated[
    Path | None, typer.Option("--picture", metavar="FILE", help="Also draw it: a PNG, PDF or SVG.")
]


def add_debug_commands(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command()(diff)
    app.command()(hang)


def diff(
    run: Run, other: Other = None, tolerance: Tolerance = None, picture: Picture = None
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
