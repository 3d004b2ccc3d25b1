"""Play a pipeline schedule on paper: when every rank does what, and what it holds meanwhile.

Each rank runs its actions in order, each as soon as its input is there; what it puts out leaves at
once, and the rank goes on. From the start and end of every action follow the length of the step,
the bubble, and the activations held at any moment. Notebook 08_pipeline.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from course_lib.core.records import Event, Ledger
from course_lib.cost.actions import Action, Schedule, num_model_chunks_of, target_of
from course_lib.cost.schedule_player import Player
from course_lib.cost.schedule_rules import check_schedule
from course_lib.cost.schedule_times import PipelineTimes

_HELD = {"forward": 1, "backward": -1, "backward_input": 0, "backward_weight": -1}


@dataclass(frozen=True)
class SimulatedStep:
    """A schedule that was played, with times for each action in the schedule's places.

    `left_s` and `arrived_s` say when an action's output left and arrived; None if it has none.
    """

    schedule: Schedule
    times: PipelineTimes
    starts_s: list[list[float]]
    ends_s: list[list[float]]
    left_s: list[list[float | None]]
    arrived_s: list[list[float | None]]

    @property
    def step_s(self) -> float:
        """Seconds until the last rank is done."""
        return max((ends[-1] for ends in self.ends_s if ends), default=0.0)

    @property
    def busy_s(self) -> list[float]:
        """Seconds that each rank computes."""
        return [
            sum(end - start for start, end in zip(starts, ends, strict=True))
            for starts, ends in zip(self.starts_s, self.ends_s, strict=True)
        ]

    @property
    def idle_s(self) -> list[float]:
        """Seconds that each rank does not compute before the step ends: its bubble."""
        return [self.step_s - busy for busy in self.busy_s]

    @property
    def bubble_fraction(self) -> float:
        """The part of all ranks' time, until the step ends, in which they do not compute."""
        return sum(self.idle_s) / (len(self.schedule) * self.step_s or 1.0)

    @property
    def bubble_overhead(self) -> float:
        """Seconds not computed for each second computed: (p - 1)/m for 1F1B with equal times."""
        return sum(self.idle_s) / (sum(self.busy_s) or 1.0)

    @property
    def bubble_rate(self) -> float:
        """The largest part that a rank is idle between its own first start and last end.

        Source: Qi et al. 2024 (Zero bubble pipeline parallelism), section 5.3
        """
        return max(
            1 - busy / (ends[-1] - starts[0] or 1.0)
            for starts, ends, busy in zip(self.starts_s, self.ends_s, self.busy_s, strict=True)
        )

    def events(self) -> list[Event]:
        """What a recorder would have seen: compute of each rank, and sends that take time."""
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
        num_stages, num_model_chunks = len(self.schedule), num_model_chunks_of(self.schedule)
        for rank, actions in enumerate(self.schedule):
            sent = zip(actions, self.left_s[rank], self.arrived_s[rank], strict=True)
            for action, left_s, arrived_s in sent:
                peer = target_of(action, num_stages, num_model_chunks)
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
        """How many micro-batches the rank holds activations of, from each moment it changes."""
        held, history = 0, [(0.0, 0)]
        for action, start_s, end_s in self._timed(rank):
            change = _HELD[action.kind]
            if change:
                held += change
                history.append((start_s if change > 0 else end_s, held))
        return history

    def peak_in_flight(self) -> list[int]:
        """The most micro-batches each rank holds; with model chunks, each chunk counts."""
        return [
            max(count for _, count in self.in_flight(rank)) for rank in range(len(self.schedule))
        ]

    def ledger(
        self, rank: int, activation_bytes: int, weight_bytes: int | None = None, params: int = 0
    ) -> Ledger:
        """Bytes of activations over time, for a lane of memory under the lane of time.

        A micro-batch, in each model chunk, holds `activation_bytes` from its forward on, and
        `weight_bytes` of them (else all) from its backward_input until its backward_weight.
        """
        kept_bytes = activation_bytes if weight_bytes is None else weight_bytes
        change = {"forward": activation_bytes, "backward": -activation_bytes}
        change |= {"backward_input": kept_bytes - activation_bytes, "backward_weight": -kept_bytes}
        ledger, held = Ledger(rank=rank), 0
        ledger.add(0.0, params=params)
        for action, start_s, end_s in self._timed(rank):
            held += change[action.kind]
            moment_s = start_s if action.kind == "forward" else end_s
            ledger.add(moment_s, activations=held, params=params)
        ledger.add(self.step_s, activations=held, params=params)
        return ledger

    def _timed(self, rank: int) -> Iterator[tuple[Action, float, float]]:
        return zip(self.schedule[rank], self.starts_s[rank], self.ends_s[rank], strict=True)


def simulate(schedule: Schedule, times: PipelineTimes | None = None) -> SimulatedStep:
    """Play a schedule; without `times`, forward and both halves of backward take 1 s each.

    Sends do not block. A rank has one port a kind of link: what it sends leaves one message after
    the other, each taking bytes / beta, and arrives after alpha + bytes / beta.

    Raises: ScheduleError, naming the first broken law, if the schedule cannot be played to its end;
            one that can may still leave something out, which `check_schedule` says
    """
    times = times or PipelineTimes()
    try:
        player = Player(schedule, times)
        player.play()
    except (KeyError, IndexError):
        check_schedule(schedule)
        raise
    if any(len(done) < len(todo) for done, todo in zip(player.ends_s, schedule, strict=True)):
        check_schedule(schedule)
    played = (player.starts_s, player.ends_s, player.left_s, player.arrived_s)
    return SimulatedStep(schedule, times, *played)
