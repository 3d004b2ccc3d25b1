"""Launch the ranks of `course_lib.train`, and make sure that all of them end.

`run_ranks` does what torchrun does on one machine, without starting Python for every rank: this
process imports torch and the trainer once, and forks one process per rank. None of them outlives
the others or the process that started them. `work` runs in each of these processes, the same under
torchrun and, with one rank, alone. An error is reported once, by the process that started the rank.
"""

import gc
import importlib
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import NoReturn

from rich.console import Console

from course_lib.core.errors import CourseError
from course_lib.train.config import TrainConfig

BAD_INPUT, FAILED, CTRL_C = 2, 1, 130
REQUEUE = 75  # EX_TEMPFAIL of sysexits.h: everything is saved, try again later
PREEMPTED = {REQUEUE, 128 + signal.SIGTERM, 128 + signal.SIGUSR1}
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGQUIT)  # passed on to the ranks
HELD = (signal.SIGINT, *SIGNALS)  # while the ranks are forked
LATE_S = 2.0  # a rank that has only lost the others waits to be stopped, and tells nothing
STOP_S = 5  # until a rank that does not end is killed
SAVE_S = 30  # the same for a rank that finishes its step and saves first
WATCH_S = 0.5
PRELOAD = ("course_lib.train.trainer", "torch._dynamo")  # PyTorch's optimizers import _dynamo
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # torchrun's name for the file of a rank's error


class BadInputError(CourseError):
    """The requested run cannot be trained."""


def world_size_from_torchrun() -> int | None:
    """Return the number of ranks that torchrun started; None if this process is no rank."""
    return int(os.environ["WORLD_SIZE"]) if {"RANK", "WORLD_SIZE"} <= os.environ.keys() else None


def run_ranks(num_ranks: int, config: TrainConfig, stop_s: int = STOP_S) -> int:
    """Train on so many ranks of this machine; return an exit code.

    stop_s   seconds that a rank has to end when it is asked to

    Raises: KeyboardInterrupt on Ctrl-C, after the ranks have ended
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: threads do not fork
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # what matters is raised as well
    ranks: list[BaseProcess] = []
    with _signals_heard() as heard, _own_temporary_folder() as folder:
        try:
            for name in PRELOAD:
                importlib.import_module(name)
            gc.freeze()  # else a rank's first collection copies all memory that it shares with us
            _start(ranks, num_ranks, config, folder)
            failed = _wait(ranks, heard)
        finally:
            _stop(ranks, heard[0] if heard else signal.SIGTERM, stop_s)
        if failed := _not_as_asked(ranks, failed, heard, folder):
            return _tell(failed, folder)
        codes = {rank.exitcode for rank in ranks}
        return 0 if codes <= {0} else REQUEUE if REQUEUE in codes else 128 + heard[0]


@contextmanager
def _own_temporary_folder() -> Iterator[str]:
    """Give this process and its ranks a folder for all temporary files, and remove it with them."""
    before = os.environ.get("TMPDIR")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TMPDIR"] = tempfile.tempdir = folder
        try:
            yield folder
        finally:
            tempfile.tempdir = None
            del os.environ["TMPDIR"]
            if before is not None:
                os.environ["TMPDIR"] = before


@contextmanager
def _signals_heard() -> Iterator[list[signal.Signals]]:
    """Give the signals to be passed on to the ranks in the order in which they come.

    They interrupt nothing: Slurm's SIGUSR1 is followed by SIGTERM, while the ranks still save.
    """
    heard: list[signal.Signals] = []

    def hear(number: int, _frame: FrameType | None) -> None:
        heard.append(signal.Signals(number))

    before = {number: signal.signal(number, hear) for number in SIGNALS}
    try:
        yield heard
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _start(ranks: list[BaseProcess], num_ranks: int, config: TrainConfig, folder: str) -> None:
    """Fork the ranks, and add them to the list one by one."""
    context = multiprocessing.get_context("fork")
    before = signal.pthread_sigmask(signal.SIG_BLOCK, HELD)  # until a rank has its own handlers
    try:
        for rank in range(num_ranks):
            arguments = (rank, num_ranks, config, folder)
            process = context.Process(target=_work_and_leave, args=arguments)
            process.start()
            ranks.append(process)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _wait(ranks: Sequence[BaseProcess], heard: Sequence[signal.Signals]) -> dict[int, int]:
    """Wait until all ranks have ended, one has failed or a signal is heard; return failed codes.

    Raises: KeyboardInterrupt if Ctrl-C has reached a rank first
    """
    while True:
        running = [rank.sentinel for rank in ranks if rank.exitcode is None]  # before the others
        failed = {number: rank.exitcode for number, rank in enumerate(ranks) if rank.exitcode}
        if -signal.SIGINT in failed.values():
            raise KeyboardInterrupt
        if failed or heard or not running:
            return failed
        connection.wait(running, WATCH_S)  # what a rank has started may keep its sentinel open


def _stop(ranks: Sequence[BaseProcess], number: signal.Signals, stop_s: int) -> None:
    """Send the ranks that still run a signal, and kill those that have not ended after a while."""
    end_s = time.monotonic() + stop_s
    try:
        for rank in ranks:
            if rank.exitcode is None and rank.pid:
                os.kill(rank.pid, number)
        for rank in ranks:
            rank.join(max(0.0, end_s - time.monotonic()))
    finally:  # also after another Ctrl-C
        for rank in ranks:
            rank.kill()
            rank.join()


def _not_as_asked(
    ranks: Sequence[BaseProcess],
    failed: Mapping[int, int],
    heard: Sequence[signal.Signals],
    folder: str,
) -> dict[int, int]:
    """Return the exit codes of the ranks that neither a signal nor `_stop` has ended.

    failed   those that ended the run; where all of them were asked to, another may fail meanwhile
    """
    asked = {0, REQUEUE, *(-number for number in heard)}
    if asked.issuperset(failed.values()):
        asked |= {-signal.SIGTERM, -signal.SIGKILL}
        failed = {number: rank.exitcode or 0 for number, rank in enumerate(ranks)}
    has_told = {number for number in failed if _error_file(folder, number).exists()}
    return {n: code for n, code in failed.items() if code not in asked or n in has_told}


def _tell(failed: Mapping[int, int], folder: str) -> int:
    """Print which rank failed first and why; return the exit code for it."""
    Console(file=sys.stderr).show_cursor()  # a rank that was stopped could not
    told = [path for rank in failed if (path := _error_file(folder, rank)).exists()]
    if told:
        first = min(told, key=lambda path: path.stat().st_mtime_ns)
        rank, error = int(first.stem), json.loads(first.read_text(encoding="utf-8"))
        print(error["message"]["extraInfo"]["py_callstack"].rstrip(), file=sys.stderr)
    else:
        rank = next(iter(failed))
    code = failed[rank]
    if told and code == BAD_INPUT:
        return BAD_INPUT
    why = f"was killed by {signal.Signals(-code).name}" if code < 0 else "failed"
    print(f"rank {rank} {why}; the other ranks were stopped.", file=sys.stderr)
    return FAILED


def _error_file(folder: str, rank: int) -> Path:
    return Path(folder, f"{rank}.error")


def _work_and_leave(rank: int, num_ranks: int, config: TrainConfig, folder: str) -> None:
    """Run a forked rank."""
    for number in HELD:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(num_ranks),
        LOCAL_WORLD_SIZE=str(num_ranks),
        COURSE_RANKS_FOLDER=folder,
    )
    os.environ[ERROR_FILE] = str(_error_file(folder, rank))
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a laptop's own name may not resolve
    if code := work(config):  # one that ends early exits: nobody waits for what it would return
        sys.stdout.flush()
        os._exit(code)


def work(config: TrainConfig) -> int:
    """Run one rank: train, and on failure report why to the process that started this one.

    Return 0 when the training is done, or nobody reads its lines any more; REQUEUE when a signal
    has ended it early.

    Raises: CourseError, or what the training raised, where this process is the only one
    """
    alone = world_size_from_torchrun() is None
    if alone:
        os.environ["RANK"] = "0"  # so that no server for more ranks is started
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # as for each of several ranks
    else:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # torchrun decides what Ctrl-C means
        _end_with_parent()
    from course_lib.ranks import launch

    try:
        return int(launch(_train, config))
    except Exception as error:
        if alone:
            raise
        _leave(error)


def _train(rank: int, config: TrainConfig) -> int:
    from course_lib.ranks.work_handle import ConnectionLostError
    from course_lib.train.trainer import Trainer

    try:
        trainer = Trainer(rank, config)
    except ConnectionLostError:
        raise
    except CourseError as error:
        raise BadInputError(str(error)) from error
    trainer.run()
    return 0 if trainer.is_done or trainer.metrics.is_unread else REQUEUE


def _leave(error: Exception) -> NoReturn:
    """End this rank. Its error goes into the file that torchrun prints, or to stderr."""
    if _only_lost_the_others(error):
        time.sleep(LATE_S)
        os._exit(FAILED)
    is_plain = isinstance(error, CourseError)
    text = str(error) if is_plain else "".join(traceback.format_exception(error))
    if path := os.environ.get(ERROR_FILE):
        extra = {"py_callstack": text, "timestamp": str(int(time.time()))}
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"message": {"message": str(error), "extraInfo": extra}}, file)
    else:
        print(f"rank {os.environ['RANK']}: {text}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(BAD_INPUT if isinstance(error, BadInputError) else FAILED)


def _only_lost_the_others(error: BaseException | None) -> bool:
    """Return whether the error only says that another rank has ended."""
    from course_lib.ranks.work_handle import ConnectionLostError

    while error is not None:
        text = str(error)
        if isinstance(error, ConnectionLostError) or "Connection closed by peer" in text:
            return True
        if "Connection reset by peer" in text or "Broken pipe" in text:
            return True
        error = error.__cause__ or error.__context__
    return False


def _end_with_parent() -> None:
    """End this process as soon as the one that started it has ended, for whatever reason."""
    parent = multiprocessing.parent_process()
    pid = parent.pid if parent else os.getppid()

    def watch() -> None:
        while os.getppid() == pid:
            time.sleep(WATCH_S)
        os._exit(FAILED)

    threading.Thread(target=watch, daemon=True).start()
