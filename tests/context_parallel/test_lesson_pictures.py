"""The drawings of the lesson, and the seconds of each form by formula."""

from dataclasses import replace

import pytest

from course_lib.context_parallel import explorer, live, pictures
from course_lib.context_parallel.cost import (
    FORMS,
    AttentionSizes,
    block_pairs,
    causal_pairs,
    contiguous_imbalance,
)
from course_lib.context_parallel.lab import forward_s
from course_lib.context_parallel.layouts import LAYOUTS, positions
from course_lib.cost.hardware import H100

LLAMA = AttentionSizes(seq=65536, num_heads=32, kv_heads=8, head_dim=128)
FLOP_PER_S, BYTES_PER_S = 500e12, 50e9


def test_a_ring_has_the_keys_of_each_rank_once():
    figure, title = pictures.ring_blocks(3)
    words = [text.get_text() for text in figure.axes[0].texts]
    assert sorted(word for word in words if word.startswith("keys")) == sorted(
        f"keys of {rank}" for rank in range(3) for _ in range(3)
    )
    assert title.endswith("a causal mask empties 3 of 9")


def test_every_part_is_drawn_before_and_during_attention():
    figure, _ = pictures.tokens_to_heads(3)
    words = [text.get_text() for text in figure.axes[0].texts]
    for token in range(3):
        for head in range(3):
            assert words.count(f"t{token} h{head}") == 2


def test_without_messages_all_forms_take_as_long_as_they_compute():
    found = forward_s(LLAMA, 8, FLOP_PER_S, float("inf"))
    pairs = sum(causal_pairs(8, LLAMA.seq)) / 8
    flop = 4 * pairs * LLAMA.num_heads * LLAMA.head_dim
    assert set(found) == set(FORMS)
    for form_s in found.values():
        assert form_s == pytest.approx(flop / FLOP_PER_S, rel=1e-4)


def test_without_computing_a_form_takes_as_long_as_it_sends():
    found = forward_s(LLAMA, 8, float("inf"), BYTES_PER_S)
    for form, form_s in found.items():
        assert form_s == pytest.approx(FORMS[form](LLAMA, 8, 0, "zigzag").forward / BYTES_PER_S)


def test_a_ring_hides_what_an_all_gather_exposes():
    found = forward_s(LLAMA, 8, FLOP_PER_S, BYTES_PER_S)
    gather_s = FORMS["all-gather"](LLAMA, 8, 0, "zigzag").forward / BYTES_PER_S
    assert found["all-gather"] - found["ring"] == pytest.approx(gather_s)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("p", "seq"), [(1, 5), (3, 13), (4, 32)])
def test_pairs_by_block_are_those_of_the_mask(layout, p, seq):
    found = block_pairs(p, seq, layout)
    assert [sum(row) for row in found] == causal_pairs(p, seq, layout)
    held = [positions(rank, p, seq, layout) for rank in range(p)]
    assert found[0][-1] == sum(key <= query for query in held[0] for key in held[-1])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("link", ["NVLink", "InfiniBand NDR"])
def test_the_explorer_takes_as_long_as_the_formula_where_work_is_balanced(form, link):
    for seq in (2**12, 2**16):
        events = live.forward_events(8, seq, form, "zigzag", link)
        sizes = replace(LLAMA, seq=seq)
        formula = forward_s(sizes, 8, live.FLOP_PER_S, H100.links[link])[form]
        assert max(event.end_s for event in events) == pytest.approx(formula, rel=0.01)


def test_in_the_explorer_a_contiguous_ring_waits_for_its_last_rank():
    end_s = {
        layout: max(e.end_s for e in live.forward_events(8, 2**18, "ring", layout, "NVLink"))
        for layout in ("contiguous", "zigzag")
    }
    imbalanced = contiguous_imbalance(8)
    assert end_s["contiguous"] / end_s["zigzag"] == pytest.approx(imbalanced, rel=0.01)


def test_the_explorer_draws_every_form_and_says_what_it_finds():
    drawn = explorer.attention_explorer()
    for form in FORMS:
        drawn.sliders["form"].value = form
        assert drawn.alt.startswith(f"{form}, contiguous, 4,096 tokens on each of 4 ranks: ")
        assert not drawn.image.picture["failed"]


def test_ulysses_is_left_out_where_heads_do_not_suffice():
    assert set(forward_s(LLAMA, 16, FLOP_PER_S, BYTES_PER_S)) == {"ring", "all-gather"}


def test_the_title_names_the_fastest_form_at_both_ends():
    found = {8: {"ring": 2.0, "Ulysses": 1.0}, 16: {"ring": 3.0, "Ulysses": 4.0}}
    _, title = pictures.forms_picture(found.__getitem__, [8, 16], "two forms")
    assert title == "Fastest at 8 tokens: Ulysses; at 16 tokens: ring"


def test_published_runs_are_slower_than_by_their_flop_alone():
    figure, title = pictures.long_runs_picture()
    assert "cp 1, 2, 4, 8" in title
    assert title.endswith("548 tokens/s per GPU are left, by the FLOP of a token 1,088")
    assert figure.axes
