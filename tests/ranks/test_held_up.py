"""A rank that a busy machine keeps waiting for a core is not one that waits for another rank."""

import os
import subprocess
import sys
import threading
import zlib
from pathlib import Path
from types import SimpleNamespace

import pytest

from course_lib.ranks import rank_process
from course_lib.ranks.held_up import is_ready, others_are_ready, waited_for_core_s
from course_lib.ranks.rank_process import HEARTBEAT_S, Heartbeat

BEATS = 6


def folder_of(process: subprocess.Popen) -> Path:
    return Path("/proc", str(process.pid))


def test_who_spins_is_ready_and_who_reads_from_an_empty_pipe_is_not():
    spins, reads = (
        subprocess.Popen(
            [sys.executable, "-c", f"print(flush=True)\n{code}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for code in ("while True: pass", "input()")
    )
    try:
        for process in (spins, reads):
            process.stdout.readline()
        while is_ready(folder_of(reads)):
            os.sched_yield()
        assert is_ready(folder_of(spins))
    finally:
        for process in (spins, reads):
            process.kill()
            process.communicate()
    assert not is_ready(folder_of(spins))  # where there is nothing to read


def test_another_thread_is_seen_while_it_computes():
    before_s, large = waited_for_core_s(), bytes(2**24)
    ended = threading.Event()

    def compute():
        while not ended.is_set():
            zlib.crc32(large)  # without Python's lock

    thread = threading.Thread(target=compute)
    thread.start()
    while not others_are_ready():
        os.sched_yield()
    ended.set()
    thread.join()
    assert waited_for_core_s() >= before_s


@pytest.mark.parametrize(
    ("ready", "moved_s", "idle"),
    [
        (False, 0.0, BEATS),  # asleep in torch: it waits
        (True, 0.0, 0),  # it would compute, and has no core
        (False, 0.5 * HEARTBEAT_S, 0),  # it computed, or waited for a core, for half of each beat
    ],
)
def test_only_a_rank_that_sleeps_idles(monkeypatch, ready, moved_s, idle):
    told, clock = [], iter(range(1000))

    def beat(_rank, idle_s, *_):
        told.append(idle_s)
        if len(told) == BEATS:
            raise SystemExit

    tracer = SimpleNamespace(rank=0, outstanding={}, call_board=SimpleNamespace(beat=beat))
    monkeypatch.setattr(rank_process, "owner", lambda _file: "torch")
    monkeypatch.setattr(rank_process.time, "sleep", lambda _s: None)
    monkeypatch.setattr(rank_process, "is_ready", lambda: ready)
    monkeypatch.setattr(rank_process, "_moved_s", lambda: next(clock) * moved_s)
    with pytest.raises(SystemExit):
        Heartbeat(tracer).run()
    assert told[-1] == pytest.approx(idle * HEARTBEAT_S)
