"""Recorded runs in the Chrome trace format, which Perfetto, TensorBoard and Chrome open.

Each run record is a process of the trace. One of its threads shows compute and waits, another the
communication (with further threads for calls at the same time), so a transfer with no compute at
the same time is exposed. Arrows join sends with their recvs; the bytes held are a counter.

Source:  "Trace Event Format" of the Chromium project, which PyTorch's profiler writes, too
"""

import gzip
import json
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from course_lib.core.errors import CourseError
from course_lib.core.files import write_result
from course_lib.core.records import COMMUNICATION_KINDS, Event, RunRecord

HOW_TO_OPEN = "Open it in https://ui.perfetto.dev (it stays on your machine) or chrome://tracing."
_TRANSFER_KINDS = (*COMMUNICATION_KINDS, "write")
_STEPS, _COMPUTE, _TRANSFERS = 1, 10, 100  # the first thread of each kind; it decides their order
_Part = dict[str, Any]


@dataclass(frozen=True)
class _Placed:
    """An event with its process and its thread."""

    pid: int
    tid: int
    event: Event


def trace_of_events(runs: Mapping[str, Iterable[Event]], unit: str = "") -> dict[str, Any]:
    """Return runs, by name, as a Chrome trace: {"predicted": events, "measured": events}.

    The first event of each run is at 0, so they can be compared.

    unit   what a second of the events stands for, if it is not one: "F" in a simulation
    """
    records: dict[str, list[RunRecord]] = {}
    for name, events in runs.items():
        by_rank: dict[int, list[Event]] = defaultdict(list)
        for event in events:
            by_rank[event.rank].append(event)
        start_s = min((one.start_s for own in by_rank.values() for one in own), default=0.0)
        records[name] = [
            RunRecord(rank, len(by_rank), events=[one.since(start_s) for one in own])
            for rank, own in by_rank.items()
        ]
    about = {"unit": f"a second of this trace stands for 1 {unit}"} if unit else {}
    return _trace(records, about)


def trace_of_folder(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the run records of a folder (`rank0.jsonl`, ...), or one of them, as a Chrome trace.

    Records in different folders are separate runs, and so is a run that was resumed from a
    checkpoint. The time 0 of each run is when all of its ranks had started.

    Raises: CourseError where there is no record, where one cannot be read, or where all are empty
    """
    path, runs = Path(path), defaultdict[str, list[RunRecord]](list)
    files = record_files(path)
    for file in files:
        folder = "" if file == path else str(file.parent.relative_to(path))
        parts = (folder.removeprefix("."), file.stem.partition("-")[2])
        runs[" ".join(filter(None, parts))].append(RunRecord.read(file))
    about = {name or "run": _as_json(records[0].run) for name, records in runs.items()}
    trace = _trace(runs, about)
    if not any(part["ph"] == "X" for part in trace["traceEvents"]):
        some = f"{len(files)} record{'s' if len(files) != 1 else ''} without an event"
        got = some if path.exists() else "no such folder"
        raise CourseError(
            f"{path}: need run records, files such as rank0.jsonl, with events; got {got}. Try "
            "python -m course_lib.train --ranks 2 --out runs/NAME, then course trace runs/NAME."
        )
    return trace


def record_files(path: Path) -> list[Path]:
    """Return the files of the run records in a folder, or the one record that the path names."""
    return [path] if path.is_file() else sorted(path.rglob("*.jsonl"))


def write_trace(trace: Mapping[str, Any], path: str | os.PathLike[str]) -> int:
    """Write a trace as JSON, compressed if the name ends in .gz; return the bytes written.

    Raises: CourseError where it cannot be written
    """
    data = json.dumps(trace, separators=(",", ":"), allow_nan=False).encode()
    data = gzip.compress(data, mtime=0) if str(path).endswith(".gz") else data
    write_result(Path(path), data)
    return len(data)


def _trace(runs: Mapping[str, Sequence[RunRecord]], about: Mapping[str, Any]) -> dict[str, Any]:
    parts: list[_Part] = []
    num_processes = 0
    for name, records in runs.items():
        placed: list[_Placed] = []
        for record in sorted(records, key=lambda one: one.rank):
            title = f"{name}: rank {record.rank}" if name else f"rank {record.rank}"
            own = list(_places(record.events, num_processes))
            parts += _process(num_processes, title, record, own)
            placed += own
            num_processes += 1
        parts += _arrows(placed, len(parts))
    return {"traceEvents": parts, "displayTimeUnit": "ms", "otherData": dict(about)}


def _process(pid: int, title: str, record: RunRecord, placed: Sequence[_Placed]) -> Iterator[_Part]:
    """Yield the parts of one rank: its name, its steps, its threads, its memory."""
    yield _metadata("process_name", pid, 0, name=title)
    yield _metadata("process_sort_index", pid, 0, sort_index=pid)
    if record.steps:
        yield _metadata("thread_name", pid, _STEPS, name="steps")
    for step in record.steps:
        rest = {key: value for key, value in step.items() if not key.endswith("_s")}
        name = f"step {step['step']}"
        yield _box(pid, _STEPS, name, step["start_s"], step["end_s"], _as_json(rest))
    for tid in sorted({one.tid for one in placed}):
        name, first = ("transfers", _TRANSFERS) if tid >= _TRANSFERS else ("compute", _COMPUTE)
        name = f"{name} {tid - first + 1}" if tid > first else name
        yield _metadata("thread_name", pid, tid, name=name)
        yield _metadata("thread_sort_index", pid, tid, sort_index=tid)
    for one in placed:
        event = one.event
        kind, label = event.kind, event.label
        title = label if label.startswith(kind) else f"{kind} {label}".strip()
        yield _box(pid, one.tid, title, event.start_s, event.end_s, _args(event), kind)
    if record.ledger:
        for index, time_s in enumerate(record.ledger.times_s):
            held = {kind: sizes[index] for kind, sizes in record.ledger.bytes_by_kind.items()}
            yield {"name": "bytes", "ph": "C", "pid": pid, "ts": _ns(time_s) / 1e3, "args": held}


def _places(events: Iterable[Event], pid: int) -> Iterator[_Placed]:
    """Yield the events with their threads: in one thread, events nest or follow one another."""
    open_until: dict[int, list[int]] = defaultdict(list)  # by thread: ends of the open events
    for event in sorted(events, key=lambda one: (_ns(one.start_s), -_ns(one.end_s))):
        transfer = event.kind in _TRANSFER_KINDS
        tid, end = _TRANSFERS if transfer else _COMPUTE, _ns(event.end_s)
        while True:
            ends = open_until[tid]
            while ends and ends[-1] <= _ns(event.start_s):
                ends.pop()
            if not ends or (end <= ends[-1] and not transfer):
                break
            tid += 1
        ends.append(end)
        yield _Placed(pid, tid, event)


def _arrows(placed: Iterable[_Placed], first_id: int) -> Iterator[_Part]:
    """Yield an arrow from each send to its recv, matched in order for each pair of ranks and size.

    Where the numbers differ, or a recv would end before its send starts, some messages were not
    recorded or two clocks differ. Then the order proves nothing, and none of these has an arrow.
    """
    ways: dict[tuple[Any, ...], tuple[list[_Placed], list[_Placed]]] = defaultdict(lambda: ([], []))
    for one in placed:
        event = one.event
        if event.kind in ("send", "recv") and event.peer is not None:
            pair = (event.rank, event.peer) if event.kind == "send" else (event.peer, event.rank)
            ways[pair, event.group, event.num_bytes][event.kind == "recv"].append(one)
    for sends, recvs in ways.values():
        pairs = list(zip(sorted(sends, key=_times_ns), sorted(recvs, key=_times_ns), strict=False))
        times_ns = [(_times_ns(send)[0], _times_ns(recv)[1]) for send, recv in pairs]
        if len(sends) != len(recvs) or any(start > end for start, end in times_ns):
            continue
        for (send, recv), (start_ns, end_ns) in zip(pairs, times_ns, strict=True):
            if start_ns < end_ns:  # an arrow ends inside its box
                yield _flow("s", send, start_ns, first_id)
                yield _flow("f", recv, end_ns - 1, first_id) | {"bp": "e"}
                first_id += 1


def _times_ns(one: _Placed) -> tuple[int, int]:
    return _ns(one.event.start_s), _ns(one.event.end_s)


def _flow(end: str, one: _Placed, time_ns: int, number: int) -> _Part:
    shared = {"name": "message", "cat": "message", "id": number}
    return shared | {"ph": end, "pid": one.pid, "tid": one.tid, "ts": time_ns / 1e3}


def _box(
    pid: int,
    tid: int,
    name: str,
    start_s: float,
    end_s: float,
    args: Mapping[str, Any],
    kind: str = "step",
) -> _Part:
    times = {"ts": _ns(start_s) / 1e3, "dur": (_ns(end_s) - _ns(start_s)) / 1e3}
    return {"name": name, "cat": kind, "ph": "X", "pid": pid, "tid": tid, **times, "args": args}


def _args(event: Event) -> dict[str, Any]:
    """Return what a click on the event shows."""
    found: dict[str, Any] = {"bytes": event.num_bytes} if event.num_bytes else {}
    if event.peer is not None:
        found["peer"] = event.peer
    return found | ({"group": list(event.group)} if event.group else {})


def _as_json(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values, with those as text that JSON does not have: nan and inf."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        try:
            json.dumps(value, allow_nan=False)
            found[key] = value
        except ValueError:
            found[key] = str(value)
    return found


def _metadata(what: str, pid: int, tid: int, **args: Any) -> _Part:
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "args": args}


def _ns(time_s: float) -> int:
    return round(time_s * 1e9)
