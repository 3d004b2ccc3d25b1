"""A context-parallel GPT: losses and gradients of one process, and bad input named."""

import sys
from dataclasses import replace
from unittest.mock import patch

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from course_lib.context_parallel import (
    context_loss,
    layouts,
    model,
    parallelize_context,
    set_documents,
    shard,
    shard_batch,
)
from course_lib.context_parallel.lab import ATTENTION
from course_lib.context_parallel.layouts import LAYOUTS
from course_lib.core import ModelSpec
from course_lib.data_parallel import naive_ddp
from course_lib.ddp import DDP
from course_lib.models import GPT, padded_batch, token_loss
from course_lib.recompute import recompute_full, recompute_none, recompute_selective
from course_lib.tensor_parallel import (
    finish_gradients,
    gather_tensors,
    parallel_token_loss,
    parallelize,
)
from tests.law.law import WORLDS
from tests.refusals import assert_refused

cloudpickle.register_pickle_by_value(sys.modules[__name__])

LEARNED = ModelSpec(hidden=24, num_layers=2, num_heads=12, ffn_hidden=36, vocab=48, max_seq=13)
ROTARY = replace(LEARNED, num_kv_heads=1, gated=True, norm="rms", positions="rope", bias=False)
PARTLY = replace(ROTARY, head_dim=4, rope=replace(ROTARY.rope, share=0.5))
SPECS = {"learned": LEARNED, "rope, one KV head": ROTARY}
STEPS = 3


def gpt(spec, **options):
    torch.manual_seed(0)
    return GPT(spec, **options).double()


def batch(step, seq=13):
    """Sequences that end early: some shards have no target at all."""
    return padded_batch(step, batch=3, seq=seq, vocab=48)


def trained(wrapped, module, loss_of, finish):
    """Losses, and at last gradients and parameters, of some steps."""
    optimizer, losses = torch.optim.SGD(module.parameters(), lr=0.3), []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(wrapped, *batch(step))
        loss.backward()
        finish()
        optimizer.step()
        losses.append(loss.detach())
    grads = {f"{name}.grad": p.grad.clone() for name, p in module.named_parameters()}
    return {"losses": torch.stack(losses)} | grads | module.state_dict()


def alone(spec):
    module = gpt(spec)
    return trained(module, module, lambda m, x, y: token_loss(m(x), y), lambda: None)


def on_rank(rank, name, form, layout, also=lambda module: None):
    """This rank trains on its shards; the mean of the ranks' losses is the loss."""
    p, module = dist.get_world_size(), gpt(SPECS[name])
    parallelize_context(module, None, ATTENTION[form], layout, seq=13)
    also(module)
    wrapped = DDP(module)

    def loss_of(wrapped, x, y):
        tokens, targets = shard_batch(x, y, rank, p, layout)
        return model.context_loss(wrapped(tokens), targets)

    found = trained(wrapped, module, loss_of, wrapped.finish)
    dist.all_reduce(found["losses"])
    found["losses"] /= p
    return found


def assert_same(by_rank, wanted):
    for found in by_rank:
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("name", SPECS)
def test_a_context_parallel_gpt_trains_as_on_one_process(pools, name, world_size):
    wanted = alone(SPECS[name])
    for form, layout in zip(ATTENTION, LAYOUTS, strict=True):
        assert_same(pools(world_size).run(on_rank, name, form, layout), wanted)


@pytest.mark.parametrize("also", [recompute_selective, recompute_full, recompute_none])
def test_recomputation_changes_no_number(pools, also):
    by_rank = pools(2).run(on_rank, "learned", "ring", "zigzag", also)
    assert_same(by_rank, alone(LEARNED))


def test_context_and_tensor_parallelism_together(pools):
    """Two context-parallel ranks of a model that is split over two tensor-parallel ones."""

    def step(rank):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
        module, cp = parallelize(gpt(LEARNED), mesh["tp"]), mesh["cp"].get_group()
        wrapped = DDP(parallelize_context(module, cp, layout="zigzag", seq=13), group=cp)
        x, y = shard_batch(*batch(0), mesh["cp"].get_local_rank(), 2, "zigzag")
        loss = parallel_token_loss(wrapped(x), y, mesh["tp"].get_group())
        naive_ddp.weighted_loss(loss, int((y >= 0).sum()), cp).backward()
        wrapped.finish()
        finish_gradients(module)
        return gather_tensors(module, {n: p.grad for n, p in module.named_parameters()})

    module = gpt(LEARNED)
    x, y = batch(0)
    token_loss(module(x), y).backward()
    assert_same(pools(4).run(step), {n: p.grad for n, p in module.named_parameters()})


def test_replicas_of_context_parallel_ranks(pools):
    """Two replicas (dp) over two ranks (cp): one group has the parameters, a token one weight."""

    def step(rank):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
        dp, cp = mesh["dp"].get_local_rank(), mesh["cp"].get_local_rank()
        module = parallelize_context(gpt(ROTARY), mesh["cp"].get_group(), layout="striped", seq=13)
        wrapped = DDP(module)
        mine = [part[dp::2] for part in batch(0)]  # two sequences, and one
        x, y = shard_batch(*mine, cp, 2, "striped")
        context_loss(wrapped(x), y).backward()
        wrapped.finish()
        return {n: p.grad for n, p in module.named_parameters()}

    module = gpt(ROTARY)
    x, y = batch(0)
    token_loss(module(x), y).backward()
    assert_same(pools(4).run(step), {n: p.grad for n, p in module.named_parameters()})


DOCUMENTS = [(0, 5), (5, 6), (6, 13)]  # of both sequences


def packed_on_rank(rank, form, layout, also):
    """The gradients of a packed batch; the ids stay until recomputation in backward is over."""
    p, module = dist.get_world_size(), gpt(PARTLY)
    parallelize_context(module, None, ATTENTION[form], layout, seq=13)
    also(module)
    ids = torch.cat([torch.full((3, end - start), start) for start, end in DOCUMENTS], dim=1)
    set_documents(module, ids)
    wrapped = DDP(module)
    x, y = shard_batch(*batch(0), rank, p, layout)
    context_loss(wrapped(x), y).backward()
    wrapped.finish()
    return {n: p.grad for n, p in module.named_parameters()}


@pytest.mark.parametrize(
    ("form", "layout", "also"),
    [("ring", "zigzag", recompute_full), ("Ulysses", "contiguous", recompute_none),
     ("all-gather", "striped", recompute_selective)],
)  # fmt: skip
def test_a_document_of_a_packed_sequence_is_computed_as_by_itself(pools, form, layout, also):
    module, (x, y) = gpt(PARTLY), batch(0)
    for start, end in DOCUMENTS:  # each at the positions 0, 1, 2, ...
        logits = module(x[:, start:end])
        asked = y[:, start:end]
        share = (asked >= 0).sum() / (y >= 0).sum()
        (token_loss(logits, asked).nan_to_num() * share).backward()
    assert_same(
        pools(3).run(packed_on_rank, form, layout, also),
        {n: p.grad for n, p in module.named_parameters()},
    )


# --- broken ones fail the law


def local(rank, p, seq, layout):
    return [*range(len(layouts.positions(rank, p, seq, layout)))]


def mean_over_ranks(logits, targets, group=None):
    return token_loss(logits, targets).nan_to_num()


def shifted_in_the_shard(tokens, targets, rank, p, layout):
    """The last token of a shard loses its target."""
    mine = shard(tokens, rank, p, layout)
    return mine, torch.cat([mine[:, 1:], torch.full_like(mine[:, :1], -100)], dim=1)


PLANTED = {
    "positions restart in every shard": (model, "positions", local),
    "the loss is averaged over cp": (model, "context_loss", mean_over_ranks),
    "targets are lost at borders": (None, "shard_batch", shifted_in_the_shard),
}


@pytest.mark.parametrize("planted", PLANTED)
@pytest.mark.parametrize("name", SPECS)
def test_a_broken_one_fails_the_law(pools, planted, name):
    def with_fault(rank):
        place, attribute, broken = PLANTED[planted]
        with patch.dict(vars(place) if place else on_rank.__globals__, {attribute: broken}):
            return on_rank(rank, name, "all-gather", "contiguous")

    with pytest.raises(AssertionError, match="not close"):
        assert_same(pools(2).run(with_fault), alone(SPECS[name]))


# --- what goes wrong is told


def forward(make=lambda: GPT(ROTARY), seq=6, whole=None, **options):
    def on_rank(rank):
        made = parallelize_context(make(), seq=whole, **options)
        return made(torch.ones(1, seq).long())

    return on_rank


def twice(rank):
    parallelize_context(parallelize_context(GPT(ROTARY)))


def recomputed():
    module = GPT(ROTARY)
    recompute_selective(module)
    return module


REPLACED = "parallelize_context: need attention as GPT has it; got one that is replaced"
REFUSED = [
    ("CourseError: parallelize_context: need a GPT; got Linear", forward(lambda: nn.Linear(2, 2))),
    (REPLACED, twice),
    (REPLACED + " already. Try it once, and before recompute_selective", forward(recomputed)),
    (
        "need attention weights without dropout; got 0.1",
        forward(lambda: GPT(ROTARY, flash=False, dropout=0.1)),
    ),
    ("need attention to all tokens before; got a window of 4. Try a model without windows",
     forward(lambda: GPT(replace(ROTARY, window=4)))),
    ("set_documents: need a context-parallel GPT; got GPT. Try parallelize_context",
     lambda rank: set_documents(GPT(ROTARY), None)),
    ("need layout as one of contiguous", forward(layout="rows")),
    ("ShapeError: rank {rank}, parallelize_context: need at most max_seq = 13 ... got 14",
     forward(seq=7)),
    ("need at most max_seq = 13", forward(lambda: GPT(LEARNED), seq=7)),
    ("need this rank's 5 of 10 tokens; got 6. Try shard_batch", forward(whole=10)),
]  # fmt: skip


def test_what_cannot_be_is_told_in_one_sentence(pools):
    assert_refused(pools(2), REFUSED)
