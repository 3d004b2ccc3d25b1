"""Seconds of collectives in the alpha-beta model.

One message of n bytes takes alpha + n / beta seconds (`Link.time_s`); beta is in bytes per second,
while papers often write beta for its inverse. A rank sends one message and receives one message at
a time. An algorithm takes its rounds one after another, and a round takes as long as its slowest
message. Adding two tensors is counted as free. Notebook 04_collectives.

Everywhere `num_bytes` is the size of the whole tensor, as in `Event.num_bytes`, and `group` is
either the ranks that take part or their number. A group of one costs nothing.
"""

from collections.abc import Callable, Iterable, Sequence

from course_lib.core.errors import CourseError
from course_lib.core.links import Link, TwoLevelLink

RankGroup = int | Sequence[int]
AnyLink = Link | TwoLevelLink


def ranks_of(group: RankGroup) -> Sequence[int]:
    """Return the ranks of a group: `4 -> range(4)`; a sequence of ranks stays as it is."""
    return range(group) if isinstance(group, int) else group


def slowest_s(num_bytes: float, hops: Iterable[tuple[int, int]], link: AnyLink) -> float:
    """Return the seconds of a round in which each (sender, receiver) moves `num_bytes`."""
    if isinstance(link, Link):
        return link.time_s(num_bytes)
    return max(link.between(*hop).time_s(num_bytes) for hop in hops)


def num_doublings(p: int) -> int:
    """Return the rounds of doubling from 1 to p, ceil(log2 p): 1 -> 0, 2 -> 1, 5..8 -> 3."""
    return (p - 1).bit_length()


# --- rings: p - 1 rounds, in each of them every rank sends one shard to its neighbor


def ring_reduce_scatter_s(num_bytes: float, group: RankGroup, link: AnyLink) -> float:
    """Return the seconds of a ring reduce-scatter: (p-1) * (alpha + n/p / beta).

    Source: NVIDIA nccl-tests, doc/PERFORMANCE.md, "ReduceScatter" (the bytes; it counts no alpha)
    """
    return _ring_s(num_bytes, ranks_of(group), link)


def ring_all_gather_s(num_bytes: float, group: RankGroup, link: AnyLink) -> float:
    """Return the seconds of a ring all-gather: (p-1) * (alpha + n/p / beta).

    Source: MPICH, src/mpi/coll/allgather/allgather_intra_ring.c, "Algorithm: Ring", Cost
    """
    return _ring_s(num_bytes, ranks_of(group), link)


def ring_all_reduce_s(num_bytes: float, group: RankGroup, link: AnyLink) -> float:
    """Return the seconds of a ring all-reduce: 2 (p-1) * (alpha + n/p / beta).

    Source: NVIDIA nccl-tests, doc/PERFORMANCE.md, "AllReduce" (the bytes; it counts no alpha)
    """
    return 2 * _ring_s(num_bytes, ranks_of(group), link)


def _ring_s(num_bytes: float, ranks: Sequence[int], link: AnyLink) -> float:
    p = len(ranks)
    if p == 1:
        return 0.0
    return (p - 1) * link.ring(ranks).time_s(num_bytes / p)


# --- trees, doubling and halving: about log2(p) rounds, of whole tensors or of halves


def tree_broadcast_s(num_bytes: float, group: RankGroup, link: AnyLink) -> float:
    """Return the seconds of a binomial-tree broadcast: ceil(log2 p) * (alpha + n/beta).

    The group's first rank is the root; the number of ranks that have the tensor doubles each round.

    Source: MPICH, src/mpi/coll/bcast/bcast_intra_binomial.c, "Algorithm: Binomial bcast", Cost
    """
    ranks = ranks_of(group)
    rounds = (_tree_hops(ranks, k) for k in range(num_doublings(len(ranks))))
    return sum((slowest_s(num_bytes, hops, link) for hops in rounds), 0.0)


def tree_reduce_s(num_bytes: float, group: RankGroup, link: AnyLink) -> float:
    """Return the seconds of a binomial-tree reduce, the broadcast reversed: the same.

    Source: MPICH, src/mpi/coll/reduce/reduce_intra_binomial.c, Cost (gamma, adding, left out)
    """
    return tree_broadcast_s(num_bytes, group, link)


def recursive_doubling_all_reduce_s(num_bytes: float, group: RankGroup, link: AnyLink) -> float:
    """Return the seconds of a recursive-doubling all-reduce: log2(p) * (alpha + n/beta).

    If p is no power of two, the ranks beyond the next lower one send their tensor first and get
    the sum at the end: two rounds more than for that power of two.

    Source: MPICH, src/mpi/coll/allreduce/allreduce_intra_recursive_doubling.c, Cost and comments
    """
    ranks = ranks_of(group)
    core = 1 << (len(ranks).bit_length() - 1)
    fold = list(zip(ranks[core:], ranks, strict=False))
    total = 2 * slowest_s(num_bytes, fold, link) if fold else 0.0
    for k in range(num_doublings(core)):
        pairs = [(ranks[i], ranks[i ^ (1 << k)]) for i in range(core)]
        total += slowest_s(num_bytes, pairs, link)
    return total


def halving_doubling_all_reduce_s(num_bytes: float, group: RankGroup, link: AnyLink) -> float:
    """Return the seconds of a halving-doubling all-reduce: 2 log2(p) alpha + 2 (p-1)/p n/beta.

    Round k of the halving moves n / 2**(k+1) bytes between ranks 2**k apart, and the doubling moves
    them back. Both halves add up to the bytes of the ring, in fewer messages. If p is no power of
    two, the ranks beyond the next lower one cost two rounds of the whole tensor more.

    Source: MPICH, src/mpi/coll/allreduce/allreduce_intra_reduce_scatter_allgather.c, Cost
    """
    ranks = ranks_of(group)
    core = 1 << (len(ranks).bit_length() - 1)
    fold = list(zip(ranks[core:], ranks, strict=False))
    total = 2 * slowest_s(num_bytes, fold, link) if fold else 0.0
    for k in range(num_doublings(core)):
        pairs = [(ranks[i], ranks[i ^ (1 << k)]) for i in range(core)]
        total += 2 * slowest_s(num_bytes / (2 << k), pairs, link)
    return total


def hierarchical_all_reduce_s(
    num_bytes: float, group: RankGroup, link: AnyLink, *, ranks_per_node: int
) -> float:
    """Return the seconds of an all-reduce in two levels, m ranks in each of p/m nodes.

    2 (m-1) (alpha + n/m / beta) inside, then 2 (p/m-1) (alpha + n/p / beta) outside, each with the
    latency and bandwidth of its own links: a reduce-scatter inside each node, an all-reduce of one
    part in m across nodes, an all-gather inside. Every rank sends across nodes through a port of
    its own. Need p to be a multiple of m.
    """
    ranks, m = ranks_of(group), ranks_per_node
    inside = [ranks[first : first + m] for first in range(0, len(ranks), m)]
    across = [ranks[local::m] for local in range(m)]
    node_s = max(ring_all_reduce_s(num_bytes, node, link) for node in inside)
    return node_s + max(ring_all_reduce_s(num_bytes / m, ring, link) for ring in across)


def barrier_s(group: RankGroup, link: AnyLink) -> float:
    """Return the seconds of a dissemination barrier: ceil(log2 p) empty messages.

    Source: MPICH, src/mpi/coll/barrier/barrier_intra_dissemination.c, "Algorithm: MPI_Barrier"
    """
    ranks = ranks_of(group)
    p, total = len(ranks), 0.0
    for k in range(num_doublings(p)):
        total += slowest_s(0, [(ranks[i], ranks[(i + (1 << k)) % p]) for i in range(p)], link)
    return total


def _tree_hops(ranks: Sequence[int], k: int) -> list[tuple[int, int]]:
    """Return (sender, receiver) in round k: the first 2**k ranks, each to the rank 2**k later."""
    return list(zip(ranks[: 1 << k], ranks[1 << k :], strict=False))


# --- one by one: p - 1 messages through the port of one rank


def star_broadcast_s(num_bytes: float, group: RankGroup, link: AnyLink) -> float:
    """Return the seconds of a linear broadcast, the root to each: (p-1) * (alpha + n/beta)."""
    root, *others = ranks_of(group)
    return sum((link.between(root, other).time_s(num_bytes) for other in others), 0.0)


def scatter_s(num_bytes: float, group: RankGroup, link: AnyLink) -> float:
    """Return the seconds of a linear scatter from the root: (p-1) * (alpha + n/p / beta).

    Source: MPICH, src/mpi/coll/scatterv/scatterv_allcomm_linear.c, "Algorithm: Linear", Cost
    """
    return star_broadcast_s(num_bytes / len(ranks_of(group)), group, link)


def gather_s(num_bytes: float, group: RankGroup, link: AnyLink) -> float:
    """Return the seconds of a linear gather at the root: those of the scatter, reversed."""
    return scatter_s(num_bytes, group, link)


def all_to_all_s(num_bytes: float, group: RankGroup, link: AnyLink) -> float:
    """Return the seconds of a pairwise all-to-all: (p-1) * (alpha + n/p / beta).

    Source: MPICH, src/mpi/coll/alltoall/alltoall_intra_pairwise.c, "Algorithm: Pairwise Exchange"
    """
    ranks = ranks_of(group)
    p = len(ranks)
    if isinstance(link, Link):
        return (p - 1) * link.time_s(num_bytes / p)
    rounds = ([(ranks[i], ranks[(i + k) % p]) for i in range(p)] for k in range(1, p))
    return sum((slowest_s(num_bytes / p, hops, link) for hops in rounds), 0.0)


def send_s(num_bytes: float, group: RankGroup, link: AnyLink) -> float:
    """Return the seconds of one message from the group's first rank to its last: alpha + n/beta."""
    ranks = ranks_of(group)
    return link.between(ranks[0], ranks[-1]).time_s(num_bytes) if len(ranks) > 1 else 0.0


_COSTS: dict[str, Callable[[float, RankGroup, AnyLink], float]] = {
    "all_reduce": ring_all_reduce_s,
    "all_gather": ring_all_gather_s,
    "reduce_scatter": ring_reduce_scatter_s,
    "broadcast": tree_broadcast_s,
    "reduce": tree_reduce_s,
    "scatter": scatter_s,
    "gather": gather_s,
    "all_to_all": all_to_all_s,
    "barrier": lambda num_bytes, group, link: barrier_s(group, link),
    "send": send_s,
    "recv": send_s,
}


def collective_s(kind: str, num_bytes: float, group: RankGroup, link: AnyLink) -> float:
    """Return the seconds of a built-in collective over `link`, with the usual algorithm.

    Rings for all_reduce, all_gather and reduce_scatter, binomial trees for broadcast and reduce,
    linear scatter and gather, pairwise all_to_all. The root is the group's first rank; a send goes
    from the group's first rank to its last.

    Raises: CourseError for a kind that is no communication
    """
    if kind not in _COSTS:
        raise CourseError(f"collective_s: need one of {', '.join(_COSTS)}; got {kind!r}.")
    return _COSTS[kind](num_bytes, group, link)


def crossover_bytes(
    p: int,
    link: Link,
    rival: Callable[[float, RankGroup, AnyLink], float] = ring_all_reduce_s,
) -> float:
    """Return the bytes from which a rival all-reduce beats recursive doubling; inf for p <= 2.

    The rival is the ring, unless you name another function of this module. All times are linear in
    the size, so two sizes determine each.
    """

    def gain_s(num_bytes: float) -> float:
        doubling_s = recursive_doubling_all_reduce_s(num_bytes, p, link)
        return doubling_s - rival(num_bytes, p, link)

    slope = gain_s(link.bytes_per_s) - gain_s(0)
    return abs(gain_s(0) / slope * link.bytes_per_s) if p > 2 else float("inf")
