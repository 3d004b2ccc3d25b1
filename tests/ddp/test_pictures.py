"""The pictures of lesson 06, drawn from runs that a test makes up."""

import torch
from matplotlib.figure import Figure

from course_lib.core import Link
from course_lib.ddp import pictures
from course_lib.ddp.cost import StepCost, ddp_step, ready_by_share
from course_lib.ranks.timing import Measured

COST = StepCost(forward_s=0.1, ready_s=ready_by_share([1] * 4, 0.2), grad_bytes=(100,) * 4)
LINKS = {
    "fast": Link(latency_s=0.01, bytes_per_s=1e5),
    "slow": Link(latency_s=0.01, bytes_per_s=1e3),
}


def measured(size, link):
    return Measured((0.3, 0.4), ddp_step(COST, size, 2, link))


def test_every_picture_is_drawn():
    swept = {
        name: {size: measured(size, link) for size in (100, 200, 400)}
        for name, link in LINKS.items()
    }
    step = measured(200, LINKS["fast"])
    figures = (
        pictures.sweep(COST, LINKS, swept, "title"),
        pictures.one_bucket_size(COST, 200, LINKS["fast"], step.events, "title"),
        pictures.overlap_on_the_clock(COST, 200, LINKS["fast"], step, step, "title"),
        pictures.ready_order(["a", "b", "c"], ["c", "a", "b"], "title"),
        pictures.delivered([1, 2], {"top k": [10.0, 5.0]}, {"top k": 3.0}, "title"),
    )
    assert all(isinstance(figure, Figure) for figure in figures)


def test_what_is_missing_is_a_share_of_the_gradient():
    right = torch.tensor([3.0, 4.0])
    errors = pictures.errors_of({"half": [right / 2, right]}, right)
    assert errors == {"half": [50.0, 0.0]}


def test_parameters_out_of_line_are_counted():
    assert pictures.num_out_of_line(["a", "b", "c"], ["c", "b", "a"]) == 0
    assert pictures.num_out_of_line(["a", "b", "c"], ["c", "a", "b"]) == 2
