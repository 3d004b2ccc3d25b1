"""Pictures of the lesson on ZeRO: titles and alt texts tell the numbers that are drawn."""

import pytest

from course_lib.core.records import Ledger
from course_lib.zero import pictures
from course_lib.zero.explorer import shards_explorer


def title_of(figure):
    return " ".join(figure.texts[0].get_text().split())


def a_step():
    ledger = Ledger()
    for time_s, params, grads in ((0.0, 8, 0), (0.1, 16, 0), (0.2, 16, 4), (0.3, 8, 2)):
        ledger.add(time_s, params=params * 2**10, grads=grads * 2**10)
    return ledger


@pytest.mark.parametrize(
    ("drawn", "title", "told"),
    [
        (
            pictures.states_on_paper(),
            "Stage 1 tends to 4 bytes",
            "30.1, 15.1 and 0.117 of 120",
        ),
        (pictures.four_tensors(4), "23 numbers on 4 ranks: 6 each, 1 of padding", "4 tensors"),
        (pictures.grads_over_time(a_step(), 1), "Stage 1: at most 4 KiB of gradients", "whole"),
        (pictures.grads_over_time(a_step(), 2), "Stage 2's engine: at most 4 KiB", "come and go"),
        (pictures.params_over_time(a_step()), "8 KiB of parameters, at the peak 16", "tooth"),
        (
            pictures.sent_by_stage([1, 8]),
            "1.5 times DDP's bytes with m = 1, 12 times",
            "send 1 and 4.5 times",
        ),
        (
            pictures.moments_by_rank(1024, [4, 4, 4, 4], [7, 3, 3, 3]),
            "PyTorch's fullest rank keeps 7 KiB, ours 4",
            "4 KiB",
        ),
    ],
)
def test_title_and_alt_tell_what_is_drawn(drawn, title, told):
    figure, alt = drawn
    assert title in title_of(figure)
    assert told in alt


def test_what_is_measured_is_told():
    held = {zero: [16.0, 16.0 / zero] for zero in pictures.STAGES}
    figure, _ = pictures.states_on_ranks(1024, [1, 4], held)
    assert "One rank holds 16 KiB, each of 4 ranks 16, 8, 5 KiB" in title_of(figure)
    figure, alt = pictures.sent_by_stage([1, 2], {1: [1, 1], 2: [1, 1.5], 3: [2, 5]})
    assert "5 times with m = 2" in title_of(figure)
    assert alt.endswith("stages 1 and 2 then send 1 and 1.5 times")


def test_the_formula_is_the_papers():
    for zero, printed in pictures.TABLE_1_GB.items():
        for p, published_gb in zip(pictures.TABLE_1_RANKS, printed, strict=True):
            held_gb = pictures.held_bytes(pictures.TABLE_1_PARAMS, zero, p) / 1e9
            assert held_gb == pytest.approx(published_gb, rel=0.03)  # the paper rounds


def test_the_slider_cuts_the_parameter_for_one_rank_too():
    seen = shards_explorer()
    assert seen.alt.endswith("for 4 ranks")
    seen.sliders["p"].value = 1
    assert seen.alt.endswith("for 1 rank")
