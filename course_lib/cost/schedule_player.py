"""The clocks of all ranks while a pipeline schedule is played on paper. Notebook 08_pipeline."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from course_lib.core.links import Link
from course_lib.cost.actions import LETTERS, Action, Schedule, num_model_chunks_of, target_of
from course_lib.cost.schedule_times import INSTANT, PipelineTimes

Arrivals = list[float | None]


@dataclass
class _Port:
    """Where a rank's messages over one kind of link leave, one after the other."""

    free_s: float = 0


@dataclass(frozen=True)
class _Route:
    """The way of a stage's output: the receiver's inbox, the port, seconds by micro-batch."""

    inbox: Arrivals
    first: int  # place of micro-batch 0 in the inbox
    port: _Port
    occupied_s: list[float]
    travel_s: list[float]

    def send(self, micro_batch: int, now_s: float) -> tuple[float, float]:
        """Put a message on the wire; return when it leaves and when it arrives."""
        start_s = now_s if now_s > self.port.free_s else self.port.free_s
        self.port.free_s = start_s + self.occupied_s[micro_batch]
        arrival_s = start_s + self.travel_s[micro_batch]
        self.inbox[self.first + micro_batch] = arrival_s
        return start_s, arrival_s


class _Work(NamedTuple):
    """An action of one kind on one model chunk: its time, its input's place, its output's way."""

    duration_s: float
    inbox: Arrivals
    first: int  # place of micro-batch 0 in the inbox
    route: _Route | None


class Player:
    """Plays the ranks in turn, each as far as its inputs have come.

    `inbox[kind]` says when the input of an action arrives, None before that is known; it has a
    place for each depth and micro-batch. What needs no input has its input from the start.
    """

    def __init__(self, schedule: Schedule, times: PipelineTimes) -> None:
        self.schedule, self.times = schedule, times
        self.num_stages, self.num_model_chunks = len(schedule), num_model_chunks_of(schedule)
        self.num_micro_batches = 1 + max(
            (a.micro_batch for one in schedule for a in one), default=0
        )
        self.duration_s = times.by_depth(self.num_stages, self.num_model_chunks)
        self.scales = [times.scale(i) for i in range(self.num_micro_batches)]
        self.inbox = self._inboxes()
        self.starts_s: list[list[float]] = [[] for _ in schedule]
        self.ends_s: list[list[float]] = [[] for _ in schedule]
        self.left_s: list[Arrivals] = [[] for _ in schedule]
        self.arrived_s: list[Arrivals] = [[] for _ in schedule]
        self._ports: dict[tuple[int, Link], _Port] = {}
        self._seconds: dict[Link, tuple[list[float], list[float]]] = {}

    def _inboxes(self) -> dict[str, Arrivals]:
        here: Arrivals = [0] * self.num_micro_batches
        num_depths = self.num_stages * self.num_model_chunks
        later: Arrivals = [None] * (self.num_micro_batches * (num_depths - 1))
        gradients = later + here
        return {
            "forward": here + later,
            "backward": gradients,
            "backward_input": gradients,
            "backward_weight": here * num_depths,
        }

    def _route(self, kind: str, depth: int) -> _Route | None:
        """The way of what an action puts out; None if nobody waits for it."""
        chunk, stage = divmod(depth, self.num_stages)
        receiver = target_of(Action(kind, stage, 0, chunk), self.num_stages, self.num_model_chunks)
        if receiver is None:
            return None
        link = INSTANT if receiver == stage else self.times.link.between(stage, receiver)
        if link not in self._seconds:
            sizes = [self.times.bytes_of(i) for i in range(self.num_micro_batches)]
            occupied_s = [size / link.bytes_per_s for size in sizes]
            self._seconds[link] = occupied_s, [link.time_s(size) for size in sizes]
        first = (depth + (1 if kind == "forward" else -1)) * self.num_micro_batches
        port = self._ports.setdefault((stage, link), _Port())
        return _Route(self.inbox[kind], first, port, *self._seconds[link])

    def _work(self, kind: str, depth: int) -> _Work:
        first = depth * self.num_micro_batches
        route = self._route(kind, depth)
        return _Work(self.duration_s[kind][depth], self.inbox[kind], first, route)

    def play(self) -> None:
        """Play until nothing moves any more."""
        ranks = [self._run(rank) for rank in range(self.num_stages)]
        waits_for: list[tuple[Arrivals, int] | None] = [None] * self.num_stages
        to_play = list(range(self.num_stages))
        while to_play:
            rank = to_play.pop()
            waits_for[rank] = next(ranks[rank], None)
            for other in ((rank - 1) % self.num_stages, (rank + 1) % self.num_stages):
                wanted = waits_for[other]
                if wanted and wanted[0][wanted[1]] is not None:
                    waits_for[other] = None
                    to_play.append(other)

    def _run(self, rank: int) -> Iterator[tuple[Arrivals, int]]:
        """Play one rank; whenever an input is missing, yield which: its inbox, the place there."""
        starts, ends = self.starts_s[rank], self.ends_s[rank]
        left, arrived = self.left_s[rank], self.arrived_s[rank]
        depths = range(rank, self.num_stages * self.num_model_chunks, self.num_stages)
        work = {kind: [self._work(kind, depth) for depth in depths] for kind in LETTERS}
        now_s: float = 0
        for kind, _, micro_batch, chunk in self.schedule[rank]:
            duration_s, inbox, first, route = work[kind][chunk]
            while (input_s := inbox[first + micro_batch]) is None:
                yield inbox, first + micro_batch
            if input_s > now_s:
                now_s = input_s
            starts.append(now_s)
            now_s += duration_s * self.scales[micro_batch]
            ends.append(now_s)
            left_s, arrived_s = route.send(micro_batch, now_s) if route else (None, None)
            left.append(left_s)
            arrived.append(arrived_s)
