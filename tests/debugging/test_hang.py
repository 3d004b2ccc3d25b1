"""Dumps of the flight recorder, written by its format: who is behind, in which call, since when."""

import json
import os
import pickle
import subprocess
import sys
from contextlib import closing
from socket import socket

import pytest
from typer.testing import CliRunner

from course_lib.cli.commands import app
from course_lib.core import CourseError
from course_lib.debugging.flight_recorder import read_dumps
from course_lib.debugging.hang_report import find_waits, hang_report

SINCE_NS = 1_700_000_000 * 10**9  # 2023-11-14 22:13:20 UTC
WORLD, TP = ("0", "default_pg"), ("1", "tp")


def call(number, kind="all_reduce", *, group=WORLD, size=4, state="completed", at_s=0):
    """An entry as NCCL writes it; a message has its ranks in its name."""
    is_p2p = kind[:4] in ("send", "recv")
    return {
        "process_group": group,
        "collective_seq_id": 0 if is_p2p else number,
        "p2p_seq_id": number if is_p2p else 0,
        "is_p2p": is_p2p,
        "profiling_name": f"nccl:{kind}",
        "state": state,
        "input_sizes": [[size]],
        "output_sizes": [[size]],
        "time_created_ns": SINCE_NS + at_s * 10**9,
        "frames": [
            {"filename": "/x/torch/distributed/c10d.py", "line": 1, "name": "wrapper"},
            {"filename": "/home/me/train.py", "line": 10 + number, "name": "step"},
        ],
    }


def opened(number, kind="all_reduce", **more):
    return call(number, kind, state="started", **more)


def written(folder, by_rank, groups=None, write=pickle.dumps):
    for rank, entries in by_rank.items():
        config = {
            name: {"name": name, "desc": desc, "ranks": json.dumps(ranks)}
            for (name, desc), ranks in (groups or {}).items()
        }
        dump = {"version": "2.10", "entries": entries, "pg_config": config}
        (folder / f"nccl_trace_rank_{rank}").write_bytes(write(dump))
    return folder


def as_json(dump):
    return json.dumps(dump).encode()


ALL = {WORLD: [0, 1, 2, 3]}
CASES = {  # dumps by rank, groups, who waits for whom, what is said
    "one is behind": (
        {rank: [call(6), *([opened(7, at_s=rank)] if rank != 2 else [])] for rank in range(4)},
        ALL,
        {0: (2,), 1: (2,), 3: (2,)},
        [
            "rank 2 is behind: its last call was all_reduce [4], call 6 of group default_pg (0)",
            "ranks 0, 1, 3 wait in all_reduce [4], call 7 of group default_pg (0), for rank 2",
            "train.py line 17",
            "rank 0 has waited the longest, since 2023-11-14 22:13:20 UTC",
        ],
    ),
    "a circle": (
        {0: [opened(1)], 1: [opened(1, group=TP)]},
        {WORLD: [0, 1], TP: [0, 1]},
        {0: (1,), 1: (0,)},
        ["hang: nothing can move any more", "circle of waiting: 0 -> 1 -> 0"],
    ),
    "other sizes": (
        {0: [opened(3)], 1: [opened(3, size=5)]},
        {WORLD: [0, 1]},
        {},
        ["mismatch: the ranks made different calls, number 3", "rank 1 calls all_reduce [5]"],
    ),
    "a message that was never sent": (
        {0: [opened(1, "recv 0<-1")], 1: [call(1, "send 1->0", group=TP)]},
        {WORLD: [0, 1], TP: [0, 1]},
        {0: (1,)},
        ["rank 1 is behind", "rank 0 waits in recv"],
    ),
    "a message on its way": (
        {0: [opened(1, "recv 0<-1")], 1: [opened(1, "send 1->0")]},
        {WORLD: [0, 1]},
        {},
        ["all ranks have called recv [4]", "it has not ended on ranks 0, 1"],
    ),
    "a rank that is gone": (
        {rank: [opened(1)] for rank in range(3)},
        ALL,
        dict.fromkeys(range(3), (3,)),
        ["rank 3 left no dump", "ranks 0, 1, 2 wait in all_reduce"],
    ),
    "a group that no dump describes": (
        {0: [call(1), opened(2)], 1: [call(1)], 2: [call(9, group=TP)]},
        None,
        {0: (1,)},
        ["rank 1 is behind"],
    ),
    "nothing": ({0: [call(1)], 1: [call(1)]}, ALL, {}, ["No rank waits"]),
}


@pytest.mark.parametrize("write", [pickle.dumps, as_json])
@pytest.mark.parametrize("name", CASES)
def test_the_rank_behind_is_named(name, write, tmp_path):
    by_rank, groups, waits, told = CASES[name]
    dumps = read_dumps(written(tmp_path, by_rank, groups, write))
    assert {wait.rank: wait.waits_for for wait in find_waits(dumps)} == waits
    report = hang_report(dumps)
    assert all(part in report for part in told), report
    assert ("hang: nothing can move" in report) == (name == "a circle")


class Evil:
    def __reduce__(self):
        return os.mkdir, ("evil",)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "need the dumps of a flight recorder"),
        (b"#!/bin/bash", "need a dump of PyTorch's flight recorder"),
        (b"{}", "got another file"),
        (pickle.dumps({"entries": [{}]}), "got another file"),
        (pickle.dumps({"entries": Evil()}), "asks for posix.mkdir"),
    ],
)
def test_a_file_that_is_no_dump_is_one_sentence(content, told, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if content is not None:
        (tmp_path / "rank_0").write_bytes(content)
    done = CliRunner().invoke(app, ["hang", str(tmp_path)])
    assert isinstance(done.exception, CourseError)
    assert told in str(done.exception)
    assert not (tmp_path / "evil").exists()


STUCK = """
import os, sys, time, torch, torch.distributed as dist
rank = int(os.environ["RANK"])
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(4))
if rank == 0:
    dist.all_reduce(torch.ones(5), async_op=True)
time.sleep(0.5)
open(sys.argv[1] + str(rank), "wb").write(torch._C._distributed_c10d._dump_fr_trace())
os._exit(0)
"""


def test_pytorchs_own_recorder_on_the_cpu(tmp_path):
    with closing(socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", STUCK, str(tmp_path / "nccl_trace_rank_")],
            env=os.environ | place | {"RANK": str(rank), "TORCH_FR_BUFFER_SIZE": "100"},
        )
        for rank in range(2)
    ]
    assert [one.wait(timeout=300) for one in started] == [0, 0]
    (wait,) = find_waits(read_dumps(tmp_path))
    assert (wait.rank, wait.waits_for) == (0, (1,))
    assert wait.kind.startswith("all_reduce [5], call 2 of group default_pg")
