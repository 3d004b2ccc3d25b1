"""Ring, Ulysses and all-gather: the attention of one process, in as many bytes as formulas say."""

import sys
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache
from unittest.mock import patch

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from course_lib.context_parallel import (
    all_gather_attention,
    inputs,
    masks,
    ring,
    ring_attention,
    shard,
    ulysses_attention,
    unshard,
    usp_attention,
)
from course_lib.context_parallel.cost import FORMS, AttentionSizes, PassBytes, ulysses_bytes
from course_lib.context_parallel.lab import ATTENTION, sent_by
from course_lib.context_parallel.layouts import LAYOUTS, positions
from course_lib.ranks import RankError, record
from tests.law.law import WORLDS
from tests.refusals import assert_refused

cloudpickle.register_pickle_by_value(sys.modules[__name__])

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2e-2}


@dataclass(frozen=True)
class Case:
    """Attention of one layer; `needs` are those of q, k and v whose gradients are wanted."""

    form: str
    layout: str = "contiguous"
    seq: int = 13  # no p above 1 divides it
    kv_heads: int = 12
    causal: bool = True
    documents: bool = False
    dtype: torch.dtype = torch.float64
    needs: tuple[bool, bool, bool] = (True, True, True)


def whole(case):
    """q, k, v, the gradient of the output, and documents of unequal lengths."""
    torch.manual_seed(7)
    heads = 12, case.kv_heads, case.kv_heads, 12
    tensors = [torch.randn(2, one, case.seq, 4, dtype=torch.float64) for one in heads]
    ids = torch.tensor([[0] * 5 + [1] * (case.seq - 5), [4] * 2 + [2] * 3 + [4] * (case.seq - 5)])
    return [x.to(case.dtype) for x in tensors], ids if case.documents else None


@cache
def alone(case):
    """Output and gradients of one process, in fp32 or wider."""
    tensors, ids = whole(case)
    q, k, v, grad = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in tensors)
    mask = torch.ones(1, case.seq, case.seq, dtype=torch.bool)
    mask = mask.tril() if case.causal else mask
    if ids is not None:
        mask = mask & (ids[:, :, None] == ids[:, None])
    given = [x.requires_grad_() for x in (q, k, v)]
    o = F.scaled_dot_product_attention(q, k, v, mask[:, None], enable_gqa=True)
    return [o.detach(), *torch.autograd.grad(o, given, grad)]


def on_rank(rank, cases, group=None, tile=masks.TILE):
    """Output and gradients of this rank's shard."""
    p, me, found = dist.get_world_size(group), dist.get_rank(group), []
    for case in cases:
        tensors, ids = whole(case)
        q, k, v, grad = (shard(x, me, p, case.layout, dim=2) for x in tensors)
        given = [x.requires_grad_(need) for x, need in zip((q, k, v), case.needs, strict=True)]
        options = {"causal": case.causal, "layout": case.layout, "seq": case.seq}
        with patch.object(masks, "TILE", tile):
            o = ATTENTION[case.form](*given, group, documents=ids, **options)
            if any(case.needs):
                o.backward(grad)
        assert o.requires_grad == any(case.needs)
        found.append([o.detach(), *(x.grad for x in given)])
    return found


def assert_law(by_rank, cases):
    for case, *found in zip(cases, *by_rank, strict=True):
        for name, wanted, *shards in zip(["o", "dq", "dk", "dv"], alone(case), *found, strict=True):
            if name != "o" and not case.needs[["dq", "dk", "dv"].index(name)]:
                assert shards == [None] * len(shards)
                continue
            got = unshard(shards, case.layout, dim=2)
            assert got.dtype == case.dtype
            off = (got - wanted).abs().max().item() / max(1, wanted.abs().max().item())
            assert off <= TOLERANCE[case.dtype], f"{case}, {name}: off by {off:.2g}"


def kv_heads_for(form, p):
    """12, one, and some in between that the form can split."""
    some = [n for n in (2, 3) if form != "Ulysses" or n % p == 0 or p % n == 0]
    return [12, 1, *some]


# --- the law: the numbers of one process


USP = [
    Case("USP", "zigzag"),
    Case("USP", "contiguous", kv_heads=1, documents=True),
    Case("USP", "striped", kv_heads=6, causal=False, documents=True),
]


def over_a_grid(rank, cases, u):
    """As `on_rank`, on u ranks in a row that share heads, and rings over the others."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // u, u), mesh_dim_names=("ring", "u"))
    found, (i, j) = [], mesh.get_coordinate()
    for case in cases:
        tensors, ids = whole(case)
        of_ring = [shard(x, i, mesh["ring"].size(), case.layout, dim=2) for x in tensors]
        q, k, v, grad = (shard(x, j, u, dim=2) for x in of_ring)
        given = [x.requires_grad_() for x in (q, k, v)]
        groups = mesh["u"].get_group(), mesh["ring"].get_group()
        usp_attention(*given, *groups, case.causal, case.layout, case.seq, ids).backward(grad)
        o = usp_attention(*given, *groups, case.causal, case.layout, case.seq, ids)
        found.append([o.detach(), *(x.grad for x in given)])
    return found


@pytest.mark.parametrize(("world_size", "u"), [(4, 2), (3, 3), (4, 1)])
def test_ulysses_inside_a_ring_has_the_numbers_of_one_process(pools, world_size, u):
    by_rank = pools(world_size).run(over_a_grid, USP, u)
    rows = [by_rank[start : start + u] for start in range(0, world_size, u)]
    of_rings = [
        [
            [torch.cat(parts, dim=2) for parts in zip(*one, strict=True)]
            for one in zip(*row, strict=True)
        ]
        for row in rows
    ]
    assert_law(of_rings, USP)


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("form", FORMS)
def test_context_parallel_attention_has_the_numbers_of_one_process(pools, form, world_size):
    kinds = [(True, False), (True, True), (False, False), (False, True)]
    masked = [{"causal": causal, "documents": documents} for causal, documents in kinds]
    cases = [Case(form, layout, **one) for layout in LAYOUTS for one in masked]
    heads = kv_heads_for(form, world_size)
    cases += [Case(form, LAYOUTS[n % 3], kv_heads=n, documents=n > 1) for n in heads]
    cases += [Case(form, layout, seq=seq) for layout in LAYOUTS for seq in (6, 24)]
    cases += [Case(form, "zigzag", dtype=dtype) for dtype in (torch.float32, torch.bfloat16)]
    assert_law(pools(world_size).run(on_rank, cases), cases)
    if form == "ring":  # several tiles a block
        assert_law(pools(world_size).run(on_rank, cases[::3], None, 2), cases[::3])


@pytest.mark.parametrize("form", FORMS)
def test_gradients_are_computed_of_what_needs_them(pools, form):
    kinds = [(a, b, c) for a in (0, 1) for b in (0, 1) for c in (0, 1)]
    cases = [Case(form, kv_heads=1, needs=tuple(map(bool, needs))) for needs in kinds]
    assert_law(pools(3).run(on_rank, cases), cases)


@pytest.mark.parametrize("form", FORMS)
def test_each_group_attends_to_its_own_tokens(pools, form):
    cases = [Case(form), Case(form, "zigzag", seq=9, documents=True)]

    def in_groups(rank):
        groups = [dist.new_group([0, 2]), dist.new_group([3, 1])]
        return on_rank(rank, [cases[rank % 2]], groups[rank % 2])

    by_rank = pools(4).run(in_groups)
    assert_law(by_rank[0::2], cases[:1])
    assert_law(by_rank[1::2], cases[1:])


def test_ulysses_sends_a_shared_head_to_the_ranks_whose_queries_share_it(pools):
    cases = [Case("Ulysses", kv_heads=2), Case("Ulysses", "zigzag", kv_heads=1)]
    assert_law(pools(4).run(on_rank, cases), cases)


@pytest.mark.parametrize("form", FORMS)
def test_a_second_backward_adds_the_same_and_a_second_derivative_is_refused(pools, form):
    def twice(rank):
        q, k, v = (torch.randn(1, 4, 3, 2).requires_grad_() for _ in range(3))
        o = ATTENTION[form](q, k, v)
        o.sum().backward(retain_graph=True)
        once = [x.grad.clone() for x in (q, k, v)]
        o.sum().backward()
        same = all(torch.equal(x.grad, 2 * one) for x, one in zip((q, k, v), once, strict=True))
        with pytest.raises(RuntimeError, match="second time"):
            o.sum().backward()
        o = ATTENTION[form](q, k, v)
        (dv,) = torch.autograd.grad(o.square().sum(), v, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            dv.sum().backward()
        with torch.no_grad():
            return same, ATTENTION[form](q, k, v).requires_grad

    assert pools(2).run(twice) == [(True, False)] * 2


# --- broken ones fail the law


def from_zero(rank, p, seq, layout):
    """Every shard's positions begin again."""
    return [*range(len(positions(rank, p, seq, layout)))]


def mean_of(o, lse, o2, lse2):
    return (o + o2) / 2, lse


real_exchange = ring.start_exchange


def from_the_wrong_side(member, out, to, into, source):
    return real_exchange(member, out, source, into, to)


def forgets_the_others(member, out, to, into, source):
    into.zero_()  # this rank's own term only


PLANTED = {
    "mask of local positions": (inputs, "positions", from_zero, "need .* tokens|off by"),
    "parts not weighed": (ring, "merge", mean_of, "off by"),
    "keys of another rank": (ring, "start_exchange", from_the_wrong_side, "off by"),
    "gradients not sent home": (ring, "exchange", forgets_the_others, "d[kv]: off by"),
}


@pytest.mark.parametrize("planted", PLANTED)
def test_a_broken_ring_fails_the_law(pools, planted):
    place, name, broken, told = PLANTED[planted]
    cases = [Case("ring", seq=12)]

    def with_fault(rank):
        with patch.object(place, name, broken):
            return on_rank(rank, cases)

    with pytest.raises(AssertionError, match=told):
        assert_law(pools(3).run(with_fault), cases)


# --- bytes


def sizes_of(case):
    dtype_bytes = torch.empty(0, dtype=case.dtype).element_size()
    sizes = {"batch": 2, "seq": case.seq, "num_heads": 12, "head_dim": 4}
    return AttentionSizes(kv_heads=case.kv_heads, number_bytes=dtype_bytes, **sizes)


def sent_on_rank(rank, cases):
    """Bytes sent in forward and backward; those of an all_to_all by its split sizes."""
    p, found, all_to_all = dist.get_world_size(), [], dist.all_to_all_single

    def counting(into, out, into_sizes, out_sizes, group):
        counted.append((out.numel() - out_sizes[rank]) * out.element_size())
        return all_to_all(into, out, into_sizes, out_sizes, group=group)

    for case in cases:
        tensors, _ = whole(case)
        q, k, v, grad = (shard(x, rank, p, case.layout, dim=2) for x in tensors)
        given = [x.requires_grad_() for x in (q, k, v)]
        sent = []
        with patch.object(dist, "all_to_all_single", counting):
            for step in ("forward", "backward"):
                counted = []
                with record() as log:
                    if step == "forward":
                        o = ATTENTION[case.form](*given, layout=case.layout, seq=case.seq)
                    else:
                        o.backward(grad)
                kinds = {e.kind for e in log.events} - {"forward", "backward", "wait"}
                sent.append(sum(counted) if "all_to_all" in kinds else sent_by(log.events))
        found.append(PassBytes(*sent))
    return found


@pytest.mark.parametrize("world_size", WORLDS)
def test_bytes_sent_are_those_of_the_formula(pools, world_size):
    cases = [
        Case(form, layout, seq=seq, kv_heads=kv_heads, dtype=dtype)
        for form in FORMS
        for layout, seq in (("contiguous", 12), ("zigzag", 13), ("striped", 14))
        for kv_heads, dtype in ((12, torch.bfloat16), (1, torch.float64))
    ]
    by_rank = pools(world_size).run(sent_on_rank, cases)
    for rank, found in enumerate(by_rank):
        wanted = [FORMS[c.form](sizes_of(c), world_size, rank, c.layout) for c in cases]
        assert dict(zip(cases, found, strict=True)) == dict(zip(cases, wanted, strict=True))


def test_bytes_of_even_shards_are_those_of_the_papers():
    """2 (p-1)/p b s h_kv numbers for K and V; Ulysses (2 h + 2 h_kv) b s/p (p-1)/p."""
    sizes, p = AttentionSizes(batch=3, seq=64, num_heads=16, kv_heads=8, head_dim=4), 4
    travels = 2 * (p - 1) * 3 * 64 * 8 * 4 // p
    assert FORMS["ring"](sizes, p, 0, "zigzag") == (2 * travels, 2 * travels + 4 * travels)
    assert FORMS["all-gather"](sizes, p, 3, "striped") == (2 * travels, 4 * travels)
    numbers = (2 * 16 + 2 * 8) * 4 * 3 * 64 * (p - 1) // p**2
    assert ulysses_bytes(sizes, p) == (2 * numbers, 2 * numbers)
    replicated = ulysses_bytes(replace(sizes, kv_heads=2), p)
    assert replicated == ulysses_bytes(replace(sizes, kv_heads=4), p)
    assert all(
        form(replace(sizes, kv_heads=2), 1, 0, "zigzag") == (0, 0) for form in FORMS.values()
    )


def test_the_next_block_is_on_its_way_while_one_is_computed_and_empty_ones_are_skipped(pools):
    def events(rank):
        calls, attend = [], ring.attend_block
        q, k, v = (torch.randn(1, 2, 4, 2) for _ in range(3))
        with ExitStack() as stack:
            counting = patch.object(ring, "attend_block", lambda *x: calls.append(x) or attend(*x))
            stack.enter_context(counting)
            log = stack.enter_context(record())
            ring_attention(q, k, v)
        starts = {kind: [e.start_s for e in log.events if e.kind == kind] for kind in
                  ("send", "recv", "forward")}  # fmt: skip
        return len(calls), starts

    for rank, (num_blocks, starts) in enumerate(pools(3).run(events)):
        assert num_blocks == rank + 1
        assert [len(x) for x in starts.values()] == [2, 2, 3]
        for step in range(2):
            posted = max(starts["send"][step], starts["recv"][step])
            assert posted <= starts["forward"][step]


# --- what goes wrong is told


def attend(form=ring_attention, q=(2, 4, 3, 6), k=(2, 2, 3, 6), v=(2, 2, 3, 6), **options):
    dtypes = options.pop("dtypes", [torch.float32] * 3)
    made = [torch.ones(shape, dtype=d) for shape, d in zip((q, k, v), dtypes, strict=True)]
    return lambda rank: form(*made, **options)


def foreign_group(form):
    def on_rank(rank):
        groups = [dist.new_group([0]), dist.new_group([1])]
        return attend(form, group=groups[1 - rank])(rank)

    return on_rank


INT = [torch.float32, torch.int64, torch.float32]
MIXED = [torch.float32, torch.bfloat16, torch.float32]
LIKE = "ShapeError: rank {rank}, ring_attention: need q [batch, heads, seq/p, head_dim], and k and "
HEADS = "MeshError: rank {rank}, ulysses_attention: need heads divisible by p, and kv_heads by p "
REFUSED = [
    (LIKE + "v alike ... got [2, 4, 3, 6] float32, [2, 2, 4, 6]", attend(k=(2, 2, 4, 6))),
    (LIKE, attend(v=(2, 2, 3, 5))),
    (LIKE, attend(q=(2, 4, 3, 5))),
    (LIKE, attend(q=(3, 4, 3, 6))),
    (LIKE, attend(q=(4, 3, 6))),
    (LIKE, attend(k=(2, 0, 3, 6), v=(2, 0, 3, 6))),
    (
        "need heads of q divisible by those of k and v; got 4 and 3",
        attend(k=(2, 3, 3, 6), v=(2, 3, 3, 6)),
    ),
    ("CourseError: rank {rank}, ring_attention: need q, k and v as floating", attend(dtypes=INT)),
    ("need q, k and v of one dtype, on one device; got", attend(dtypes=MIXED)),
    ("need layout as one of contiguous, zigzag, striped; got 'zag'", attend(layout="zag")),
    ("need 4 tokens, those of rank {rank} of 2 of a contiguous sequence of 8", attend(seq=8)),
    ("and a token for every rank, seq >= p; got", attend(seq=1)),
    ("need documents, the whole number ... as [2, 6]; got [2, 3] int64", attend(
        documents=torch.zeros(2, 3, dtype=torch.long), seq=6)),
    ("as [2, 6]; got [6] int64", attend(documents=torch.zeros(6, dtype=torch.long))),
    ("need documents, ... got [2, 6] float32", attend(documents=torch.zeros(2, 6))),
    ("need documents, ... got list", attend(documents=[[1] * 6] * 2)),
    ("need 5 tokens ... got 3. Try shard(", attend(
        documents=torch.zeros(2, 10, dtype=torch.long))),
    ("need seq as a whole number of tokens; got 6.0", attend(seq=6.0)),
    *(
        (f"MeshError: rank {{rank}}, {form.__name__}: need a group that holds", foreign_group(form))
        for form in ATTENTION.values()
    ),
    (HEADS, attend(ulysses_attention, q=(2, 3, 3, 6), k=(2, 3, 3, 6), v=(2, 3, 3, 6))),
    (HEADS + "or p by kv_heads; got 6, 3 and p = 2. Try ring_attention", attend(
        ulysses_attention, q=(2, 6, 3, 6), k=(2, 3, 3, 6), v=(2, 3, 3, 6))),
    ("all_gather_attention: need 4 tokens", attend(all_gather_attention, seq=8)),
]  # fmt: skip


def test_what_cannot_be_is_told_in_one_sentence(pools):
    assert_refused(pools(2), REFUSED, silent=True)


@pytest.mark.parametrize("form", FORMS)
def test_unequal_shards_without_seq_are_refused_before_numbers_are_wrong(pools, form):
    """No rank knows the others' lengths without a message: the first message tells."""

    def uneven(rank):
        q, k, v = (torch.ones(1, 2, 4 - rank, 2) for _ in range(3))
        return ATTENTION[form](q, k, v)

    with pytest.raises(RankError, match=r"rank \d calls (send|recv|all_gather|all_to_all)"):
        pools(2).run(uneven)
