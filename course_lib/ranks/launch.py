"""Run a function on ranks outside of notebooks: `torchrun script.py` with `launch(fn)` at its end.

torchrun sets RANK, WORLD_SIZE, LOCAL_RANK and MASTER_ADDR; `launch` joins the world with them and
calls fn(rank). The ranks of one machine share a call board here too, so a mismatch or a hang is
reported as in a notebook.
"""

import contextlib
import gc
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # later, its default arguments would keep the world alive

from course_lib.core.records import RunRecord
from course_lib.ranks.call_board import CallBoard
from course_lib.ranks.hangs import HangWatch, find_dropped, find_orphans, find_unkept
from course_lib.ranks.job import TICK_S
from course_lib.ranks.machine import describe_machine
from course_lib.ranks.rank_process import Heartbeat
from course_lib.ranks.report import Report, dropped_words, find_mismatch, orphan_words, told_once
from course_lib.ranks.tracer import CallTracer, MismatchError
from course_lib.ranks.world import join_world, why_cpu

LAST = "the barrier is the one at the end of launch(). Try as many steps on every rank."
MEETING = "COURSE_RANKS_FOLDER"  # where ranks meet that a process of this course has forked
ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}


def launch(fn: Callable[..., Any], *args: Any, record_to: str | None = None) -> Any:
    """Join the world that torchrun describes, return `fn(rank, *args)`, and leave the world.

    Without torchrun the world is this one process. With `record_to`, each rank writes its run
    record to that folder, or to that of this attempt within a job of `course submit`.

    Raises: SystemExit with a report where the ranks' calls do not match
    """
    for name, value in ALONE.items():
        os.environ.setdefault(name, value)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    with _meeting_place() as (url, board):
        call_board = CallBoard(str(board), world_size)
        tracer = CallTracer(rank, call_board)
        join_world(tracer, url, rank, world_size)
        if os.environ["LOCAL_RANK"] == "0" and (sentence := why_cpu()):
            print(sentence, file=sys.stderr, flush=True)
        Heartbeat(tracer).start()
        zero_s = common_zero_s()
        tracer.recorder.events = []
        sees_all = int(os.environ["LOCAL_WORLD_SIZE"]) == world_size and rank == 0
        if sees_all:
            threading.Thread(target=_watch, args=(call_board,), daemon=True).start()
        try:
            result = fn(rank, *args)
            if record_to:
                _leave_record(tracer, world_size, attempt_folder(record_to), zero_s)
            dist.barrier()
        except MismatchError:
            calls = find_mismatch(call_board, world_size)
            report = str(Report(mismatch=calls))
            early = [
                r for r, post in calls if post.kind == "barrier" and "launch(" in post.line.text
            ]
            sys.exit("\n".join([report, *(f"rank {r} had returned: {LAST}" for r in early)]))
        if sees_all:
            _warn(call_board, zero_s)
        tracer.forget_unkept()
        dist.destroy_process_group()
    gc.collect()  # what still holds a group keeps gloo's threads, and they may not outlive Python
    return result


@contextlib.contextmanager
def _meeting_place() -> Iterator[tuple[str, Path]]:
    """Give the URL at which the ranks meet, and one file for the call board of this machine.

    The first rank to leave deletes that file.
    """
    with tempfile.TemporaryDirectory() as own:
        url, board = "env://", Path(tempfile.gettempdir()) / _board_of_torchrun()
        if MEETING in os.environ or "MASTER_ADDR" not in os.environ:
            folder = os.environ.get(MEETING, own)
            url, board = f"file://{folder}/store", Path(folder, "board")
        try:
            yield url, board
        finally:
            board.unlink(missing_ok=True)


def _board_of_torchrun() -> str:
    names = ("TORCHELASTIC_RUN_ID", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
    job = "-".join(os.environ.get(name, "") for name in names)
    return f"ranks-board-{os.getuid()}-{job}"


def common_zero_s() -> float:
    """Return the start of the job in seconds on this rank's clock, the same instant on all ranks.

    Machines do not share a clock; between them the end of a barrier is taken.

    Cost:    a barrier, and on one machine an all_reduce of one number
    """
    dist.barrier()
    now_s = torch.tensor(time.perf_counter(), dtype=torch.float64)
    if os.environ["LOCAL_WORLD_SIZE"] == os.environ["WORLD_SIZE"]:
        dist.all_reduce(now_s, op=dist.ReduceOp.MAX)
    return now_s.item()


def attempt_folder(wanted: str) -> Path:
    """Return the folder for this process's record: `wanted`, or one within RUN_FOLDER.

    `course submit` gives each job a RUN_FOLDER. In it every element of a job array, and every
    attempt of a job that is restarted, has its own folder, so that no record overwrites another;
    `course collect` knows which ones count.
    """
    if "RUN_FOLDER" not in os.environ:
        return Path(wanted)
    element = os.environ.get("SLURM_ARRAY_TASK_ID", "0")
    restarts = os.environ.get("SLURM_RESTART_COUNT", "0")
    return Path(os.environ["RUN_FOLDER"]) / "records" / f"{element}.{restarts}"


def _leave_record(tracer: CallTracer, world_size: int, folder: Path, zero_s: float) -> None:
    events = tracer.recorder.events
    record = RunRecord(
        rank=tracer.rank,
        world_size=world_size,
        run={"script": os.path.basename(sys.argv[0])},
        machine=describe_machine(),
        events=[event.since(zero_s) for event in events],
    )
    record.write(folder / f"rank{tracer.rank}.jsonl")


def _warn(call_board: CallBoard, zero_s: float) -> None:
    """Print the messages whose handle was not kept, once all ranks have returned."""
    everyone = range(call_board.world_size)
    unkept = find_unkept(call_board, everyone, zero_s)
    orphans = find_orphans(call_board, everyone, zero_s)
    for said in [*told_once(dropped_words, unkept), *told_once(orphan_words, orphans)]:
        print(said, file=sys.stderr, flush=True)


def _watch(call_board: CallBoard) -> None:
    """Watch for a hang on rank 0: report it and exit; torchrun then ends the other ranks."""
    everyone, hang = range(call_board.world_size), HangWatch(call_board)
    while not hang.is_certain(everyone):
        time.sleep(TICK_S)
    report = Report(waits=hang.waits, dropped=find_dropped(call_board, hang.waits))
    print(report, file=sys.stderr, flush=True)
    os._exit(1)
