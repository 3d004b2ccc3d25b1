"""Parameters, states and activations: exact against models, ledgers against laws, bad input."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from course_lib.core import MODELS, CourseError, ShapeError, presets
from course_lib.core.parallelism import Parallelism
from course_lib.cost.params import count_tensors
from course_lib.memory import (
    activations,
    count_params,
    model_states,
    param_parts,
    params_on_rank,
    step_ledger,
)
from course_lib.models import GPT

TINY = replace(
    MODELS["tiny"], hidden=24, num_heads=6, num_layers=3, ffn_hidden=40, vocab=11, max_seq=16
)
LLAMA = replace(
    TINY, num_kv_heads=2, gated=True, norm="rms", positions="rope", bias=False, tied=False
)
BUILDS = {
    "gpt": TINY,
    "untied": replace(TINY, tied=False),
    "llama": LLAMA,
    "no bias": replace(TINY, bias=False),
    "rms with bias": replace(LLAMA, bias=True),
    "gated": replace(TINY, gated=True, num_kv_heads=3),
}


@pytest.mark.parametrize("spec", BUILDS.values(), ids=BUILDS)
def test_count_params_is_the_instantiated_model(spec):
    params = list(GPT(spec).parameters())
    assert count_params(spec) == sum(param.numel() for param in params)
    assert count_tensors(spec) == len(params)


PUBLISHED = {path.stem for path in Path(presets.__file__).parent.glob("configs/*.json")}


@pytest.mark.parametrize("name", [name for name in MODELS if name not in PUBLISHED])
def test_count_params_of_every_preset_that_gpt_builds(name):
    with torch.device("meta"):
        model = GPT(replace(MODELS[name], max_seq=min(MODELS[name].max_seq, 2048)))
    more = MODELS[name].max_seq - model.spec.max_seq  # rope tables need not be that long here
    assert more == 0 or MODELS[name].positions == "rope"
    assert count_params(MODELS[name]) == sum(param.numel() for param in model.parameters())


@pytest.mark.parametrize(
    ("name", "num_params"),
    [
        ("gpt2", 124_439_808),
        ("gpt2-xl", 1_557_611_200),
        ("llama-1b", 1_235_814_400),
        ("llama-3b", 3_212_749_824),
        ("llama-8b", 8_030_261_248),
        ("llama-70b", 70_553_706_496),
        ("llama-405b", 405_853_388_800),
        ("llama2-7b", 6_738_415_616),
        ("llama2-13b", 13_015_864_320),
    ],
)
def test_released_models_have_the_released_counts(name, num_params):
    assert count_params(MODELS[name]) == num_params


@pytest.mark.parametrize("spec", BUILDS.values(), ids=BUILDS)
def test_stages_together_hold_every_parameter(spec):
    stages = [params_on_rank(spec, Parallelism(pp=3), stage) for stage in range(3)]
    tied_copy = param_parts(spec)["embedding"] if spec.tied else 0
    assert sum(stages) == count_params(spec) + tied_copy
    assert params_on_rank(spec) == count_params(spec)


def test_tensor_parallel_ranks_repeat_norms_and_output_biases():
    parallelism = Parallelism(tp=2)
    repeated = sum(
        param.numel()
        for name, param in GPT(TINY).named_parameters()
        if "norm" in name or name.endswith("out.bias") or "positions" in name
    )
    halves = 2 * params_on_rank(TINY, parallelism)
    odd_rows = TINY.vocab * TINY.hidden % 2
    assert halves == count_params(TINY) + repeated + odd_rows


@given(num_params=st.integers(0, 10**12), dp=st.integers(1, 1024), zero=st.integers(0, 3))
def test_zero_never_needs_more_and_shards_cover_everything(num_params, dp, zero):
    whole = model_states(num_params)
    shard = model_states(num_params, parallelism=Parallelism(dp=dp, zero=zero))
    for stage, kind in ((1, "optim_state"), (2, "grads"), (3, "params")):
        if zero < stage:
            assert shard[kind] == whole[kind]
        else:
            assert whole[kind] <= dp * shard[kind] < whole[kind] + dp * 12


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_activations_are_linear_in_batch(recompute):
    one, three = (
        sum(activations(LLAMA, batch, 16, recompute=recompute).values()) for batch in (1, 3)
    )
    assert three == 3 * one


def test_scores_grow_with_the_square_of_the_sequence_and_flash_does_not():
    def per_token(seq, flash):
        return activations(TINY, 1, seq, flash=flash)["attention"] / seq

    assert per_token(16, True) == per_token(8, True)
    unfused = per_token(16, False) - per_token(8, False)
    assert unfused == TINY.num_layers * 2 * TINY.num_heads * 8  # softmax: 2as more a token, 8 more


def test_a_layer_is_34_and_5_times_heads_times_seq_over_hidden():
    def layer(**how):
        held = (
            sum(activations(replace(TINY, ffn_hidden=96, num_layers=n), 2, 16, **how).values())
            for n in (1, 2)
        )
        return -next(held) + next(held)

    sbh = 16 * 2 * TINY.hidden
    scores = 5 * 6 * 16 * 16 * 2
    assert layer(flash=False, dropout=True) == 34 * sbh + scores
    assert layer(flash=False, dropout=True, recompute="selective") == 34 * sbh
    assert layer(recompute="full") == 2 * sbh
    assert layer() == 32 * sbh
    assert layer(number_bytes=4) == 64 * sbh


def test_the_ledger_of_four_steps():
    ledger = step_ledger(TINY, 2, 16, recipe="bf16")
    num_params = count_params(TINY)
    optim = ledger.bytes_by_kind["optim_state"]
    assert optim[0] == 4 * num_params  # the master copy; the moments come with the first step
    assert optim[-1] == 12 * num_params
    first_with_moments = optim.index(12 * num_params)
    assert 4 * first_with_moments == len(optim) - 1 - 4  # each step ends with: stepped, emptied
    assert set(ledger.bytes_by_kind["params"]) == {2 * num_params}
    assert max(ledger.bytes_by_kind["grads"]) == 2 * num_params
    kept = sum(activations(TINY, 2, 16).values())
    assert max(ledger.bytes_by_kind["activations"]) == kept
    assert ledger.times_s == sorted(ledger.times_s)


def test_the_peak_is_higher_from_the_second_step_on():
    one, four = (step_ledger(TINY, 2, 16, num_steps=n).peak_bytes() for n in (1, 4))
    assert four - one > 0
    assert four == step_ledger(TINY, 2, 16, num_steps=2).peak_bytes()


@pytest.mark.parametrize(("num_micro_batches", "in_flight"), [(1, 1), (2, 2), (3, 3), (9, 3)])
def test_a_first_stage_holds_as_many_micro_batches_as_there_are_stages(
    num_micro_batches, in_flight
):
    parallelism = Parallelism(pp=3)
    ledger = step_ledger(TINY, 1, 16, parallelism=parallelism, num_micro_batches=num_micro_batches)
    most = max(ledger.bytes_by_kind["activations"])
    assert 3 * most == in_flight * sum(activations(TINY, 1, 16, parallelism=parallelism).values())


def test_micro_batches_cost_gradients_and_no_more_activations():
    one, many = (step_ledger(TINY, 1, 16, num_micro_batches=n, num_steps=2) for n in (1, 4))
    assert max(one.bytes_by_kind["activations"]) == max(many.bytes_by_kind["activations"])
    full_grads = 2 * count_params(TINY)
    assert many.peak_bytes() - one.peak_bytes() == full_grads


@pytest.mark.parametrize("flash", [True, False])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_a_backward_frees_all_that_its_forward_keeps(recompute: str, flash: bool):
    ledger = step_ledger(TINY, 2, 16, recompute=recompute, flash=flash)
    held = ledger.bytes_by_kind["activations"]
    assert held[-1] == 0
    if (
        flash and recompute == "selective"
    ):  # a fused kernel saves no scores: there is nothing to drop
        assert held == step_ledger(TINY, 2, 16).bytes_by_kind["activations"]


def test_full_recompute_keeps_one_layer_whole_while_it_is_in_backward():
    none, full = (
        max(step_ledger(TINY, 2, 16, recompute=how).bytes_by_kind["activations"])
        for how in ("none", "full")
    )
    kept = sum(activations(TINY, 2, 16, recompute="full").values())
    layer = sum(activations(TINY, 2, 16).values()) - sum(
        activations(replace(TINY, num_layers=2), 2, 16).values()
    )
    head = 2 * 32 * 24 * 2 + 4 * 32 * 11
    assert full == max(kept, kept - head - 2 * 32 * 24 + layer)
    assert full < none


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: activations(TINY, 0, 16), "need batch as a whole number above 0; got 0"),
        (lambda: activations(TINY, 1, -4), "need seq as a whole number above 0; got -4"),
        (
            lambda: activations(TINY, 1, 15, parallelism=Parallelism(cp=2)),
            "divisible by cp; got 15 and 2",
        ),
        (lambda: activations(TINY, 1, 16, recompute="most"), "need one of none, selective, full"),
        (lambda: model_states(-1), "need num_params of 0 or more; got -1"),
        (lambda: step_ledger(TINY, 1, 16, parallelism=Parallelism(tp=4)), "need num_heads of tiny"),
    ],
)
def test_bad_input_is_one_sentence(call, words):
    with pytest.raises(CourseError, match=words) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_sizes_are_shape_errors():
    with pytest.raises(ShapeError):
        activations(TINY, 0, 16)
