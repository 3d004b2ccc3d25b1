"""The pictures of lesson 06, drawn from runs that a test makes up."""

import torch
from matplotlib.figure import Figure

from course_lib.core import Link
from course_lib.ddp import pictures
from course_lib.ddp.cost import StepCost, ddp_step, exposed_s, ready_by_share
from course_lib.ddp.explorer import bucket_explorer
from course_lib.ranks.timing import Measured

COST = StepCost(forward_s=0.1, ready_s=ready_by_share([1] * 4, 0.2), grad_bytes=(100,) * 4)
LINKS = {
    "fast": Link(latency_s=0.01, bytes_per_s=1e5),
    "slow": Link(latency_s=0.04, bytes_per_s=1e3),
}


def measured(size, link):
    return Measured((0.3, 0.4), ddp_step(COST, size, 2, link))


def swept():
    return {
        name: {size: measured(size, link) for size in (100, 200, 400)}
        for name, link in LINKS.items()
    }


def title_of(figure):
    return " ".join(figure.texts[0].get_text().split())


def test_a_step_on_the_clock_tells_what_was_measured():
    late, early = (
        Measured(seconds, ddp_step(COST, 200, 2, LINKS["fast"]))
        for seconds in ((0.5, 0.6, 0.7), (0.3, 0.4, 0.5))
    )
    figure, alt = pictures.overlap_on_the_clock(COST, 200, LINKS["fast"], late, early)
    assert title_of(figure) == "Overlap: a step takes 400 ms instead of 600 ms"
    assert alt.startswith(title_of(figure))
    assert isinstance(pictures.one_bucket_size(COST, 200, LINKS["fast"], early.events, "t"), Figure)


def test_the_sweep_tells_the_best_number_of_each_link_with_and_without_runs():
    for runs, note in ((swept(), "4 emulated layers"), (None, "4 layers")):
        figure, alt = pictures.sweep(COST, LINKS, (1, 2, 4), runs)
        assert title_of(figure) == "Predicted best number of buckets: 4 at fast, 2 at slow"
        assert any(note in text.get_text() for text in figure.texts)
        assert alt.startswith(title_of(figure))
        assert alt.endswith("at fast: 321 ms, 324 ms with 1, 321 ms with 4")


def test_the_slider_starts_where_it_is_told_and_its_finding_is_the_title():
    seen = bucket_explorer(COST, LINKS, swept(), num_buckets=2)
    assert seen.values() == {"num_buckets": 2, "link": "fast"}
    assert seen.alt == title_of(seen.figure)
    paper_ms = 1e3 * exposed_s(COST, 200, 2, LINKS["fast"])
    assert f"by formula {paper_ms:.0f} ms" in seen.alt


def test_the_order_of_the_hooks_is_told_with_what_is_out_of_line():
    figure, alt = pictures.ready_order(["a", "b", "c"], ["c", "a", "b"])
    assert "except for 2 of 3" in title_of(figure)
    assert alt.startswith(title_of(figure))


def test_what_is_delivered_is_told_for_every_hook():
    right = torch.tensor([3.0, 4.0])
    means = {
        "none": [right, right],
        "half": [right * 0.97, right * 0.98],
        "top": [right / 2, right * 0.9],
    }
    figure, alt = pictures.delivered([1, 8], means, {"none": 100.0, "half": 50.0, "top": 3.0})
    assert (
        title_of(figure) == "top, constant gradient: 50 % missing after step 1, 10 % after step 8"
    )
    assert alt.endswith("half 2.0 %")
    assert any("half 50.0 %, top 3.0 %" in text.get_text() for text in figure.texts)


def test_what_is_missing_is_a_share_of_the_gradient():
    right = torch.tensor([3.0, 4.0])
    errors = pictures.errors_of({"half": [right / 2, right]}, right)
    assert errors == {"half": [50.0, 0.0]}


def test_parameters_out_of_line_are_counted():
    assert pictures.num_out_of_line(["a", "b", "c"], ["c", "b", "a"]) == 0
    assert pictures.num_out_of_line(["a", "b", "c"], ["c", "a", "b"]) == 2
