"""Exercise 5 of 04_collectives: the price of the ring."""

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

from course_lib.checks.exercise import CheckFailed, Exercise, Mistake
from course_lib.core import INFINIBAND, PCIE, Link
from course_lib.cost import network

ALONE = "Alone, a rank sends nothing: there are p - 1 steps in a half, for every p."

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
    alone = answer(1e6, 1, slow)
    if not _close(alone, 0.0):
        raise CheckFailed(f"1 rank: need 0 s; got {alone!r}. {ALONE}")
    return "Right for 1, 2, 4 and 9 ranks, small and large tensors, three links."


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
    mistakes=(
        *(Mistake(*wrong) for wrong in WRONG_PRICES),
        Mistake(
            "a step if alone",
            lambda n, p, link: 2 * max(1, p - 1) * link.time_s(n / p),
            says=ALONE,
        ),
    ),
)
