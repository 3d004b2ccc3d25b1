"""Collective algorithms as lists of messages, and a simulation of such a list on links.

On paper, an algorithm is a list of messages: in which step who sends which shard to whom. The
stepper draws this list, and `simulate` gives every message its time on the links. The formulas of
`course_lib.cost.network` must give the same end. Notebook 04_collectives.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import groupby

from course_lib.core.links import Link, TwoLevelLink
from course_lib.core.records import Event
from course_lib.cost.network import num_doublings


@dataclass(frozen=True, kw_only=True)
class Message:
    """One message: in `step` (from 1), `sender` sends its `shard`; the receiver adds or stores it.

    It lands in the receiver's shard of the same index, or in `to_shard`.
    """

    step: int
    sender: int
    receiver: int
    shard: int = 0
    num_bytes: float = 0.0
    adds: bool = False
    to_shard: int | None = None

    @property
    def target_shard(self) -> int:
        """Index of the receiver's shard where it lands."""
        return self.shard if self.to_shard is None else self.to_shard


# --- rings


def ring_reduce_scatter_messages(p: int, num_bytes: float = 0.0) -> list[Message]:
    """List p - 1 steps: in step t, rank r sends shard r - t to its right, which adds it."""
    return _ring(p, num_bytes, shift=0, adds=True)


def ring_all_gather_messages(p: int, num_bytes: float = 0.0) -> list[Message]:
    """List p - 1 steps: in step t, rank r sends shard r + 1 - t to its right, which stores it."""
    return _ring(p, num_bytes, shift=1, adds=False)


def ring_all_reduce_messages(p: int, num_bytes: float = 0.0) -> list[Message]:
    """List a reduce-scatter, then an all-gather: 2 (p - 1) steps."""
    gather = ring_all_gather_messages(p, num_bytes)
    later = [replace(message, step=message.step + p - 1) for message in gather]
    return ring_reduce_scatter_messages(p, num_bytes) + later


def _ring(p: int, num_bytes: float, *, shift: int, adds: bool) -> list[Message]:
    return [
        Message(
            step=step,
            sender=rank,
            receiver=(rank + 1) % p,
            shard=(rank + shift - step) % p,
            num_bytes=num_bytes / p,
            adds=adds,
        )
        for step in range(1, p)
        for rank in range(p)
    ]


# --- trees and doubling: the whole tensor is shard 0


def star_broadcast_messages(p: int, num_bytes: float = 0.0, root: int = 0) -> list[Message]:
    """List p - 1 steps: the root sends to one rank after another."""
    return [
        Message(step=i, sender=root, receiver=(root + i) % p, num_bytes=num_bytes)
        for i in range(1, p)
    ]


def tree_broadcast_messages(p: int, num_bytes: float = 0.0, root: int = 0) -> list[Message]:
    """List ceil(log2 p) steps: in each, every rank that has the tensor sends it on."""
    return [
        Message(
            step=k + 1,
            sender=(root + i) % p,
            receiver=(root + i + 2**k) % p,
            num_bytes=num_bytes,
        )
        for k in range(num_doublings(p))
        for i in range(min(2**k, p - 2**k))
    ]


def recursive_doubling_messages(p: int, num_bytes: float = 0.0) -> list[Message]:
    """List the rounds: exchange sums with the rank 1, 2, 4 ... away.

    Ranks past the largest power of two send theirs first, and receive the sum last.
    """
    core = 1 << (p.bit_length() - 1)
    fold = [
        Message(step=1, sender=rank, receiver=rank - core, num_bytes=num_bytes, adds=True)
        for rank in range(core, p)
    ]
    first = 2 if fold else 1
    swaps = [
        Message(step=first + k, sender=rank, receiver=rank ^ 2**k, num_bytes=num_bytes, adds=True)
        for k in range(num_doublings(core))
        for rank in range(core)
    ]
    last = first + num_doublings(core)
    unfold = [
        replace(message, step=last, sender=message.receiver, receiver=message.sender, adds=False)
        for message in fold
    ]
    return fold + swaps + unfold


# --- one by one


def scatter_messages(p: int, num_bytes: float = 0.0, root: int = 0) -> list[Message]:
    """List p - 1 steps: the root sends one rank after another its shard."""
    return [
        replace(message, shard=message.receiver, num_bytes=num_bytes / p)
        for message in star_broadcast_messages(p, num_bytes, root)
    ]


# --- the simulation


def simulate(messages: Iterable[Message], link: Link | TwoLevelLink) -> list[Event]:
    """Time every message: return a `send` and a `recv` event for each, as real ranks record them.

    A rank starts a step when its own part of the steps before is done, without waiting for other
    ranks. It sends one message at a time, and receives one at a time.
    """
    done_s: dict[int, float] = defaultdict(float)
    out_free_s: dict[int, float] = defaultdict(float)
    in_free_s: dict[int, float] = defaultdict(float)
    events: list[Event] = []
    for _, one_step in groupby(sorted(messages, key=lambda m: m.step), key=lambda m: m.step):
        ready_s = done_s.copy()
        for m in one_step:
            ready = max(ready_s.get(m.sender, 0.0), ready_s.get(m.receiver, 0.0))
            start_s = max(ready, out_free_s[m.sender], in_free_s[m.receiver])
            end_s = start_s + link.between(m.sender, m.receiver).time_s(m.num_bytes)
            out_free_s[m.sender] = in_free_s[m.receiver] = end_s
            for rank in (m.sender, m.receiver):
                done_s[rank] = max(done_s[rank], end_s)
            events += _both_ends(m, start_s, end_s)
    return events


def _both_ends(m: Message, start_s: float, end_s: float) -> list[Event]:
    ends = (m.sender, "send", "to", m.receiver), (m.receiver, "recv", "from", m.sender)
    return [
        Event(
            rank=rank,
            kind=kind,
            start_s=start_s,
            end_s=end_s,
            num_bytes=round(m.num_bytes),
            label=f"{word} {peer}",
            peer=peer,
            group=tuple(sorted((m.sender, m.receiver))),
        )
        for rank, kind, word, peer in ends
    ]


def end_of(events: Iterable[Event]) -> float:
    """Return the time when the last event ends; 0 if there is none."""
    return max((event.end_s for event in events), default=0.0)
