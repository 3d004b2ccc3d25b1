"""FSDP over tensor parallelism against PyTorch's: `fully_shard` over DTensors, the same numbers."""

import sys
from collections import Counter

import cloudpickle
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from course_lib.fsdp import FSDP
from course_lib.mesh import Mesh, RankMesh
from course_lib.mesh.clip import clip_grad_norm_across, finish_over_axes, held_grads
from course_lib.mesh.model_part import apply_methods
from course_lib.models import padded_batch
from course_lib.ranks import record
from course_lib.tensor_parallel import parallel_token_loss
from tests.tensor_parallel.test_beside_torch import SPECS, plan, seeded

cloudpickle.register_pickle_by_value(sys.modules[__name__])

TOLERANCE = {"rtol": 1e-11, "atol": 1e-12}  # float64: sums run in another order
STEPS, MOST = 3, 0.1


def batch(rank, step):
    """The part of a copy of the model: ranks 0 and 1 have one, 2 and 3 the other."""
    return [x[rank // 2 :: 2] for x in padded_batch(step, batch=4, seq=12, vocab=48)]


def share(targets, step):
    """The copy's share of all targets that count, times the number of copies."""
    whole = padded_batch(step, batch=4, seq=12, vocab=48)[1]
    return 2 * (targets >= 0).sum() / (whole >= 0).sum()


def calls_of(log):
    """How many gathers and reductions along dp, and their bytes."""
    along = {(0, 2), (1, 3)}
    wanted = [e for e in log.events if e.kind in ("all_gather", "reduce_scatter")]
    found = Counter()
    for event in wanted:
        if tuple(event.group) in along:
            found[event.kind] += event.num_bytes
    return found


def torchs(rank, spec):
    """PyTorch's losses, norms and weights, and the calls of the last step."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import loss_parallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = parallelize_module(seeded(spec), mesh["tp"], plan(spec, False, True))
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh["dp"])
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.5), []
    for step in range(STEPS):
        tokens, targets = batch(rank, step)
        optimizer.zero_grad()
        with record() as log, loss_parallel():
            loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
            loss = loss * share(targets, step)
            loss.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if is_split(p)])
        rest = torch.nn.utils.get_total_norm(
            [p.grad for p in model.parameters() if not is_split(p)]
        )
        norm = (norm.full_tensor() ** 2 + rest.full_tensor() ** 2).sqrt()
        for param in model.parameters():
            param.grad.mul_((MOST / (norm + 1e-6)).clamp(max=1.0).item())
        optimizer.step()
        found.append((loss.full_tensor().item() if hasattr(loss, "full_tensor") else loss.item(),
                      norm.item()))  # fmt: skip
    weights = {name: param.full_tensor().detach() for name, param in model.named_parameters()}
    return found, weights, calls_of(log)


def is_split(param):
    """Is it split over both axes? Norms of DTensors on one mesh each can be taken together."""
    return param.device_mesh.ndim == 2


def ours(rank, spec):
    mesh = RankMesh(Mesh(dp=2, tp=2))
    part = apply_methods(seeded(spec), mesh, lambda module, group: FSDP(module, group=group))
    model, module = part.wrapped, part.module
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.5), []
    for step in range(STEPS):
        tokens, targets = batch(rank, step)
        optimizer.zero_grad()
        with record() as log:
            loss = parallel_token_loss(model(tokens), targets, mesh.group("tp"))
            loss = loss * share(targets, step)
            loss.backward()
        finish_over_axes(module, mesh, held_grads(module), sums_tied=False)
        norm = clip_grad_norm_across(module, mesh, MOST, held_grads(module))
        optimizer.step()
        found.append((loss.item(), norm.item()))
    part.shard_of |= {one.local: one.shard_of for one in model.param_shards()}
    return found, part.full_state(), calls_of(log)


@pytest.mark.parametrize("name", SPECS)
def test_fsdp_over_tp_computes_and_sends_what_pytorchs_does(pools, name):
    our, their = (pools(4).run(run, SPECS[name]) for run in (ours, torchs))
    for (numbers, weights, calls), (their_numbers, their_weights, their_calls) in zip(
        our, their, strict=True
    ):
        torch.testing.assert_close(numbers, their_numbers, **TOLERANCE)
        torch.testing.assert_close(weights, their_weights, **TOLERANCE)
        assert max(norm for _, norm in numbers) > 2 * MOST
        assert calls == their_calls
