"""Softmax in parts, masks from global positions, and layouts: each without any rank."""

import itertools
import math
from functools import partial, reduce

import pytest
import torch
from torch.nn import functional as F

from course_lib.context_parallel import (
    attend_block,
    block_gradients,
    merge,
    positions,
    shard,
    shard_batch,
    unshard,
)
from course_lib.context_parallel.layouts import LAYOUTS
from course_lib.context_parallel.masks import HeldTokens, sees, tiles, whole_of
from course_lib.context_parallel.partial import no_part
from course_lib.core import CourseError, ShapeError
from course_lib.models import next_tokens

EXACT = {"rtol": 1e-12, "atol": 1e-12}


def qkv(n=5, m=7, heads=6, kv_heads=3, dtype=torch.float64, scale=1.0):
    random = torch.Generator().manual_seed(3)
    shapes = [(2, heads, n, 4), (2, kv_heads, m, 4), (2, kv_heads, m, 4)]
    return [scale * torch.randn(s, generator=random, dtype=torch.float64).to(dtype) for s in shapes]


def whole_attention(q, k, v, mask=None):
    mask = mask if mask is None else mask[:, None]
    return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)


# --- parts and their merge


@pytest.mark.parametrize("order", [*itertools.permutations(range(3))])
def test_parts_merge_in_any_order_into_the_whole(order):
    q, k, v = qkv()
    blocks = [slice(0, 1), slice(1, 5), slice(5, 7)]
    parts = [attend_block(q, k[:, :, blocks[n]], v[:, :, blocks[n]]) for n in order]
    o, lse = reduce(lambda one, other: merge(*one, *other), parts, no_part(q))
    torch.testing.assert_close(o, whole_attention(q, k, v), **EXACT)
    scores = q @ k.repeat_interleave(2, dim=1).mT / 2  # sqrt of 4
    torch.testing.assert_close(lse, scores.logsumexp(-1), **EXACT)


def test_a_part_in_which_nothing_is_seen_counts_for_nothing():
    q, k, v = qkv()
    mask = torch.ones(2, 5, 7, dtype=torch.bool)
    mask[0, 1] = mask[1, 3] = False  # no key at all
    o, lse = attend_block(q, k, v, mask)
    assert lse[0, :, 1].eq(-math.inf).all()
    assert o[0, :, 1].eq(0).all()
    assert lse.isfinite().sum() == 2 * 6 * 5 - 2 * 6
    empty = attend_block(q, k, v, torch.zeros(1, 5, 7, dtype=torch.bool))
    for one in (merge(o, lse, *empty), merge(*empty, o, lse)):
        torch.testing.assert_close(one, (o, lse), **EXACT)
    assert not merge(*empty, *empty)[0].isnan().any()


@pytest.mark.parametrize("scale", [1e-3, 30.0])
def test_large_scores_do_not_overflow(scale):
    q, k, v = qkv(scale=scale, dtype=torch.float32)
    parts = [attend_block(q, k[:, :, part], v[:, :, part]) for part in (slice(3), slice(3, 7))]
    o, _ = merge(*parts[0], *parts[1])
    torch.testing.assert_close(o, whole_attention(q, k, v), rtol=1e-5, atol=1e-5)


def test_sixteen_bits_are_summed_in_more_also_under_autocast():
    q, k, v = qkv(dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        o, lse = attend_block(q, k, v)
    assert o.dtype == lse.dtype == torch.float32
    torch.testing.assert_close(o, whole_attention(q.float(), k.float(), v.float()))


def test_gradients_of_blocks_add_up_to_those_of_the_whole():
    q, k, v = (x.requires_grad_() for x in qkv())
    mask = torch.ones(2, 5, 7, dtype=torch.bool).tril(2)
    o = whole_attention(q, k, v, mask)
    grad = torch.linspace(-1, 2, o.numel(), dtype=o.dtype).view_as(o)
    wanted = torch.autograd.grad(o, (q, k, v), grad)
    q, k, v = q.detach(), k.detach(), v.detach()
    _, lse = attend_block(q, k, v, mask)
    found = [torch.zeros_like(x) for x in (q, k, v)]
    for part in (slice(0, 3), slice(3, 7)):
        block = q, k[:, :, part], v[:, :, part], mask[..., part]
        dq, dk, dv = block_gradients(*block, lse, grad, (grad * o.detach()).sum(-1))
        found[0] += dq
        found[1][:, :, part] += dk
        found[2][:, :, part] += dv
    torch.testing.assert_close(found, list(wanted), **EXACT)


# --- layouts


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("p", "seq"), [(1, 1), (2, 7), (3, 12), (4, 4), (4, 13), (5, 64)])
def test_every_position_is_on_one_rank_and_lengths_are_nearly_equal(layout, p, seq):
    held = [positions(rank, p, seq, layout) for rank in range(p)]
    assert sorted(itertools.chain(*held)) == [*range(seq)]
    assert all(one == sorted(one) for one in held)
    lengths = [len(one) for one in held]
    assert max(lengths) - min(lengths) <= 1
    assert min(lengths) >= 1


def test_the_layouts_are_those_of_the_papers():
    by_layout = {layout: [positions(r, 2, 8, layout) for r in range(2)] for layout in LAYOUTS}
    assert by_layout == {
        "contiguous": [[0, 1, 2, 3], [4, 5, 6, 7]],
        "zigzag": [[0, 1, 6, 7], [2, 3, 4, 5]],
        "striped": [[0, 2, 4, 6], [1, 3, 5, 7]],
    }
    assert positions(1, 2, 7, "zigzag") == [2, 3, 4, 5]  # chunks 2, 2, 2, 1
    assert positions(0, 3, 7) == [0, 1, 2]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_shards_become_the_whole_again(layout):
    whole = torch.arange(2 * 11 * 3).view(2, 11, 3)
    for dim, p in ((1, 4), (-2, 3), (1, 1)):
        shards = [shard(whole, rank, p, layout, dim=dim) for rank in range(p)]
        assert torch.equal(unshard(shards, layout, dim=dim), whole)
    with pytest.raises(ShapeError, match=r"need the .* shards of 11 tokens, of lengths"):
        unshard([*whole.split([1, 10], dim=1)], layout)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_targets_are_the_next_tokens_of_the_sequence_also_at_the_end_of_a_shard(layout):
    tokens = torch.arange(100, 112).expand(2, 12)
    for rank in range(3):
        mine, targets = shard_batch(*next_tokens(tokens), rank, 3, layout)
        assert torch.equal(targets, mine + 1)
    with pytest.raises(ShapeError, match="need a target for every token"):
        shard_batch(tokens, tokens[:, 1:], 0, 3)


def test_bad_layouts_are_told_in_one_sentence():
    with pytest.raises(CourseError, match=r"layout as one of contiguous, .*; got 'zig'"):
        positions(0, 2, 8, "zig")
    for case in ((2, 2, 8), (0, 4, 3), (-1, 2, 8)):
        with pytest.raises(ShapeError, match="need a rank from 0 to p - 1 and a token for every"):
            positions(*case)


# --- masks


def tokens_of(seq, layout, p, documents):
    ids = torch.tensor([[0] * 5 + [1] * (seq - 5), [0] * 2 + [1] * 4 + [2] * (seq - 6)])
    held = [torch.tensor(positions(rank, p, seq, layout)) for rank in range(p)]
    return [HeldTokens(one, ids[:, one] if documents else None) for one in held]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("documents", [True, False])
def test_tiles_hold_every_pair_that_is_seen_once_and_few_others(layout, causal, documents):
    held = tokens_of(13, layout, 3, documents)
    for (queries, keys), size in itertools.product(itertools.product(held, held), (1, 2, 99)):
        seen = sees(queries, keys, causal)
        found = torch.zeros_like(seen, dtype=torch.int)
        for rows, columns, mask in tiles(queries, keys, causal, size):
            part = found[:, rows, columns]
            part += torch.ones_like(part) if mask is None else mask.int()
            assert seen[:, rows, columns].any()
            ends = seen[:, rows, columns].any(dim=0).any(dim=0)
            assert ends[0]
            assert ends[-1]
        assert torch.equal(found, seen.int())


def test_the_whole_has_the_mask_of_one_process():
    causal = torch.ones(13, 13, dtype=torch.bool).tril()
    for layout, p in itertools.product(LAYOUTS, (1, 3)):
        whole = whole_of(tokens_of(13, layout, p, documents=True))
        order = whole.positions.argsort()
        seen = partial(sees, causal=True)(whole, whole)[:, order][:, :, order]
        assert torch.equal(seen[0], causal & sees(*tokens_of(13, layout, 1, True) * 2, False)[0])
