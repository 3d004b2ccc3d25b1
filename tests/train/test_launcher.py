"""What a run on several ranks ends with: the launcher, and ranks that act one after another."""

import gc
import json
import os
import signal
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from signal import SIGKILL, SIGTERM, SIGUSR1

import pytest

from course_lib.train import launcher
from course_lib.train.launcher import run_ranks


def asks(number):
    """The launcher gets a signal."""
    os.kill(os.getppid(), number)


def hears(number):
    """Wait for a signal from the launcher, and go on."""
    signal.sigwait({number})


def dies(number):
    signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    signal.raise_signal(number)


def fails(words):
    """Leave the file of an error, as `work` does, and end."""
    text = {"message": {"message": words, "extraInfo": {"py_callstack": words}}}
    Path(os.environ[launcher.ERROR_FILE]).write_text(json.dumps(text))
    os._exit(1)


def rank_does(acts, path):
    os.environ[launcher.ERROR_FILE] = str(path)
    for act, argument in acts:
        act(argument)


@pytest.fixture
def run(monkeypatch):
    """The exit code of a run whose ranks do these things."""

    def start(by_rank, at_once, ranks, num_ranks, config, folder):
        before = signal.pthread_sigmask(signal.SIG_BLOCK, launcher.SIGNALS)  # for the ranks
        for rank, acts in enumerate(by_rank):
            does = (acts, launcher._error_file(folder, rank))
            ranks.append(get_context("fork").Process(target=rank_does, args=does))
            ranks[-1].start()
            if at_once:  # the launcher finds all of them ended
                ranks[-1].join()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def run(by_rank, at_once=False):
        monkeypatch.setattr(launcher, "PRELOAD", ())
        monkeypatch.setattr(launcher, "_start", partial(start, by_rank, at_once))
        return run_ranks(len(by_rank), None, stop_s=60)

    yield run
    gc.unfreeze()


SAVES = (os._exit, 75)
FULL = (fails, "save: need room")
ASKED = [(asks, SIGUSR1), (hears, SIGUSR1)]
ENDS = {
    "all done": ([[(os._exit, 0)], []], 0),
    "all done, though a signal came": ([[*ASKED, (os._exit, 0)], [(hears, SIGUSR1)]], 0),
    "SIGTERM while they save": ([[*ASKED, (asks, SIGTERM), SAVES], [(hears, SIGUSR1), SAVES]], 75),
    "a signal to a rank": ([[SAVES], [(hears, SIGTERM), SAVES]], 75),
    "a signal to a rank, and one that is stopped": (
        [[SAVES], [(hears, SIGTERM), (dies, SIGTERM)]],
        75,
    ),
    "a signal to ranks that do not save": ([[*ASKED, (dies, SIGUSR1)], [(hears, SIGUSR1)]], 138),
    "a signal after a failure": ([[(os._exit, 1)], [(hears, SIGTERM), (asks, SIGUSR1), SAVES]], 1),
    "a full disk after a signal": ([[*ASKED, SAVES], [(hears, SIGUSR1), FULL]], 1),
    "a full disk after a signal to a rank": ([[SAVES], [(hears, SIGTERM), FULL]], 1),
}


@pytest.mark.parametrize("end", ENDS)
def test_a_run_asks_for_a_requeue_only_where_every_rank_ended_as_asked(run, capfd, end):
    by_rank, code = ENDS[end]
    assert run(by_rank) == code
    assert ("rank 1 failed" in capfd.readouterr().err) == (FULL in by_rank[1])


@pytest.mark.parametrize(
    ("failure", "says"),
    [
        (FULL, "save: need room\nrank 1 failed"),
        ((signal.raise_signal, SIGKILL), "rank 1 was killed by SIGKILL"),
    ],
)
def test_ranks_that_have_saved_hide_no_failure(run, capfd, failure, says):
    assert run([[SAVES], [failure]], at_once=True) == 1
    assert says in capfd.readouterr().err
