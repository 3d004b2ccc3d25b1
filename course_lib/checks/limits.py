"""Limits of a check: an answer that never ends is ended, in the kernel as on a rank.

A wait that never returns is ended by the clock. A loop that never ends is ended sooner, by the time
that it has computed: that is no longer on a busy machine than on a quiet one.
"""

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any, NoReturn

COMPUTING_S = 20.0  # without an end; the slowest right answer computes for 2 s


class OutOfTime(BaseException):
    """The end of an answer that has run into a limit; no `except Exception` of its swallows it."""


@contextlib.contextmanager
def at_most(limit_s: float, *, computing: bool = False) -> Iterator[None]:
    """Raise OutOfTime in the block after some seconds, or some seconds of computing (0: no limit).

    In a thread, where no signal arrives, there is no limit.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    kinds = (signal.ITIMER_PROF, signal.SIGPROF), (signal.ITIMER_REAL, signal.SIGALRM)
    timer, number = kinds[0] if computing else kinds[1]

    def strike(*_: Any) -> NoReturn:
        raise OutOfTime(f"ended after {limit_s:g} s{' of computing' * computing}")

    before = signal.signal(number, strike)
    signal.setitimer(timer, limit_s)
    try:
        yield
    finally:
        signal.setitimer(timer, 0)
        signal.signal(number, before)
