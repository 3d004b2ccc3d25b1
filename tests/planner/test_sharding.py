"""Sharding of a chain: the optimum of its integer program, and what is known to be best."""

from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from course_lib.core import CourseError
from course_lib.planner import find_cluster
from course_lib.planner.sharding import (
    LAYOUTS,
    WAYS,
    ChainProduct,
    ShardedChain,
    collective_clock,
)

CLUSTER = find_cluster("selene-a100")
HIDDEN = 4096
MLP = [ChainProduct("up", HIDDEN, 4 * HIDDEN), ChainProduct("down", 4 * HIDDEN, HIDDEN)]
LAYER = [ChainProduct("qkv", HIDDEN, HIDDEN), ChainProduct("out", HIDDEN, HIDDEN), *MLP]
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


@given(
    widths=st.lists(st.integers(1, 50), min_size=2, max_size=5),
    tokens=st.integers(1, 100),
    costs=st.tuples(*[st.integers(0, 20)] * len(KINDS)),
    ends=st.tuples(st.sampled_from(LAYOUTS), st.sampled_from(LAYOUTS)),
)
def test_it_finds_the_optimum_of_the_integer_program(widths, tokens, costs, ends):
    """Any prices, of latency as of bytes: the dynamic program misses nothing."""
    prices = dict(zip(KINDS, costs, strict=True))
    chain = ShardedChain(
        [ChainProduct(str(n), *sizes) for n, sizes in enumerate(pairwise(widths))],
        tokens,
        lambda kind, num_bytes: prices[kind] * (100 + num_bytes),
        *ends,
    )
    every = product(WAYS, repeat=len(chain.products))
    assert chain.seconds(chain.best()) == min(map(chain.seconds, every))


def best_splits(products, tokens, layout):
    chain = ShardedChain(products, tokens, collective_clock(CLUSTER, 8), layout, layout)
    return [way.split for way in chain.best()], chain


@pytest.mark.parametrize("layout", ["whole", "tokens"])
def test_an_mlp_of_few_tokens_is_split_as_megatron_splits_it(layout):
    splits, chain = best_splits(MLP, 2048, layout)
    assert splits == ["columns", "rows"]
    kinds = [kind for way in chain.best() for kind, _ in (way.forward, way.backward) if kind]
    if layout == "whole":  # Shoeybi et al. 2019: one sum forward, one backward
        assert kinds == ["all_reduce", "all_reduce"]
    else:  # Korthikanti et al. 2022: the same sums in halves
        assert kinds == ["all_gather", "reduce_scatter", "reduce_scatter", "all_gather"]
    assert best_splits(LAYER, 2048, layout)[0] == ["columns", "rows"] * 2


@pytest.mark.parametrize(
    ("tokens", "splits"),
    [(4 * HIDDEN - 1, ["columns", "rows"]), (4 * HIDDEN + 1, ["tokens", "tokens"])],
)
def test_from_four_tokens_a_hidden_on_data_parallelism_sends_less(tokens, splits):
    """Four halves of a sum of tokens * hidden numbers, against two sums of 4 hidden**2."""
    ring = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1}
    chain = ShardedChain(MLP, tokens, lambda kind, sent: ring[kind] * sent, "tokens", "tokens")
    assert [way.split for way in chain.best()] == splits
    numbers = min(4 * tokens * HIDDEN, 16 * HIDDEN**2)
    assert chain.seconds(chain.best()) == 2 * numbers  # bytes


def test_where_neighbours_disagree_the_tensor_between_them_is_resharded():
    chain = ShardedChain(MLP, 100, lambda kind, num_bytes: num_bytes)
    columns, by_tokens = WAYS[0], WAYS[-1]
    one, other = chain.way_s(MLP[0], columns), chain.way_s(MLP[1], by_tokens)
    between = 2 * 100 * 4 * HIDDEN * 2  # hidden to tokens, and back: an all_to_all each
    after = 100 * HIDDEN * 2  # tokens to whole: an all_gather
    assert chain.seconds([columns, by_tokens]) == one + other + between + after


@pytest.mark.parametrize("sent", [1e6, 3e7])
def test_the_clock_is_the_clusters(sent):
    clock = collective_clock(CLUSTER, 8)
    assert clock("all_reduce", sent) == CLUSTER.collective_s("all_reduce", sent, 8)
    exchanged = CLUSTER.collective_s("all_gather", sent / 8, 8)
    assert clock("all_to_all", sent) == pytest.approx(exchanged)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (([],), "need at least one product; got none"),
        (([MLP[0], MLP[0]],), "as many inputs of up as outputs of up; got 4096 and 16384"),
        ((MLP, "rows"), "need a layout out of whole, tokens, hidden; got 'rows'"),
        ((MLP, "whole", "rows"), "need a layout out of whole, tokens, hidden; got 'rows'"),
    ],
)
def test_a_chain_that_is_none_is_refused(arguments, says):
    products, *layouts = arguments
    with pytest.raises(CourseError, match=says):
        ShardedChain(products, 8, collective_clock(CLUSTER, 8), *layouts)
