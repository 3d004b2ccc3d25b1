"""The recorder: calls and computation of one rank as events.

Every rank keeps the events of the job it runs; `ranks.events` fetches them. `span` records the
computation in a block under a name, `record` returns the events of a block. Both work in a notebook
and under torchrun.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import torch.distributed as dist
from torch.autograd import _profiler_enabled
from torch.profiler import record_function

from course_lib.core.errors import CourseError
from course_lib.core.records import Event

MAX_EVENTS = 200_000


class Recorder:
    """Events of one rank; times are `time.perf_counter()`, one clock for a whole machine.

    ahead_s   by how much the clock of the notebook's machine is ahead; events are on that clock
    """

    def __init__(self, rank: int) -> None:
        self.rank, self.ahead_s = rank, 0.0
        self.tell: Callable[[str], object] = lambda text: None  # shows it below the cell
        self.events: list[Event] = []

    def add(
        self,
        kind: str,
        start_s: float,
        end_s: float,
        *,
        num_bytes: int = 0,
        label: str = "",
        peer: int | None = None,
        group: tuple[int, ...] = (),
    ) -> None:
        """Add one event; after 200,000 further ones are dropped, to save memory."""
        if len(self.events) < MAX_EVENTS:
            event = Event(
                rank=self.rank,
                kind=kind,
                start_s=start_s + self.ahead_s,
                end_s=max(start_s, end_s) + self.ahead_s,
                num_bytes=num_bytes,
                label=label,
                peer=peer,
                group=group,
            )
            self.events.append(event)


@dataclass
class Recording:
    """Events between the start and the end of a `record()` block."""

    events: list[Event] = field(default_factory=list)


def current_recorder() -> Recorder | None:
    """Return the recorder of the world this process belongs to, or None outside of one."""
    if not dist.is_initialized():
        return None
    return getattr(dist.group.WORLD, "recorder", None)


@contextmanager
def span(kind: str, label: str = "", num_bytes: int = 0) -> Iterator[None]:
    """Record the block as one event of this kind: `with span("forward", "F0"): ...`.

    Under PyTorch's profiler it is a range of that trace, too.

    Raises: CourseError for a kind that is not in `KINDS`
    """
    recorder = current_recorder()
    start_s = time.perf_counter()
    try:
        with record_function(f"{kind} {label}".strip()) if _profiler_enabled() else nullcontext():
            yield
    finally:
        if recorder is not None:
            recorder.add(kind, start_s, time.perf_counter(), num_bytes=num_bytes, label=label)


@contextmanager
def record() -> Iterator[Recording]:
    """Record this rank's events in the block: `with record() as log: ...`, then `log.events`.

    Raises: CourseError where the process is no rank of a world
    """
    recorder = current_recorder()
    if recorder is None:
        raise CourseError(
            "record: need a rank; this process belongs to no world. Try it inside ranks.run(fn), "
            "a %%ranks cell, or a script started with launch(fn)."
        )
    recording, first = Recording(), len(recorder.events)
    try:
        yield recording
    finally:
        recording.events = recorder.events[first:]
