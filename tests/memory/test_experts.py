"""Experts, latent attention and windows: what is saved, held and kept, counted in another way."""

from functools import partial

import pytest
import torch
from torch.nn import functional as F

from course_lib.core import CourseError, ModelSpec, Parallelism
from course_lib.core.layers import LayerKind, layers, matrices
from course_lib.core.specs import Experts, LatentAttention
from course_lib.cost.flops import forward_flop, layers_flop, score_pairs
from course_lib.cost.params import (
    active_params,
    count_params,
    expert_params_on_rank,
    layers_params,
    params_on_rank,
    weights_on_rank,
)
from course_lib.memory import activations, model_states, step_ledger
from course_lib.memory.formulas import kv_cache
from course_lib.memory.layer_bytes import Pass, total
from course_lib.memory.saved_tensors import measure_saved

EXPERTS = Experts(count=8, active=2, ffn_hidden=24, shared_hidden=40, dense_layers=(0,))
ROUTED = ModelSpec(
    **{"hidden": 16, "num_layers": 3, "num_heads": 4, "num_kv_heads": 2, "ffn_hidden": 48},
    **{"vocab": 50, "max_seq": 32, "gated": True, "norm": "rms", "positions": "rope"},
    **{"bias": False, "tied": False, "experts": EXPERTS},
)
LATENT = LatentAttention(q_rank=24, kv_rank=12, nope_dim=6, rope_dim=2, value_dim=5)


def routed_mlp(x, weights):
    """A layer of experts by hand: route, copy, compute each expert's tokens, weigh, add."""
    probs = (x @ weights["router"]).softmax(-1)
    best, chosen = probs.topk(EXPERTS.active)
    order = chosen.flatten().argsort(stable=True)
    sent = x[order // EXPERTS.active]
    counts = torch.bincount(chosen.flatten(), minlength=EXPERTS.count).tolist()
    outputs = []
    for mine, gate, up, down in zip(
        sent.split(counts), weights["gate"], weights["up"], weights["down"], strict=True
    ):
        outputs.append((F.silu(mine @ gate) * (mine @ up)) @ down)
    weighed = torch.cat(outputs) * best.flatten()[order][:, None]
    shared = F.silu(x @ weights["s_gate"]) * (x @ weights["s_up"])
    own = weighed[order.argsort()].view(len(x), EXPERTS.active, -1).sum(1)
    return shared @ weights["s_down"] + own


def test_a_layer_of_experts_saves_what_autograd_holds():
    h, tokens, e, s = 16, 2 * 12, EXPERTS, EXPERTS.shared_hidden
    sizes = {"router": (h, e.count), "s_gate": (h, s), "s_up": (h, s), "s_down": (s, h)}
    weights = {name: torch.randn(size, requires_grad=True) for name, size in sizes.items()}
    for name, size in {"gate": (h, 24), "up": (h, 24), "down": (24, h)}.items():
        weights[name] = [torch.randn(size, requires_grad=True) for _ in range(e.count)]
    given = [one for w in weights.values() for one in (w if isinstance(w, list) else [w])]
    saved = measure_saved(partial(routed_mlp, torch.randn(tokens, h), weights), given=given)
    held = sum(one.num_bytes for one in saved if one.dtype == torch.float32)
    rows = Pass(spec=ROUTED, batch=2, seq=12, number_bytes=4).layer(layers(ROUTED)[-1])
    counted = total(row for row in rows if row.part in ("experts", "mlp"))
    assert held == counted + tokens * e.active * 4  # and the weights of the outputs, in order


def test_the_ranks_together_hold_every_expert_once_and_repeat_what_is_whole():
    axes = Parallelism(dp=4, tp=2, ep=4, expert_tp=1, pp=3)
    held = [layers_params(ROUTED, axes, stage) for stage in range(3)]
    every = [layers_params(ROUTED, Parallelism(pp=3), stage) for stage in range(3)]
    for mine, all_of_it in zip(held, every, strict=True):
        assert mine["experts"] * axes.ep == all_of_it["experts"]
        assert mine["split"] * axes.tp == all_of_it["split"]
        assert mine["whole"] == all_of_it["whole"]
    assert held[0]["experts"] == 0 < held[1]["experts"]  # layer 0 is dense


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_experts_are_sharded_over_the_ranks_that_hold_the_same_ones(zero):
    axes = Parallelism(dp=8, tp=2, ep=4, expert_tp=2, zero=zero)
    assert (axes.zero_ranks, axes.expert_zero_ranks) == (8, 2)
    params, experts = params_on_rank(ROUTED, axes), expert_params_on_rank(ROUTED, axes)
    states = model_states(params, "bf16", parallelism=axes, expert_params=experts)
    assert states["optim_state"] == 12 * (-(-(params - experts) // 8) + -(-experts // 2))
    ledger = step_ledger(ROUTED, 1, 12, parallelism=axes, num_steps=2)
    assert max(ledger.bytes_by_kind["params"]) == states["params"]
    assert max(ledger.bytes_by_kind["optim_state"]) == states["optim_state"]
    assert max(ledger.bytes_by_kind["grads"]) == states["grads"]


def test_one_expert_of_one_is_an_mlp_with_a_router():
    dense = ModelSpec(
        **{"hidden": 16, "num_layers": 2, "num_heads": 4, "ffn_hidden": 48, "vocab": 50},
        max_seq=32,
    )
    only = ModelSpec(
        **{"hidden": 16, "num_layers": 2, "num_heads": 4, "ffn_hidden": 48, "vocab": 50},
        **{"max_seq": 32, "experts": Experts(count=1, active=1, ffn_hidden=48, bias=True)},
    )
    assert count_params(only) == active_params(only) == count_params(dense) + 2 * 16
    flop, routed = forward_flop(dense, 2, 8), forward_flop(only, 2, 8)
    assert (routed["experts"], routed["mlp"]) == (flop["mlp"], 0)
    more = activations(only, 2, 8)["experts"] - activations(dense, 2, 8)["mlp"]
    copies, softmax = 2 * (2 * 8 * 16 * 2), 2 * 8 * 4
    assert more == 2 * (copies + softmax)


def test_a_capacity_pads_and_ep_moves_no_bytes_when_tokens_are_even():
    base = dict(ROUTED.__dict__)
    padded = ModelSpec(**{**base, "experts": Experts(**{**EXPERTS.__dict__, "capacity": 1.5})})
    sent = [
        {row.name: row.num_bytes for row in Pass(spec=spec, batch=2, seq=12).layer()}
        for spec in (ROUTED, padded)
    ]
    assert sent[1]["tokens sent to experts"] == 1.5 * sent[0]["tokens sent to experts"]
    axes = Parallelism(dp=8, ep=8)
    assert activations(ROUTED, 2, 12, parallelism=axes) == activations(ROUTED, 2, 12)


def test_latent_attention_keeps_one_small_vector():
    base = {**ROUTED.__dict__, "num_kv_heads": None, "latent": LATENT, "experts": None}
    spec = ModelSpec(**base)
    assert kv_cache(spec, 10) == 10 * 3 * (12 + 2) * 2
    assert kv_cache(ROUTED, 10) == 10 * 3 * 2 * (2 * 4) * 2
    rows = {row.name: row.num_bytes for row in Pass(spec=spec, batch=1, seq=8).layer()}
    assert rows["q"] == 8 * 4 * (6 + 2) * 2
    assert rows["k and v"] == 8 * 4 * (6 + 2 + 5) * 2
    assert rows["normed latent of k and v"] == 8 * 12 * 2


def test_latent_vectors_are_of_a_ranks_own_tokens_with_sequence_parallelism():
    """Their matrices are not split: a rank computes them, and their norms, for its tokens."""
    base = {**ROUTED.__dict__, "num_kv_heads": None, "latent": LATENT, "experts": None}
    saved = {}
    for is_split in (False, True):
        axes = Parallelism(tp=2, sequence_parallel=is_split)
        one = Pass(spec=ModelSpec(**base), batch=1, seq=8, parallelism=axes)
        saved[is_split] = {row.name: row.num_bytes for row in one.layer()}
    for name in ("q", "k and v"):
        for row in (f"normed latent of {name}", f"input of the {name}'s latent norm"):
            assert saved[True][row] == saved[False][row] / 2
        assert saved[True][name] == saved[False][name]


@pytest.mark.parametrize("seq", [1, 5, 16])
@pytest.mark.parametrize("window", [None, 1, 4, 16, 99])
def test_pairs_of_a_window_are_those_of_its_mask(seq, window):
    size = window or seq
    keys = torch.arange(seq)
    behind = keys[:, None] - keys[None]
    sliding = int(((behind >= 0) & (behind < size)).sum())
    assert abs(score_pairs(seq, window, causal=True) - sliding) <= min(
        size, seq
    )  # half the diagonal
    chunks = keys[:, None] // size == keys[None] // size  # the last one may be shorter
    assert score_pairs(seq, window, chunked=True) == int(chunks.sum())
    causal = int((chunks & (behind >= 0)).sum())
    assert abs(score_pairs(seq, window, chunked=True, causal=True) - causal) <= (seq + 1) / 2
    assert score_pairs(seq, window) == seq * min(size, seq)


def test_the_flop_of_layers_are_their_own():
    some = ModelSpec(**{**ROUTED.__dict__, "window": 4, "window_layers": (1,)})
    each, flop = layers_flop(some, 2, 32), forward_flop(some, 2, 32)
    assert sum(each) == sum(flop.values()) - flop["logits"]
    pairs = 32 * 32 - 32 * 4  # of query and key, that the window leaves out
    assert each[2] - each[1] == 2 * 2 * 4 * (4 + 4) * pairs


def test_model_chunks_of_layers_that_differ_are_refused():
    axes = Parallelism(pp=1)
    with pytest.raises(CourseError, match="need num_model_chunks=1 for a model whose layers"):
        activations(ROUTED, 1, 8, parallelism=axes, num_model_chunks=3)


def test_windows_are_counted_in_their_layers_only():
    plain = ModelSpec(**{**ROUTED.__dict__, "experts": None})
    some = ModelSpec(**{**plain.__dict__, "window": 4, "window_layers": (1,)})
    assert [one.window for one in layers(some)] == [None, 4, None]
    whole, less = (forward_flop(spec, 1, 32)["attention scores"] for spec in (plain, some))
    assert less == whole * (32 + 4 + 32) // (3 * 32)
    assert kv_cache(some, 32) == kv_cache(plain, 32) * (32 + 4 + 32) // (3 * 32)


def test_heads_of_keys_that_are_fewer_than_tp_are_on_several_ranks():
    axes = Parallelism(tp=4)
    plain = ModelSpec(**{**ROUTED.__dict__, "experts": None, "ffn_hidden": 64})
    axes.check(plain)
    rows = {row.name: row.num_bytes for row in Pass(spec=plain, batch=1, seq=8).layer()}
    split = {
        row.name: row.num_bytes
        for row in Pass(spec=plain, batch=1, seq=8, parallelism=axes).layer()
    }
    assert (split["q"], split["k and v"]) == (rows["q"] / 4, rows["k and v"] / 2)
    keys = matrices(plain, LayerKind(rotary=True))[1]
    assert weights_on_rank(keys, axes) == 16 * 8 / 2
