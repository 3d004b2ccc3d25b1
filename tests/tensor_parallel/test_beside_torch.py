"""Tensor parallelism against PyTorch's own: the same numbers, in the same collectives."""

import sys

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from course_lib.core import ModelSpec
from course_lib.models import GPT, padded_batch
from course_lib.ranks import record
from course_lib.tensor_parallel import (
    finish_gradients,
    gather_tensors,
    parallel_token_loss,
    parallelize,
)
from course_lib.tensor_parallel.cost import tensor_traffic

cloudpickle.register_pickle_by_value(sys.modules[__name__])

TOLERANCE = {"rtol": 1e-12, "atol": 1e-12}  # float64: sums run in another order
SIZES = {"hidden": 24, "num_layers": 2, "num_heads": 4, "vocab": 48, "max_seq": 12}
SPECS = {
    "gpt": ModelSpec(**SIZES, ffn_hidden=96, positions="rope", tied=False),
    "llama": ModelSpec(
        **SIZES, ffn_hidden=64, positions="rope", tied=False, gated=True, norm="rms", bias=False
    ),
}


def seeded(spec):
    torch.manual_seed(0)
    return GPT(spec, flash=False).double()  # unfused: DTensor takes it with whole heads only


def plan(spec, sequence_parallel, shared):
    """What parallelize_module is told; `shared`: q, k and v (up and gate) have one way in."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
    )

    stream = Shard(1) if sequence_parallel else Replicate()
    styles = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=stream),
        "head": ColwiseParallel(input_layouts=stream, use_local_output=False),
    }
    columns = {"attention": "qkv", "mlp": ["up", *["gate"] * spec.gated]}
    for part, names in columns.items():
        path = f"blocks.*.{part}"
        inputs = Replicate() if shared else stream
        styles |= {f"{path}.{name}": ColwiseParallel(input_layouts=inputs) for name in names}
        styles[f"{path}.out"] = RowwiseParallel(output_layouts=stream)
        if shared:
            styles[path] = PrepareModuleInput(
                input_layouts=(stream,), desired_input_layouts=(Replicate(),)
            )
        if sequence_parallel:
            styles |= {f"{path}_norm": SequenceParallel(), "norm": SequenceParallel()}
    return styles


def batch():
    return padded_batch(0, batch=3, seq=12, vocab=48)


def a_mesh():
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))


def torchs(rank, spec, sequence_parallel, shared):
    """PyTorch's loss, whole gradients and calls."""
    from torch.distributed.tensor.parallel import loss_parallel, parallelize_module

    model = parallelize_module(seeded(spec), a_mesh(), plan(spec, sequence_parallel, shared))
    tokens, targets = batch()
    with record() as log, loss_parallel():
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
    grads = {name: whole(param.grad) for name, param in model.named_parameters()}
    return whole(loss).detach(), grads, calls_of(log)


def whole(tensor):
    """A parameter that every rank holds is a plain tensor where nothing has split it."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def ours(rank, spec, sequence_parallel):
    mesh = a_mesh()
    model = parallelize(seeded(spec), mesh, sequence_parallel)
    tokens, targets = batch()
    with record() as log:
        loss = parallel_token_loss(model(tokens), targets, mesh.get_group())
        loss.backward()
        finish_gradients(model)
    grads = {name: param.grad for name, param in model.named_parameters()}
    return loss.detach(), gather_tensors(model, grads), calls_of(log)


def calls_of(log):
    return [(event.kind, event.num_bytes) for event in log.events if event.kind != "wait"]


def without(paper, *left_out):
    """The paper's calls but those of some parts or phases."""
    return [
        (call.kind, call.num_bytes)
        for call in paper
        if call.part not in left_out and call.phase not in left_out
    ]


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("name", SPECS)
def test_pytorch_sends_the_same(pools, name, sequence_parallel):
    """All but two things: its loss sends its three numbers a token in three calls, ours in two;
    and it adds up the norms' gradients when somebody asks for them."""
    spec = SPECS[name]
    paper = tensor_traffic(spec, 3, 12, 8, sequence_parallel=sequence_parallel)
    our = pools(2).run(ours, spec, sequence_parallel)
    their = pools(2).run(torchs, spec, sequence_parallel, True)
    torch.testing.assert_close(
        [case[:2] for case in our], [case[:2] for case in their], **TOLERANCE
    )
    numbers = 3 * 12 * 8  # one a token
    for (*_, our_calls), (*_, their_calls) in zip(our, their, strict=True):
        assert our_calls == without(paper)
        assert [c for c in our_calls if c[1] < 3 * numbers][:2] == [
            ("all_reduce", numbers), ("all_reduce", 2 * numbers)
        ]  # fmt: skip
        small = [call for call in their_calls if call[1] <= numbers]
        assert small == [("all_reduce", numbers)] * 3
        assert [call for call in their_calls if call not in small] == without(
            paper, "loss", "finish"
        )


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("name", SPECS)
def test_matrices_that_do_not_share_their_way_in_send_more(pools, name, sequence_parallel):
    """PyTorch's plan without PrepareModuleInput: q, k and v (gate and up) each enter alone."""
    spec = SPECS[name]
    more = spec.num_layers * (2 + spec.gated)
    for *_, calls in pools(2).run(torchs, spec, sequence_parallel, False):
        kinds = [kind for kind, num_bytes in calls if num_bytes == 3 * 12 * 24 * 8]
        paper = tensor_traffic(spec, 3, 12, 8, sequence_parallel=sequence_parallel)
        wanted = [kind for kind, _ in without(paper, "loss", "finish")]
        for kind in ("all_gather", "reduce_scatter") if sequence_parallel else ("all_reduce",):
            assert kinds.count(kind) == wanted.count(kind) + more
