"""The exercises of notebook 00_ranks: global rank, and taking turns.

A right answer comes first, then its check, then the planted mistakes. The other three exercises are
in `mean.py`, `ring.py` and `report.py`.
"""

import operator
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from course_lib.checks.exercise import CheckFailed, Exercise, Mistake
from course_lib.checks.expect import expect_equal, on_ranks, run
from course_lib.checks.ranks.mean import MEAN, WORLD_SIZES, calls_of
from course_lib.checks.ranks.report import REPORT
from course_lib.checks.ranks.ring import RING
from course_lib.core import Event
from course_lib.ranks import Ranks, span

# --- ranks-1: the number of a rank from its node and its number on that node


def global_rank(node: int, local_rank: int, ranks_per_node: int) -> int:
    """Return the rank of the process with this local rank on this node."""
    return node * ranks_per_node + local_rank


WRONG_NUMBERS: tuple[tuple[str, Callable[[int, int, int], int], str], ...] = (
    (
        "local_rank for rank",
        lambda node, local, size: local,
        "That is the local rank: it starts again at 0 on every node, so two ranks would share it.",
    ),
    (
        "one rank a node",
        lambda node, local, size: node + local,
        "Each node before yours holds ranks_per_node ranks; you count it as one.",
    ),
    (
        "node and local rank swapped",
        lambda node, local, size: local * size + node,
        "Node and local rank are swapped: torchrun fills one node before it begins the next.",
    ),
    (
        "counted from 1",
        lambda node, local, size: node * size + local + 1,
        "Ranks count from 0: the first rank of the first node is rank 0.",
    ),
    (
        "nodes counted from 1",
        lambda node, local, size: (node - 1) * size + local,
        "Nodes count from 0: there are `node` nodes before yours, not `node - 1`.",
    ),
)


def check_global_rank(answer: Callable[[int, int, int], int]) -> str:
    """Check every rank of worlds of 1 to 4 ranks, and of one of 12."""
    worlds = [(1, 1), (1, 2), (2, 1), (1, 3), (3, 1), (1, 4), (2, 2), (4, 1), (3, 4)]
    places = [
        (n, local, size) for nodes, size in worlds for n in range(nodes) for local in range(size)
    ]
    got = [_whole(answer(*place)) for place in places]
    known = (says for _, wrong, says in WRONG_NUMBERS if got == [wrong(*place) for place in places])
    says = next(known, "Count the ranks on the nodes before yours, then those before you on yours.")
    for (node, local_rank, size), number in zip(places, got, strict=True):
        where = f"node {node}, local_rank {local_rank}, ranks_per_node {size}"
        look = "That is a float: `/` makes one, `//` does not." if _is_float(number) else says
        expect_equal(number, global_rank(node, local_rank, size), where=where, look=look)
    return "Each rank has a number of its own, on 1 to 4 nodes."


def _whole(number: Any) -> Any:
    """Return a whole number of any kind as an int: an entry of an integer tensor is one, too."""
    if isinstance(number, torch.Tensor) and number.dim():
        return number
    try:
        return operator.index(number)
    except TypeError:
        return number


def _is_float(number: Any) -> bool:
    return isinstance(number, float) or (
        isinstance(number, torch.Tensor) and number.is_floating_point()
    )


# --- ranks-2: whose turn is it?


def take_turns(rank: int, world_size: int, say: Callable[[], None]) -> None:
    """Call say() on rank 0, then on rank 1, and so on, each when the one before has ended."""
    for turn in range(world_size):
        if turn == rank:
            say()
        dist.barrier()


def _turns(rank: int, answer: Callable[..., None], world_size: int) -> None:
    def say() -> None:
        with span("compute", f"rank {rank} speaks"):
            time.sleep(0.04 * (world_size - rank))

    dist.barrier()  # all begin at the same moment
    answer(rank, world_size, say)


def check_take_turns(answer: Callable[..., None]) -> str:
    """Check, from the events, that ranks speak in order when slow ranks come before quick ones."""
    stuck = "A rank waits for a turn that nobody ends. Every rank has to come to every barrier."
    for p in WORLD_SIZES:
        with Ranks(p) as ranks:
            run(ranks, _turns, answer, p, on={"hang": stuck, "mismatch": stuck})
            events = ranks.events
        turns = [event for event in events if event.kind == "compute"]
        for rank in range(p):
            times = sum(event.rank == rank for event in turns)
            expect_equal(times, 1, where=f"rank {rank} of {p}, calls of say()", look="Speak once.")
        _expect_order(turns, events, p)
    return "Ranks 1 to 4 speak one after another, in order, and wait for each other."


def _expect_order(turns: Sequence[Event], events: Sequence[Event], p: int) -> None:
    kinds = [[call.kind for call in calls_of(events, rank)] for rank in range(p)]
    calls = [len(mine) - 1 for mine in kinds]  # without the check's own
    order = [event.rank for event in sorted(turns, key=lambda event: event.start_s)]
    overlap = any(after.start_s < before.end_s for before, after in pairwise(turns))
    if order != list(range(p)) or overlap:
        how = "several speak at once" if overlap else "one at a time"
        raise CheckFailed(
            f"{on_ranks(p)}, they speak in the order {order}, {how}. {_why(kinds, order, overlap)}"
        )
    if p > 1 and max(calls) == 0:
        raise CheckFailed(
            f"{on_ranks(p)}, the order was right, but nobody waited for anybody. Sleeping is "
            "guessing: on a busy machine the order will be another one. Use dist.barrier()."
        )
    if max(calls) > p:
        enough = "1 is enough" if p == 1 else f"{p} are enough"
        raise CheckFailed(f"{on_ranks(p)}, a rank makes {max(calls)} calls; {enough}.")


def _why(kinds: Sequence[Sequence[str]], order: Sequence[int], overlap: bool) -> str:
    most = max(map(len, kinds))  # with the check's own barrier
    if most == 1:
        return "Nobody waits: no rank knows how far the others are without a barrier or a message."
    if not overlap and list(order) == list(reversed(range(len(order)))):
        return "That is the order turned round: rank 0 goes first."
    if most == 2 and {kind for mine in kinds for kind in mine} == {"barrier"}:
        return (
            "One barrier makes no turns: ranks that speak on the same side of it do not wait for "
            "each other. Each turn has to end with a barrier."
        )
    return "In turn t only rank t speaks; the others wait until it has ended."


def _nobody_waits(rank: int, world_size: int, say: Callable[[], None]) -> None:
    say()


def _sleeps(rank: int, world_size: int, say: Callable[[], None]) -> None:
    time.sleep(0.5 * rank)
    say()


def _barrier_for_the_speaker_only(rank: int, world_size: int, say: Callable[[], None]) -> None:
    for turn in range(world_size):
        if turn == rank:
            say()
            dist.barrier()


def _turned_round(rank: int, world_size: int, say: Callable[[], None]) -> None:
    take_turns(world_size - 1 - rank, world_size, say)


def _leaves_after_its_turn(rank: int, world_size: int, say: Callable[[], None]) -> None:
    for turn in range(rank + 1):
        if turn == rank:
            say()
        dist.barrier()


def _speaks_in_every_turn(rank: int, world_size: int, say: Callable[[], None]) -> None:
    for _ in range(world_size):
        say()
        dist.barrier()


EXERCISES = (
    Exercise(
        key="ranks-1",
        title="global rank from node and local rank",
        check=check_global_rank,
        reference=global_rank,
        mistakes=tuple(Mistake(name, wrong, says) for name, wrong, says in WRONG_NUMBERS),
    ),
    Exercise(
        key="ranks-2",
        title="whose turn to speak",
        check=check_take_turns,
        reference=take_turns,
        mistakes=(
            Mistake("nobody waits", _nobody_waits, "Nobody waits: no rank knows"),
            Mistake("sleeps", _sleeps, "Sleeping is guessing"),
            Mistake(
                "a barrier inside the if",
                _barrier_for_the_speaker_only,
                "One barrier makes no turns",
            ),
            Mistake("turned round", _turned_round, "the order turned round: rank 0 goes first"),
            Mistake("leaves after its turn", _leaves_after_its_turn, "a turn that nobody ends"),
            Mistake("speaks in every turn", _speaks_in_every_turn, "Speak once"),
        ),
    ),
    MEAN,
    RING,
    REPORT,
)
