"""Launch the ranks of `course_lib.train`, and make sure that all of them end.

`run_ranks` is torchrun without its pages of output, and without starting Python for every rank:
one process per rank, forked from one that has imported torch. None of them outlives the others or
the process that started them. `work` runs in each of these processes, the same under torchrun and,
with one rank, alone. An error is reported once, by the process that started the rank.
"""

import json
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
import uuid
from typing import Any, NoReturn

from rich.console import Console

from course_lib.core.errors import CourseError
from course_lib.train.config import TrainConfig

BAD_INPUT, FAILED, CTRL_C = 2, 1, 130
REQUEUE = 75  # EX_TEMPFAIL of sysexits.h: everything is saved, try again later
PREEMPTED = {REQUEUE, 128 + signal.SIGTERM, 128 + signal.SIGUSR1}
LATE_S = 2.0  # a rank that has only lost the others waits to be stopped, and tells nothing
STOP_S = 5  # until a rank that does not end is killed
SAVE_S = 30  # the same for a rank that finishes its step and saves first
WATCH_S = 0.5
PRELOAD = ("course_lib.train.trainer", "torch.nn.parallel.distributed", "torch._dynamo")


class BadInputError(CourseError):
    """The requested run cannot be trained."""


def world_size_from_torchrun() -> int | None:
    """Return the number of ranks that torchrun started; None if this process is no rank."""
    return int(os.environ["WORLD_SIZE"]) if {"RANK", "WORLD_SIZE"} <= os.environ.keys() else None


def run_ranks(num_ranks: int, config: TrainConfig, stop_s: int = STOP_S) -> int:
    """Train on so many ranks of this machine; return an exit code.

    The ranks are forked from one process that has imported torch, as those of a notebook.

    stop_s   seconds that a rank has to end when it is asked to

    Raises: KeyboardInterrupt on Ctrl-C, after the ranks have ended
    """
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from course_lib.ranks.fork_server import start_method, without_main_script

    with tempfile.TemporaryDirectory() as folder:
        _set_up_environment(folder)
        launch_config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=num_ranks,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="127.0.0.1:0",
            local_addr="127.0.0.1",
            max_restarts=0,
            shutdown_timeout=stop_s,
            signals_to_handle="SIGTERM,SIGUSR1,SIGHUP,SIGQUIT",  # SIGINT raises, here only
            logs_specs=DefaultLogsSpecs(log_dir=folder),
            start_method=start_method(PRELOAD).get_start_method(),
        )
        try:
            with without_main_script():
                elastic_launch(launch_config, _work_and_leave)(config)
        except ChildFailedError as failed:
            return _tell(failed.failures)
        except SignalException as stopped:
            return 128 + int(stopped.sigval)
    return 0


def _set_up_environment(folder: str) -> None:
    os.environ["TMPDIR"] = folder  # what ranks that are stopped leave lying goes with it
    logging.disable(logging.ERROR)  # this process only starts ranks; it has its own words for it
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # what matters is raised as well
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a laptop's own name may not resolve


def _tell(failures: dict[int, Any]) -> int:
    """Print which rank failed first and why; return the exit code for it."""
    Console(file=sys.stderr).show_cursor()  # a rank that was stopped could not
    told = {
        rank: failure for rank, failure in failures.items() if isinstance(failure.message, dict)
    }
    rank, failure = min((told or failures).items(), key=lambda item: item[1].timestamp)
    if failure.exitcode == REQUEUE:
        return REQUEUE
    if told:
        print(failure.message["extraInfo"]["py_callstack"].rstrip(), file=sys.stderr)
        if failure.exitcode == BAD_INPUT:
            return BAD_INPUT
    why = f"was killed by {failure.signal_name()}" if failure.exitcode < 0 else "failed"
    print(f"rank {rank} {why}; the other ranks were stopped.", file=sys.stderr)
    return FAILED


def _work_and_leave(config: TrainConfig) -> None:
    """Run a forked rank. One that ends early exits: nobody waits for what it would return."""
    if code := work(config):
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
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
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
    """End this process as soon as the one that asked for it has ended, for whatever reason.

    A forked rank is a child of the fork server, which lives as long as any rank does.
    """
    parent, pid = multiprocessing.parent_process(), os.getppid()

    def watch() -> None:
        if parent is not None:
            parent.join()
        else:
            while os.getppid() == pid:
                time.sleep(WATCH_S)
        os._exit(FAILED)

    threading.Thread(target=watch, daemon=True).start()
