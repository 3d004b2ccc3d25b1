"""DeepSpeed's layer of experts on gloo, under its engine, has our outputs and gradients."""

import sys
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from torch import nn

from course_lib.core.presets import MODELS
from course_lib.data_parallel import NaiveDDP
from course_lib.expert_parallel import expert_groups, parallelize_experts
from course_lib.frameworks.deepspeed_engine import deepspeed_config, quiet_deepspeed
from course_lib.mesh.mesh import Mesh
from course_lib.mesh.rank_mesh import RankMesh
from course_lib.models.mlp import MLP
from course_lib.models.moe import MoE

pytest.importorskip("deepspeed")
cloudpickle.register_pickle_by_value(sys.modules[__name__])

EXPERTS = replace(MODELS["moe-tiny"].experts, count=4, ffn_hidden=12)
SPEC = replace(MODELS["moe-tiny"], hidden=16, experts=EXPERTS)
SIZES, AUX = (9, 4, 1, 7), 0.1
CLOSE = {"rtol": 1e-4, "atol": 1e-5, "check_dtype": False}  # its engine refuses float64


class WithLoss(nn.Module):
    """A layer of DeepSpeed, which returns its auxiliary loss beside its output."""

    def __init__(self, top_k, ep):
        from deepspeed.moe.layer import MoE as Theirs

        super().__init__()
        self.layer = Theirs(
            **{"hidden_size": SPEC.hidden, "expert": MLP(SPEC, EXPERTS.ffn_hidden)},
            **{"num_experts": EXPERTS.count, "ep_size": ep, "k": top_k, "drop_tokens": False},
            **{"use_rts": False, "top2_2nd_expert_sampling": False},
        )

    def forward(self, x, aux_weight):
        y, aux, _ = self.layer(x)
        return y, weighted(y) + aux_weight * aux


def weighted(y):
    return (y * torch.linspace(-1, 2, y.numel(), dtype=y.dtype).view_as(y)).sum()


def theirs(ours, x, ep, aux_weight):
    """Output, gradients of the input, and averages of its engine for the router and own experts."""
    deepspeed = quiet_deepspeed("test")
    model, first = WithLoss(ours.router.experts.active, ep), dist.get_rank() % ep
    router, experts = (model.layer.deepspeed_moe.gate.wg, model.layer.deepspeed_moe.experts)
    with torch.no_grad():
        router.weight.copy_(ours.router.linear.weight)
    for n, one in enumerate(experts.deepspeed_experts):
        one.load_state_dict(ours.experts[first * (EXPERTS.count // ep) + n].state_dict())
    with redirect_stdout(StringIO()):
        config = deepspeed_config(0)
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=config
        )
    given = x.float().requires_grad_()
    y, loss = engine(given, aux_weight)
    engine.backward(loss)
    grads = {"router": router.weight.grad}
    for n, one in enumerate(experts.deepspeed_experts):
        number = first * (EXPERTS.count // ep) + n
        grads |= {f"{number}.{name}": param.grad for name, param in one.named_parameters()}
    return [y.detach(), given.grad, grads]


def both(rank, top_k, ep):
    """Outputs, gradients of the input and averaged ones of the weights: ours, then theirs."""
    mesh = RankMesh(Mesh(dp=dist.get_world_size()))
    groups = expert_groups(mesh, ep)
    torch.manual_seed(0)
    experts = replace(EXPERTS, active=top_k, normalized=top_k > 1)
    ours = MoE(replace(SPEC, experts=experts)).double()
    nn.init.normal_(ours.router.linear.weight)
    ours.aux_weight = AUX * (top_k != 2)  # for 2, its loss counts the first choice only
    torch.manual_seed(rank)
    tokens = SIZES[rank] if top_k > 1 else 8  # for 1, it takes as many on each rank only
    x = torch.randn(tokens, SPEC.hidden, dtype=torch.float64)
    found = theirs(ours, x, ep, ours.aux_weight)

    model = NaiveDDP(parallelize_experts(ours, groups), group=mesh.copies)
    own = x.clone().requires_grad_()
    z = model(own)
    weighted(z).backward()
    model.finish()
    grads = {"router": ours.router.linear.weight.grad}
    grads |= {name: param.grad for name, param in ours.experts.named_parameters()}
    return [z.detach(), own.grad, grads], found


@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_deepspeed_has_our_outputs_and_all_our_averaged_gradients(pools, top_k):
    for ours, theirs in pools(4).run(both, top_k, 2):
        torch.testing.assert_close(ours, theirs, **CLOSE)
        assert sum(bool(grad.any()) for grad in ours[2].values()) > 4
