"""Muon in the trainer: PyTorch's numbers on any number of ranks, its traffic, and its state."""

import sys
from dataclasses import replace

import cloudpickle
import pytest
import torch
from torch.nn import Parameter

from course_lib.core import CourseError, ModelSpec
from course_lib.memory.optimizer_states import is_hidden_matrix
from course_lib.models import GPT, next_tokens, token_batch, token_loss
from course_lib.train.config import TrainConfig
from course_lib.train.trainer import Trainer
from course_lib.zero.muon import orthogonal, shared_out
from tests.train.training_runs import by_name, losses, same, whole_state

cloudpickle.register_pickle_by_value(sys.modules[__name__])

SPEC = ModelSpec(hidden=8, num_layers=2, num_heads=2, ffn_hidden=12, vocab=21, max_seq=8)
MUON = TrainConfig(
    model=SPEC, steps=3, global_batch=8, seq=8, dtype="float64", every=0, lr=0.02, optimizer="muon"
)
# the sums over the batch run in another order on other ranks; float64 rounds at 1e-16, and
# Newton-Schulz steps enlarge small singular values up to 3.4445**5 = 485 times
TOLERANCE = {"rtol": 1e-8, "atol": 1e-11}


def trained(rank, configs):
    """For each run: its record, and on rank 0 the whole state."""
    found = []
    for config in configs:
        trainer = Trainer(rank, config)
        found.append((trainer.run(), whole_state(trainer)))
    return found


def of_pytorch(config):
    """The losses and the state after a run of one process with PyTorch's own Muon and AdamW."""
    torch.manual_seed(config.seed)
    model = GPT(SPEC).to(getattr(torch, config.dtype))
    named = dict(model.named_parameters())
    hidden = [p for name, p in named.items() if is_hidden_matrix(name, p.shape)]
    others = [p for p in named.values() if all(p is not one for one in hidden)]
    optimizers = [
        torch.optim.Muon(hidden, lr=config.lr, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=config.lr),
    ]
    found = []
    for n in range(config.steps):
        tokens = token_batch(n, batch=config.global_batch, seq=config.seq, vocab=SPEC.vocab)
        inputs, targets = next_tokens(tokens)
        loss = token_loss(model(inputs), targets)
        model.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        found.append(loss.item())
    kept = {param: state for one in optimizers for param, state in one.state.items()}
    numbered = {number: kept[param] for number, param in enumerate(named.values())}
    return found, by_name({"model": model.state_dict(), "optimizer": numbered}, model)


def test_one_process_has_the_bits_of_pytorchs_own_muon(alone):
    config = replace(MUON, dtype="float32")
    expected, state = of_pytorch(config)
    ((record, whole),) = alone(trained, [config])
    assert losses(record) == pytest.approx(expected, rel=1e-6)  # the record sums in float64
    same(whole, state)


@pytest.mark.parametrize("p", [2, 3, 4])
def test_any_number_of_ranks_has_the_numbers_of_one_process(pools, monkeypatch, p):
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)  # PyTorch's, in float64
    ways = [{"strategy": "ddp"}]
    ways += [{"pp": 2}, {"strategy": "ddp", "pp": 2}] if p == 4 else []
    ways += [{"strategy": "torch-ddp", "micro_batch": 2}] if p == 2 else []
    expected, state = of_pytorch(MUON)
    configs = [replace(MUON, **{"strategy": "naive-dp"} | way) for way in ways]
    by_rank = pools(p).run(trained, configs)
    for number in range(len(configs)):
        for found in by_rank:
            torch.testing.assert_close(losses(found[number][0]), expected, **TOLERANCE)
        same(by_rank[0][number][1], state, **TOLERANCE)


def test_a_step_sends_each_matrix_once_and_a_rank_keeps_its_part_of_the_momentum(pools):
    attention, mlp = 4 * SPEC.hidden**2, 2 * SPEC.hidden * SPEC.ffn_hidden
    matrices = SPEC.num_layers * (attention + mlp)
    others = sum(p.numel() for p in GPT(SPEC).parameters()) - matrices
    held = []
    for ((record, _),) in pools(2).run(trained, [replace(MUON, strategy="ddp")]):
        sent = [one.num_bytes for one in record.events if one.kind == "broadcast"]
        assert len(sent) == MUON.steps * SPEC.num_layers * 6
        assert sum(sent) == MUON.steps * 8 * matrices
        held.append(record.run["memory"]["optim_state"] - 8 * 2 * others)
    assert sum(held) == 8 * matrices
    assert max(held) - min(held) <= 8 * SPEC.hidden * SPEC.ffn_hidden


def test_the_largest_matrices_are_shared_out_first():
    sizes = [(8, 8), (2, 2), (8, 8), (4, 4), (16, 8), (4, 8)]
    matrices = [Parameter(torch.zeros(size)) for size in sizes]
    owners = shared_out(matrices, 2)
    assert list(owners) == matrices
    assert list(owners.values()) == [1, 1, 1, 1, 0, 0]
    load = [sum(m.numel() for m, owner in owners.items() if owner == rank) for rank in (0, 1)]
    assert load == [160, 148]


@pytest.mark.parametrize("shape", [(6, 20), (20, 6), (8, 8)])
def test_orthogonal_keeps_the_directions_and_makes_the_singular_values_about_one(shape):
    torch.manual_seed(0)
    matrix = torch.randn(shape, dtype=torch.float64)
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    turned = u.T @ orthogonal(matrix) @ v.T
    values = turned.diagonal()
    assert 0.3 < values.min() <= values.max() < 1.3
    torch.testing.assert_close(turned, values.diag(), rtol=0, atol=1e-10)


def went_on(rank, config):
    resumed = Trainer(rank, config)
    return losses(resumed.run()), whole_state(resumed)


@pytest.mark.parametrize("format_", ["course", "dcp"])
def test_a_resumed_run_never_stopped_also_on_other_ranks(pools, tmp_path, format_):
    config = replace(MUON, strategy="ddp", checkpoint_format=format_)
    expected, state = pools(2).run(went_on, config)[0]
    for p, tolerance in ((2, {"rtol": 0, "atol": 0}), (3, TOLERANCE)):
        kept = replace(config, out=str(tmp_path / f"{p}"), save_every=1)
        pools(2).run(went_on, replace(kept, steps=2))
        found, whole = pools(p).run(went_on, replace(kept, resume=True))[0]
        torch.testing.assert_close(found, expected[2:], **tolerance)
        same(whole, state, **tolerance)


@pytest.mark.parametrize(
    ("changes", "got"),
    [
        ({"strategy": "zero1"}, "--strategy zero1"),
        ({"strategy": "torch-fsdp"}, "--strategy torch-fsdp"),
        ({"strategy": "lightning-ddp"}, "--strategy lightning-ddp"),
        ({"tp": 2}, "tp=2"),
    ],
)
def test_what_has_no_whole_matrices_is_refused(changes, got):
    with pytest.raises(CourseError, match=f"muon: need ranks .* got {got}. Try --strategy ddp"):
        replace(MUON, **changes)
