"""Any config.json is counted as transformers counts it, or refused in one sentence.

Sizes, fields that are there, missing or null, and wrong values are drawn at random. What
transformers refuses itself may be refused or read.
"""

import logging
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from course_lib.core import CourseError, read_config
from course_lib.core.layers import layers
from course_lib.cost.params import count_params
from course_lib.hub.families import FAMILIES
from course_lib.hub.usual import USUAL
from tests.hub import reference
from tests.hub.test_config import small, write

SEED = st.integers(0, 2**32)
MISSING = object()
SIZES = {
    "hidden_size": [16, 24, 32],
    "num_hidden_layers": [1, 2, 5, 6],
    "num_attention_heads": [1, 2, 4],
    "num_key_value_heads": [1, 2, 4, None],
    "head_dim": [None, 4, 6, 8],
    "vocab_size": [7, 16],
    "intermediate_size": [8, 12],
    "max_position_embeddings": [16, 32],
    "num_experts": [2, 4],
    "num_local_experts": [2, 4],
    "n_routed_experts": [4, 8],
    "num_experts_per_tok": [1, 2, 3],
    "moe_intermediate_size": [4, 8],
    "shared_expert_intermediate_size": [8, 12],
    "n_shared_experts": [1, 2],
    "first_k_dense_replace": [0, 1, 2],
    "q_lora_rank": [None, 6, 8],
    "kv_lora_rank": [4, 8],
    "v_head_dim": [4, 6],
    "intermediate_size_mlp": [8, 20],
    "n_inner": [None, 12],
    "n_ctx": [8, 16, 1024],
}
SWITCHES = {
    "attention_bias": [True, False, None],
    "mlp_bias": [True, False],
    "qkv_bias": [True, False],
    "use_bias": [True, False],
    "tie_word_embeddings": [True, False, None],
    "use_qk_norm": [True, False],
    "use_parallel_residual": [True, False],
    "hidden_act": ["silu", "gelu"],
    "norm_topk_prob": [True, False],
    "moe_layer_freq": [1, 2],
    "num_nextn_predict_layers": [0, 1],
}
LAYERS = {
    "sliding_window": [None, 4, 8],
    "use_sliding_window": [True, False],
    "max_window_layers": [0, 1, 3],
    "sliding_window_pattern": [2, 3],
    "attention_chunk_size": [4, 8],
    "mlp_only_layers": [None, [], [0]],
    "decoder_sparse_step": [1, 2],
    "moe_layers": [None, [], [0]],
    "interleave_moe_layer_step": [1, 2],
    "no_rope_layer_interval": [1, 2],
}
ROPE = {
    "rope_theta": [1e4, 500000.0],
    "partial_rotary_factor": [0.5],
    "rotary_pct": [0.5],
    "rope_scaling": [None, {"rope_type": "linear", "factor": 2.0}],
}
DRAWN = {**SIZES, **SWITCHES, **LAYERS, **ROPE}
ODD = (
    None,
    True,
    -1,
    0,
    1,
    1.5,
    10**12,
    10**400,
    float("nan"),
    "",
    "7",
    "a\nb",
    [],
    [1],
    ["a"],
    {},
)
KINDS = sorted({*FAMILIES} - {"kimi_k2"})  # it is DeepSeek-V3


@pytest.fixture(autouse=True)
def _quiet():
    """Leave out what transformers says about odd values."""
    pytest.importorskip("transformers")
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def fields(kind):
    """Return the fields that an architecture knows."""
    return sorted({*small(kind), *USUAL[kind]} - {"model_type"})


def drawn(rng, kind):
    """Return the fields of a config.json: those of a small model, of which some are changed."""
    values, own = small(kind), fields(kind)
    for _ in range(rng.choice([1, 3, 8])):
        key = rng.choice(own if rng.randrange(12) else [*DRAWN])
        if key in DRAWN:
            values[key] = rng.choice(DRAWN[key])
        elif key in values and not rng.randrange(4):
            values.pop(key)
    if {"num_hidden_layers", "layer_types"} <= {*values, *own} and not rng.randrange(4):
        kinds = ["full_attention", "chunked_attention" if "llama4" in kind else "sliding_attention"]
        values["layer_types"] = rng.choices(kinds, k=values["num_hidden_layers"])
        if "no_rope_layers" in own:
            values["no_rope_layers"] = rng.choices([0, 1], k=values["num_hidden_layers"])
    if kind == "ministral3" and rng.randrange(8):
        values["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e5}
    return values


def compare(path, values):
    """Check that the reader says what transformers builds; return whether both could."""
    try:
        spec = read_config(path)
    except CourseError as error:
        said = str(error)
    else:
        said = ""
    if said:
        assert said.startswith(str(path))
        assert "\n" not in said
        return False
    try:
        config = reference.configuration(values)
        model = reference.built(config)
    except Exception:  # each architecture refuses in a way of its own
        return False
    assert count_params(spec) == reference.parameters(model)
    if values["model_type"] != "gpt2":
        assert [layer.window for layer in layers(spec)] == reference.windows(config)
        rules = config.rope_parameters.get("full_attention", config.rope_parameters)
        assert spec.rope.theta == rules["rope_theta"]
        assert spec.rope.share == rules.get("partial_rotary_factor", 1.0)
    return True


@pytest.mark.parametrize("examples", [15, 300], ids=["short", "long"])
@pytest.mark.parametrize("kind", KINDS)
def test_any_config_has_the_number_of_transformers_or_one_sentence(
    kind, examples, tmp_path_factory
):
    folder, compared = tmp_path_factory.mktemp("config"), []

    @settings(max_examples=examples)
    @given(SEED)
    def check(seed):
        values = drawn(Random(seed), kind)
        compared.append(compare(write(folder, values), values))

    check()
    assert sum(compared) > len(compared) / 6


@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_value_in_any_field_is_never_a_traceback(kind, tmp_path):
    for key in fields(kind):
        for odd in Random(kind + key).sample(ODD, 5):
            values = {**small(kind), key: odd}
            compare(write(tmp_path, values), values)
