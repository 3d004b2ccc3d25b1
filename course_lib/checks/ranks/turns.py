"""Exercise 2 of 00_ranks: one rank after another.

No duration is judged. A rank may begin when a chain of calls has told it that the one before has
ended: what a rank knew when it entered a call, the others know when they leave that call. In a
thread of its own, say() takes so long that a rank which does not wait for it goes on.
"""

import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import torch
import torch.distributed as dist

from course_lib.checks.ddp.parts import watched_handles
from course_lib.checks.edits import Edit, Own
from course_lib.checks.exercise import Cause, Exercise, failed
from course_lib.checks.expect import on_ranks
from course_lib.checks.on_ranks import At, OnRanks, Run, calls_of
from course_lib.checks.ranks.parts import dropped
from course_lib.core import Event
from course_lib.ranks import record, span

IN_THREAD_S = 0.02
CALLS = "", "called again"
STUCK = Cause("A rank waits for a turn that nobody ends. Every rank has to come to every barrier.")
SPEAK_ONCE = Cause("Speak once, in your own turn.")
NOBODY_WAITS = Cause(
    "Nobody waits: without a barrier or a message, no rank knows how far the others are. (With "
    "sleeps alone, the order can change on a busy machine.)"
)
TURNED_ROUND = Cause("That is the reverse order: rank 0 goes first.")
ONE_BARRIER = Cause(
    "One barrier makes no turns: ranks that speak on the same side of it do not wait for each "
    "other. Each turn has to end with a barrier."
)
ITS_TURN = Cause("In turn t only rank t speaks; the others wait until it has ended.")
TOO_MANY = Cause("Count the turns: world_size of them, with one barrier each.")
NOT_WAITED = Cause(
    "async_op=True gives a handle: all ranks have come when its wait() returns, not before."
)
LEFT_OPEN = Cause(
    "isend gives a handle: keep it, and call wait() on it, or the message may be lost and the next "
    "rank never knows."
)
LEFT_OVER = Cause(
    "The first call was right. Something is left over from it, such as a counter that is global: "
    "keep nothing from one call to the next."
)
IN_A_THREAD = Cause(
    "A thread speaks, and the rank goes on before that has ended. Call say() itself: when it "
    "returns, the turn has ended."
)


@dataclass
class Turn:
    """Actions of one rank: each time it spoke, its calls, and whether it spoke in a thread.

    `open` says whether it returned before say() did, `never_waited` is the number of its barriers
    that were never waited for, `open_sends` that of its sends that have not ended.
    """

    spoke: list[Event]
    calls: list[Event]
    in_thread: bool
    open: bool
    never_waited: int
    open_sends: int


def _take_turns(rank: int, answer: Callable[..., Any]) -> dict[str, Turn]:
    return {call: _one(rank, answer) for call in CALLS}


def _one(rank: int, answer: Callable[..., Any]) -> Turn:
    own, before = threading.current_thread(), set(threading.enumerate())
    threads = set[threading.Thread]()

    def say() -> None:
        with span("compute"):
            if threading.current_thread() is not own:
                threads.add(threading.current_thread())
                time.sleep(IN_THREAD_S)

    posts = cast(Any, dist.group.WORLD).tracer.call_board.history
    earlier = {post.number for post in posts(rank)}
    with record() as log, watched_handles("barrier") as open_ones:
        answer(rank, dist.get_world_size(), say)
        returned_s = time.perf_counter()
        for thread in set(threading.enumerate()) - before:
            thread.join(timeout=1.0)  # the one of a pool does not end
    spoke = [e for e in log.events if e.kind == "compute"]
    is_open = any(event.end_s > returned_s for event in spoke)
    calls = calls_of(log.events)
    sent = sum(post.kind == "send" and post.number not in earlier for post in posts(rank))
    open_sends = sent - sum(call.kind == "send" for call in calls)
    return Turn(spoke, calls, bool(threads), is_open, len(open_ones), open_sends)


def _meetings(run: Run, label: str) -> list[dict[int, Event]]:
    """Return which calls of the ranks belong together: each rank's nth of a kind, or of a pair."""
    met = defaultdict[Any, list[dict[int, Event]]](list)
    for rank in range(run.world_size):
        counts = defaultdict[Any, int](int)
        for call in run.by_rank[rank][label].calls:
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


def _heard(run: Run, label: str) -> list[set[int]]:
    """Return of whom each rank knew, when it spoke, that they had spoken."""
    meetings, turns = _meetings(run, label), [seen[label] for seen in run.by_rank]

    @cache
    def known(rank: int, by_s: float) -> frozenset[int]:
        who = {rank} if turns[rank].spoke[0].end_s <= by_s else set[int]()
        for meeting in meetings:
            if rank in meeting and meeting[rank].end_s <= by_s:
                for other, call in meeting.items():
                    if _tells(other, rank, call) and call.start_s < by_s:
                        who |= known(other, call.start_s)
        return frozenset(who)

    return [set(known(rank, turns[rank].spoke[0].start_s)) for rank in range(run.world_size)]


def _one_after_another(at: At) -> None:
    """Demand that each rank spoke once, after it had heard that the one before had."""
    for other in at.everyone:
        if len(other.seen.spoke) != 1:
            cause = SPEAK_ONCE if at.label == CALLS[0] else LEFT_OVER
            other.fail(f"calls say() {len(other.seen.spoke)} times; need once", cause)
        if other.seen.open_sends > 0:
            other.fail("has not waited for its isend", LEFT_OPEN)
        if other.seen.never_waited:
            other.fail("goes on before its barrier ends", NOT_WAITED)
        if other.seen.open:
            other.fail("returns before its say() has ended", IN_A_THREAD)
    heard, where = _heard(at.run, at.label), on_ranks(at.world_size)
    for rank in range(1, at.world_size):
        if rank - 1 not in heard[rank]:
            says = f"{where}, rank {rank} speaks before it can know that rank {rank - 1} has ended"
            raise failed(says, _why(at, heard))
    most = max(len(other.seen.calls) for other in at.everyone)
    if most > at.world_size:
        enough = "1 is enough" if at.world_size == 1 else f"{at.world_size} are enough"
        raise failed(f"{where}, a rank makes {most} calls; {enough}", TOO_MANY)


def _why(at: At, heard: list[set[int]]) -> Cause:
    kinds = [[call.kind for call in other.seen.calls] for other in at.everyone]
    if not any(kinds):
        return NOBODY_WAITS
    if any(other.seen.in_thread for other in at.everyone):
        return IN_A_THREAD
    if all(rank + 1 in heard[rank] for rank in range(at.world_size - 1)):
        return TURNED_ROUND
    return ONE_BARRIER if all(mine == ["barrier"] for mine in kinds) else ITS_TURN


def _token_not_waited(rank: int, world_size: int, say: Callable[[], None]) -> None:
    token = torch.zeros(1)
    if rank > 0:
        dist.recv(token, rank - 1)
    say()
    if rank + 1 < world_size:
        dist.isend(token, rank + 1)


SAYS_ONCE = ("    say()", "    say()\nspoken.append(1)")
SLEEPS = ("    say()", "    time.sleep(0.05 * rank)\nsay()")

TURNS = Exercise(
    key="ranks-2",
    title="whose turn to speak",
    check=OnRanks(
        observe_on_rank=_take_turns,
        trouble=(
            ("hang", dropped("send"), LEFT_OPEN),
            ("hang", "", STUCK),
            ("mismatch", "", STUCK),
        ),
        expect=(_one_after_another,),
        success="1 to 4 ranks speak one after another, in order, and wait for each other.",
    ),
    wrong=(
        Edit("dist.barrier()", "pass", NOBODY_WAITS),
        Edit("dist.barrier()", "dist.barrier(async_op=True)", NOT_WAITED),
        Edit(
            "dist.barrier()",
            "pass",
            NOBODY_WAITS,
            also=(SLEEPS,),
        ),
        Edit(
            "for turn in",
            "dist.barrier()\nfor turn in",
            ONE_BARRIER,
            also=(
                ("\n        dist.barrier()", ""),
                SLEEPS,
            ),
        ),
        Edit("    dist.barrier()", "        dist.barrier()", ONE_BARRIER),
        Edit("turn == rank", "turn == world_size - 1 - rank", TURNED_ROUND),
        Edit("range(world_size)", "range(rank + 1)", STUCK),
        Edit("turn == rank", "True", SPEAK_ONCE),
        Edit(
            "say):",
            "say, spoken=[]):",
            LEFT_OVER,
            also=(("turn == rank", "turn == rank and not spoken"), SAYS_ONCE),
        ),
        Own(_token_not_waited, LEFT_OPEN),
        Edit("turn == rank", "turn == 0", ITS_TURN),
        Edit("range(world_size)", "range(4)", TOO_MANY),
        Edit(
            "    say()",
            "    from threading import Thread\nThread(target=say).start()",
            IN_A_THREAD,
        ),
    ),
)
