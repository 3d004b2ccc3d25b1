"""Megatron-Core's layer of experts, with its all-to-all, has our outputs and gradients."""

import logging
import sys
import warnings
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import patch

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

from course_lib.core.presets import MODELS
from course_lib.data_parallel import NaiveDDP
from course_lib.expert_parallel import expert_groups, parallelize_experts
from course_lib.frameworks.megatron_on_cpu import stand_ins
from course_lib.mesh.mesh import Mesh
from course_lib.mesh.rank_mesh import RankMesh
from course_lib.models.moe import MoE

pytest.importorskip("megatron.core")
cloudpickle.register_pickle_by_value(sys.modules[__name__])

SPEC = replace(MODELS["moe-tiny"], hidden=16)
SPEC = replace(SPEC, experts=replace(SPEC.experts, ffn_hidden=12))
SIZES, AUX = (9, 4, 1, 7), 0.1
CLOSE = {"rtol": 1e-5, "atol": 1e-6}  # its softmax of the router rounds float64 to fp32


class OneStream:
    """The stream of a device without streams: everything is done when it is called."""

    def __init__(self, *args):
        pass

    def __eq__(self, other):
        return True

    __hash__ = object.__hash__

    def wait_stream(self, other):
        pass

    def record_event(self):
        return SimpleNamespace(synchronize=lambda: None)


def on_host(tensor, as_numpy=False, record_stream=False):
    """Sizes as numbers: Megatron-Core reads those on a GPU only."""
    return tensor.tolist() if as_numpy and torch.is_tensor(tensor) else tensor


@contextmanager
def no_streams():
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(stand_ins())
        for name, instead in (
            ("Stream", OneStream),
            ("current_stream", OneStream),
            ("stream", lambda _: nullcontext()),
        ):
            stack.enter_context(patch.object(torch.cuda, name, instead))
        from megatron.core.transformer.moe import moe_utils, token_dispatcher

        # it names this one, of Transformer Engine, without asking whether that is installed
        stack.enter_context(patch.object(moe_utils, "te_general_gemm", None, create=True))
        stack.enter_context(patch.object(token_dispatcher, "maybe_move_tensor_to_cpu", on_host))
        yield


def made(ours, ep):
    """Megatron-Core's layer with this rank's part of our weights; call it inside `no_streams`."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    logging.disable(logging.WARNING)
    parallel_state.initialize_model_parallel(
        expert_model_parallel_size=ep, create_gloo_process_groups=False
    )
    experts = SPEC.experts
    config = TransformerConfig(
        **{"num_layers": 1, "hidden_size": SPEC.hidden, "num_attention_heads": SPEC.num_heads},
        **{"num_moe_experts": experts.count, "moe_router_topk": experts.active},
        **{"ffn_hidden_size": experts.ffn_hidden, "moe_ffn_hidden_size": experts.ffn_hidden},
        **{"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": AUX},
        **{"moe_token_dispatcher_type": "alltoall", "moe_router_dtype": "fp64"},
        **{"gated_linear_unit": True, "activation_func": F.silu, "add_bias_linear": False},
        **{"params_dtype": torch.float64, "use_cpu_initialization": True},
        **{"expert_model_parallel_size": ep, "bias_activation_fusion": False},
    )
    spec = get_moe_module_spec(use_te=False, num_experts=experts.count, moe_grouped_gemm=False)
    layer = spec.module(config, submodules=spec.submodules, layer_number=1).double()
    first = dist.get_rank() % ep * (experts.count // ep)
    with torch.no_grad():
        layer.router.weight.copy_(ours.router.linear.weight)
        for n, one in enumerate(layer.experts.local_experts):
            mine = ours.experts[first + n]
            one.linear_fc1.weight.copy_(torch.cat([mine.gate.weight, mine.up.weight]))
            one.linear_fc2.weight.copy_(mine.out.weight)
    return layer


def weighted(y):
    return (y * torch.linspace(-1, 2, y.numel(), dtype=y.dtype).view_as(y)).sum()


def both(rank, ep):
    """Outputs, gradients of the input and of the weights: ours, then theirs."""
    from megatron.core import parallel_state

    mesh = RankMesh(Mesh(dp=dist.get_world_size()))
    groups = expert_groups(mesh, ep)
    torch.manual_seed(0)
    ours = MoE(SPEC).double()
    torch.nn.init.normal_(ours.router.linear.weight)
    ours.aux_weight = AUX
    torch.manual_seed(rank)
    x = torch.randn(SIZES[rank], 2, SPEC.hidden, dtype=torch.float64)  # [seq, batch, hidden]
    with no_streams():
        theirs, given = made(ours, ep), x.clone().requires_grad_()
        y, _ = theirs(given)
        weighted(y).backward()
    parallel_state.destroy_model_parallel()
    their_grads = {"router": theirs.router.weight.grad}
    dist.all_reduce(their_grads["router"])
    first = rank % ep * (SPEC.experts.count // ep)
    for n, one in enumerate(theirs.experts.local_experts):
        grads = one.linear_fc1.weight.grad, one.linear_fc2.weight.grad
        for name, grad in zip(("in", "out"), grads, strict=True):
            dist.all_reduce(grad, group=groups.expert_dp)
            their_grads[f"{first + n}.{name}"] = grad
    their_grads = {name: grad / mesh.num_copies for name, grad in their_grads.items()}

    model = NaiveDDP(parallelize_experts(ours, groups), group=mesh.copies)
    own = x.clone().requires_grad_()
    z = model(own)
    weighted(z).backward()
    model.finish()
    our_grads = {"router": ours.router.linear.weight.grad}
    for number, one in ours.experts.named_children():
        our_grads[f"{number}.in"] = torch.cat([one.gate.weight.grad, one.up.weight.grad])
        our_grads[f"{number}.out"] = one.out.weight.grad
    return [z.detach(), own.grad, our_grads], [y.detach(), given.grad, their_grads]


@pytest.mark.parametrize("ep", [2, 4])
def test_megatron_core_has_our_outputs_and_all_our_gradients(pools, ep):
    for ours, theirs in pools(4).run(both, ep):
        torch.testing.assert_close(ours, theirs, **CLOSE)
        assert all(grad.any() for grad in ours[2].values())
