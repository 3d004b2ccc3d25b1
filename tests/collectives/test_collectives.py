"""Hand-written collectives: the same numbers as torch.distributed, with the promised traffic."""

import sys
import time
from collections import Counter

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from course_lib import collectives as c
from course_lib.collectives import messages, ring, ring_all_reduce
from course_lib.collectives.collectives import SMALL_BYTES
from course_lib.collectives.group import GroupMember, shard_of
from course_lib.core import Link
from course_lib.cost import network
from course_lib.ranks import RankError, Ranks
from tests.collectives import message_lists

cloudpickle.register_pickle_by_value(sys.modules[__name__])

LENGTHS = (0, 1, 2, 3, 4, 5, 1000)  # p - 1, p and p + 1 for every p up to 4
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool)
SIZES = (1, 2, 3, 4)


def value(rank, n, dtype=torch.float64):
    """What rank `rank` brings: sums of up to 8 of them are exact in bfloat16, and never neutral."""
    return ((torch.arange(n) % 2 + 1) * 2**rank).to(dtype)


def each_case(rank, test, dtypes=DTYPES):
    """Run `test(rank, n, dtype)` for every length and dtype; name the cases that failed."""
    failed = []
    for dtype in dtypes:
        for n in LENGTHS:
            ours, theirs = test(rank, n, dtype)
            same = (ours is None) == (theirs is None) and (
                theirs is None or (ours.dtype == theirs.dtype and torch.equal(ours, theirs))
            )
            if not same:
                failed.append((str(dtype), n, str(ours), str(theirs)))
    return failed


# --- the law: the same bits as torch.distributed


def all_reduces(rank, n, dtype):
    wanted = value(rank, n, dtype)
    dist.all_reduce(wanted)
    got = [reduce(value(rank, n, dtype)) for reduce in ALL_REDUCES]
    return next((x for x in got if not torch.equal(x, wanted)), got[0]), wanted


def all_reduces_max(rank, n, dtype):
    wanted = value(rank, n, dtype)
    dist.all_reduce(wanted, dist.ReduceOp.MAX)
    got = [reduce(value(rank, n, dtype), "max") for reduce in ALL_REDUCES]
    return next((x for x in got if not torch.equal(x, wanted)), got[0]), wanted


def broadcasts(rank, n, dtype):
    root = dist.get_world_size() - 1
    wanted = value(rank, n, dtype)
    dist.broadcast(wanted, root)
    got = [send(value(rank, n, dtype), root) for send in (c.broadcast, c.star_broadcast)]
    return next((x for x in got if not torch.equal(x, wanted)), got[0]), wanted


def reduces(rank, n, dtype):
    root = dist.get_world_size() // 2
    wanted = value(rank, n, dtype)
    dist.reduce(wanted, root)
    return c.reduce(value(rank, n, dtype), root), wanted if rank == root else None


def reduce_scatters(rank, n, dtype):
    mine = value(rank, n, dtype)
    wanted = mine.clone()
    dist.all_reduce(wanted)
    got = c.reduce_scatter(mine)
    assert torch.equal(mine, value(rank, n, dtype)), "the input has changed"
    return got, wanted.tensor_split(dist.get_world_size())[rank]


def all_gathers(rank, n, dtype):
    wanted = value(0, n, dtype)
    shard = wanted.tensor_split(dist.get_world_size())[rank]
    return c.all_gather(shard, torch.empty_like(wanted)), wanted


def equal_all_gathers(rank, n, dtype):
    p = dist.get_world_size()
    wanted = [torch.empty(n, dtype=dtype) for _ in range(p)]
    dist.all_gather(wanted, value(rank, n, dtype))
    return c.all_gather(value(rank, n, dtype)), torch.cat(wanted)


def scatters(rank, n, dtype):
    p = dist.get_world_size()
    whole = value(1, n, dtype)
    shards = [shard.clone() for shard in whole.tensor_split(p)]
    out = torch.empty_like(shards[rank])
    return c.scatter(whole if rank == p - 1 else None, out, p - 1), shards[rank]


def gathers(rank, n, dtype):
    p = dist.get_world_size()
    whole = value(1, n, dtype)
    out = torch.empty_like(whole) if rank == p - 1 else None
    got = c.gather(whole.tensor_split(p)[rank], out, p - 1)
    return got, whole if rank == p - 1 else None


def all_to_alls(rank, n, dtype):
    p = dist.get_world_size()
    shards = [value(other, n, dtype).tensor_split(p)[rank] for other in range(p)]
    return c.all_to_all(value(rank, n, dtype)), torch.cat(shards)


def two_levels(tensor, op="sum", group=None):
    """The all-reduce in two levels: nodes of two ranks, or one node if their number is odd."""
    p = dist.get_world_size(group)
    return c.hierarchical_all_reduce(tensor, op, group, ranks_per_node=p if p % 2 else 2)


ALL_REDUCES = (
    *(c.all_reduce, c.ring_all_reduce, c.recursive_doubling_all_reduce),
    *(c.halving_doubling_all_reduce, two_levels),
)
LAWS = (
    all_reduces, all_reduces_max, broadcasts, reduces, reduce_scatters, all_gathers,
    equal_all_gathers, scatters, gathers, all_to_alls,
)  # fmt: skip


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
@pytest.mark.parametrize("p", SIZES)
def test_the_same_bits_as_torch(pools, p, law):
    assert pools(p).run(each_case, law) == [[]] * p


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_the_same_bits_on_eight_ranks(pools, law):
    assert pools(8).run(each_case, law, [torch.float64]) == [[]] * 8


def transposed(rank):
    x = (torch.arange(6.0).view(2, 3).t() + 1) * 10**rank  # [3, 2], not contiguous
    y, z, strided = x.clone(), x.t().clone().t(), torch.zeros(9)[::2]
    y = torch.as_strided(x, x.shape, x.stride())
    whole = c.all_gather(c.reduce_scatter(x), torch.empty(2, 3).t())
    c.ring_all_reduce(y)
    c.recursive_doubling_all_reduce(z)
    strided += 10**rank
    c.broadcast(strided, root=1)
    return whole, y, z, strided


def test_tensors_that_are_not_contiguous(pools):
    wanted = (torch.arange(6.0).view(2, 3).t() + 1) * 1111
    for whole, summed, doubling, strided in pools(4).run(transposed):
        assert torch.equal(whole, wanted)
        assert torch.equal(summed, wanted)
        assert torch.equal(doubling, wanted)
        assert strided.tolist() == [10.0] * 5


def in_groups(rank):
    mine = dist.new_group([1, 3]), dist.new_group([0, 2])
    group, members = (mine[0], (1, 3)) if rank % 2 else (mine[1], (0, 2))
    x = torch.full((5,), 10.0**rank)
    results = [reduce(x.clone(), group=group).tolist() for reduce in ALL_REDUCES]
    shard = c.reduce_scatter(x, group=group)
    results.append(c.all_gather(shard, torch.empty(5), group).tolist())
    results.append(c.broadcast(x.clone(), members[1], group).tolist())
    summed = c.reduce(x, members[1], group=group)
    results.append([0.0] * 5 if summed is None else summed.tolist())
    c.barrier(group)
    return results


def test_groups_of_some_ranks(pools):
    for rank, results in enumerate(pools(4).run(in_groups)):
        total, other = (1010.0, 1000.0) if rank % 2 else (101.0, 100.0)
        last = total if rank in (2, 3) else 0.0
        totals = [total] * (len(ALL_REDUCES) + 1)
        assert results == [[x] * 5 for x in (*totals, other, last)]


@pytest.mark.parametrize("p", SIZES)
def test_mean_divides_once(pools, p):
    def means(rank):
        x = torch.full((7,), 10.0**rank, dtype=torch.float64)
        shard = c.reduce_scatter(x, "mean")
        reduced = c.reduce(x, 0, "mean")
        return [*(reduce(x.clone(), "mean") for reduce in ALL_REDUCES), shard, reduced]

    wanted = sum(10.0**rank for rank in range(p)) / p
    for results in pools(p).run(means):
        assert all((x == wanted).all() for x in results if x is not None)


# --- order, and sameness on every rank


def random_sums(rank, n, piece_bytes):
    x = torch.randn(n, generator=torch.Generator().manual_seed(rank))
    return x.clone(), ring_all_reduce(x.clone(), piece_bytes=piece_bytes), c.reduce_scatter(x)


@pytest.mark.parametrize("p", SIZES)
def test_a_ring_sums_in_the_order_of_the_ring(pools, p):
    """Shard s: rank s + 1 first, then s + 2, ... and rank s last; in pieces or not."""
    results = pools(p).run(random_sums, 1001, 256)
    inputs = [x.tensor_split(p) for x, _, _ in results]
    for s in range(p):
        total = inputs[(s + 1) % p][s]
        for step in range(2, p + 1):
            total = total + inputs[(s + step) % p][s]
        assert torch.equal(results[s][2], total)
        for _, reduced, _ in results:
            assert torch.equal(reduced.tensor_split(p)[s], total)


@pytest.mark.parametrize("all_reduce", ALL_REDUCES, ids=lambda call: call.__name__)
def test_all_ranks_hold_the_same_bits(pools, all_reduce):
    def summed(rank):
        return all_reduce(torch.randn(1001, generator=torch.Generator().manual_seed(rank)))

    for p in (*SIZES, 8):
        first, *others = pools(p).run(summed)
        assert all(torch.equal(first, other) for other in others)


@given(n=st.integers(0, 50), p=st.integers(1, 9))
def test_shards_are_those_of_tensor_split(n, p):
    member = GroupMember(0, tuple(range(p)), None)
    shards = [shard_of(torch.arange(n), member, r, "") for r in range(p)]
    assert torch.equal(torch.cat(shards), torch.arange(n))
    assert max(map(len, shards)) - min(map(len, shards)) <= 1


# --- the behaviour: who sends what to whom


PAPER = {
    c.ring_all_reduce: messages.ring_all_reduce_messages,
    c.reduce_scatter: messages.ring_reduce_scatter_messages,
    c.broadcast: messages.tree_broadcast_messages,
    c.star_broadcast: messages.star_broadcast_messages,
    c.reduce: message_lists.tree_reduce_messages,
    c.recursive_doubling_all_reduce: messages.recursive_doubling_messages,
    c.halving_doubling_all_reduce: messages.halving_doubling_messages,
    c.all_to_all: message_lists.all_to_all_messages,
}


def call(rank, collective, n):
    collective(torch.zeros(n))


@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("collective", PAPER, ids=lambda collective: collective.__name__)
def test_real_ranks_send_the_messages_on_paper(pools, collective, p):
    n = 24  # divisible by every p
    ranks = pools(p)
    ranks.run(call, collective, n)
    real = Counter(
        (event.rank, event.peer, event.num_bytes) for event in ranks.events if event.kind == "send"
    )
    paper = PAPER[collective](p, 4 * n)
    assert real == Counter((m.sender, m.receiver, int(m.num_bytes)) for m in paper)
    assert {event.kind for event in ranks.events} <= {"send", "recv", "wait"}


@pytest.mark.parametrize(("p", "ranks_per_node"), [(4, 2), (4, 4), (4, 1), (6, 3), (8, 4)])
def test_two_levels_send_the_messages_on_paper(pools, p, ranks_per_node):
    def two_levels_of_zeros(rank):
        c.hierarchical_all_reduce(torch.zeros(24), ranks_per_node=ranks_per_node)

    ranks = pools(p)
    ranks.run(two_levels_of_zeros)
    real = Counter((e.rank, e.peer, e.num_bytes) for e in ranks.events if e.kind == "send")
    paper = messages.hierarchical_all_reduce_messages(p, 96, ranks_per_node=ranks_per_node)
    assert real == Counter((m.sender, m.receiver, int(m.num_bytes)) for m in paper)
    across = sum(
        e.num_bytes for e in ranks.events if e.kind == "send" and crosses(e, ranks_per_node)
    )
    num_nodes = p // ranks_per_node
    assert across == 2 * (num_nodes - 1) * 96  # of all ranks: each node sends its sums once around


def crosses(event, ranks_per_node):
    """Whether a message leaves its node."""
    return event.rank // ranks_per_node != event.peer // ranks_per_node


@pytest.mark.parametrize("p", [1, 2, 4, 8])
@pytest.mark.parametrize("n", [0, 1, 7, 8, 64, 1001])
def test_halving_doubling_sends_the_bytes_of_the_ring_in_2_log2_p_messages(pools, p, n):
    ranks = pools(p)
    ranks.run(call, c.halving_doubling_all_reduce, n)
    sent = [
        [e.num_bytes for e in ranks.events if (e.kind, e.rank) == ("send", r)] for r in range(p)
    ]
    assert {len(sizes) for sizes in sent} == {2 * network.num_doublings(p)}
    assert sum(map(sum, sent)) == 2 * (p - 1) * 4 * n
    if n % p == 0:
        assert {sum(sizes) for sizes in sent} == {2 * (p - 1) * 4 * n // p}


def test_pieces_change_the_messages_and_not_the_bytes(pools):
    def in_pieces(rank):
        ring_all_reduce(torch.zeros(1000), piece_bytes=256)

    ranks = pools(4)
    ranks.run(in_pieces)
    sent = [event.num_bytes for event in ranks.events if (event.kind, event.rank) == ("send", 0)]
    assert (len(sent), sum(sent)) == (2 * 3 * 4, 2 * 3 * 1000)  # 250 numbers a shard in 4 pieces
    assert max(sent) <= 256


STEPS = {
    ring.reduce_scatter_steps: messages.ring_reduce_scatter_messages,
    ring.all_gather_steps: messages.ring_all_gather_messages,
    lambda rank, p: ring.reduce_scatter_steps(rank, p) + ring.all_gather_steps(rank, p): (
        messages.ring_all_reduce_messages
    ),
}


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
def test_the_steps_of_the_ring_are_the_messages_on_paper(steps, p):
    paper = STEPS[steps](p)
    for rank in range(p):
        took = steps(rank, p)
        sent = [(m.shard, m.adds) for m in paper if m.sender == rank]
        received = [(m.shard, m.adds) for m in paper if m.receiver == rank]
        assert [(step.send, step.adds) for step in took] == sent
        assert [(step.receive, step.adds) for step in took] == received


def in_pairs(rank, n):
    """The ring as NCCL needs it: who starts what together, and the sums."""
    together, start_exchange = [], ring.start_exchange

    def noted(member, out, to, into, source):
        together.append((to - rank, rank - source, out.numel(), into.numel()))
        return start_exchange(member, out, to, into, source)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ring, "needs_pairs", lambda tensor: True)
        patch.setattr(ring, "start_exchange", noted)
        patch.setattr(ring.GroupMember, "irecv", None)  # nothing starts alone
        patch.setattr(ring.GroupMember, "isend", None)
        x = torch.full((n,), 10.0**rank)
        shard, whole = c.reduce_scatter(x, "mean"), c.all_gather(x)
        return ring_all_reduce(x.clone(), piece_bytes=8), shard, whole, together


@pytest.mark.parametrize("p", SIZES)
def test_for_nccl_each_receive_starts_together_with_a_send(pools, p):
    n = 10
    total = sum(10.0**rank for rank in range(p))
    for reduced, shard, whole, together in pools(p).run(in_pairs, n):
        assert torch.equal(reduced, torch.full((n,), total))
        assert (shard == total / p).all()
        assert whole.view(p, n).unique_consecutive(dim=1).flatten().tolist() == [
            10.0**rank for rank in range(p)
        ]
        assert [pair[:2] for pair in together] == [(1, 1)] * (4 * (p - 1))  # whole shards


def test_small_tensors_take_doubling_and_large_ones_the_ring(pools):
    ranks = pools(4)
    for n, num_messages in ((SMALL_BYTES // 4, 2), (SMALL_BYTES // 4 + 4, 6)):
        ranks.run(call, c.all_reduce, n)
        sends = [e for e in ranks.events if (e.kind, e.rank) == ("send", 0)]
        assert len(sends) == num_messages
    link = Link(latency_s=50e-6, bytes_per_s=2.5e9)
    assert all(network.crossover_bytes(p, link) > SMALL_BYTES for p in range(2, 65))


def test_a_barrier_lets_nobody_go_before_all_have_come(pools):
    def late(rank):
        time.sleep(0.05 * rank)
        came = time.perf_counter()
        c.barrier()
        return came, time.perf_counter()

    for p in SIZES:
        came, went = zip(*pools(p).run(late), strict=True)
        assert min(went) >= max(came)


def test_over_an_emulated_link_the_ring_takes_what_the_formula_says(undisturbed):
    link = Link(latency_s=0.02, bytes_per_s=1e7)

    def timed(rank):
        c.barrier()
        start_s = time.perf_counter()
        c.ring_all_reduce(torch.zeros(100_000))
        return time.perf_counter() - start_s

    formula_s = network.ring_all_reduce_s(400_000, 3, link)
    with Ranks(3, link=link) as ranks:
        measured_s = undisturbed(lambda: max(ranks.run(timed)), formula_s, within=0.25)
    assert 0.95 * formula_s < measured_s < 1.25 * formula_s


# --- bad input: one sentence on every rank, never a hang


X = torch.ones(4)
BAD = {
    "root outside": (lambda rank: c.broadcast(X, root=7), "MeshError", "need a root out of"),
    "root below 0": (lambda rank: c.reduce(X, root=-1), "MeshError", "got -1"),
    "gather root": (lambda rank: c.gather(X, root=9), "MeshError", "Try root=0"),
    "unknown op": (lambda rank: c.all_reduce(X, "avg"), "ValueError", "out of sum, mean, max"),
    "mean of ints": (lambda rank: c.all_reduce(X.long(), "mean"), "ValueError", "Try tensor.flo"),
    "a list": (lambda rank: c.all_reduce(X, group=[0, 1]), "MeshError", "group that holds"),
    "no dims": (lambda rank: c.reduce_scatter(torch.tensor(1.0)), "ShapeError", "one dim"),
    "wrong out": (lambda rank: c.all_gather(X, torch.ones(10)), "ShapeError", "tensor_split(2)"),
    "nodes of 3": (
        lambda rank: c.hierarchical_all_reduce(X, ranks_per_node=3),
        "MeshError",
        "Try ring_all_reduce",
    ),
    "wrong dtype": (lambda rank: c.all_gather(X, torch.ones(8).int()), "ShapeError", "int32"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_told_on_every_rank(pools, name):
    wrong, error, words = BAD[name]
    with pytest.raises(RankError) as caught:
        pools(2).run(wrong)
    assert caught.value.kind == "raised"
    assert [kind for kind, _ in caught.value.failures.values()] == [error] * 2
    for rank, (_, message) in caught.value.failures.items():
        assert f"rank {rank}, " in message
        assert words in message


def test_a_rank_outside_the_group_is_told(pools):
    def outsider(rank):
        group = dist.new_group([0, 1])
        if rank == 2:
            c.all_reduce(torch.ones(4), group=group)

    with pytest.raises(RankError, match="need a group that holds this rank"):
        pools(3).run(outsider)


def test_a_scatter_without_a_tensor_on_the_root_is_told(pools):
    with pytest.raises(RankError, match="need the root's tensor"):
        pools(2).run(lambda rank: c.scatter(None, torch.empty(2)))
    with pytest.raises(RankError, match="shape of its shard 0 of 2"):
        pools(2).run(lambda rank: c.scatter(torch.ones(5), torch.empty(2)))


@pytest.mark.parametrize(
    "collective",
    [
        *(c.ring_all_reduce, c.recursive_doubling_all_reduce, c.halving_doubling_all_reduce),
        *(c.broadcast, c.all_to_all),
    ],
)
@pytest.mark.parametrize("p", [2, 3, 4])
def test_mixed_lengths_are_one_clear_error(pools, p, collective):
    def mixed(rank):
        collective(torch.ones(10 if rank else 12))

    with pytest.raises(RankError) as caught:
        pools(p).run(mixed)
    assert caught.value.kind == "mismatch"
