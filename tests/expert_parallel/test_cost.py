"""Bytes, loads, drops, nodes and memory of experts: each formula against counting one by one."""

import random
from collections import Counter

import pytest

from course_lib.core import CourseError, ShapeError
from course_lib.core.parallelism import Parallelism
from course_lib.core.presets import MODELS
from course_lib.core.specs import capacity_of
from course_lib.cost.params import params_on_rank
from course_lib.expert_parallel.cost import (
    RoutedSizes,
    dropped_share,
    exchange_bytes,
    expert_tensor_bytes,
    level_bytes,
    load_imbalance,
    nodes_reached,
    rank_loads,
    sent_bytes,
    state_bytes,
)
from course_lib.expert_parallel.simulation import (
    count_dispatch,
    count_experts,
    draw_choices,
    mean_nodes,
)

SIZES = RoutedSizes(tokens=12, hidden=10, experts=8, active=2)


@pytest.mark.parametrize("ep", [1, 2, 4])
def test_uniform_bytes_are_those_of_equal_counts(ep):
    counts = [[SIZES.tokens * SIZES.active // ep] * ep for _ in range(ep)]
    for rank in range(ep):
        assert sent_bytes(counts, rank, SIZES.copy_bytes) == exchange_bytes(SIZES, ep)


def test_a_rank_sends_its_row_and_its_column_but_not_to_itself():
    counts = [[1, 10, 100], [1_000, 10_000, 100_000], [7, 70, 700]]
    assert sent_bytes(counts, 1, 2) == ((1_000 + 100_000 + 10 + 70) * 2,) * 2


@pytest.mark.parametrize("active", [1, 2, 8])
@pytest.mark.parametrize("p", [2, 4, 8])
def test_expert_parallelism_sends_k_of_p_parts_of_expert_tensor_parallelism(active, p):
    sizes = RoutedSizes(tokens=64, hidden=8, experts=8, active=active)
    ratio = exchange_bytes(sizes, p).forward / expert_tensor_bytes(sizes, p).forward
    assert ratio == pytest.approx(active / p)


def test_all_copies_of_a_dispatch_go_somewhere():
    inside, outside = level_bytes(1600.0, 16, 4)
    assert inside + outside == pytest.approx(1600 * 15 / 16)
    assert level_bytes(1600.0, 4, 4) == (1200, 0)


@pytest.mark.parametrize("most", [None, 4, 2])
@pytest.mark.parametrize("nodes", [2, 8, 16])
def test_nodes_of_a_token_are_those_of_tokens_drawn(nodes, most):
    choices = draw_choices(1000, 128, 8, nodes=nodes, most_nodes=most)
    found = nodes_reached(nodes, 8, most)
    assert found == pytest.approx(mean_nodes(choices, 128, nodes), rel=0.035)
    _, outside = level_bytes(900.0, 2 * nodes, 2, 8, sends_once=True, most_nodes=most)
    assert outside == pytest.approx(900 / 8 * found * (nodes - 1) / nodes)


def test_tokens_drawn_are_sent_where_their_experts_are():
    choices = draw_choices(400, 8, 2, skew=1.0)
    assert all(len(set(chosen)) == 2 for chosen in choices.tolist())
    tokens, counts = count_experts(choices, 8), count_dispatch(choices, 8, 4)
    assert sum(tokens) == 800
    assert tokens[0] > 3 * tokens[7]
    assert [sum(sent) for sent in zip(*counts, strict=True)] == rank_loads(tokens, 4)
    assert [sum(row) for row in counts] == [200] * 4
    with pytest.raises(CourseError, match="need experts divisible by nodes, and active of at most"):
        draw_choices(1, 8, 3, nodes=4, most_nodes=1)


def test_the_fullest_rank_decides():
    tokens = [8, 0, 1, 1, 2, 0, 0, 0]
    assert rank_loads(tokens, 4) == [8, 2, 2, 0]
    assert load_imbalance(tokens, 4) == pytest.approx(8 / 3)
    assert load_imbalance(tokens) == pytest.approx(8 / 1.5)
    assert load_imbalance([0, 0]) == 1


@pytest.mark.parametrize("factor", [0.5, 1.0, 1.25, 3.0])
def test_what_is_dropped_is_what_no_place_is_left_for(factor):
    draw = random.Random(0)
    choices = draw.choices(range(4), weights=[5, 2, 1, 1], k=90)
    places, dropped = [capacity_of(90, 4, factor)] * 4, 0
    for expert in choices:
        places[expert] -= 1
        dropped += places[expert] < 0
    tokens = [Counter(choices)[expert] for expert in range(4)]
    assert dropped_share(tokens, factor) == pytest.approx(dropped / 90)


@pytest.mark.parametrize("name", ["mixtral-8x7b", "deepseek-v3", "qwen3-30b-a3b"])
def test_states_by_kind_are_those_of_all_layers(name):
    spec, split = MODELS[name], Parallelism(dp=8, tp=2, ep=4, expert_tp=2)
    kinds = state_bytes(spec, split)
    alone = state_bytes(spec, Parallelism())
    assert kinds["experts"] * 8 == alone["experts"]
    assert kinds["split"] * 2 == alone["split"]
    assert kinds["whole"] == alone["whole"]
    ends = 2 * -(-spec.padded_vocab * spec.hidden // 2) + spec.hidden
    assert sum(kinds.values()) == 16 * (params_on_rank(spec, split) - ends)
    sharded = state_bytes(spec, Parallelism(dp=8, tp=2, ep=4, expert_tp=2, zero=3))
    assert sharded["experts"] == pytest.approx(kinds["experts"] / 2)  # 2 ranks hold the same ones
    assert sharded["split"] == pytest.approx(kinds["split"] / 8)


def test_what_cannot_be_is_told():
    with pytest.raises(ShapeError, match="need sizes above 0, and active of at most experts"):
        RoutedSizes(tokens=1, hidden=1, experts=2, active=3)
    with pytest.raises(ShapeError, match="need experts divisible by ep; got 6 and 4"):
        rank_loads([1] * 6, 4)
    with pytest.raises(CourseError, match="need nodes, active and most of at least 1; got 4, 0"):
        nodes_reached(4, 0)
