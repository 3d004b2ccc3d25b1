"""What a run on several ranks ends with: the launcher, and ranks that act one after another."""

import gc
import json
import os
import signal
from functools import partial
from multiprocessing import get_context
from signal import SIGTERM, SIGUSR1

import pytest

from course_lib.train import launcher
from course_lib.train.launcher import run_ranks


def asks(number):
    """The launcher gets a signal."""
    os.kill(os.getppid(), number)


def hears(number):
    """Wait for a signal from the launcher, and go on."""
    signal.sigwait({number})


def rank_does(acts):
    for act, argument in acts:
        act(argument)


@pytest.fixture
def run(monkeypatch):
    """The exit code of a run whose ranks do these things."""

    def start(by_rank, ranks, num_ranks, config, folder):
        before = signal.pthread_sigmask(signal.SIG_BLOCK, launcher.SIGNALS)  # for the ranks
        for acts in by_rank:
            ranks.append(get_context("fork").Process(target=rank_does, args=(acts,)))
            ranks[-1].start()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def run(by_rank):
        monkeypatch.setattr(launcher, "PRELOAD", ())
        monkeypatch.setattr(launcher, "_start", partial(start, by_rank))
        return run_ranks(len(by_rank), None, stop_s=60)

    yield run
    gc.unfreeze()


ASKED = [(asks, SIGUSR1), (hears, SIGUSR1)]
ENDS = {
    "SIGTERM while they save": (
        [[*ASKED, (asks, SIGTERM), (os._exit, 75)], [(hears, SIGUSR1), (os._exit, 75)]],
        128 + SIGUSR1,
    ),
    "a signal after a failure": (
        [[(os._exit, 1)], [(hears, SIGTERM), (asks, SIGUSR1), (os._exit, 75)]],
        1,
    ),
}


@pytest.mark.parametrize("end", ENDS)
def test_a_run_ends_with_the_code_of_what_happened_first(run, end):
    by_rank, code = ENDS[end]
    assert run(by_rank) == code
