"""What the lesson measures and draws: bytes and drops are the formula's, rules balance."""

import pytest

from course_lib.core import CourseError
from course_lib.core.presets import MODELS
from course_lib.expert_parallel import pictures
from course_lib.expert_parallel.cost import (
    RoutedSizes,
    dropped_share,
    exchange_bytes,
    load_imbalance,
    seconds_by_plan,
)
from course_lib.expert_parallel.explorer import by_ep, expert_explorer
from course_lib.expert_parallel.lab import (
    ROW_S,
    dropped_by_layer,
    even_choices,
    layer_runs,
    measure_bytes,
    skewed_choices,
    train_loads,
)
from course_lib.expert_parallel.live import layer_ms
from course_lib.expert_parallel.simulation import count_experts, draw_choices


def title_of(figure):
    return " ".join(figure.texts[0].get_text().split())


@pytest.mark.parametrize("active", [1, 2])
def test_measured_bytes_are_the_formula(pools, active):
    sizes = RoutedSizes(tokens=16, hidden=8, experts=8, active=active, number_bytes=4)
    measured = {p: measure_bytes(pools(p), sizes) for p in (1, 2, 4)}
    for p, found in measured.items():
        assert found == [exchange_bytes(sizes, p)] * p
    figure, alt = pictures.bytes_picture(sizes, {active: measured})
    assert title_of(figure) == alt
    assert f"k = {active}: {sum(exchange_bytes(sizes, 4)) / 1024:.0f} KiB" in alt


def test_experts_sleep_for_each_row_on_the_rank_that_has_it(pools):
    choices = {"even": even_choices(16, 4, 2), "skewed": skewed_choices(16, 4, 2, skew=3)}
    runs = layer_runs(pools(2), choices, experts=4)
    for name, events in runs.items():
        loads = count_experts(choices[name].numpy(), 4)
        for kind, times in (("forward", 1), ("backward", 2)):
            spans = {e.rank: e for e in events if e.kind == kind}
            for rank, rows in enumerate((sum(loads[:2]), sum(loads[2:]))):
                assert spans[rank].label == f"{rows} rows"
                assert spans[rank].end_s - spans[rank].start_s >= times * ROW_S * rows
    figure, alt = pictures.layer_on_the_clock(runs)
    assert title_of(figure) == alt


@pytest.mark.parametrize("skew", [0.0, 1.0])
def test_a_layer_drops_what_the_formula_says(skew):
    factors, choices = (0.25, 1.0, 1.3, 2.0, 4.0), draw_choices(101, 8, 2, skew=skew)
    loads = count_experts(choices, 8)
    dropped = [dropped_by_layer(choices, 8, factor) for factor in factors]
    assert dropped == pytest.approx([dropped_share(loads, factor) for factor in factors])
    figure, alt = pictures.dropped_picture({"all": loads}, {"all": dropped}, factors)
    assert title_of(figure) == alt


def test_both_rules_balance_a_skewed_stream():
    loads = {rule: train_loads(rule) for rule in ("none", "auxiliary loss", "moved bias")}
    last = {
        rule: load_imbalance([sum(one) for one in zip(*steps[-30:], strict=True)], 4)
        for rule, steps in loads.items()
    }
    assert last["none"] > 1.5
    assert max(last["auxiliary loss"], last["moved bias"]) < 1.1
    figure, alt = pictures.loads_picture(loads, 4)
    assert title_of(figure) == alt
    with pytest.raises(CourseError, match="need rule as one of none, "):
        train_loads("bias")


def test_drawings_say_what_they_show():
    figure, alt = pictures.dispatch_picture([[0], [2], [1], [0], [3], [0], [0], [1]], 4, 4)
    assert alt.endswith("after dispatch they have 4, 2, 1, 1")
    words = [text.get_text() for text in figure.axes[0].texts]
    assert words.count("t5 e0") == 2  # at home, and at its expert
    figure, alt = pictures.groups_picture(4, 2, 8)
    assert [text.get_text() for text in figure.axes[0].texts].count("e4–7") == 2
    _, alt = pictures.memory_picture(MODELS["mixtral-8x7b"], 64, 1, (1, 2, 4, 8), 80 * 2**30)
    assert "fits from ep 4 on into 80 GiB" in alt
    _, alt = pictures.published_balance_picture()
    assert "8 to 20 % slower" in alt


def test_the_explorer_exchanges_less_with_fewer_nodes():
    _, anywhere = layer_ms("deepseek-v3", 64, 1.0, True, "any")
    _, limited = layer_ms("deepseek-v3", 64, 1.0, True, "2")
    _, each_copy = layer_ms("deepseek-v3", 64, 1.0, False, "any")
    assert limited < anywhere < each_copy
    alone, nothing = layer_ms("mixtral-8x7b", 1, 1.0, True, "any")
    assert nothing == 0
    assert layer_ms("mixtral-8x7b", 8, 2.0, True, "any")[0] == pytest.approx(2 * alone)
    assert title_of(by_ep("deepseek-v3", 1.2, True, "any")) == expert_explorer().alt


def test_a_plan_that_does_not_fit_is_left_out():
    layer, fullest = (64, 8, 16, 4, 2), {1: 1.0, 2: 1.5, 4: 2.0}
    plans = [(1, 4, None), (2, 2, None), (4, 1, 1.0), (2, 1, None)]
    found = seconds_by_plan(plans, layer, fullest, 48 * 8 * 16, 1e9, float("inf"))
    flop_s = 6 * 8 * 16 * 128 / 1e9
    assert found == {
        (1, 4, None): pytest.approx(flop_s),
        (2, 2, None): pytest.approx(1.5 * flop_s),
        (4, 1, 1.0): pytest.approx(flop_s),
    }
