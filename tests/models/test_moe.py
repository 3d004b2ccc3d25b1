"""Experts: the numbers of transformers' Mixtral, the rules of balance, what is dropped."""

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from torch import nn

from course_lib.core import CourseError, ShapeError
from course_lib.core.presets import MODELS
from course_lib.core.specs import Experts
from course_lib.cost.params import count_params
from course_lib.models import GPT, next_tokens, token_batch, token_loss
from course_lib.models.moe import MoE, Router, Routing, aux_loss, drop, move_bias
from course_lib.recompute import recompute_full

TINY = MODELS["moe-tiny"]


def with_experts(**changes):
    return replace(TINY, experts=replace(TINY.experts, **changes))


def layer(**changes):
    torch.manual_seed(3)
    made = MoE(with_experts(**changes)).double()
    nn.init.normal_(made.router.linear.weight)  # a clear choice
    return made


def gradients(model):
    return {name: param.grad for name, param in model.named_parameters()}


@pytest.mark.parametrize("top_k", [1, 2, 8])
def test_outputs_and_gradients_are_those_of_transformers_mixtral(top_k):
    mixtral = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_local_experts": 8}
    config = mixtral.MixtralConfig(**sizes, num_experts_per_tok=top_k)
    theirs, ours = mixtral.MixtralSparseMoeBlock(config), layer(active=top_k).float()
    with torch.no_grad():
        theirs.gate.weight.copy_(ours.router.linear.weight)
        for n, one in enumerate(ours.experts):
            theirs.experts.gate_up_proj[n] = torch.cat([one.gate.weight, one.up.weight])
            theirs.experts.down_proj[n] = one.out.weight
    x, grad = torch.randn(2, 3, 20, 64)
    inputs = x.clone().requires_grad_(), x.clone().requires_grad_()
    outputs = ours(inputs[0]), theirs(inputs[1])
    for y in outputs:
        y.backward(grad)
    close = {"rtol": 0, "atol": 1e-5}
    torch.testing.assert_close(*outputs, **close)
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad, **close)
    found = theirs.gate.weight.grad, theirs.experts.gate_up_proj.grad, theirs.experts.down_proj.grad
    torch.testing.assert_close(ours.router.linear.weight.grad, found[0], **close)
    for n, one in enumerate(ours.experts):
        both = torch.cat([one.gate.weight.grad, one.up.weight.grad])
        torch.testing.assert_close(both, found[1][n], **close)
        torch.testing.assert_close(one.out.weight.grad, found[2][n], **close)


def one_by_one(moe, x):
    """The layer as its definition reads: a token after the other."""
    rows = []
    for token in x:
        logits = moe.router.linear(token)
        sigmoid = moe.router.bias is not None
        scores = logits.sigmoid() if sigmoid else logits.softmax(0)
        best = (scores + moe.router.bias if sigmoid else scores).topk(moe.router.experts.active)
        weights = scores[best.indices]
        weights = weights / weights.sum() if moe.router.experts.normalized else weights
        y = sum(w * moe.experts[e](token) for w, e in zip(weights, best.indices, strict=True))
        if moe.shared is not None:
            y = y + moe.shared(token) * moe.shared_gate(token).sigmoid()
        rows.append(y)
    return torch.stack(rows)


@pytest.mark.parametrize(
    "changes",
    [
        {"active": 1, "normalized": False},
        {"active": 3, "router": "sigmoid", "router_bias": True, "bias": True},
        {"shared_hidden": 24, "shared_gate": True},
    ],
)
def test_a_layer_is_the_sum_over_the_experts_of_each_token(changes):
    moe = layer(**changes)
    if moe.router.bias is not None:
        moe.router.bias.copy_(torch.linspace(-0.5, 0.5, 8))
    x = torch.randn(13, 64, dtype=torch.float64)
    wanted, alone = one_by_one(twin := deepcopy(moe), x), moe(x)
    torch.testing.assert_close(alone, wanted)
    for y in (wanted, alone):
        y.square().sum().backward()
    unused = moe.tokens_per_expert == 0
    for (name, grad), other in zip(gradients(moe).items(), gradients(twin).values(), strict=True):
        if other is None:  # nobody sent it a token
            assert unused[int(name.split(".")[1])]
            assert not grad.any()
        else:
            torch.testing.assert_close(grad, other)


def test_a_bias_selects_but_does_not_weigh():
    router = Router(4, Experts(count=4, active=2, ffn_hidden=8, router="sigmoid"))
    nn.init.zeros_(router.linear.weight)
    router.bias.copy_(torch.tensor([0.0, 3.0, 0.0, 2.0]))
    experts, weights, scores = router(torch.randn(5, 4))
    assert experts.tolist() == [[1, 3]] * 5
    assert weights.tolist() == [[0.5, 0.5]] * 5
    assert scores.tolist() == [[0.5] * 4] * 5
    assert [name for name, _ in router.named_parameters()] == ["linear.weight"]


def routing_of(experts, num_experts=4):
    experts = torch.tensor(experts)
    weights = torch.arange(1.0, experts.numel() + 1).view(experts.shape)
    return Routing(experts, weights, torch.full((len(experts), num_experts), 1 / num_experts))


def test_an_expert_drops_its_last_tokens_over_capacity():
    routing = routing_of([[0, 1], [0, 2], [1, 0], [0, 3]])  # 8 copies on 4 experts
    assert drop(routing, 1.0).experts.tolist() == [[0, 1], [0, 2], [1, -1], [-1, 3]]
    assert drop(routing, 1.01).experts.tolist() == [[0, 1], [0, 2], [1, 0], [-1, 3]]
    assert drop(routing, 2.0).experts.tolist() == routing.experts.tolist()
    assert torch.equal(drop(routing, 1.0).weights, routing.weights)


def test_a_token_that_all_its_experts_drop_gets_nothing_from_them():
    moe = layer(active=1, capacity=0.25)
    nn.init.zeros_(moe.router.linear.weight)  # all tokens choose the same expert
    y = moe(torch.randn(32, 64, dtype=torch.float64))
    assert (y != 0).any(1).tolist() == [True] + [False] * 31
    assert sorted(moe.tokens_per_expert.tolist()) == [0] * 7 + [32]  # what was asked for


def test_the_auxiliary_loss_by_hand():
    scores = torch.tensor([[0.7, 0.1, 0.1, 0.1], [0.4, 0.3, 0.2, 0.1]], requires_grad=True)
    routing = Routing(torch.tensor([[0, 1], [0, 1]]), torch.ones(2, 2), scores)
    loss = aux_loss(routing)
    assert loss.item() == pytest.approx(4 * (0.5 * 0.55 + 0.5 * 0.2))
    assert aux_loss(routing._replace(scores=scores * 3)).item() == pytest.approx(loss.item())
    assert aux_loss(routing_of([[0, 1], [2, 3]])).item() == 1
    alone = torch.eye(4)[[0, 0]]
    assert aux_loss(Routing(torch.zeros(2, 1, dtype=torch.int64), alone, alone)).item() == 4
    counts = torch.tensor([2, 0, 0, 2])  # of other tokens, too
    assert aux_loss(routing, counts).item() == pytest.approx(4 * (0.5 * 0.55 + 0.5 * 0.1))


def test_backward_adds_the_auxiliary_loss_and_counts_each_token_once():
    torch.manual_seed(0)
    model, batch = GPT(TINY).double(), token_batch(0, batch=2, seq=17, vocab=TINY.vocab)
    tokens, targets = next_tokens(batch)
    layers = [block.mlp for block in model.blocks]
    explicit, kept = deepcopy(model), []
    for one in explicit.blocks:  # the same inputs once more, through the router
        one.mlp.register_forward_pre_hook(lambda _, args: kept.append(args[0]))
    loss = token_loss(explicit(tokens), targets)
    for one, x in zip(explicit.blocks, kept, strict=True):
        loss = loss + 0.5 * aux_loss(one.mlp.router(x.flatten(0, -2)))
    loss.backward()
    for one in layers:
        one.aux_weight = 0.5
    recomputed = deepcopy(model)
    recompute_full(recomputed)
    for run in (model, recomputed):
        token_loss(run(tokens), targets).backward()
        for name, grad in gradients(explicit).items():
            torch.testing.assert_close(dict(run.named_parameters())[name].grad, grad)
        for block in run.blocks:
            assert block.mlp.load.sum() == 34 * 2
            assert torch.equal(block.mlp.load, block.mlp.tokens_per_expert)
    with torch.no_grad():
        model(tokens)
    assert all(one.load.sum() == 34 * 2 for one in layers)


@pytest.mark.parametrize("rule", ["none", "bias", "auxiliary loss"])
def test_balance_on_a_skewed_stream(rule):
    """Tokens whose mean prefers two experts: within 10 % of even with a rule, far off without."""
    router = "sigmoid" if rule == "bias" else "softmax"
    moe = layer(active=2, router=router, ffn_hidden=4).float()
    nn.init.normal_(moe.router.linear.weight, std=0.1)
    skew = 4 * (moe.router.linear.weight[0] + moe.router.linear.weight[1]).detach()
    optimizer = torch.optim.SGD(moe.router.parameters(), lr=0.3)
    moe.aux_weight, loads = 1.0, []
    torch.manual_seed(1)
    for _ in range(150):
        moe.load.zero_()
        moe(torch.randn(256, 64) + skew).sum().mul(0).backward()
        if rule == "bias":
            moe.router.bias.copy_(move_bias(moe.router.bias, moe.load, 0.003))
        if rule == "auxiliary loss":
            optimizer.step()
        optimizer.zero_grad()
        loads.append(moe.load.clone())
    last = torch.stack(loads[-30:]).double().sum(0)
    most = (last.max() / last.mean()).item()
    assert most > 2 if rule == "none" else most < 1.1


def test_a_gpt_with_experts_has_the_parameters_of_the_formula():
    for spec in (TINY, with_experts(shared_hidden=16, shared_gate=True, dense_layers=(1,))):
        model = GPT(spec)
        assert sum(p.numel() for p in model.parameters()) == count_params(spec)
        assert [isinstance(b.mlp, MoE) for b in model.blocks] == [True, spec is TINY]


def test_what_cannot_be_is_told():
    with pytest.raises(CourseError, match="MoE: need a spec with experts; got tiny, which is"):
        MoE(MODELS["tiny"])
    with pytest.raises(CourseError, match="need router softmax or sigmoid; got 'top'"):
        with_experts(router="top")
    with pytest.raises(ShapeError, match="need capacity above 0"):
        with_experts(capacity=0)
