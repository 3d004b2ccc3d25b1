"""Preemption: after SIGTERM or SIGUSR1 to any rank, all ranks finish the same step, save and stop.

A scheduler that needs its nodes back, or whose time limit is near, sends a signal first. It does
not reach all ranks during the same step, so they have to agree. Notebook 14_checkpoint.
"""

import signal
import threading
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from course_lib.ranks.world import rank_device

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class Preemption:
    """The ranks' agreement to stop: `with Preemption(...) as preemption:`.

    before each step  preemption.ask(): start to ask all ranks whether one has been signaled
    after it          preemption.agree(): read the answer, which has arrived meanwhile
    is_agreed         all ranks stop after this step

    The block can be entered again: a signal during loading counts at the first step.

    listens   False: signals keep their usual meaning, and nothing is communicated

    Cost:    an all_reduce of one number per step, overlapped with the step
    """

    def __init__(self, listens: bool) -> None:
        self._listens = listens
        self._is_signaled = self.is_agreed = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Preemption":
        if self._listens and threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._hear) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _hear(self, _number: int, _frame: FrameType | None) -> None:
        self._is_signaled = True

    def ask(self) -> None:
        """Start to ask all ranks. Every rank calls it before a step."""
        if self._listens:
            self._votes = torch.tensor(float(self._is_signaled), device=rank_device())
            self._work = dist.all_reduce(self._votes, op=dist.ReduceOp.MAX, async_op=True)

    def agree(self) -> None:
        """Read what all ranks answered. Every rank calls it after the step."""
        if self._listens:
            self._work.wait()
            self.is_agreed = bool(self._votes)
