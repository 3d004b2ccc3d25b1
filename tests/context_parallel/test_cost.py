"""Cost, lab and pictures of context parallelism: what is counted, measured and drawn agrees."""

import itertools
import sys
from dataclasses import replace

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from course_lib.context_parallel.cost import (
    FORMS,
    AttentionSizes,
    causal_pairs,
    contiguous_imbalance,
    hides_from,
    imbalance,
    kept_bytes,
    ulysses_bytes,
)
from course_lib.context_parallel.lab import (
    ATTENTION,
    RingRuns,
    fitted_pair_s,
    measure_bytes,
    measure_ring,
    own_qkv,
)
from course_lib.context_parallel.layouts import LAYOUTS, positions
from course_lib.context_parallel.masks import HeldTokens, sees
from course_lib.context_parallel.pictures import (
    busy_picture,
    bytes_picture,
    causal_work,
    hiding_picture,
    memory_picture,
    ring_on_the_clock,
)
from course_lib.core import CourseError, ShapeError
from course_lib.core.records import Event
from course_lib.cost.hardware import H100
from course_lib.memory.saved_tensors import measure_saved

cloudpickle.register_pickle_by_value(sys.modules[__name__])

SIZES = AttentionSizes(batch=2, seq=48, num_heads=8, kv_heads=4, head_dim=4, number_bytes=4)


def title_of(figure):
    return " ".join(figure.texts[0].get_text().split()).replace("all- ", "all-")  # wrapped there


# --- work


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("p", "seq"), [(1, 5), (3, 13), (4, 32)])
def test_work_is_the_number_of_pairs_in_the_mask(layout, p, seq):
    keys = HeldTokens(torch.arange(seq))
    held = [HeldTokens(torch.tensor(positions(rank, p, seq, layout))) for rank in range(p)]
    counted = [int(sees(own, keys, causal=True).sum()) for own in held]
    assert causal_pairs(p, seq, layout) == counted
    assert sum(counted) == seq * (seq + 1) // 2
    assert imbalance(p, seq, layout) == pytest.approx(max(counted) / (sum(counted) / p))


@pytest.mark.parametrize("p", [1, 2, 4, 16])
def test_a_contiguous_ring_is_up_to_twice_as_slow_and_the_others_are_balanced(p):
    seq = 2048 * p
    assert imbalance(p, seq) == pytest.approx(contiguous_imbalance(p), rel=1e-3)
    assert imbalance(p, seq, "zigzag") == 1
    assert imbalance(p, seq, "striped") == pytest.approx(1, abs=1e-3)
    blocks = [rank + 1 for rank in range(p)]  # the own block computed whole
    assert contiguous_imbalance(p, whole_diagonal=True) == pytest.approx(p * p / sum(blocks))


# --- overlap


def test_a_ring_hides_where_computing_takes_as_long_as_sending():
    for number_bytes in (2, 4, 8):
        for causal, backward in itertools.product((True, False), repeat=2):
            options = {"number_bytes": number_bytes, "causal": causal, "backward": backward}
            n = hides_from(1e12, 1e9, kv_share=0.25, **options)
            flop = (10 if backward else 4) * n * n * 64 / (2 if causal else 1)
            grads = max(4, number_bytes) if backward else 0
            assert flop / 1e12 == pytest.approx(2 * n * 16 * (number_bytes + grads) / 1e9)


def test_on_an_h100_with_nvlink_it_takes_about_2200_tokens_a_rank():
    n = hides_from(H100.peak(), H100.links["NVLink"])
    assert n == pytest.approx(2200, rel=0.01)
    assert hides_from(H100.peak(), H100.links["NVLink"], causal=True) == pytest.approx(2 * n)
    assert hides_from(H100.peak(), H100.links["NVLink"], kv_share=1 / 8) == pytest.approx(n / 8)
    with pytest.raises(CourseError, match="need rates, kv_share and number_bytes above 0"):
        hides_from(1e12, 0)


# --- memory


@pytest.mark.parametrize("form", FORMS)
def test_what_is_kept_for_backward_is_the_formula(pools, form):
    sizes = replace(SIZES, kv_heads=8)  # where heads are shared, the kernels of CPUs copy them

    def kept(rank):
        p = dist.get_world_size()
        q, k, v, _ = own_qkv(rank, p, sizes, "contiguous")
        saved = measure_saved(lambda: ATTENTION[form](q, k, v, causal=False))
        return sum(one.num_bytes for one in saved)

    for p in (1, 2):
        assert pools(p).run(kept) == [kept_bytes(sizes, p, form)] * p


def test_only_gathered_keys_grow_with_the_whole_sequence():
    for p in (2, 4):
        longer = replace(SIZES, seq=p * SIZES.seq)
        alone = kept_bytes(SIZES, 1, "ring")
        assert kept_bytes(longer, p, "ring") == kept_bytes(longer, p, "Ulysses") == alone
        gathered = 2 * 2 * 4 * 4 * (longer.seq - SIZES.seq) * 4  # K, V of the other ranks
        assert kept_bytes(longer, p, "all-gather") == alone + gathered
    with pytest.raises(CourseError, match=r"need form as one of ring, .*; got 'rings'"):
        kept_bytes(SIZES, 2, "rings")
    with pytest.raises(ShapeError, match="need seq divisible by p; got 48 and 5"):
        kept_bytes(SIZES, 5, "ring")


def test_sizes_that_cannot_be_are_told():
    with pytest.raises(ShapeError, match="need sizes above 0, and num_heads divisible by"):
        replace(SIZES, kv_heads=3)
    with pytest.raises(ShapeError, match="need num_heads divisible by p, and kv_heads by p or"):
        ulysses_bytes(SIZES, 3)


# --- measured, and drawn beside the formula


def test_measured_bytes_are_the_formula(pools):
    measured = {p: measure_bytes(pools(p), SIZES, "zigzag") for p in (2, 4)}
    for p, by_form in measured.items():
        for form, found in by_form.items():
            assert found == [FORMS[form](SIZES, p, rank, "zigzag") for rank in range(p)]
    figure, alt = bytes_picture(SIZES, measured)
    assert title_of(figure) == alt
    assert "on 4 ranks: ring" in alt
    formula, dots = figure.axes[0].lines[0].get_ydata(), figure.axes[0].lines[1].get_ydata()
    assert (
        list(formula)
        == list(dots)
        == [sum(FORMS["ring"](SIZES, p, 0, "zigzag")) / 2**10 for p in measured]
    )


def test_busy_ranks_follow_their_part_of_the_mask(pools):
    """Processor seconds: a loaded machine stretches them, but not by what is told apart here."""
    sizes = AttentionSizes(seq=2048, num_heads=2, kv_heads=2, head_dim=32, number_bytes=4)
    runs = measure_ring(pools(4), sizes, ("contiguous", "zigzag"), turns=3)
    first, *_, last = (min(turns) for turns in runs["contiguous"].busy_s)
    assert last > 1.5 * first
    assert runs["zigzag"].imbalance < runs["contiguous"].imbalance
    figure, alt = busy_picture(sizes, 4, runs)
    assert title_of(figure) == alt
    assert "(formula 1.75), zigzag" in alt


def test_seconds_of_the_formula_are_fitted_to_the_sum_of_the_measured_ones():
    runs = {
        "contiguous": RingRuns([[2.0, 1.0], [3.0, 3.5]], []),
        "zigzag": RingRuns([[2.0]] * 2, []),
    }
    assert runs["contiguous"].imbalance == 1.5
    assert fitted_pair_s(SIZES, runs) == pytest.approx(8 / (2 * 48 * 49 / 2))


def test_the_ring_on_the_clock_has_every_block_and_message(pools):
    runs = measure_ring(pools(2), SIZES, ("contiguous", "zigzag"), turns=2)
    kinds = [(e.rank, e.kind) for e in runs["zigzag"].fastest]
    for rank in (0, 1):  # a message of blocks each way, and one of gradients
        numbers = [kinds.count((rank, kind)) for kind in ("forward", "backward", "send", "recv")]
        assert numbers == [2, 2, 3, 3]
    assert min(event.start_s for event in runs["contiguous"].fastest) == 0
    ends = {"contiguous": 0.04, "zigzag": 0.03}
    events = {n: [Event(rank=0, kind="forward", start_s=0.0, end_s=s)] for n, s in ends.items()}
    figure, alt = ring_on_the_clock({name: RingRuns([], own) for name, own in events.items()})
    assert "forward and backward: contiguous 40 ms, zigzag 30 ms" in title_of(figure)
    assert alt.startswith(title_of(figure))


def test_the_mask_has_a_row_for_every_query_as_wide_as_its_keys():
    figure, alt = causal_work(4, 16)
    assert alt == title_of(figure)
    assert "contiguous 1.71, zigzag 1.00, striped 1.18" in alt
    widths = [box.get_width() for box in figure.axes[0].patches]
    one = min(widths)
    assert sorted(round(width / one) for width in widths) == sorted([*range(1, 17)] * 3)
    numbers = [text.get_text() for text in figure.axes[0].texts]
    assert numbers.count("3") == 3 * 4


def test_the_tokens_from_which_a_ring_hides_are_where_the_lines_cross():
    figure, alt = hiding_picture()
    assert "NVLink: 2,199, NVLink, GQA: 550, InfiniBand NDR, GQA: 4,948" in title_of(figure) == alt
    computing, nvlink, *_ = figure.axes[0].lines
    cross = [
        x
        for x, one, other in zip(
            computing.get_xdata(), computing.get_ydata(), nvlink.get_ydata(), strict=True
        )
        if one >= other
    ]
    assert cross[0] == pytest.approx(2199, rel=0.05)


def test_memory_over_the_length_is_a_line_a_form():
    sizes = AttentionSizes(seq=8192, num_heads=32, kv_heads=8, head_dim=128)
    figure, alt = memory_picture(sizes, 16)
    assert "ring 1.3 GiB, all-gather 5 GiB, Ulysses 1.5 GiB; one rank 20" in title_of(figure) == alt
    one, ring = (line.get_ydata()[0] for line in figure.axes[0].lines[:2])
    assert one == pytest.approx(16 * ring)
