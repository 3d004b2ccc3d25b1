"""The two records that all of the course uses, and the file that holds them.

An `Event` is one operation of a rank; a `Ledger` is the memory, in bytes, that a rank holds over
time. Formulas, simulations and real ranks all produce them, so the same pictures can show them. A
`RunRecord` is the file of one rank of one run, in JSON lines, the same in a notebook, under
torchrun and under Slurm.
"""

import json
import os
import warnings
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from course_lib.core.errors import CourseError
from course_lib.core.files import read_text, whole_file
from course_lib.core.plain_values import build
from course_lib.core.units import GIB

AGAIN = "Try to run it again, or delete the file."
COMMUNICATION_KINDS = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "broadcast",
    "reduce",
    "scatter",
    "gather",
    "all_to_all",
    "barrier",
    "send",
    "recv",
)
COMPUTE_KINDS = (
    "compute",
    "forward",
    "recompute",
    "backward",
    "backward_input",
    "backward_weight",
    "optimizer",
)
KINDS = (*COMPUTE_KINDS, *COMMUNICATION_KINDS, "write", "wait")  # write: to storage
MEMORY_KINDS = ("params", "grads", "optim_state", "activations", "buffers")


@dataclass(frozen=True, kw_only=True)
class Event:
    """An operation of one rank, from `start_s` to `end_s` (seconds) on the clock of the run.

    `num_bytes` is the size of the whole tensor of the call (the gathered one of an all_gather, the
    unscattered one of a reduce_scatter), not the bytes that an algorithm sends over the links.
    `peer` is the other rank of a send or recv, the root of a rooted collective, else None.
    `group` holds the ranks that take part.

    Raises: CourseError for a kind that is not in KINDS, or an end before the start
    """

    rank: int
    kind: str
    start_s: float
    end_s: float
    num_bytes: int = 0
    label: str = ""
    peer: int | None = None
    group: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise CourseError(
                f"Event: need one of the kinds {', '.join(KINDS)}; got {self.kind!r}."
            )
        if self.end_s < self.start_s:
            raise CourseError(f"Event: need end_s >= start_s; got {self.start_s} and {self.end_s}.")

    @property
    def duration_s(self) -> float:
        """Seconds from start to end."""
        return self.end_s - self.start_s

    def since(self, zero_s: float) -> "Event":
        """Return the event with its times measured from `zero_s`."""
        return replace(self, start_s=self.start_s - zero_s, end_s=self.end_s - zero_s)


@dataclass
class Ledger:
    """Bytes that one rank holds over time, by memory kind.

    `times_s[i]` is when `bytes_by_kind[kind][i]` was held; every kind has one number per time.
    """

    rank: int = 0
    times_s: list[float] = field(default_factory=list)
    bytes_by_kind: dict[str, list[int]] = field(
        default_factory=lambda: {kind: [] for kind in MEMORY_KINDS}
    )

    def add(self, time_s: float, **num_bytes: int) -> None:
        """Add the bytes held at `time_s`; kinds that are not named hold 0 bytes.

        Raises: CourseError for a kind that is not in MEMORY_KINDS
        """
        unknown = set(num_bytes) - set(MEMORY_KINDS)
        if unknown:
            raise CourseError(
                f"Ledger: need kinds out of {', '.join(MEMORY_KINDS)}; got {sorted(unknown)}."
            )
        self.times_s.append(time_s)
        for kind in MEMORY_KINDS:
            self.bytes_by_kind[kind].append(num_bytes.get(kind, 0))

    def totals(self) -> list[int]:
        """Return the sum of the bytes over all kinds, one number per time."""
        return [sum(held) for held in zip(*self.bytes_by_kind.values(), strict=True)]

    def peak_bytes(self) -> int:
        """Return the most bytes held at any time; 0 for an empty ledger."""
        return max(self.totals(), default=0)


@dataclass
class RunRecord:
    """Record of one rank in one run.

    `run` describes what was run (strategy, model, sizes), `machine` the hardware; `steps` holds one
    dictionary per step: `step`, `start_s`, `end_s`, and what else was measured (`loss`, ...).
    """

    rank: int
    world_size: int
    run: dict[str, Any] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=dict)
    steps: list[dict[str, Any]] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    ledger: Ledger | None = None

    def write(self, path: str | os.PathLike[str]) -> Path:
        """Write the record as JSON lines, whole or not at all; return its path."""
        with whole_file(path, sync=True, one_writer=True) as file:
            for line in self._lines():
                file.write(json.dumps(line).encode() + b"\n")
        return Path(path)

    def _lines(self) -> Iterable[dict[str, Any]]:
        yield {
            "line": "run",
            "rank": self.rank,
            "world_size": self.world_size,
            "run": self.run,
            "machine": self.machine,
        }
        for step in self.steps:
            yield {"line": "step", **step}
        for event in self.events:
            yield {"line": "event", **asdict(event)}
        if self.ledger is not None:
            yield {"line": "ledger", **asdict(self.ledger)}

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> "RunRecord":
        """Read a record; a last line that a crash cut short is left out with a warning.

        Raises: CourseError, with the line's number, for any other line that cannot be read.
        """
        path = Path(path)
        lines = read_text(path, "a run record", hint=AGAIN, most_bytes=GIB).splitlines()
        record: RunRecord | None = None
        for number, text in enumerate(lines, start=1):
            try:
                line = json.loads(text)
                record = _take(record, line)
            except (ValueError, RecursionError, CourseError) as problem:
                is_cut = isinstance(problem, json.JSONDecodeError) and number == len(lines)
                if is_cut and record is not None:
                    warnings.warn(
                        f"{path.name}: the last line was cut short and is left out", stacklevel=2
                    )
                    break
                raise CourseError(
                    f"{path.name}, line {number}: need a line of a run record; got {text[:60]!r} "
                    f"({problem}). {AGAIN}"
                ) from problem
        if record is None:
            raise CourseError(f"{path.name}: need a run record; the file is empty. {AGAIN}")
        return record


def _take(record: RunRecord | None, plain: Any) -> RunRecord:
    """Add one line of a file to the record it belongs to. Raises: CourseError for another line"""
    line = build(dict[str, Any], plain, "line")
    what = line.pop("line", None)
    if what == "run":
        return build(RunRecord, line, "run")
    if record is None:
        raise CourseError("the first line has to be the run's")
    if what == "step":
        record.steps.append(_checked_step(line))
    elif what == "event":
        record.events.append(build(Event, line, "event"))
    elif what == "ledger":
        record.ledger = build(Ledger, line, "ledger")
        held = record.ledger.bytes_by_kind.values()
        if any(len(one) != len(record.ledger.times_s) for one in held):
            raise CourseError("ledger: need a number of bytes for each time")
    else:
        raise CourseError(f"unknown line {repr(what)[:60]}")
    return record


def _checked_step(line: dict[str, Any]) -> dict[str, Any]:
    """Return the step. Raises: CourseError where its number or times are missing or wrong"""
    for name, kind in (("step", int), ("start_s", float), ("end_s", float)):
        if name not in line:
            raise CourseError(f"step: need {name}; it is not there.")
        build(kind, line[name], f"step.{name}")
    if line["end_s"] < line["start_s"]:
        raise CourseError(f"step: need end_s >= start_s; got {line['start_s']}, {line['end_s']}.")
    return line


def read_runs(folder: str | os.PathLike[str]) -> list[RunRecord]:
    """Read all run records (`*.jsonl`) below a folder, in the order of their paths.

    Raises: CourseError for a file that is no run record
    """
    return [RunRecord.read(path) for path in sorted(Path(folder).rglob("*.jsonl"))]
