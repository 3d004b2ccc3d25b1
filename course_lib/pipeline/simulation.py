"""Simulation of a pipeline schedule: start and end of every action, without running anything.

`simulate(schedule, times)` is the entry. Each rank executes its actions in order, each as soon as
its input has arrived; sends do not block. `PipelineTimes` (`times.py`) holds the assumed durations,
`SchedulePlayer` computes the clock times, and `SimulatedStep` derives step time, bubble, events and
activation memory from them. `engine.py` executes the same schedules. Notebook 08_pipeline.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from course_lib.core.links import Link
from course_lib.core.records import Event, Ledger
from course_lib.pipeline.actions import (
    LETTERS,
    Action,
    Schedule,
    depths_of,
    placement_of,
    target_of,
)
from course_lib.pipeline.schedule_rules import check_schedule
from course_lib.pipeline.times import INSTANT, PipelineTimes

_IN_FLIGHT = {"forward": 1, "backward": -1, "backward_input": 0, "backward_weight": -1}
Arrivals = list[float | None]  # seconds at which inputs arrive; None: not known yet


@dataclass(frozen=True)
class SimulatedStep:
    """Result of a simulation: clock times in seconds, indexed [rank][position in its actions].

    `left_s` and `arrived_s` are the times at which an action's output was sent and arrived; None
    if it sends nothing.
    """

    schedule: Schedule
    times: PipelineTimes
    starts_s: list[list[float]]
    ends_s: list[list[float]]
    left_s: list[list[float | None]]
    arrived_s: list[list[float | None]]

    @property
    def step_s(self) -> float:
        """Seconds until the last rank has finished."""
        return max((ends[-1] for ends in self.ends_s if ends), default=0.0)

    @property
    def busy_s(self) -> list[float]:
        """Seconds that each rank computes; where two actions overlap, they count once."""
        return [
            sum(
                end - max(start, before)
                for start, end, before in zip(starts, ends, [0, *ends[:-1]], strict=True)
            )
            for starts, ends in zip(self.starts_s, self.ends_s, strict=True)
        ]

    @property
    def idle_s(self) -> list[float]:
        """Seconds that each rank does not compute before the step ends: its bubble."""
        return [self.step_s - busy for busy in self.busy_s]

    @property
    def bubble_fraction(self) -> float:
        """Idle time of all ranks divided by their total time, p * step_s."""
        return sum(self.idle_s) / (len(self.schedule) * self.step_s or 1.0)

    @property
    def bubble_overhead(self) -> float:
        """Idle time divided by computing time: (p - 1)/m for 1F1B with equal times."""
        return sum(self.idle_s) / (sum(self.busy_s) or 1.0)

    @property
    def bubble_rate(self) -> float:
        """Largest idle fraction of a rank, from its first action's start to its last one's end.

        Source: Qi et al. 2024 (Zero bubble pipeline parallelism), section 5.3
        """
        return max(
            1 - busy / (ends[-1] - starts[0] or 1.0)
            for starts, ends, busy in zip(self.starts_s, self.ends_s, self.busy_s, strict=True)
        )

    def events(self) -> list[Event]:
        """Return events as a recorder would: compute of each rank, and sends that take time."""
        return [*self._computed(), *self._sent()]

    def _computed(self) -> Iterator[Event]:
        for rank, actions in enumerate(self.schedule):
            for action, start_s, end_s in zip(
                actions, self.starts_s[rank], self.ends_s[rank], strict=True
            ):
                yield Event(
                    rank=rank, kind=action.kind, start_s=start_s, end_s=end_s, label=action.label
                )

    def _sent(self) -> Iterator[Event]:
        num_stages, placement = len(self.schedule), placement_of(self.schedule)
        for rank, actions in enumerate(self.schedule):
            sent = zip(actions, self.left_s[rank], self.arrived_s[rank], strict=True)
            for action, left_s, arrived_s in sent:
                peer = target_of(action, num_stages, placement)
                if peer is None or left_s is None or arrived_s is None or left_s == arrived_s:
                    continue
                yield Event(
                    rank=rank,
                    kind="send",
                    start_s=left_s,
                    end_s=arrived_s,
                    num_bytes=round(self.times.bytes_of(action.micro_batch)),
                    label=f"{action.label} to {peer}",
                    peer=peer,
                    group=tuple(sorted((rank, peer))),
                )

    def in_flight(self, rank: int) -> list[tuple[float, int]]:
        """Return (seconds, micro-batches in flight on the rank from then on) at every change."""
        count, history = 0, [(0.0, 0)]
        for action, start_s, end_s in self._timed(rank):
            change = _IN_FLIGHT[action.kind]
            if change:
                count += change
                history.append((start_s if change > 0 else end_s, count))
        return history

    def peak_in_flight(self) -> list[int]:
        """Return each rank's largest number in flight; with model chunks, each chunk counts."""
        return [
            max(count for _, count in self.in_flight(rank)) for rank in range(len(self.schedule))
        ]

    def ledger(
        self, rank: int, activation_bytes: int, weight_bytes: int | None = None, params: int = 0
    ) -> Ledger:
        """Return a rank's bytes of activations over time, and the constant bytes of `params`.

        A micro-batch, in each model chunk, holds `activation_bytes` from its forward on, and
        `weight_bytes` of them (by default all) from its backward_input until its backward_weight.
        """
        kept_bytes = activation_bytes if weight_bytes is None else weight_bytes
        change = {"forward": activation_bytes, "backward": -activation_bytes}
        change |= {"backward_input": kept_bytes - activation_bytes, "backward_weight": -kept_bytes}
        ledger, num_bytes = Ledger(rank=rank), 0
        ledger.add(0.0, params=params)
        for action, start_s, end_s in self._timed(rank):
            num_bytes += change[action.kind]
            change_s = start_s if action.kind == "forward" else end_s
            ledger.add(change_s, activations=num_bytes, params=params)
        ledger.add(self.step_s, activations=num_bytes, params=params)
        return ledger

    def _timed(self, rank: int) -> Iterator[tuple[Action, float, float]]:
        return zip(self.schedule[rank], self.starts_s[rank], self.ends_s[rank], strict=True)


def simulate(schedule: Schedule, times: PipelineTimes | None = None) -> SimulatedStep:
    """Simulate a step; without `times`, forward, backward_input and backward_weight take 1 s each.

    Sends do not block. A rank has one port per kind of link: it sends one message after another,
    each of which occupies the port for bytes / beta and arrives after alpha + bytes / beta (alpha:
    latency in s, beta: bandwidth in bytes/s).

    Raises: ScheduleError, naming the first broken rule, if the schedule cannot reach its end; one
            that can may still leave something out, which `check_schedule` finds
    """
    times = times or PipelineTimes()
    try:
        player = SchedulePlayer(schedule, times)
        player.play()
    except (KeyError, IndexError):
        check_schedule(schedule)
        raise
    if any(len(done) < len(todo) for done, todo in zip(player.ends_s, schedule, strict=True)):
        check_schedule(schedule)
    played = (player.starts_s, player.ends_s, player.left_s, player.arrived_s)
    return SimulatedStep(schedule, times, *played)


@dataclass
class _Port:
    """Sending port of a rank for one kind of link; messages leave one after another."""

    free_s: float = 0  # when the last message has left


@dataclass(frozen=True)
class _Route:
    """Path of the outputs of one model chunk: sender's port, receiver's inbox, seconds."""

    inbox: Arrivals
    first: int  # index of micro-batch 0 in the inbox
    port: _Port
    occupied_s: list[float]  # by micro-batch: seconds on the port
    travel_s: list[float]  # by micro-batch: seconds until it arrives

    def send(self, micro_batch: int, now_s: float) -> tuple[float, float]:
        """Send as soon as the port is free; return when the message leaves and when it arrives."""
        start_s = now_s if now_s > self.port.free_s else self.port.free_s
        self.port.free_s = start_s + self.occupied_s[micro_batch]
        arrival_s = start_s + self.travel_s[micro_batch]
        self.inbox[self.first + micro_batch] = arrival_s
        return start_s, arrival_s


class _Work(NamedTuple):
    """Actions of one kind on one model chunk: their duration, inbox and route."""

    duration_s: float
    inbox: Arrivals
    first: int  # index of micro-batch 0 in the inbox
    route: _Route | None


class SchedulePlayer:
    """Simulator of one step: runs each rank until it needs an input that has not been sent yet.

    inbox   by kind of action: arrival time of each input, indexed depth * num_micro_batches +
            micro_batch; 0 for what needs no message, None until the message has been sent
    """

    def __init__(self, schedule: Schedule, times: PipelineTimes) -> None:
        self.schedule, self.times = schedule, times
        self.num_stages, self.placement = len(schedule), placement_of(schedule)
        self.num_micro_batches = 1 + max(
            (a.micro_batch for one in schedule for a in one), default=0
        )
        self.duration_s = times.by_depth(self.placement)
        self.scales = [times.scale(i) for i in range(self.num_micro_batches)]
        self.inbox = self._inboxes()
        self.starts_s: list[list[float]] = [[] for _ in schedule]
        self.ends_s: list[list[float]] = [[] for _ in schedule]
        self.left_s: list[Arrivals] = [[] for _ in schedule]
        self.arrived_s: list[Arrivals] = [[] for _ in schedule]
        self._ports: dict[tuple[int, Link], _Port] = {}
        self._seconds: dict[Link, tuple[list[float], list[float]]] = {}

    def _inboxes(self) -> dict[str, Arrivals]:
        """Return empty inboxes; both kinds of backward share one, of gradients."""
        here: Arrivals = [0] * self.num_micro_batches
        num_depths = len(self.placement)
        later: Arrivals = [None] * (self.num_micro_batches * (num_depths - 1))
        gradients = later + here
        return {
            "forward": here + later,
            "backward": gradients,
            "backward_input": gradients,
            "backward_weight": here * num_depths,
        }

    def _route(self, kind: str, depth: int) -> _Route | None:
        """Return the route of an action's output; None if no other action needs it."""
        chunk, stage = divmod(depth, self.num_stages)
        sender = self.placement[depth]
        receiver = target_of(Action(kind, stage, 0, chunk), self.num_stages, self.placement)
        if receiver is None:
            return None
        link = INSTANT if receiver == sender else self.times.link.between(sender, receiver)
        if link not in self._seconds:
            sizes = [self.times.bytes_of(i) for i in range(self.num_micro_batches)]
            occupied_s = [size / link.bytes_per_s for size in sizes]
            self._seconds[link] = occupied_s, [link.time_s(size) for size in sizes]
        first = (depth + (1 if kind == "forward" else -1)) * self.num_micro_batches
        port = self._ports.setdefault((sender, link), _Port())
        return _Route(self.inbox[kind], first, port, *self._seconds[link])

    def _work(self, kind: str, depth: int) -> _Work:
        first = depth * self.num_micro_batches
        route = self._route(kind, depth)
        return _Work(self.duration_s[kind][depth], self.inbox[kind], first, route)

    def play(self) -> None:
        """Run ranks until all have finished or every remaining one waits for another."""
        ranks = [self._run(rank) for rank in range(self.num_stages)]
        waits_for: list[tuple[Arrivals, int] | None] = [None] * self.num_stages
        receivers = self._receivers()
        runnable = list(range(self.num_stages))
        while runnable:
            rank = runnable.pop()
            waits_for[rank] = next(ranks[rank], None)
            for other in receivers[rank]:
                wanted = waits_for[other]
                if wanted and wanted[0][wanted[1]] is not None:
                    waits_for[other] = None
                    runnable.append(other)

    def _receivers(self) -> list[list[int]]:
        """Return for each rank the others that hold the chunks before and after its own."""
        found: list[set[int]] = [{rank} for rank in range(self.num_stages)]
        for one, other in pairwise(self.placement):
            found[one].add(other)
            found[other].add(one)
        return [sorted(others - {rank}) for rank, others in enumerate(found)]

    def _run(self, rank: int) -> Iterator[tuple[Arrivals, int]]:
        """Run one rank; whenever an input is missing, yield where it will be: inbox and index."""
        starts, ends = self.starts_s[rank], self.ends_s[rank]
        left, arrived = self.left_s[rank], self.arrived_s[rank]
        depths = depths_of(rank, self.placement)
        work = {kind: [self._work(kind, depth) for depth in depths] for kind in LETTERS}
        now_s: float = 0
        overlap, forward = self.times.overlap, (-1, 0.0)  # micro-batch, seconds just before
        for kind, _, micro_batch, chunk in self.schedule[rank]:
            duration_s, inbox, first, route = work[kind][chunk]
            duration_s *= self.scales[micro_batch]
            while (input_s := inbox[first + micro_batch]) is None:
                yield inbox, first + micro_batch
            if overlap and kind == "backward" and forward[0] not in (-1, micro_batch):
                now_s -= overlap * min(duration_s, forward[1])
            forward = (micro_batch, duration_s) if kind == "forward" else (-1, 0.0)
            if input_s > now_s:
                now_s = input_s
            starts.append(now_s)
            now_s += duration_s
            ends.append(now_s)
            left_s, arrived_s = route.send(micro_batch, now_s) if route else (None, None)
            left.append(left_s)
            arrived.append(arrived_s)
