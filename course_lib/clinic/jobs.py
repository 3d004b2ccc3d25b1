"""Two jobs on four ranks to read: flight-recorder dumps of one that hangs, records of a slow one.

They are written in the formats of real ones, with times that are made up. Notebook 17_clinic.
"""

import json
import pickle
from pathlib import Path
from typing import Any

from course_lib.core.records import Event, RunRecord

SINCE_NS = 1_772_424_712 * 10**9  # 2026-03-02 04:11:52 UTC
GROUPS = {"0": ("default_pg", [0, 1, 2, 3]), "1": ("tp", [0, 1]), "2": ("tp", [2, 3])}
COMPUTE_S = (0.30, 0.31, 0.52, 0.30)


def write_dumps(folder: Path) -> Path:
    """Write the dumps of a job that hangs: rank 3 went on without an all-reduce over tp."""
    for rank in range(4):
        tp = "1" if rank < 2 else "2"
        calls = [_entry("0", 41, 88, done=True), _entry(tp, 1204, 91, done=True)]
        if rank < 3:
            calls.append(_entry(tp, 1205, 91, done=rank < 2))
        if rank < 2:
            calls.append(_entry("0", 42, 88, done=False))
        config = {
            name: {"desc": desc, "ranks": json.dumps(r)} for name, (desc, r) in GROUPS.items()
        }
        dump = {"version": "2.10", "entries": calls, "pg_config": config}
        (folder / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(dump))
    return folder


def _entry(group: str, number: int, line: int, *, done: bool) -> dict[str, object]:
    sizes = [[4096, 4096]] if group == "0" else [[8, 2048, 4096]]
    return {
        "process_group": (group, GROUPS[group][0]),
        "collective_seq_id": number,
        "p2p_seq_id": 0,
        "is_p2p": False,
        "profiling_name": "nccl:all_reduce",
        "state": "completed" if done else "started",
        "input_sizes": sizes,
        "output_sizes": sizes,
        "time_created_ns": SINCE_NS + number % 7 * 10**6,
        "frames": [{"filename": "/home/me/train.py", "line": line, "name": "step"}],
    }


def write_records(folder: Path, num_steps: int = 3) -> Path:
    """Write the records of a run whose rank 2 computes longer: all end an all-reduce together."""
    for rank, compute_s in enumerate(COMPUTE_S):
        events = []
        for step in range(num_steps):
            done_s, end_s = step + compute_s, step + max(COMPUTE_S) + 0.08
            at: dict[str, Any] = {"rank": rank, "start_s": done_s, "end_s": end_s}
            events += [
                Event(rank=rank, kind="backward", start_s=float(step), end_s=done_s),
                Event(kind="all_reduce", group=(0, 1, 2, 3), **at),
                Event(kind="wait", **at),
            ]
        steps = [{"step": n, "start_s": float(n), "end_s": n + 0.62} for n in range(num_steps)]
        RunRecord(rank, 4, {"strategy": "ddp"}, steps=steps, events=events).write(
            folder / f"rank{rank}.jsonl"
        )
    return folder
