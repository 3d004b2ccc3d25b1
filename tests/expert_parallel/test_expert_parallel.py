"""Experts over ranks: outputs and all gradients of one process, in as many bytes as counted."""

import sys
from dataclasses import replace

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD

from course_lib.core.errors import CourseError
from course_lib.core.presets import MODELS
from course_lib.data_parallel import NaiveDDP
from course_lib.ddp import DDP
from course_lib.expert_parallel import (
    ExpertGroups,
    combine,
    dispatch,
    expert_groups,
    parallelize_experts,
)
from course_lib.expert_parallel import model as parallel_model
from course_lib.fsdp import FSDP
from course_lib.mesh.mesh import Mesh
from course_lib.mesh.rank_mesh import RankMesh
from course_lib.models import GPT, next_tokens, token_batch, token_loss
from course_lib.models.moe import MoE, Routing
from course_lib.ranks import record
from course_lib.zero import ZeRO1, ZeRO2, ZeRO3

cloudpickle.register_pickle_by_value(sys.modules[__name__])

TINY = replace(MODELS["moe-tiny"], hidden=16, max_seq=16, vocab=32)
TINY = replace(TINY, experts=replace(TINY.experts, ffn_hidden=12))
CASES = {
    "top-2": {},
    "top-1": {"active": 1, "normalized": False},
    "sigmoid, shared": {"router": "sigmoid", "shared_hidden": 8, "shared_gate": True},
    "capacity": {"capacity": 0.7},
    "all to one": {"active": 1, "normalized": False, "router_bias": True},
    "some without tokens": {"router_bias": True},
}
SIZES = (9, 4, 0, 7)  # tokens of the ranks
CLOSE = {"rtol": 0, "atol": 1e-12}


def layer(case):
    torch.manual_seed(3)
    moe = MoE(replace(TINY, experts=replace(TINY.experts, **CASES[case]))).double()
    nn.init.normal_(moe.router.linear.weight)
    if moe.router.linear.bias is not None:  # experts that no token, or every token, chooses
        nn.init.zeros_(moe.router.linear.weight)
        with torch.no_grad():
            moe.router.linear.bias.copy_(torch.tensor([0.0, 0, 0, 9, 0, 0, 0, 8]))
        nn.init.normal_(moe.router.linear.weight, std=1e-3)
    moe.aux_weight = 0.1
    return moe


def tokens_of(rank):
    torch.manual_seed(40 + rank)
    return torch.randn(2, SIZES[rank], TINY.hidden, dtype=torch.float64)


def weighted(y):
    """A loss whose gradient differs from number to number."""
    return (y * torch.linspace(-1, 2, y.numel(), dtype=y.dtype).view_as(y)).sum() / 10


def alone(case, p):
    """Outputs of the ranks' tokens, one batch after another, and gradients of the mean loss."""
    moe, found = layer(case), []
    moe.aux_weight /= p
    for rank in range(p):
        x = tokens_of(rank).requires_grad_()
        y = moe(x)
        (weighted(y) / p).backward()
        found.append((y.detach(), x.grad * p))
    return found, {name: param.grad for name, param in moe.named_parameters()}, moe.load


def on_ranks(rank, cases, ep, wrap=NaiveDDP):
    found, mesh = [], RankMesh(Mesh(dp=dist.get_world_size()))
    groups = expert_groups(mesh, ep)
    for case in cases:
        moe = parallelize_experts(layer(case), groups)
        model, x = wrap(moe, group=mesh.copies), tokens_of(rank).requires_grad_()
        y = model(x)
        weighted(y).backward()
        model.finish()
        grads = {name: param.grad for name, param in moe.named_parameters()}
        found.append((y.detach(), x.grad, grads, moe.load))
    return found


@pytest.mark.parametrize(("world_size", "ep"), [(1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4)])
def test_outputs_and_all_gradients_are_those_of_one_process(pools, world_size, ep):
    by_rank = pools(world_size).run(on_ranks, CASES, ep)
    for number, case in enumerate(CASES):
        outputs, grads, load = alone(case, world_size)
        found = [ranks[number] for ranks in by_rank]
        held = [set(grads) for *_, grads, _ in found]
        assert set.union(*held) == set(grads)
        for rank, (y, of_x, own, _) in enumerate(found):
            torch.testing.assert_close(y, outputs[rank][0], **CLOSE)
            torch.testing.assert_close(of_x, outputs[rank][1], **CLOSE)
            experts = {int(name.split(".")[1]) for name in own if name.startswith("experts")}
            first = rank % ep * (8 // ep)
            assert experts == set(range(first, first + 8 // ep))
            for name, grad in own.items():
                torch.testing.assert_close(grad, grads[name], **CLOSE, msg=f"{case}, {name}")
        assert torch.equal(sum(loads for *_, loads in found), load)


def test_the_cases_have_what_they_are_named_for():
    for case, most in {"all to one": 1, "some without tokens": 2}.items():
        (*_, load) = alone(case, 4)
        assert (load > 0).sum() == most
        assert load.sum() == sum(SIZES) * 2 * most
    moe = layer("capacity")
    assert (moe(tokens_of(0)) == 0).all(-1).any()


# --- the classic mistakes are seen by the law


def wrong_scale(rank, factor):
    scale = parallel_model._scale_grad
    parallel_model._scale_grad = lambda x, by: scale(x, by if by > 1 else by * factor)
    try:
        return on_ranks(rank, ["top-2"], 2)
    finally:
        parallel_model._scale_grad = scale


@pytest.mark.parametrize("factor", [2, 0.5])
def test_gradients_of_experts_that_are_ep_times_off_are_not_those_of_one_process(pools, factor):
    _, grads, _ = alone("top-2", 4)
    ((_, _, own, _),) = pools(4).run(wrong_scale, factor)[0]
    for name, grad in own.items():
        wanted = grads[name] * (factor if name.startswith("experts") else 1)
        torch.testing.assert_close(grad, wanted, **CLOSE)


# --- with every wrapper, over several steps


def batch_of(rank, step, p):
    return next_tokens(token_batch(step, batch=2 * p, seq=13, vocab=TINY.vocab)[rank::p])


def start():
    torch.manual_seed(5)
    return GPT(TINY).double()


def trained_alone(p):
    model = start()
    optimizer = SGD(model.parameters(), lr=0.5)
    for step in range(3):
        optimizer.zero_grad()
        for rank in range(p):
            inputs, targets = batch_of(rank, step, p)
            (token_loss(model(inputs), targets) / p).backward()
        optimizer.step()
    return model.state_dict()


def trained(rank, kind, ep):
    mesh = RankMesh(Mesh(dp=dist.get_world_size()))
    model = parallelize_experts(start(), expert_groups(mesh, ep))
    if issubclass(kind, ZeRO1):
        engine = kind(model, SGD, mesh.copies, lr=0.5, bucket_bytes=4000)
        optimizer = engine
    else:
        engine = kind(model, group=mesh.copies)
        optimizer = SGD(engine.parameters(), lr=0.5)
    for step in range(3):
        optimizer.zero_grad()
        inputs, targets = batch_of(rank, step, mesh.num_copies)
        token_loss(engine(inputs), targets).backward()
        if hasattr(engine, "finish"):
            engine.finish()
        optimizer.step()
    if kind is FSDP:
        return engine.full_state_dict()
    if kind is ZeRO3:
        for one in engine.all_flat_params:
            one.gather()
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("kind", [NaiveDDP, DDP, ZeRO1, ZeRO2, ZeRO3, FSDP])
def test_every_wrapper_averages_or_shards_experts_over_their_own_group(pools, kind):
    wanted = trained_alone(4)
    seen = set()
    for state in pools(4).run(trained, kind, 2):
        for name, tensor in state.items():
            torch.testing.assert_close(tensor, wanted[name], rtol=0, atol=1e-11, msg=name)
        seen |= {*state}
    assert seen == {*wanted}


# --- expert tensor parallelism


def split(rank, ep):
    """Two ranks split each expert; with ep 2, two pairs of them share the experts."""
    mesh = RankMesh(Mesh(dp=4))
    same, pair = expert_groups(mesh, 1), expert_groups(mesh, 2)
    moe = layer("top-2")
    if ep == 1:  # ranks 0 and 1 split the experts; 2 and 3 hold the same halves
        parallelize_experts(moe, ExpertGroups(same.ep, pair.expert_dp), expert_tp=pair.ep)
    else:
        parallelize_experts(moe, ExpertGroups(pair.expert_dp, same.ep), expert_tp=pair.ep)
    model, x = NaiveDDP(moe, group=mesh.copies), own_tokens(rank)
    y = model(x)
    weighted(y).backward()
    model.finish()
    return y.detach(), x.grad, {name: param.grad for name, param in moe.named_parameters()}


def own_tokens(rank):
    """Two tokens of each sequence for every rank: gathered ones are equally many."""
    return tokens_of(0)[:, 2 * rank : 2 * rank + 2].clone().requires_grad_()


@pytest.mark.parametrize("ep", [1, 2])
def test_experts_that_are_split_have_the_numbers_of_one_process(pools, ep):
    moe, outputs = layer("top-2"), []
    moe.aux_weight /= 4
    for rank in range(4):
        x = own_tokens(rank)
        y = moe(x)
        (weighted(y) / 4).backward()
        outputs.append((y.detach(), x.grad * 4))
    grads = {name: param.grad for name, param in moe.named_parameters()}
    for rank, (y, of_x, own) in enumerate(pools(4).run(split, ep)):
        torch.testing.assert_close(y, outputs[rank][0], **CLOSE)
        torch.testing.assert_close(of_x, outputs[rank][1], **CLOSE)
        for name, grad in own.items():
            wanted = grads[name]
            if name.startswith("experts"):
                wanted = wanted.chunk(2, int("out" in name))[rank % 2]
            torch.testing.assert_close(grad, wanted, **CLOSE, msg=name)


# --- bytes


def sent(rank):
    """The bytes that a rank sends for copies, and for counts; two copies go to every expert."""
    first = torch.arange(8)
    experts = torch.stack([first, (first + 1) % 8], dim=1)
    weights = torch.rand(8, 2, dtype=torch.float64).requires_grad_()
    tokens = torch.randn(8, 16, dtype=torch.float64).requires_grad_()
    with record() as recorder:
        there = dispatch(tokens, Routing(experts, weights, torch.ones(8, 8)), 8)
        combine(there.inputs * 2, there).sum().backward()
    assert there.counts.tolist() == [2 * 4] * 2
    calls = [event for event in recorder.events if event.kind != "wait"]
    assert [event.kind for event in calls] == ["all_to_all"] * 5
    counts, *copies = [event.num_bytes - event.num_bytes // 4 for event in calls]
    return sum(copies), counts


def test_the_bytes_that_are_sent_are_those_of_the_formula(pools):
    tokens, top_k, hidden, p = 8, 2, 16, 4
    one_way = tokens * top_k * hidden * 8 * (p - 1) // p
    assert pools(4).run(sent) == [(4 * one_way, 6 * 8)] * 4


# --- what cannot be


def refused(rank):
    mesh = RankMesh(Mesh(dp=4))
    groups = expert_groups(mesh, 2)
    messages = []
    routing = Routing(torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1), torch.ones(3, 8))
    x = torch.ones(3, 4)
    attempts = [
        lambda: expert_groups(mesh, 3),
        lambda: dispatch(x, routing, 6, mesh.copies),
        lambda: dispatch(x[:2], routing, 8),
        lambda: dispatch(x, routing._replace(experts=routing.experts + 8), 8),
        lambda: combine(x[:1], dispatch(x, routing, 8)),
        lambda: parallelize_experts(nn.Linear(2, 2)),
        lambda: parallelize_experts(parallelize_experts(layer("top-2"))),
        lambda: DDP(parallelize_experts(layer("top-2")), group=mesh.copies),
        lambda: DDP(parallelize_experts(layer("top-2"), groups), group=groups.ep),
    ]
    for attempt in attempts:
        with pytest.raises(CourseError) as caught:
            attempt()
        messages.append(str(caught.value))
    return messages


def test_what_cannot_be_is_told(pools):
    said = pools(4).run(refused)[0]
    for message, wanted in zip(
        said,
        [
            "expert_groups: need ep as a divisor of dp * cp = 4; got 3. Try ep=1.",
            "need num_experts divisible by the ranks of the group; got 6 and 4",
            "need tokens [tokens, hidden] and routing.experts [tokens, top_k]; got [2, 4]",
            "need experts from 0 to 7, or -1 for a dropped one; got 8 to 8",
            "combine: need an output for every input",
            "need a model with layers of experts; got none",
            "got experts that are divided already",
            "need a group whose ranks hold the same parameters",
            "need a group of 2 * 2 ranks, those that hold expert",
        ],
        strict=True,
    ):
        assert wanted in message
