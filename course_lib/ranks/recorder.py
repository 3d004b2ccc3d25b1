"""The recorder: what this rank did, as events, whoever asked for it.

Every rank keeps the events of the job it runs; `ranks.events` fetches them. `span` marks a
stretch of computing by name, `record` looks at a stretch of the learner's own choosing. Both work
in a notebook and under torchrun.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch.distributed as dist

from course_lib.core.errors import CourseError
from course_lib.core.records import Event

MAX_EVENTS = 200_000


class Recorder:
    """Keeps a rank's events; times are `time.perf_counter()`, one clock for a whole machine."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
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
        """Keep one event; past 200,000 the rest is dropped, to save the memory."""
        if len(self.events) < MAX_EVENTS:
            event = Event(
                rank=self.rank,
                kind=kind,
                start_s=start_s,
                end_s=max(start_s, end_s),
                num_bytes=num_bytes,
                label=label,
                peer=peer,
                group=group,
            )
            self.events.append(event)


@dataclass
class Recording:
    """The events between the start and the end of a `record()` block."""

    events: list[Event] = field(default_factory=list)


def current_recorder() -> Recorder | None:
    """The recorder of the world this process belongs to, or None outside of one."""
    if not dist.is_initialized():
        return None
    return getattr(dist.group.WORLD, "recorder", None)


@contextmanager
def span(kind: str, label: str = "", num_bytes: int = 0) -> Iterator[None]:
    """Mark what runs inside as an event of this kind: `with span("forward", "F0"): ...`."""
    recorder = current_recorder()
    start_s = time.perf_counter()
    try:
        yield
    finally:
        if recorder is not None:
            recorder.add(kind, start_s, time.perf_counter(), num_bytes=num_bytes, label=label)


@contextmanager
def record() -> Iterator[Recording]:
    """Give this rank's events of the block: `with record() as log: ...`, then `log.events`.

    Raises: CourseError outside of ranks; there is nobody to record.
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
