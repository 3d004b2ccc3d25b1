"""Exercise 2 of 00_ranks: one rank after another.

No duration is judged. A rank may begin when a chain of calls has told it that the ones before have
ended: what a rank knew when it entered a call, the others know when they leave that call. In a
thread of its own, say() takes so long that a rank which does not wait for it goes on.
"""

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from course_lib.checks.edits import Edit, Own
from course_lib.checks.exercise import Cause, Exercise
from course_lib.checks.judge import ByExample
from course_lib.checks.on_ranks import Run, calls_of
from course_lib.checks.ranks.parts import end_all
from course_lib.checks.watch import UNWAITED, Watch
from course_lib.core import Event
from course_lib.ranks import Ranks, record, span

IN_THREAD_S = 0.02
LABELS = "the first call", "the second call"
SPOKE, OPEN, TOO_MANY = "calls of say()", "returns before say() has ended", "calls too many"
EVENTS, KNOWN = "events", "when it speaks, it knows of the end of the ranks"

STUCK = Cause(
    "A rank waits for a turn that nobody ends: every rank has to come to every barrier, and every "
    "message needs its send and its recv."
)
SPEAK_ONCE = Cause("Speak once, in your own turn.")
NOT_KNOWN = Cause(
    "Without a barrier or a message in between, no rank knows how far the others are (with sleeps, "
    "the order can change on a busy machine), and ranks that speak on the same side of a barrier "
    "do not wait for each other. In turn t only rank t speaks, and each turn ends with a barrier."
)
TURNED_ROUND = Cause("That is the reverse order: rank 0 goes first.")
ENOUGH = Cause("Count the turns: world_size of them, with one barrier each.")
KEEP_HANDLE = Cause(
    "async_op=True and isend give a handle, and the call has ended when its wait() returns, not "
    "before: keep it, and wait, or the next rank never knows."
)
LEFT_OVER = Cause(
    "The first call was right. Something is left over from it, such as a counter that is global: "
    "keep nothing from one call to the next."
)
IN_A_THREAD = Cause(
    "A thread speaks, and the rank goes on before that has ended. Call say() itself: when it "
    "returns, the turn has ended."
)


def _observe(rank: int, answer: Callable[..., Any]) -> dict[str, Any]:
    watch, own, p = Watch(), threading.current_thread(), dist.get_world_size()

    def say() -> None:
        with span("compute"):
            if threading.current_thread() is not own:
                time.sleep(IN_THREAD_S)

    for label in LABELS:
        before = set(threading.enumerate())
        with record() as log:
            with watch.step(label) as step:
                answer(rank, p, say)
            returned_s = time.perf_counter()
            for thread in set(threading.enumerate()) - before:
                thread.join(timeout=1.0)  # the one of a pool does not end
            end_all(step)
        spoke, calls = [e for e in log.events if e.kind == "compute"], calls_of(log.events)
        step.show(**{SPOKE: len(spoke), TOO_MANY: max(0, len(calls) - p)})
        step.show(**{OPEN: any(event.end_s > returned_s for event in spoke)})
        step.shown[EVENTS] = spoke[:1], calls
    return watch.seen


@dataclass(frozen=True, kw_only=True)
class InTurn(ByExample):
    """A check by example with a facet for which the events of all ranks are needed, KNOWN."""

    def run_on(self, ranks: Ranks, answer: Any, options: Mapping[str, Any]) -> Run:
        """Run the answer on these ranks; tell of each rank whose end it knew when it spoke."""
        run = super().run_on(ranks, answer, options)
        for label in LABELS if run.by_rank else ():
            steps = [seen[label] for seen in run.by_rank]
            events = [step.pop(EVENTS) for step in steps]
            spoke, calls = [first for first, _ in events], [calls for _, calls in events]
            for step, known in zip(steps, _known(spoke, calls), strict=True):
                step[KNOWN] = known
        return run


def _known(spoke: Sequence[list[Event]], calls: Sequence[list[Event]]) -> list[list[int]]:
    """Return of whom each rank knew, when it spoke, that they had spoken."""
    meetings = _meetings(calls)

    @cache
    def known(rank: int, by_s: float) -> frozenset[int]:
        who = {rank} if spoke[rank] and spoke[rank][0].end_s <= by_s else set[int]()
        for meeting in meetings:
            if rank in meeting and meeting[rank].end_s <= by_s:
                for other, call in meeting.items():
                    if _tells(other, rank, call) and call.start_s < by_s:
                        who |= known(other, call.start_s)
        return frozenset(who)

    return [sorted(known(r, mine[0].start_s)) if mine else [] for r, mine in enumerate(spoke)]


def _meetings(calls: Sequence[list[Event]]) -> list[dict[int, Event]]:
    """Return which calls of the ranks belong together: each rank's nth of a kind, or of a pair."""
    met = defaultdict[Any, list[dict[int, Event]]](list)
    for rank, mine in enumerate(calls):
        counts = defaultdict[Any, int](int)
        for call in mine:
            kind: Any = (call.kind, call.group)
            if call.kind in ("send", "recv"):
                kind = (rank, call.peer) if call.kind == "send" else (call.peer, rank)
            if counts[kind] == len(met[kind]):
                met[kind].append({})
            met[kind][counts[kind]][rank] = call
            counts[kind] += 1
    return [meeting for meetings in met.values() for meeting in meetings]


def _tells(teller: int, rank: int, call: Event) -> bool:
    """Return whether a rank that leaves this call knows what the teller knew when it came."""
    if call.kind in ("broadcast", "scatter"):
        return call.peer == teller
    return call.peer == rank if call.kind in ("reduce", "gather") else True


def _token_not_waited(rank: int, world_size: int, say: Callable[[], None]) -> None:
    token = torch.zeros(1)
    if rank > 0:
        dist.recv(token, rank - 1)
    say()
    if rank + 1 < world_size:
        dist.isend(token, rank + 1)


BARRIER, SPEAKS, MY_TURN = "dist.barrier()", "    say()", "turn == rank"

TURNS = Exercise(
    key="ranks-2",
    title="whose turn to speak",
    check=InTurn(
        observe_on_rank=_observe,
        facets=(UNWAITED, SPOKE, OPEN, KNOWN, TOO_MANY),
        looks=(
            *(("hang", STUCK), ("mismatch", STUCK), (UNWAITED, KEEP_HANDLE), (SPOKE, SPEAK_ONCE)),
            *((OPEN, IN_A_THREAD), (KNOWN, NOT_KNOWN), (TOO_MANY, ENOUGH)),
        ),
        success="1 to 4 ranks speak one after another, in order, and wait for each other.",
    ),
    wrong=(
        Edit(BARRIER, "pass", NOT_KNOWN, also=((SPEAKS, "    time.sleep(0.05 * rank)\nsay()"),)),
        Edit(f"    {BARRIER}", f"        {BARRIER}", NOT_KNOWN),
        Edit(MY_TURN, "turn == 0", NOT_KNOWN),
        Edit(BARRIER, "dist.barrier(async_op=True)", KEEP_HANDLE),
        Own(_token_not_waited, KEEP_HANDLE),
        Edit(MY_TURN, "turn == world_size - 1 - rank", TURNED_ROUND),
        Edit("range(world_size)", "range(rank + 1)", STUCK),
        Edit(MY_TURN, "True", SPEAK_ONCE),
        Edit(
            "say):",
            "say, spoken=[]):",
            LEFT_OVER,
            also=(
                (MY_TURN, f"{MY_TURN} and not spoken"),
                (SPEAKS, "    say()\nspoken.append(1)"),
            ),
        ),
        Edit("range(world_size)", "range(4)", ENOUGH),
        Edit(SPEAKS, "    from threading import Thread\nThread(target=say).start()", IN_A_THREAD),
    ),
)
