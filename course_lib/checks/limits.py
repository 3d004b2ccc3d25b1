"""Limits of a check: an answer that never ends is ended, in the kernel as on a rank.

A wait that never returns is ended by the clock, which says nothing about the answer: the machine
may be busy. A loop that never ends is ended sooner, by the time that it has computed, which is no
longer on a busy machine than on a quiet one. A loop in C (`list(count())`) hears no timer: its
memory ends it.
"""

import contextlib
import resource
import signal
import threading
from collections.abc import Iterator
from typing import Any, NoReturn

import psutil

COMPUTING_S = 20.0  # without an end; the slowest right answer computes for 2 s
MOST_BYTES = 2 * 2**30  # more than before the check; right answers take a hundredth of it


class OutOfTime(BaseException):
    """The end of an answer that has run into a limit; no `except Exception` of its swallows it."""


class Endless(OutOfTime):
    """The end of an answer that has computed for longer than any right one."""


@contextlib.contextmanager
def at_most(limit_s: float, *, computing: bool = False) -> Iterator[None]:
    """Raise OutOfTime in the block after some seconds (0: no limit), or Endless, of computing.

    In a thread, where no signal arrives, there is no limit.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    kinds = (signal.ITIMER_PROF, signal.SIGPROF), (signal.ITIMER_REAL, signal.SIGALRM)
    timer, number = kinds[0] if computing else kinds[1]

    def strike(*_: Any) -> NoReturn:
        if computing:
            raise Endless(f"ended after {limit_s:g} s of computing")
        raise OutOfTime(f"ended after {limit_s:g} s")

    before = signal.signal(number, strike)
    signal.setitimer(timer, limit_s)
    try:
        yield
    finally:
        signal.setitimer(timer, 0)
        signal.signal(number, before)


@contextlib.contextmanager
def little_memory() -> Iterator[None]:
    """Let this process take MOST_BYTES more in the block; then Python raises MemoryError (Linux).

    A process that is started in the block keeps this limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    taken = getattr(psutil.Process().memory_info(), "data", 0)  # 0: this system does not say
    most = taken + MOST_BYTES if taken else soft
    if soft != resource.RLIM_INFINITY:
        most = min(most, soft)
    resource.setrlimit(resource.RLIMIT_DATA, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
