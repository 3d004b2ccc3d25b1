"""The exercises of notebook 04_collectives: a tree, a circle, a ring, a mean, a price, letters.

Rank r always contributes a multiple of 10**r, so that a wrong sum tells which ranks are in it. The
first four stand with their planted mistakes in a file each: `tree`, `circle`, `ring`, `mean`.
"""

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib import collectives
from course_lib.checks.collectives.parts import (
    SENDS,
    WORLD_SIZES,
    everyones,
    me,
    run_answer,
    shared_cause,
    swap,
)
from course_lib.checks.exercise import CheckFailed, Exercise, Mistake
from course_lib.checks.expect import expect_equal, expect_only, expect_traffic
from course_lib.core import INFINIBAND, PCIE, Link
from course_lib.cost import network
from course_lib.ranks import Ranks

# --- collectives-5: the price of the ring

# what a wrong price forgets: (name, seconds of n bytes on p ranks, what the check says)
WRONG_PRICES: tuple[tuple[str, Callable[[float, int, Link], float], str], ...] = (
    (
        "one half only",
        lambda n, p, link: (p - 1) * link.time_s(n / p),
        "That is one half: first reduce-scatter, then all-gather.",
    ),
    (
        "p steps",
        lambda n, p, link: 2 * p * link.time_s(n / p),
        "A step too many: a shard needs p - 1 hops, not p.",
    ),
    (
        "shards for p - 1",
        lambda n, p, link: 2 * (p - 1) * link.time_s(n / (p - 1)),
        "There are p shards, your own is one of them: a shard is n / p bytes.",
    ),
    (
        "doubling",
        lambda n, p, link: network.num_doublings(p) * link.time_s(n),
        "That is the price of doubling: a ring takes more steps, with a shard in each.",
    ),
    (
        "whole tensors",
        lambda n, p, link: 2 * (p - 1) * link.time_s(n),
        "A step moves a shard of n / p bytes, not n.",
    ),
    (
        "latency once",
        lambda n, p, link: link.time_s(2 * (p - 1) * n / p),
        "Every step pays the latency, not the first one only.",
    ),
    (
        "no latency",
        lambda n, p, link: 2 * (p - 1) * n / p / link.bytes_per_s,
        "The latency is missing: it makes small tensors slow.",
    ),
)


def check_ring_all_reduce_s(answer: Callable[..., Any]) -> str:
    """Check many sizes, numbers of ranks and links against the course's formula."""
    slow = Link(name="slow wire", latency_s=0.3, bytes_per_s=1e6)
    cases = list(product((1e6, 8.0), (4, 2, 9), (slow, PCIE, INFINIBAND)))
    got = [answer(*case) for case in cases]
    for (n, p, link), seconds in zip(cases, got, strict=True):
        right = network.ring_all_reduce_s(n, p, link)
        if not _close(seconds, right):
            shown = [f"{s:.4g} s" if isinstance(s, float) else repr(s) for s in (right, seconds)]
            is_now = repr(seconds) if shown[0] == shown[1] else shown[1]
            raise CheckFailed(
                f"{n:,.0f} bytes, {p} ranks, {link}: need {shown[0]}; got {is_now}. "
                f"{_why_priced(cases, got)}"
            )
    return "Right for 2, 4 and 9 ranks, small and large tensors, three links."


def _why_priced(cases: Sequence[tuple[float, int, Link]], got: Sequence[Any]) -> str:
    """Return the cause that fits every case."""
    if any(seconds is None for seconds in got):
        return "Does your function return its result?"
    for _, price, says in WRONG_PRICES:
        if all(_close(s, price(*case)) for s, case in zip(got, cases, strict=True)):
            return says
    return "How many steps are there, and what does one of them cost?"


def _close(seconds: Any, wanted: float) -> bool:
    return isinstance(seconds, int | float) and abs(seconds - wanted) <= 1e-9 * wanted


PRICE = Exercise(
    key="collectives-5",
    title="the price of the ring",
    check=check_ring_all_reduce_s,
    reference=network.ring_all_reduce_s,
    mistakes=tuple(Mistake(*wrong) for wrong in WRONG_PRICES),
)


# --- collectives-6: letters


FILE_IT = "Rank s needs your shard s, and you file its letter under s."


def _delivered(rank: int, answer: Callable[..., Any], p: int) -> Any:
    return answer(torch.arange(2 * p) + 100 * (rank + 1))


def check_all_to_all(answer: Callable[..., Any]) -> str:
    """Check 1 to 4 ranks: shard r of every rank, in the order of the senders, p - 1 messages."""
    for p in WORLD_SIZES:
        with Ranks(p) as ranks:
            got = run_answer(ranks, _delivered, answer, p)
            events = ranks.events
        look = shared_cause(got, [_filed_causes(rank, p) for rank in range(p)]) or FILE_IT
        for rank, filed in enumerate(got):
            wanted = _all_letters(p)[:, rank].flatten()
            expect_equal(filed, wanted, where=f"rank {rank} of {p}", look=look)
        expect_only(events, *SENDS, says="Build it from exchange.")
        says = "Send each rank its own shard only."
        expect_traffic(events, p, max_messages=p - 1, max_bytes=16 * (p - 1), says=says)
    return "1 to 4 ranks, one letter to each other rank."


def _all_letters(p: int) -> Tensor:
    """[from, to, 2]"""
    return (torch.arange(2 * p) + 100 * torch.arange(1, p + 1)[:, None]).view(p, p, 2)


def _filed_causes(rank: int, p: int) -> tuple[tuple[Tensor, str], ...]:
    letters = _all_letters(p)
    wanted = letters[:, rank].flatten()
    lost, last = wanted.clone(), wanted.clone()
    lost[2 * rank : 2 * rank + 2] = 0
    last.view(p, 2)[(rank + 1) % p] = 0
    by_arrival = letters[[(rank - i) % p for i in range(p)], rank].flatten()
    same = letters[range(p), range(p)].flatten()
    steps, home = range(1, p), letters[rank, rank]
    late, mixed, forward = (torch.zeros_like(letters[0]) for _ in range(3))
    late[rank] = mixed[rank] = forward[rank] = home
    for d in steps:
        source = (rank - d) % p
        late[d], mixed[d] = letters[source, rank], letters[source, d]
        forward[(rank + d) % p] = letters[source, rank]
    counted = letters[range(p), [(rank - s) % p for s in range(p)]].clone()
    counted[rank] = home
    filed_late = "Filed by time of arrival: the letter of rank s belongs to place s."
    by_step = "A step is a distance, not a rank: send shard `to`"
    return (
        (lost, "The letter to yourself is lost: copy your own shard."),
        (last, "The last distance is missing: count from 1 to p - 1, both included."),
        (by_arrival, filed_late),
        (late.flatten(), filed_late),
        (counted.flatten(), f"{by_step}."),
        (mixed.flatten(), f"{by_step}, and file what comes under `source`."),
        (forward.flatten(), "Filed under the rank you send to: it belongs to place `source`."),
        (same, "Everyone got the same letter of you: send shard `to`, not shard `rank`."),
    )


def _letters(x: Tensor, *, own: bool = True, late: bool = False, same: bool = False) -> Tensor:
    rank, p = me()
    shards, filed = x.tensor_split(p), torch.zeros_like(x)
    places = filed.tensor_split(p)
    if own:
        places[0 if late else rank].copy_(shards[rank])
    for step in range(1, p):
        to, source = (rank + step) % p, (rank - step) % p
        swap(shards[rank if same else to], to, places[step if late else source], source)
    return filed


def _by_step(x: Tensor, *, file_by: str = "source") -> Tensor:
    """Send shard `step`, or store by `step` or `to`."""
    rank, p = me()
    shards, filed = x.tensor_split(p), torch.zeros_like(x)
    places = filed.tensor_split(p)
    places[rank].copy_(shards[rank])
    for step in range(1, p):
        to, source = (rank + step) % p, (rank - step) % p
        place = {"source": source, "step": step, "to": to}[file_by]
        swap(shards[to if file_by == "to" else step], to, places[place], source)
    return filed


def _sends_first(x: Tensor) -> Tensor:
    rank, p = me()
    shards, places = x.tensor_split(p), x.clone().tensor_split(p)
    for step in range(1, p):
        dist.send(shards[(rank + step) % p], (rank + step) % p)
        dist.recv(places[(rank - step) % p], (rank - step) % p)
    return torch.cat(places)


def _everything(x: Tensor) -> Tensor:
    rank, p = me()
    return torch.cat([letter.tensor_split(p)[rank] for letter in everyones(x)])


LETTERS = Exercise(
    key="collectives-6",
    title="all-to-all",
    check=check_all_to_all,
    reference=collectives.all_to_all,
    mistakes=(
        Mistake("own shard lost", lambda x: _letters(x, own=False), says="to yourself is lost"),
        Mistake("by arrival", lambda x: _letters(x, late=True), says="Filed by time of arrival"),
        Mistake("same to all", lambda x: _letters(x, same=True), says="the same letter"),
        Mistake("shard of the step", _by_step, says="A step is a distance"),
        Mistake("step twice", lambda x: _by_step(x, file_by="step"), says="under `source`"),
        Mistake("place of `to`", lambda x: _by_step(x, file_by="to"), says="the rank you send to"),
        Mistake("blocking send on all ranks", _sends_first, says="All of you send first"),
        Mistake("sends everything", _everything, says="its own shard only"),
    ),
)
