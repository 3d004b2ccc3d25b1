"""Where the time of a recorded run went: computing, waiting for another rank, transfers.

A collective begins when its last rank calls it. Until then the others wait for that rank; what
follows is the transfer. So a straggler is the rank that calls last: its own collectives are short,
and everyone else's are long.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from course_lib.core.errors import CourseError
from course_lib.core.records import COMMUNICATION_KINDS, COMPUTE_KINDS, Event, RunRecord
from course_lib.core.trace_reading import Interval, merged, within
from course_lib.core.units import format_seconds

LATE = 0.05  # of a step that others wait for a rank: less is no straggler
LONGER = 1.1  # times the median of the ranks' computing


@dataclass
class RankTime:
    """Seconds of a mean step of one rank; they add up to `step_s`.

    waits_s   exposed waits, by the rank that is waited for
    other_s   in no event: the host, data loading, steps of Python
    """

    rank: int
    step_s: float
    compute_s: float = 0.0
    optimizer_s: float = 0.0
    transfer_s: float = 0.0
    waits_s: dict[int, float] = field(default_factory=dict)

    @property
    def wait_s(self) -> float:
        """Exposed seconds in which it waits for any rank."""
        return sum(self.waits_s.values())

    @property
    def other_s(self) -> float:
        """Seconds in no event."""
        return max(0.0, self.step_s - self.compute_s - self.transfer_s - self.wait_s)


@dataclass(frozen=True)
class TimeReport:
    """Where the time of a run went, by rank."""

    num_steps: int
    num_calls: int
    last: Counter[int]  # how often each rank was the last to call
    ranks: Sequence[RankTime]

    @property
    def slowest(self) -> RankTime:
        """The rank that computes the longest."""
        return max(self.ranks, key=lambda one: one.compute_s)

    def straggler(self) -> tuple[int, float] | None:
        """Return the rank for which another one waits the longest, and the seconds; or None."""
        most = [(one.waits_s[rank], rank) for one in self.ranks for rank in one.waits_s]
        wait_s, rank = max(most, default=(0.0, -1))
        return (rank, wait_s) if wait_s > LATE * self.ranks[0].step_s else None

    def lines(self) -> Iterator[str]:
        """Yield the report: the parts of a step by rank, what bounds it, who is waited for."""
        yield f"{len(self.ranks)} ranks, a mean of {self.num_steps} recorded steps:"
        names = ("rank", "step", "computing", "waiting", "transfer", "other")
        yield "".join(f"{name:>11}" for name in names)
        for one in self.ranks:
            parts = (one.step_s, one.compute_s, one.wait_s, one.transfer_s, one.other_s)
            yield f"{one.rank:>11}" + "".join(f"{format_seconds(part):>11}" for part in parts)
        yield self.bound()
        if found := self.straggler():
            yield self._on(*found)

    def bound(self) -> str:
        """Return what the step is bound by: the largest part on the mean rank."""
        num = len(self.ranks)
        parts = {
            "computing": sum(one.compute_s for one in self.ranks) / num,
            "waiting for other ranks": sum(one.wait_s for one in self.ranks) / num,
            "exposed transfers": sum(one.transfer_s for one in self.ranks) / num,
            "what is in no event: the host, data, Python": sum(o.other_s for o in self.ranks) / num,
        }
        name = max(parts, key=lambda part: parts[part])
        share = parts[name] / (sum(parts.values()) or 1)
        return f"Bound by {name}: {100 * share:.0f} % of a step."

    def _on(self, rank: int, wait_s: float) -> str:
        one = next(one for one in self.ranks if one.rank == rank)
        usual = median(other.compute_s for other in self.ranks if other.rank != rank)
        waiting = [other.rank for other in self.ranks if other.waits_s.get(rank, 0) > wait_s / 2]
        who = ", ".join(map(str, waiting))
        told = (
            f"Rank {rank} is waited for: it is the last to call {self.last[rank]} of "
            f"{self.num_calls} collectives, and rank{'s' * (len(waiting) > 1)} {who} "
            f"wait{'s' * (len(waiting) == 1)} up to {format_seconds(wait_s)} a step for it. "
        )
        if one.compute_s > LONGER * usual:
            return told + (
                f"It computes for {one.compute_s / usual:.1f} times as long as the others: a slow "
                "device, or more work."
            )
        return told + "It computes no longer than the others, but begins later: host, or data."


def time_report(folder: Path) -> TimeReport:
    """Return where the time of the run went whose records are in the folder.

    Of a run record, the events of the last steps are there; only steps that they cover count. All
    ranks' clocks are those of the run (`RunRecord`). A run that was resumed has records of each
    part: those on as many ranks as the last one are joined, and a step counts once.

    Raises: CourseError for a folder without run records of all ranks, with events
    """
    parts = _parts(folder)
    size = parts[-1][0].world_size
    found, seen = list[tuple[dict[int, list[Event]], list[float]]](), set[int]()
    for records in reversed(parts):
        if records[0].world_size == size:
            found.append(_common(records, seen))
    num_steps = len(seen)
    if not num_steps:
        raise CourseError(
            f"{folder}: need events of a step of all ranks; there are none. Try a run of "
            "course_lib.train on 2 ranks or more, or course_lib.ranks.record."
        )
    times = [RankTime(rank, 0.0) for rank in range(size)]
    last, num_calls = Counter[int](), 0
    for inside, lengths in found:
        for one, length in zip(times, lengths, strict=True):
            one.step_s += length / num_steps
        in_part, num = _share_out(inside, times, num_steps)
        last, num_calls = last + in_part, num_calls + num
    return TimeReport(num_steps, num_calls, last, times)


def _parts(folder: Path) -> list[list[RunRecord]]:
    """Return the records of all ranks, for each part of a run that was resumed.

    Raises: CourseError where those of a rank are missing, or where there are several runs
    """
    parts: dict[tuple[Path, int], list[RunRecord]] = defaultdict(list)
    for path in sorted(folder.rglob("*.jsonl")):
        begins = path.stem.partition("-from")[2]
        parts[path.parent, int(begins) if begins.isdigit() else 0].append(RunRecord.read(path))
    for records in parts.values():
        records.sort(key=lambda one: one.rank)
    for records in parts.values() or [[]]:
        ranks, size = [one.rank for one in records], records[0].world_size if records else 0
        if not records or ranks != list(range(size)):
            got = f"those of ranks {', '.join(map(str, ranks))} of {size}" if records else "none"
            raise CourseError(
                f"{folder}: need the run records of all ranks of one run, rank0.jsonl and so on; "
                f"got {got}. Try python -m course_lib.train --ranks 2 --out runs/NAME."
            )
    if len(runs := sorted({parent.name for parent, _ in parts})) > 1:
        raise CourseError(
            f"{folder}: need the run records of one run; got those in {', '.join(runs)}. "
            f"Try {next(iter(parts))[0]}."
        )
    return [records for _, records in sorted(parts.items())]


def _common(
    records: Sequence[RunRecord], seen: set[int]
) -> tuple[dict[int, list[Event]], list[float]]:
    """Return each rank's events in the steps that all have and that are new, and their seconds."""
    steps = [_covered(record) for record in records]
    common = set.intersection(*({int(step["step"]) for step in own} for own in steps)) - seen
    seen |= common
    inside, lengths = {}, []
    for record, own in zip(records, steps, strict=True):
        spans = [(step["start_s"], step["end_s"]) for step in own if step["step"] in common]
        inside[record.rank] = [one for one in record.events if _is_in(one, spans)]
        lengths.append(_length(spans))
    return inside, lengths


def _covered(record: RunRecord) -> list[dict[str, float]]:
    """Return the steps whose events are in the record."""
    first = min((event.start_s for event in record.events), default=float("inf"))
    return [step for step in record.steps if step["end_s"] > first]


def _is_in(event: Event, spans: Sequence[Interval]) -> bool:
    return any(start <= event.start_s < end for start, end in spans)


def _length(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)


def _share_out(
    inside: dict[int, list[Event]], times: Sequence[RankTime], num_steps: int
) -> tuple[Counter[int], int]:
    """Add what each rank does; return how often each was last, and the number of calls."""
    waits, transfers, last, num_calls = _calls(inside)
    for rank, own in enumerate(times):
        spans = merged((e.start_s, e.end_s) for e in inside[rank] if e.kind in COMPUTE_KINDS)
        blocked = merged((e.start_s, e.end_s) for e in inside[rank] if e.kind == "wait")
        busy = list(_without(spans, blocked))
        taken = busy
        for late, intervals in sorted(waits[rank].items()):
            exposed = list(_without(merged(intervals), taken))
            own.waits_s[late] = own.waits_s.get(late, 0.0) + _length(exposed) / num_steps
            taken = merged([*taken, *exposed])
        own.transfer_s += _length(_without(merged(transfers[rank]), taken)) / num_steps
        own.compute_s += _length(busy) / num_steps
        optimizer = (e.end_s - e.start_s for e in inside[rank] if e.kind == "optimizer")
        own.optimizer_s += sum(optimizer) / num_steps
    return last, num_calls


def _calls(
    inside: dict[int, list[Event]],
) -> tuple[dict[int, dict[int, list[Interval]]], dict[int, list[Interval]], Counter[int], int]:
    """Return the waits of each rank by the rank waited for, the transfers, who was last how often.

    The nth call of a kind in a group is the same one on all of its ranks.
    """
    waits: dict[int, dict[int, list[Interval]]] = defaultdict(lambda: defaultdict(list))
    transfers: dict[int, list[Interval]] = defaultdict(list)
    last, num_calls = Counter[int](), 0
    for call in _matched(inside):
        late = max(call, key=lambda event: event.start_s)
        num_calls += 1
        last[late.rank] += 1
        for event in call:
            begins = min(max(event.start_s, late.start_s), event.end_s)
            if event.kind == "send":  # a sender waits for nobody: what it sends is kept for it
                begins = event.start_s
            if begins > event.start_s:
                waits[event.rank][late.rank].append((event.start_s, begins))
            transfers[event.rank].append((begins, event.end_s))
    return waits, transfers, last, num_calls


def _matched(inside: dict[int, list[Event]]) -> Iterator[list[Event]]:
    """Yield the events of each call: of a collective one a rank, of a message a send and a recv."""
    found: dict[object, list[Event]] = defaultdict(list)
    for rank, events in inside.items():
        seen = Counter[object]()
        for event in sorted(events, key=lambda one: one.start_s):
            if event.kind not in COMMUNICATION_KINDS:
                continue
            if event.kind in ("send", "recv"):
                pair = (rank, event.peer) if event.kind == "send" else (event.peer, rank)
                what: object = ("message", pair)
            else:
                what = (event.kind, event.group)
            found[what, seen[what]].append(event)
            seen[what] += 1
    yield from found.values()


def _without(intervals: Iterable[Interval], others: list[Interval]) -> Iterator[Interval]:
    """Yield what of the intervals lies outside of the others, which are disjoint and in order."""
    for start, end in intervals:
        for a, b in within(others, start, end):
            if a > start:
                yield start, a
            start = max(start, b)
        if end > start:
            yield start, end
