"""The alpha-beta model: formula and simulation agree, and both say what the course says."""

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from course_lib.collectives import messages as m
from course_lib.core import COMMUNICATION_KINDS, CourseError, Link, TwoLevelLink
from course_lib.cost import network as n
from course_lib.cost.bandwidth import bus_bandwidth, bus_factor, fit_link
from tests.collectives import message_lists as lists

LINK = Link(latency_s=1e-3, bytes_per_s=1e9)
SLOW = Link(latency_s=5e-3, bytes_per_s=1e8)
TWO_LEVEL = TwoLevelLink(inside=LINK, outside=SLOW, ranks_per_node=2)
PAIRS = {
    "ring_reduce_scatter": (n.ring_reduce_scatter_s, m.ring_reduce_scatter_messages),
    "ring_all_gather": (n.ring_all_gather_s, m.ring_all_gather_messages),
    "ring_all_reduce": (n.ring_all_reduce_s, m.ring_all_reduce_messages),
    "star_broadcast": (n.star_broadcast_s, m.star_broadcast_messages),
    "tree_broadcast": (n.tree_broadcast_s, m.tree_broadcast_messages),
    "tree_reduce": (n.tree_reduce_s, lists.tree_reduce_messages),
    "recursive_doubling": (n.recursive_doubling_all_reduce_s, m.recursive_doubling_messages),
    "halving_doubling": (n.halving_doubling_all_reduce_s, m.halving_doubling_messages),
    "scatter": (n.scatter_s, m.scatter_messages),
    "gather": (n.gather_s, lists.gather_messages),
    "all_to_all": (n.all_to_all_s, lists.all_to_all_messages),
}
links = st.builds(
    Link, latency_s=st.floats(0, 1e-2), bytes_per_s=st.floats(1e6, 1e12), name=st.just("any")
)


@pytest.mark.parametrize("name", PAIRS)
@given(p=st.integers(1, 17), num_bytes=st.floats(0, 1e9), link=links)
def test_the_formula_is_the_simulation(name, p, num_bytes, link):
    formula_s, messages = PAIRS[name]
    simulated = m.end_of(m.simulate(messages(p, num_bytes), link))
    assert simulated == pytest.approx(formula_s(num_bytes, p, link), rel=1e-9, abs=1e-15)


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("p", range(1, 10))
def test_over_two_kinds_of_link_the_formula_is_never_too_optimistic(name, p):
    formula_s, messages = PAIRS[name]
    simulated = m.end_of(m.simulate(messages(p, 1e6), TWO_LEVEL))
    assert simulated <= formula_s(1e6, p, TWO_LEVEL) * (1 + 1e-9)
    if name.startswith("ring") or name in ("star_broadcast", "scatter", "gather"):
        assert simulated == pytest.approx(formula_s(1e6, p, TWO_LEVEL))


@pytest.mark.parametrize("p", range(1, 10))
def test_the_slowest_hop_sets_the_pace_of_a_ring(p):
    slow = p > 2
    expected = n.ring_all_reduce_s(1e6, p, SLOW if slow else LINK)
    assert n.ring_all_reduce_s(1e6, p, TWO_LEVEL) == pytest.approx(expected)


@pytest.mark.parametrize("p", range(1, 10))
def test_messages_end_with_each_rank_counted_once(p):
    """The lists of messages are right algorithms: every rank's 10**r arrives exactly once."""
    whole = sum(10**rank for rank in range(p))
    held = [[10**rank] * p for rank in range(p)]
    _play(m.ring_all_reduce_messages(p), held)
    assert held == [[whole] * p] * p
    held = [[10**rank] * p for rank in range(p)]
    _play(m.ring_reduce_scatter_messages(p), held)
    assert [held[rank][rank] for rank in range(p)] == [whole] * p
    for build, expected in (
        (m.recursive_doubling_messages, [[whole]] * p),
        (m.tree_broadcast_messages, [[1]] * p),
        (m.star_broadcast_messages, [[1]] * p),
    ):
        held = [[10**rank] for rank in range(p)]
        _play(build(p), held)
        assert held == expected
    held = [[10**rank] for rank in range(p)]
    _play(lists.tree_reduce_messages(p, root=p - 1), held)
    assert held[p - 1] == [whole]
    held = [[10**rank] * p for rank in range(p)]
    _play(_one_by_one(m.halving_doubling_messages(p)), held)
    core = 1 << (p.bit_length() - 1)  # shards, where p is no power of two
    assert [row[:core] for row in held] == [[whole] * core] * p


def _one_by_one(messages):
    return [one for message in messages for one in message.one_by_one()]


@pytest.mark.parametrize(("p", "ranks_per_node"), [(1, 1), (4, 1), (4, 2), (4, 4), (6, 2), (8, 4)])
def test_two_levels_count_each_rank_once_and_take_what_the_formula_says(p, ranks_per_node):
    link = TwoLevelLink(inside=LINK, outside=SLOW, ranks_per_node=ranks_per_node)
    messages = m.hierarchical_all_reduce_messages(p, 1e6, ranks_per_node=ranks_per_node)
    held = [[10**rank] * p for rank in range(p)]
    _play(_one_by_one(messages), held)
    assert held == [[sum(10**rank for rank in range(p))] * p] * p
    formula_s = n.hierarchical_all_reduce_s(1e6, p, link, ranks_per_node=ranks_per_node)
    assert m.end_of(m.simulate(messages, link)) == pytest.approx(formula_s)
    inside, nodes = ranks_per_node, p // ranks_per_node
    by_hand = 2 * (inside - 1) * LINK.time_s(1e6 / inside) + 2 * (nodes - 1) * SLOW.time_s(1e6 / p)
    assert formula_s == pytest.approx(by_hand)
    assert formula_s <= n.ring_all_reduce_s(1e6, p, link) * (1 + 1e-9)


def test_all_to_all_is_a_transpose():
    held = [[10 * rank + shard for shard in range(4)] for rank in range(4)]
    _play(lists.all_to_all_messages(4), held)
    assert held == [[10 * shard + rank for shard in range(4)] for rank in range(4)]


def _play(messages, held):
    """Deliver the messages step by step; those of one step leave before any arrives."""
    for step in sorted({message.step for message in messages}):
        now = [list(row) for row in held]
        for message in (message for message in messages if message.step == step):
            arrives = now[message.sender][message.shard]
            kept = held[message.receiver][message.target_shard] if message.adds else 0
            held[message.receiver][message.target_shard] = kept + arrives


@pytest.mark.parametrize("p", range(2, 9))
def test_a_ring_sends_the_least_and_a_tree_takes_the_fewest_steps(p):
    ring = m.ring_all_reduce_messages(p, 1.0)
    sent = Counter()
    for message in ring:
        sent[message.sender] += message.num_bytes
    assert {round(num, 9) for num in sent.values()} == {round(2 * (p - 1) / p, 9)}
    assert max(message.step for message in ring) == 2 * (p - 1)
    tree = m.tree_broadcast_messages(p)
    assert max(message.step for message in tree) == math.ceil(math.log2(p))


def test_the_postman_and_the_tree():
    """5 MB to 7 friends over 1 MB/s: 35 s one after another, 15 s in three rounds."""
    uplink = Link(latency_s=0.0, bytes_per_s=1e6)
    assert n.star_broadcast_s(5e6, 8, uplink) == 35.0
    assert n.tree_broadcast_s(5e6, 8, uplink) == 15.0
    at_once = [_all_in_step_one(message) for message in m.star_broadcast_messages(8, 5e6)]
    assert m.end_of(m.simulate(at_once, uplink)) == 35.0


def _all_in_step_one(message):
    return m.Message(
        step=1, sender=message.sender, receiver=message.receiver, num_bytes=message.num_bytes
    )


@pytest.mark.parametrize("kind", COMMUNICATION_KINDS)
def test_every_kind_has_a_cost_and_alone_it_is_free(kind):
    assert n.collective_s(kind, 1e6, [3], LINK) == 0
    assert n.collective_s(kind, 1e6, [3], TWO_LEVEL) == 0
    assert n.collective_s(kind, 1e6, [0, 1], LINK) > 0
    assert n.collective_s(kind, 1e6, [1, 2], TWO_LEVEL) > n.collective_s(
        kind, 1e6, [0, 1], TWO_LEVEL
    )


def test_groups_are_ranks_or_their_number():
    assert n.ring_all_reduce_s(1e6, 4, TWO_LEVEL) == n.ring_all_reduce_s(1e6, range(4), TWO_LEVEL)
    assert n.ring_all_reduce_s(1e6, [0, 1], TWO_LEVEL) < n.ring_all_reduce_s(1e6, [0, 2], TWO_LEVEL)


def test_an_unknown_kind_is_told():
    with pytest.raises(CourseError, match="need one of all_reduce"):
        n.collective_s("allreduce", 1e6, 4, LINK)
    with pytest.raises(CourseError, match="bus_factor: need one of"):
        bus_factor("barrier", 4)


@given(p=st.integers(3, 64), link=links.filter(lambda link: link.latency_s > 1e-6))
def test_at_the_crossover_ring_and_doubling_take_as_long(p, link):
    size = n.crossover_bytes(p, link)
    ring_s = n.ring_all_reduce_s(size, p, link)
    assert ring_s == pytest.approx(n.recursive_doubling_all_reduce_s(size, p, link))
    assert n.ring_all_reduce_s(4 * size, p, link) < n.recursive_doubling_all_reduce_s(
        4 * size, p, link
    )


@given(
    k=st.integers(2, 12),
    num_bytes=st.floats(0, 1e12),
    link=links.filter(lambda link: link.latency_s > 1e-6),
)
def test_halving_doubling_beats_the_ring_at_every_size(k, num_bytes, link):
    """For p = 4, 8, 16 ...: the same bytes, 2 log2(p) latencies in place of 2 (p-1)."""
    p = 2**k
    ring_s = n.ring_all_reduce_s(num_bytes, p, link)
    halving_s = n.halving_doubling_all_reduce_s(num_bytes, p, link)
    saved_s = 2 * (p - 1 - k) * link.latency_s
    assert ring_s - halving_s == pytest.approx(saved_s, rel=1e-6, abs=1e-9 * ring_s)
    assert saved_s > 0


@given(num_bytes=st.floats(0, 1e12), link=links)
def test_on_two_ranks_halving_doubling_is_the_ring(num_bytes, link):
    ring_s = n.ring_all_reduce_s(num_bytes, 2, link)
    assert n.halving_doubling_all_reduce_s(num_bytes, 2, link) == pytest.approx(ring_s)


@given(k=st.integers(2, 8), link=links.filter(lambda link: link.latency_s > 1e-6))
def test_doubling_beats_halving_doubling_for_small_tensors(k, link):
    p = 2**k
    size = n.crossover_bytes(p, link, n.halving_doubling_all_reduce_s)
    assert 0 < size < n.crossover_bytes(p, link)
    for bytes_, doubling_wins in ((size / 2, True), (size * 2, False)):
        doubling_s = n.recursive_doubling_all_reduce_s(bytes_, p, link)
        assert (doubling_s < n.halving_doubling_all_reduce_s(bytes_, p, link)) == doubling_wins


@pytest.mark.parametrize("p", [2, 4, 8, 16, 64])
def test_if_the_ranks_stand_in_a_circle_only_the_ring_shares_no_wire(p):
    """Bytes over the busiest wire, in n: those of a rank on the ring, log2(p), and p - 1."""

    def busiest(build):
        return m.busiest_wire_bytes(build(p, 1.0), p)

    assert busiest(m.ring_all_reduce_messages) == pytest.approx(2 * (p - 1) / p)
    assert busiest(m.halving_doubling_messages) == pytest.approx(math.log2(p))
    assert busiest(m.recursive_doubling_messages) == pytest.approx(p - 1)


def test_two_ranks_have_no_crossover():
    assert n.crossover_bytes(2, LINK) == math.inf
    assert n.ring_all_reduce_s(1e6, 2, LINK) > n.recursive_doubling_all_reduce_s(1e6, 2, LINK)


@pytest.mark.parametrize(
    "kind", ["all_reduce", "reduce_scatter", "all_gather", "all_to_all", "send"]
)
@pytest.mark.parametrize("p", [2, 3, 8])
def test_bus_bandwidth_of_a_large_tensor_is_the_wire(kind, p):
    wire = Link(latency_s=0.0, bytes_per_s=3e9)
    time_s = n.collective_s(kind, 1e8, p, wire)
    assert bus_bandwidth(kind, 1e8, time_s, p) == pytest.approx(3e9)


def test_bus_factors_are_those_of_nccl_tests():
    assert [bus_factor(kind, 4) for kind in ("all_reduce", "all_gather", "broadcast")] == [
        1.5, 0.75, 1.0,
    ]  # fmt: skip


@given(link=links)
def test_fit_finds_the_link_that_made_the_times(link):
    sizes = [2**k for k in range(0, 28, 3)]
    found = fit_link(sizes, [link.time_s(size) + 1e-9 for size in sizes])
    assert found.latency_s == pytest.approx(link.latency_s + 1e-9, rel=1e-3, abs=1e-10)
    assert found.bytes_per_s == pytest.approx(link.bytes_per_s, rel=1e-3)


def test_one_slow_sample_does_not_move_the_fit():
    sizes = [2**k for k in range(8, 24, 2)] * 5
    times = [LINK.time_s(size) for size in sizes]
    times[3] *= 50
    found = fit_link(sizes, times)
    assert found.latency_s == pytest.approx(LINK.latency_s)
    assert found.bytes_per_s == pytest.approx(LINK.bytes_per_s)


def test_a_latency_below_zero_is_zero():
    found = fit_link([1e6, 2e6, 4e6], [1e-3, 2.1e-3, 4.4e-3])
    assert found.latency_s == 0.0
    assert found.bytes_per_s == pytest.approx(1e9, rel=0.1)


@pytest.mark.parametrize(
    ("sizes", "times"), [([], []), ([8, 8], [1, 2]), ([8, 16], [0, 1]), ([1, 1e9], [2.0, 1.0])]
)
def test_points_that_fix_no_line_are_told(sizes, times):
    with pytest.raises(CourseError, match="fit_link: need times"):
        fit_link(sizes, times)
