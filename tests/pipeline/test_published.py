"""Published runs beside the formulas of a pipeline: they fit, and nothing was fitted to them."""

import pytest

from course_lib.pipeline import one_f_one_b, simulate
from course_lib.pipeline.cost import (
    PUBLISHED,
    BatchCost,
    bubble_fraction,
    bubble_rate_table,
    h100_stages,
    parts_table,
    zero_bubble_throughput,
)
from course_lib.pipeline.pictures import h100_picture, throughput_picture
from course_lib.pipeline.times import INSTANT


def test_eight_h100_lose_what_bubble_and_slowest_stage_say():
    found = h100_stages()
    assert found.stages == [1, 2, 4, 8]
    assert found.formula[0] == found.bubble_only[0] == found.published[0]
    for formula, published in zip(found.formula, found.published, strict=True):
        assert formula == pytest.approx(published, rel=0.05)
    assert found.published[-1] < 0.75 * found.bubble_only[-1]  # the bubble is not the reason
    assert 1 - found.bubble_only[-1] / found.published[0] == pytest.approx(bubble_fraction(8, 256))
    assert found.head_layers == pytest.approx(3.2, abs=0.01)


@pytest.mark.parametrize("model", ["1.5B", "6.2B"])
def test_simulated_samples_per_second_are_a_few_percent_above_the_published_ones(model):
    found = zero_bubble_throughput(model)
    assert found.num_micro_batches == [24, 32, 64]
    for ours, theirs in (("1F1B", "1F1B"), ("ZB-H1", "ZB-1p")):
        pairs = zip(found.simulated[ours], found.published[theirs], strict=True)
        assert all(published < simulated < 1.08 * published for simulated, published in pairs)
    gains = [
        fast / slow
        for fast, slow in zip(found.published["ZB-1p"], found.published["1F1B"], strict=True)
    ]
    assert gains == sorted(gains, reverse=True)  # the more micro-batches, the less to gain
    assert gains[-1] > 1


def test_the_tables_have_a_line_for_each_case():
    lines = bubble_rate_table().splitlines()
    assert len(lines) == 1 + len(PUBLISHED)
    for line in lines[1:]:
        _, _, *rates = line.split()
        assert rates[0] == rates[1]
        assert rates[2] == rates[3]
    batch = BatchCost(forward_s=1.0, backward_s=2.0)
    head, *rows = parts_table(4, [4, 8], batch, INSTANT).splitlines()
    assert head.split()[:3] == ["m", "compute", "bubble"]
    assert [row.split() for row in rows] == [
        ["4", "3000.0", "2250.0", "0.0"],
        ["8", "3000.0", "1125.0", "0.0"],
    ]
    assert simulate(one_f_one_b(4, 4), batch.times(4)).step_s == pytest.approx(5.25)


def test_the_pictures_name_their_source_and_their_curves():
    figures = {
        "Ultra-Scale Playbook": h100_picture(h100_stages(), "t"),
        "Qi et al. 2024": throughput_picture(zero_bubble_throughput(), "t"),
    }
    for source, figure in figures.items():
        assert any(source in text.get_text() for text in figure.texts)
