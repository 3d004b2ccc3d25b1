"""Collective algorithms as lists of messages, and a simulation of such a list on links.

On paper, an algorithm is a list of messages: in which step who sends which shard to whom. The
stepper draws this list, and `simulate` gives every message its time on the links. The formulas of
`course_lib.cost.network` must give the same end. Notebook 04_collectives.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from course_lib.core.links import Link, TwoLevelLink
from course_lib.core.records import Event
from course_lib.cost.network import num_doublings


@dataclass(frozen=True, kw_only=True)
class Message:
    """One message: in `step` (from 1), `sender` sends its `shard`; the receiver adds or stores it.

    It lands in the receiver's shard of the same index, or in `to_shard`. With `num_shards` it
    carries that many consecutive shards, the first of which is `shard`.
    """

    step: int
    sender: int
    receiver: int
    shard: int = 0
    num_shards: int = 1
    num_bytes: float = 0.0
    adds: bool = False
    to_shard: int | None = None

    @property
    def target_shard(self) -> int:
        """Index of the receiver's shard where it lands."""
        return self.shard if self.to_shard is None else self.to_shard

    def one_by_one(self) -> list["Message"]:
        """Return a message for each shard that it carries: pictures draw an arrow for each."""
        return [
            replace(self, shard=shard, num_shards=1, num_bytes=self.num_bytes / self.num_shards)
            for shard in range(self.shard, self.shard + self.num_shards)
        ]


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


def halving_doubling_messages(p: int, num_bytes: float = 0.0) -> list[Message]:
    """List log2(p) rounds that halve the part to be summed, and as many that send the sums back.

    In round k, rank r keeps the half of its part that bit k of r selects; the rank 2**k away keeps
    the other one. The second half of the rounds is the first one backwards. Ranks past the largest
    power of two send theirs first, and receive the sum last.
    """
    core = 1 << (p.bit_length() - 1)
    num_rounds = num_doublings(core)
    fold = [
        Message(
            step=1,
            sender=rank,
            receiver=rank - core,
            num_shards=core,
            num_bytes=num_bytes,
            adds=True,
        )
        for rank in range(core, p)
    ]
    first = 2 if fold else 1
    halve = [
        Message(
            step=first + k,
            sender=rank,
            receiver=rank ^ 2**k,
            shard=first_shard(rank ^ 2**k, k + 1, core),
            num_shards=core >> (k + 1),
            num_bytes=num_bytes / 2 ** (k + 1),
            adds=True,
        )
        for k in range(num_rounds)
        for rank in range(core)
    ]
    last = first + 2 * num_rounds
    return fold + halve + _sent_back(halve, first + last - 1) + _sent_back(fold, last + 1)


def first_shard(rank: int, num_rounds: int, p: int) -> int:
    """Return where a rank's part begins after so many halvings of p shards: bit 0 decides first."""
    return sum((p >> (k + 1)) * (rank >> k & 1) for k in range(num_rounds))


def _sent_back(messages: Iterable[Message], both_steps: int) -> list[Message]:
    """Return the answers: the receiver sends back what it has summed up, the last one first.

    The steps of a message and its answer add up to `both_steps`.
    """
    return [
        replace(
            message,
            step=both_steps - message.step,
            sender=message.receiver,
            receiver=message.sender,
            adds=False,
        )
        for message in messages
    ]


# --- two levels


def hierarchical_all_reduce_messages(
    p: int, num_bytes: float = 0.0, *, ranks_per_node: int
) -> list[Message]:
    """List a reduce-scatter inside each node, an all-reduce across nodes, an all-gather inside.

    Each of the three is a ring; the ring across nodes has one rank of each node, and sums one of
    `ranks_per_node` parts. Need p to be a multiple of `ranks_per_node`.
    """
    num_nodes = p // ranks_per_node
    inside = [range(first, first + ranks_per_node) for first in range(0, p, ranks_per_node)]
    across = [range(local, p, ranks_per_node) for local in range(ranks_per_node)]
    scatter = ring_reduce_scatter_messages(ranks_per_node, num_bytes)
    reduce = ring_all_reduce_messages(num_nodes, num_bytes / ranks_per_node)
    gather = ring_all_gather_messages(ranks_per_node, num_bytes)
    done = ranks_per_node - 1, ranks_per_node - 1 + 2 * (num_nodes - 1)
    return [
        *(_among(ranks, m, 0, 0, num_nodes) for ranks in inside for m in scatter),
        *(
            _among(ranks, m, done[0], num_nodes * local, 1)
            for local, ranks in enumerate(across)
            for m in reduce
        ),
        *(_among(ranks, m, done[1], 0, num_nodes) for ranks in inside for m in gather),
    ]


def _among(
    ranks: Sequence[int], message: Message, steps: int, first: int, num_shards: int
) -> Message:
    """Return a message of a ring of `ranks`, after so many steps; its shards are this long."""
    return replace(
        message,
        step=steps + message.step,
        sender=ranks[message.sender],
        receiver=ranks[message.receiver],
        shard=first + num_shards * message.shard,
        num_shards=num_shards,
    )


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


def busiest_wire_bytes(messages: Iterable[Message], p: int) -> float:
    """Return the bytes over the busiest wire, summed over the steps, if ranks stand in a circle.

    Each rank has a wire to its right neighbor and one to its left; a message takes the shorter way
    (if both are equally short, to the right), and messages of one step that need the same wire
    share it.
    """
    loads: dict[int, dict[tuple[int, int], float]] = defaultdict(lambda: defaultdict(float))
    for m in messages:
        to_the_right = (m.receiver - m.sender) % p
        way = 1 if to_the_right <= p - to_the_right else -1
        for hop in range(min(to_the_right, p - to_the_right)):
            loads[m.step][(m.sender + way * hop) % p, way] += m.num_bytes
    return sum((max(by_wire.values()) for by_wire in loads.values()), 0.0)


def end_of(events: Iterable[Event]) -> float:
    """Return the time when the last event ends; 0 if there is none."""
    return max((event.end_s for event in events), default=0.0)
