"""The pictures of lesson 10, drawn from steps on paper and from runs that a test makes up."""

import pytest

from course_lib.core import Link, TwoLevelLink
from course_lib.core.records import Ledger
from course_lib.fsdp import pictures
from course_lib.fsdp.cost import UnitSizes, UnitTimes, fsdp_ledger, fsdp_step, peak_param_bytes
from course_lib.ranks.timing import Measured

LINK = Link(latency_s=0.001, bytes_per_s=1e6)
SIZES = UnitSizes(numels=(2048, 4096, 4096), p=4)
TIMES = UnitTimes(forward_s=(0.01, 0.01), backward_s=(0.02, 0.02))


def title_of(figure):
    return " ".join(figure.texts[0].get_text().split())


def holding(**num_bytes):
    ledger = Ledger()
    ledger.add(0.0, **num_bytes)
    return ledger


def both_ways():
    return {
        name: fsdp_step(TIMES, SIZES, 4, LINK, prefetch=ahead)
        for name, ahead in {"on demand": False, "prefetch": True}.items()
    }


def test_the_sawtooth_tells_the_peak_that_was_measured_and_the_formulas():
    paper, found = fsdp_ledger(SIZES), Ledger()
    for held in paper.bytes_by_kind["params"]:
        found.add(0.0, params=held + 2**10)
    figure, alt = pictures.params_over_step(paper, found)
    peak = peak_param_bytes(SIZES) // 2**10
    assert title_of(figure) == f"Gather, use, free: at most {peak + 1} KiB; the formula says {peak}"
    assert alt.startswith(title_of(figure))


def test_the_sawtooth_of_a_large_model_is_in_mb():
    sizes = UnitSizes(numels=(10**6, *[10**6] * 8), p=4)
    figure, alt = pictures.params_by_formula(sizes, "A model")
    assert alt == "A model on 4 ranks: a rank holds at most 21 of 36 MB"
    assert title_of(figure) == alt


def test_bars_of_memory_tell_their_bytes():
    held = {"freed": holding(params=2**20), "kept": holding(params=2**21)}
    figure, alt = pictures.freed_beside_kept(held, 1.453)
    assert title_of(figure) == "Freeing blocks sends 1.45 times the bytes of DP, but holds less"
    assert alt.startswith(title_of(figure))
    figure, alt = pictures.every_backward_or_the_last(*held.values(), 1.348)
    assert "1.00 MiB if every backward reduces its gradients, 2.00 MiB" in title_of(figure)
    assert alt.endswith("1.35 times the bytes")


def test_timelines_show_rank_0_and_tell_predicted_or_measured_steps():
    plan = both_ways()
    before, after = (1e3 * max(one.end_s for one in events) for events in plan.values())
    figure, alt = pictures.prefetch_steps(plan, LINK)
    assert title_of(figure) == f"Prefetch shortens the step from {before:.0f} ms to {after:.0f} ms"
    assert len(figure.axes) == 2
    real = {name: Measured((0.5,) if n else (0.7,), plan[name]) for n, name in enumerate(plan)}
    figure, alt = pictures.prefetch_steps(plan, LINK, real)
    assert alt.startswith("Prefetch shortens the step from 700 ms to 500 ms")
    assert len(figure.axes) == 3
    nodes = TwoLevelLink(inside=LINK, outside=LINK, ranks_per_node=2)
    figure, alt = pictures.hybrid_steps(plan, nodes, real)
    assert alt == "Hybrid sharding shortens the step from 700 ms to 500 ms"
    assert len(figure.axes) == 4
    assert "predicted" in pictures.hybrid_steps(plan, "predicted: a link")[0].texts[1].get_text()


def test_losses_are_told_first_and_last():
    found = {"GPT-2": ([5.0, 3.0], [5.0, 3.0]), "BERT": ([5.5, 2.6], [5.5, 2.6])}
    figure, alt = pictures.losses_on_two_ranks(found)
    assert title_of(figure) == "Two ranks reach the losses of one: from 5.5 to 2.6 for BERT"
    assert alt.startswith(title_of(figure))
    figure, alt = pictures.losses_beside_fp32({"fp32": [5.0, 3.0], "bf16": [5.0, 3.25]})
    assert title_of(figure) == "In 2 steps the loss stays within 0.25 of fp32's"


def test_published_runs_keep_more_speed_with_as_many_tokens_per_gpu():
    runs = pictures.runs_at_scale()
    assert runs["8B, 16,384 tokens per GPU"] == {8: 6667, 128: 6514}
    assert [*runs["70B, 16,384 per GPU"]] == [512, 256, 128]
    kept = [found[min(found) * 4] / found[min(found)] for found in [*runs.values()][1:]]
    assert kept == pytest.approx([1007 / 1058, 39837 / 44123, 35368 / 39273])
    figure, alt = pictures.fsdp_at_scale()
    assert "keeps 98 % of its tokens/s" in title_of(figure)
    assert "62 % if it has fewer" in title_of(figure)
    assert alt.endswith("plain DP on 256: 40 %")
