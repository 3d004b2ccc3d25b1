"""Say from flight-recorder dumps who waits for whom, in the words of a hang of our own ranks."""

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

from course_lib.debugging.flight_recorder import Dump, DumpedCall
from course_lib.ranks.hangs import Wait
from course_lib.ranks.report import Report, in_words

SAME_SIZES = {"all_reduce", "broadcast", "reduce", "all_gather", "all_gather_into_tensor"}
NS = 10**9


def find_waits(dumps: Sequence[Dump]) -> list[Wait]:
    """Return the wait of each rank whose oldest open call lacks a rank."""
    found = []
    for dump in dumps:
        call = _open_call(dump)
        missing = _missing(call, dumps) if call else ()
        if call and missing:
            what = f"{call.what}, call {call.number} of group {call.group},"
            found.append(Wait(dump.rank, what, missing, call.line))
    return found


def hang_report(dumps: Sequence[Dump]) -> str:
    """Return who is behind, in which call, since when; the calls that do not match; the waits."""
    waits, parts = find_waits(dumps), list(_mismatch(dumps))
    awaited = sorted({rank for wait in waits for rank in wait.waits_for})
    waiting, there = {wait.rank for wait in waits}, {dump.rank for dump in dumps}
    parts += [
        f"rank {dump.rank} is behind: {_last_call(dump)}"
        for dump in dumps
        if dump.rank in awaited and dump.rank not in waiting
    ]
    if gone := [rank for rank in awaited if rank not in there]:
        parts.append(f"{in_words(gone)} left no dump: ended, or without a flight recorder")
    if waits:
        lines = str(Report(waits=waits)).splitlines()
        parts += lines[waiting != there or bool(gone) :]  # else somebody may still move
        parts.append(_since(dumps))
    elif opened := [call for dump in dumps if (call := _open_call(dump))]:
        first = min(opened, key=lambda call: call.since_ns)
        parts.append(
            f"all ranks have called {first.what}, call {first.number} of group {first.group}, and "
            f"it has not ended on {in_words(sorted(call.rank for call in opened))}: the network, "
            f"sizes that differ, or a GPU that is stuck\n    {first.line}"
        )
    else:
        parts.append("No rank waits: all recorded calls have ended.")
    return "\n".join(parts)


def _open_call(dump: Dump) -> DumpedCall | None:
    """Return the rank's oldest call that has not ended."""
    return next((call for call in dump.calls if not call.is_done), None)


def _members(group: str, dumps: Sequence[Dump]) -> tuple[int, ...]:
    """Return the ranks of a group; where no dump names them, those that have ever called it."""
    named = next((dump.members[group] for dump in dumps if group in dump.members), None)
    seen = (dump.rank for dump in dumps if any(call.group == group for call in dump.calls))
    return named or tuple(seen)


def _missing(call: DumpedCall, dumps: Sequence[Dump]) -> tuple[int, ...]:
    """Return the ranks that have not made their side of a call."""
    members, by_rank = _members(call.group, dumps), {dump.rank: dump.calls for dump in dumps}
    if call.peer is None:
        return tuple(rank for rank in members if not _has_made(by_rank.get(rank, ()), call))
    if call.peer >= len(members):
        return ()
    own, peer = members.index(call.rank), members[call.peer]
    other = "recv" if call.kind == "send" else "send"
    mine = [one for one in by_rank[call.rank] if _is(one, call.group, call.kind, call.peer)]
    theirs = [one for one in by_rank.get(peer, ()) if _is(one, call.group, other, own)]
    return (peer,) if len(theirs) <= mine.index(call) else ()


def _has_made(calls: Sequence[DumpedCall], wanted: DumpedCall) -> bool:
    """Return whether a rank has come as far as this collective; old ones leave the buffer."""
    return any(
        call.group == wanted.group and call.peer is None and call.number >= wanted.number
        for call in calls
    )


def _is(call: DumpedCall, group: str, kind: str, peer: int) -> bool:
    return (call.group, call.kind, call.peer) == (group, kind, peer)


def _mismatch(dumps: Sequence[Dump]) -> Iterator[str]:
    """Yield the lines on the first collective in which ranks made different calls."""
    found: dict[tuple[str, int], list[DumpedCall]] = {}
    for dump in dumps:
        for call in dump.calls:
            if call.peer is None:
                found.setdefault((call.group, call.number), []).append(call)
    for calls in sorted(found.values(), key=lambda calls: min(call.since_ns for call in calls)):
        kinds = {call.kind for call in calls}
        sizes = {call.sizes for call in calls if call.kind in SAME_SIZES}
        if len(kinds) > 1 or len(sizes) > 1:
            first = calls[0]
            where = f"number {first.number} of group {first.group}"
            yield f"mismatch: the ranks made different calls, {where}"
            yield from (f"rank {one.rank} calls {one.what}\n    {one.line}" for one in calls)
            return


def _last_call(dump: Dump) -> str:
    if not dump.calls:
        return "it has made no call"
    last = max(dump.calls, key=lambda call: call.since_ns)
    return (
        f"its last call was {last.what}, call {last.number} of group {last.group}\n    {last.line}"
    )


def _since(dumps: Sequence[Dump]) -> str:
    """Return since when the first rank waits, by the clocks of the nodes."""
    calls = [call for dump in dumps if (call := _open_call(dump)) and _missing(call, dumps)]
    first = min(calls, key=lambda call: call.since_ns)
    at = datetime.fromtimestamp(first.since_ns // NS, UTC)
    return f"rank {first.rank} has waited the longest, since {at:%Y-%m-%d %H:%M:%S} UTC"
