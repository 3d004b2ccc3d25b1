"""The command `course trace`: a recorded run as a file for Perfetto, TensorBoard or Chrome."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from course_lib.core.chrome_trace import HOW_TO_OPEN, record_files, trace_of_folder, write_trace
from course_lib.core.errors import CourseError
from course_lib.core.files import check_result_path
from course_lib.core.trace_reading import communicating, exposed_s
from course_lib.core.units import format_bytes, format_seconds

RunArgument = Annotated[
    Path, typer.Argument(metavar="RUN", help="A run's folder, or one of its records.")
]
TracePath = Annotated[
    Path | None,
    typer.Option(
        "--out",
        "-o",
        metavar="PATH",
        help="The file to write, compressed if it ends in .json.gz. Default: RUN/trace.json.",
    ),
]


def add_trace_command(app: typer.Typer) -> None:
    """Add `trace` to the command line."""
    app.command()(trace)


def trace(run: RunArgument, out: TracePath = None) -> None:
    """Write a recorded run as a trace for Perfetto: what each rank did, and when.

    \b
    python -m course_lib.train --ranks 2 --strategy ddp --out runs/ddp
    course trace runs/ddp -o trace.json
    """
    records = record_files(run)
    path = out or (run if run.is_dir() else run.parent) / "trace.json"
    if records:  # if there are none, the next call says so, and no folder is made
        _check_path(path, records)
    found = trace_of_folder(run)
    size = format_bytes(write_trace(found, path))
    boxes = [part for part in found["traceEvents"] if part["ph"] == "X"]
    counts = f"{_count(len(records), 'run record')}, {_count(len(boxes), 'event')}"
    print(f"{path}: {counts}, {size}. {HOW_TO_OPEN}")
    if line := _communication(found):
        print(line)


def _check_path(path: Path, records: Sequence[Path]) -> None:
    """Check that a trace can be written there. Raises: CourseError, also for a run record"""
    is_record = path.exists() and any(path.samefile(record) for record in records)
    if is_record or path.suffix == ".jsonl":
        got = "one of the run's own records" if is_record else "the name of a run record"
        raise CourseError(
            f"{path}: need a path for a trace, which ends in .json or .json.gz; got {got}. "
            "Try -o trace.json."
        )
    check_result_path(path)


def _count(number: int, word: str) -> str:
    return f"{number} {word}" + ("s" if number != 1 else "")


def _communication(trace: Mapping[str, Any]) -> str:
    """Return a line on the rank with the most exposed communication; empty if none communicates."""
    names, by_rank = {}, defaultdict[int, list[Any]](list)
    for part in trace["traceEvents"]:
        by_rank[part["pid"]].append(part)
        if part["name"] == "process_name":
            names[part["pid"]] = part["args"]["name"]
    found = []
    for pid, parts in by_rank.items():
        own = {"traceEvents": parts}
        total_s = sum(end - start for start, end in communicating(own, pid)) / 1e6
        found.append((exposed_s(own, pid), total_s, names[pid]))
    rank_exposed_s, total_s, name = max(found)
    if not total_s:
        return ""
    exposed = format_seconds(rank_exposed_s)
    return f"{name} communicates for {format_seconds(total_s)}, of which {exposed} exposed"
