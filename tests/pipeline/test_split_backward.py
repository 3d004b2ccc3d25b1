"""A split backward gives the gradients of one backward, for whatever a module does."""

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F

from course_lib.core import ModelSpec
from course_lib.models import GPT
from course_lib.pipeline import zero_bubble_h1, zero_bubble_v
from course_lib.pipeline.p2p import CommPlan
from course_lib.pipeline.split_backward import SplitBackward


class Body(nn.Module):
    """A module of two layers with a forward of one's own: `forward(module, x)`."""

    def __init__(self, forward):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.randn(4))
        self.never = nn.Parameter(torch.randn(4))
        self.frozen = nn.Parameter(torch.randn(4), requires_grad=False)
        self.run = forward

    def forward(self, x):
        return self.run(self, x)


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight**2

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad * weight**2, (2 * grad * x * weight).sum(0)


def in_place_through_a_view(module, x):
    hidden = module.first(x)
    hidden[:, 0].add_(module.scale[0])
    hidden[:, 1].mul_(2.0)
    return module.second(hidden)


def written_into_a_buffer(module, x):
    hidden = x * 1.0
    hidden[0] = module.scale
    return module.second(hidden)


FORWARDS = {
    "layers": lambda m, x: m.second(F.gelu(m.first(x))) * m.scale,
    "a layer twice": lambda m, x: m.first(torch.tanh(m.first(x))),
    "shared in two operations": lambda m, x: F.linear(m.first(x), m.first.weight.t()),
    "transposed": lambda m, x: x @ m.first.weight.t() + m.scale.view(4),
    "two outputs": lambda m, x: torch.cat(m.first.weight.split(2)) @ x.t(),
    "in place": lambda m, x: m.second(F.relu(m.first(x), inplace=True)),
    "in place, the input's operation": lambda m, x: m.second((x * 1.0).mul_(m.scale)),
    "in place, through a view": in_place_through_a_view,
    "written into": written_into_a_buffer,
    "own function": lambda m, x: m.second(Squared.apply(m.first(x), m.scale)) * m.scale,
    "two branches": lambda m, x: m.first(x) * m.second(x) + m.frozen,
    "parameters only": lambda m, x: m.first.weight * m.scale,
    "shape and dtype asked": lambda m, x: m.first(x.to(m.scale.dtype)).view(-1, *m.scale.shape),
}


def grads_of(module):
    return {name: param.grad for name, param in module.named_parameters()}


@pytest.mark.parametrize("wants_x", [True, False])
@pytest.mark.parametrize("name", list(FORWARDS))
def test_two_halves_give_the_gradients_of_one_backward(name, wants_x):
    torch.manual_seed(0)
    module = Body(FORWARDS[name]).double()
    batches = [torch.randn(5, 4).double() for _ in range(2)]
    wanted_x, got_x = [], []
    for x in batches:  # gradients add up
        leaf = x.clone().requires_grad_(wants_x)
        module(leaf).square().sum().backward()
        wanted_x.append(leaf.grad)
    wanted = grads_of(module)
    module.zero_grad()
    for x in batches:
        leaf = x.clone().requires_grad_(wants_x)
        with SplitBackward(module) as split:
            out = module(leaf)
        edge, grad = get_gradient_edge(out), 2 * out.detach()
        got_x.append(split.backward_input(edge, grad, leaf if wants_x else None))
        split.backward_weight()
    torch.testing.assert_close(grads_of(module), wanted, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(got_x, wanted_x, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("schedule", "rank", "halved"),
    [
        (zero_bubble_h1(2, 3), 0, []),  # W follows at once, and rank 0 sends no gradient
        (zero_bubble_h1(2, 3), 1, [(0, 0), (0, 1), (0, 2)]),  # rank 0 waits for I
        (zero_bubble_v(2, 3), 0, [(1, 0), (1, 1), (1, 2)]),
        # in the turn of the V nothing is sent; the last W there fills a bubble
        (zero_bubble_v(2, 3), 1, [(0, 0), (0, 1), (0, 2), (1, 2)]),
    ],
)
def test_only_what_another_rank_or_a_later_w_waits_for_is_split(schedule, rank, halved):
    assert sorted(CommPlan(schedule, rank).split_backwards) == halved
    everything = {(a.model_chunk, a.micro_batch) for a in schedule[rank] if a.kind[-6:] == "weight"}
    assert CommPlan(schedule, rank, splits_all=True).split_backwards == everything


def test_a_gpt_has_its_gradients_and_the_first_half_touches_no_weight():
    spec = ModelSpec(hidden=8, num_layers=2, num_heads=2, ffn_hidden=16, vocab=11, max_seq=6)
    torch.manual_seed(0)
    model, tokens = GPT(spec).double(), torch.arange(6).view(1, 6)
    model(tokens).square().mean().backward()
    wanted = grads_of(model)
    model.zero_grad()
    with SplitBackward(model) as split:
        out = model(tokens)
    split.backward_input(out, 2 * out.detach() / out.numel())
    assert set(grads_of(model).values()) == {None}
    split.backward_weight()
    torch.testing.assert_close(grads_of(model), wanted, rtol=1e-12, atol=1e-15)


def test_hooks_of_parameters_see_the_gradient():
    layer, seen = nn.Linear(4, 4), []
    layer.weight.register_post_accumulate_grad_hook(lambda param: seen.append(param.grad.clone()))
    with SplitBackward(layer) as split:
        out = layer(torch.ones(2, 4))
    split.backward_input(out, torch.ones_like(out))
    assert seen == []
    split.backward_weight()
    assert [grad.tolist() for grad in seen] == [[[2.0] * 4] * 4]


def test_a_module_without_anything_to_train():
    layer, x = nn.Linear(4, 4).requires_grad_(False), torch.ones(2, 4, requires_grad=True)
    with SplitBackward(layer) as split:
        out = layer(x)
    grad = split.backward_input(out, torch.ones_like(out), x)
    split.backward_weight()
    torch.testing.assert_close(grad, torch.ones(2, 4) @ layer.weight)


def test_the_products_of_one_backward_are_done_once():
    from torch.utils.flop_counter import FlopCounterMode

    def flop(fn):
        with FlopCounterMode(display=False) as counter:
            fn()
        return counter.get_total_flops()

    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(3)))
    x = torch.randn(4, 8, requires_grad=True)
    with SplitBackward(model) as split:
        out = model(x)
    product = 2 * 4 * 8 * 8
    assert flop(lambda: split.backward_input(out, torch.ones_like(out), x)) == 3 * product
    assert flop(split.backward_weight) == 3 * product
