"""The process of one rank: joins its world, then runs the jobs that the notebook sends."""

import ast
import errno
import faulthandler
import gc
import linecache
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from io import TextIOWrapper
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle
import torch
import torch.distributed as dist

from course_lib.core.links import Link, TwoLevelLink
from course_lib.ranks.call_board import CallBoard
from course_lib.ranks.held_up import is_ready, waited_for_core_s
from course_lib.ranks.process_tree import adopt_orphans, end_descendants
from course_lib.ranks.recorder import record, span
from course_lib.ranks.scratch import no_room
from course_lib.ranks.source_lines import Line, line_of, lines_of, owner
from course_lib.ranks.tracer import CallTracer
from course_lib.ranks.world import backend_name, join_world, rank_device

HEARTBEAT_S = 0.2
LITTLE = 0.1  # of a heartbeat: who moves for less than that sleeps


@dataclass(frozen=True)
class WorkerConfig:
    """Arguments of a rank's process: rank, world size, the world's folder, output file, link.

    local_rank, local_world_size  its number among those of its node; -1 and 0 on one machine
    store                         where the ranks meet; empty: in the world's folder
    interface                     that gloo talks over
    ahead_s                       by how much the notebook's clock is ahead of this node's
    """

    rank: int
    world_size: int
    folder: str
    output_file: str
    link: Link | TwoLevelLink | None = None
    local_rank: int = -1
    local_world_size: int = 0
    store: str = ""
    interface: str = "lo"
    ahead_s: float = 0.0


@dataclass(frozen=True)
class RankFailure:
    """Failure of a job on one rank, in plain values that can always be pickled."""

    name: str
    message: str
    lines: tuple[Line, ...] = ()
    traceback: str = ""


def live(config: WorkerConfig, jobs: Connection, kernel_alive: Connection) -> None:
    """Run the process of a rank from start to end: set up, join the world, run job after job."""
    _set_up_process(config)
    for pipe in (jobs, kernel_alive):
        os.set_inheritable(pipe.fileno(), False)  # closed when another program takes this over
    die_with(kernel_alive)
    call_board = CallBoard(os.path.join(config.folder, "board"), config.world_size)
    tracer = CallTracer(config.rank, call_board, config.link)
    tracer.recorder.ahead_s = config.ahead_s
    store = config.store or "file://" + os.path.join(config.folder, "store")
    join_world(tracer, store, config.rank, config.world_size)
    Heartbeat(tracer).start()
    if config.rank == 0:
        tracer.recorder.tell = lambda text: jobs.send(("progress", text))
    worker = Worker(config, tracer)
    jobs.send(("ready", backend_name()))
    while True:
        try:
            kind, blob = jobs.recv()
        except (EOFError, OSError):
            os._exit(0)
        jobs.send(worker.do(kind, blob))


def _set_up_process(config: WorkerConfig) -> None:
    gc.freeze()  # else the first collection copies all memory that is shared with the fork server
    os.setsid()  # a group of its own: a terminal's signals go to the notebook only
    adopt_orphans()  # what the learner starts in here ends with the rank
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the notebook decides what Stop means
    output = os.open(config.output_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout = sys.stderr = TextIOWrapper(
        os.fdopen(1, "wb", closefd=False), "utf-8", errors="replace", line_buffering=True
    )
    faulthandler.enable(sys.stderr)
    alone = config.local_rank < 0
    os.environ.update(
        RANK=str(config.rank),
        LOCAL_RANK=str(config.rank if alone else config.local_rank),
        WORLD_SIZE=str(config.world_size),
        LOCAL_WORLD_SIZE=str(config.world_size if alone else config.local_world_size),
        OMP_NUM_THREADS="1",
    )
    if sys.platform == "linux" and config.interface:  # a laptop's own name may not resolve
        os.environ.setdefault("GLOO_SOCKET_IFNAME", config.interface)
    torch.set_num_threads(1)


def die_with(kernel_alive: Connection) -> None:
    """End this rank and all it started as soon as the notebook's kernel is gone."""

    def watch() -> None:
        try:
            kernel_alive.recv_bytes()
        except (EOFError, OSError):
            end_descendants([os.getpid()])
            os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


class Heartbeat(threading.Thread):
    """Thread that reports, 5 times per second, the rank's line and whether it idles inside PyTorch.

    Only so can a wait deep in C++ (in DDP's backward, for example) be seen. A rank that a busy
    machine keeps waiting for a core does not idle.
    """

    def __init__(self, tracer: CallTracer) -> None:
        super().__init__(daemon=True)
        self._tracer = tracer
        self._main = threading.main_thread().ident

    def run(self) -> None:
        """Write the state to the call board until the process ends."""
        idle_s, moved_s = 0.0, _moved_s()
        while True:
            time.sleep(HEARTBEAT_S)
            frame = sys._current_frames().get(self._main or 0)
            before_s, moved_s = moved_s, _moved_s()
            idles = moved_s - before_s < LITTLE * HEARTBEAT_S and not is_ready()
            in_torch = frame is not None and owner(frame.f_code.co_filename) == "torch"
            idle_s = idle_s + HEARTBEAT_S if in_torch and idles else 0.0
            waiting = list(self._tracer.outstanding.values())
            oldest = (waiting[0].channel, waiting[0].seq) if waiting else (0, 0)
            self._tracer.call_board.beat(self._tracer.rank, idle_s, line_of(frame), oldest)
            del frame  # the tensors in it would live until the next beat


def _moved_s() -> float:
    """Return the seconds for which this process has run, or could have run, so far."""
    return time.process_time() + waited_for_core_s()


class Worker:
    """Runner of jobs on one rank; it keeps the names that the learner's cells define."""

    def __init__(self, config: WorkerConfig, tracer: CallTracer) -> None:
        self.config, self.tracer = config, tracer
        self._names: dict[str, Any] = {
            "__name__": "__ranks__",
            "rank": config.rank,
            "local_rank": int(os.environ["LOCAL_RANK"]),
            "world_size": config.world_size,
            "device": rank_device(),
            "torch": torch,
            "dist": dist,
            "span": span,
            "record": record,
        }

    def do(self, kind: str, blob: bytes) -> tuple[str, Any]:
        """Run one job; return `("done", pickled result)` or `("failed", RankFailure)`."""
        if kind == "events":
            return "events", self.tracer.recorder.events
        jobs: dict[str, Callable[[bytes], Any]] = {
            "call": self._call,
            "cell": self._cell,
            "push": self._push,
        }
        self.tracer.recorder.events = []
        self.tracer.call_board.beat(
            self.config.rank, 0.0, Line(), (0, 0)
        )  # not the last job's line
        try:
            result = jobs[kind](blob)
            sys.stdout.flush()
        except BaseException as error:  # SystemExit and KeyboardInterrupt too: the rank lives on
            with suppress(OSError):
                sys.stdout.flush()
            return "failed", _failure(error, self.config.folder)
        return _pack(result)

    def _call(self, blob: bytes) -> Any:
        fn, args, kwargs = cloudpickle.loads(blob)
        return fn(self.config.rank, *args, **kwargs)

    def _push(self, blob: bytes) -> None:
        self._names.update(cloudpickle.loads(blob))

    def _cell(self, blob: bytes) -> None:
        source, name = cloudpickle.loads(blob)
        linecache.cache[name] = (len(source), None, source.splitlines(True), name)
        tree = ast.parse(source, name)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, name, "exec"), self._names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), name, "eval"), self._names)
            if value is not None:
                print(repr(value))


def _pack(result: Any) -> tuple[str, Any]:
    try:
        return "done", cloudpickle.dumps(result)
    except Exception as error:
        message = (
            f"the result is a {type(result).__name__}, which cannot be sent to the notebook "
            f"({error}). Try to return numbers, tensors, or plain data."
        )
        return "failed", RankFailure("CannotSendError", message)


def _failure(error: BaseException, folder: str) -> RankFailure:
    try:
        message = str(error)
        if isinstance(error, OSError) and error.errno == errno.ENOSPC and not error.filename:
            message = str(no_room(folder, 0, error))  # for the file that holds what it printed
    except Exception:
        message = "(its message cannot be read)"
    text = "".join(traceback.format_exception(error))
    return RankFailure(type(error).__name__, message, tuple(lines_of(error.__traceback__)), text)
