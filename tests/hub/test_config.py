"""A config.json is counted as published and as transformers builds it, or refused by name."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from course_lib.core import MODELS, CourseError, read_config
from course_lib.core.layers import layers
from course_lib.cost.params import active_params, count_params
from course_lib.hub.families import FAMILIES
from course_lib.hub.usual import USUAL
from tests.hub import reference

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = (ROOT / "tests/data/configs", ROOT / "course_lib/core/configs")  # the latter are presets
FILES = sorted(path for folder in FOLDERS for path in folder.glob("*.json"))
ROW = re.compile(r"\| [^|]+ \| `(\S+)` \| ([\d,]+) \| (.*?)(†?) \| ([\d,]*)(\S*) \| (.*?) \|\n")
TABLE = {row[1]: row.groups()[1:] for row in ROW.finditer((ROOT / "docs/models.md").read_text())}
UNITS = {"M": 10**6, "B": 10**9, "T": 10**12}
SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "vocab_size": 40,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 8}
SHARED = {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1}
DEEPSEEK = {
    **{**SMALL, **EXPERTS, **SHARED, "q_lora_rank": 8, "kv_lora_rank": 8, "v_head_dim": 6},
    **{"qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "n_group": 2, "topk_group": 1},
}
SMALL_OF = {
    "gpt_neox": {key: value for key, value in SMALL.items() if key != "num_key_value_heads"},
    "gpt2": {"n_embd": 32, "n_layer": 3, "n_head": 4, "vocab_size": 40, "n_positions": 64},
    "mixtral": {**SMALL, "num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": {**SMALL, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
    "olmoe": {**SMALL, "num_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {**SMALL, **EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 12},
    "qwen3_moe": {**SMALL, **EXPERTS, "num_experts": 4},
    "glm4_moe": {**SMALL, **EXPERTS, **SHARED},
    "deepseek_v2": DEEPSEEK,
    "deepseek_v3": DEEPSEEK,
    "llama4_text": {**SMALL, "head_dim": 8, "intermediate_size_mlp": 40, "num_local_experts": 4},
}


def small(kind):
    """Return the sizes of a small model of an architecture, of which all are given."""
    return {"model_type": kind, **SMALL_OF.get(kind, SMALL)}


def write(folder, values):
    (path := folder / "config.json").write_text(json.dumps(values))
    return path


def published(text):
    """Return a published count, such as 235 B, to its last digit, which may be cut off."""
    number, unit = text.split()
    digits = len(number.partition(".")[2])
    return pytest.approx(float(number) * UNITS[unit], abs=UNITS[unit] / 10**digits, rel=0)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_published_model_is_counted_as_published(path):
    spec = read_config(path)
    counted, said, more, active, without, said_active = TABLE[path.stem]
    assert f"{count_params(spec):,}" == counted
    assert said == "–" or more or count_params(spec) == published(said)
    if spec.experts is None:
        assert active == said_active.strip() == ""
    else:
        found = active_params(spec, embedding=not without)
        assert f"{found:,}" == active
        assert said_active == "–" or found == published(said_active)


def test_the_table_of_the_documentation_has_all_files():
    assert set(TABLE) == {path.stem for path in FILES}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_transformers_builds_as_many_parameters(path):
    pytest.importorskip("transformers")
    spec = read_config(path)
    config = reference.configuration(json.loads(path.read_text()))
    model = reference.built(config)
    assert count_params(spec) == reference.parameters(model)
    _, said, more, *_ = TABLE[path.stem]
    assert not more or sum(one.numel() for one in model.parameters()) == published(said)
    assert [layer.window for layer in layers(spec)] == reference.windows(config)


@pytest.mark.parametrize("kind", sorted({*FAMILIES} - {*reference.ALIASES}))
def test_what_transformers_writes_is_read(kind, tmp_path):
    pytest.importorskip("transformers")
    config = reference.configuration(small(kind))
    config.save_pretrained(tmp_path)
    spec = read_config(tmp_path / "config.json")
    assert count_params(spec) == reference.parameters(reference.built(config))
    if kind != "gpt2":
        assert [layer.window for layer in layers(spec)] == reference.windows(config)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("kind", "of_text"),
    [("gemma3", "gemma3_text"), ("llama4", "llama4_text"), ("mistral3", "mistral")],
)
def test_a_model_of_text_and_more_is_counted_without_the_more(kind, of_text, tied, tmp_path):
    pytest.importorskip("transformers")
    inner = {**small(of_text), "tie_word_embeddings": tied}
    values = {"model_type": kind, "text_config": inner, "tie_word_embeddings": tied}
    config = reference.configuration(values)
    config.save_pretrained(tmp_path)
    model = reference.built(config)
    assert count_params(read_config(tmp_path / "config.json")) == reference.parameters(model)
    with pytest.raises(CourseError, match="the same inside and outside of text_config"):
        read_config(write(tmp_path, {**values, "tie_word_embeddings": not tied}))


@pytest.mark.parametrize("kind", sorted({*FAMILIES} - {*reference.ALIASES}))
def test_a_field_that_is_not_there_has_the_value_of_transformers(kind):
    pytest.importorskip("transformers")
    from transformers import CONFIG_MAPPING

    fields = CONFIG_MAPPING[kind]
    known = {key for key in USUAL[kind] if hasattr(fields, key) and "rope_" not in key}
    same = {key: USUAL[kind][key] for key in known}
    assert same == {key: getattr(fields, key) for key in same}
    given = {"rope_parameters": {"rope_type": "default"}} if kind == "ministral3" else {}
    config = reference.configuration({**small(kind), **given})
    rules = getattr(config, "rope_parameters", None) or {}
    rules = rules.get("full_attention", rules)
    theta = USUAL[kind].get("rotary_emb_base" if kind == "gpt_neox" else "rope_theta")
    share = USUAL[kind].get("rotary_pct" if kind == "gpt_neox" else "partial_rotary_factor")
    assert kind == "gpt2" or rules["rope_theta"] == theta
    assert rules.get("partial_rotary_factor", share) == share


@pytest.mark.parametrize(
    ("kind", "change", "words"),
    [
        ("llama", {"num_attention_heads": 5}, "num_attention_heads: need a divisor of hidden_size"),
        ("llama", {"num_key_value_heads": 3}, "num_key_value_heads: need a divisor of num_attent"),
        ("llama", {"num_hidden_layers": 0}, "num_hidden_layers: need a whole number from 1"),
        ("llama", {"hidden_size": -32}, "hidden_size: need a whole number from 1"),
        ("llama", {"vocab_size": 10**30}, "vocab_size: need a whole number"),
        ("llama", {"num_hidden_layers": 10**12}, "num_hidden_layers: need a whole number from 1"),
        ("llama", {"intermediate_size": True}, "intermediate_size: need a whole number; got True"),
        ("llama", {"rms_norm_eps": float("nan")}, "rms_norm_eps: need a number; got nan"),
        ("llama", {"tie_word_embeddings": "no"}, "tie_word_embeddings: need true or false"),
        ("llama", {"vocab_size": [1]}, "vocab_size: need a whole number"),
        ("llama", {"layer_types": ["full_attention"]}, "the field 'layer_types'"),
        ("llama", {"is_encoder_decoder": True}, "is_encoder_decoder: need False"),
        (
            "llama",
            {"rope_scaling": {"type": "linear", "rope_type": "llama3", "factor": 2.0}},
            "rope_scaling: need the same type and rope_type",
        ),
        ("mistral", {"attention_bias": True}, "the field 'attention_bias'"),
        ("mixtral", {"num_experts_per_tok": 5}, "num_experts_per_tok: need at most num_local_exp"),
        ("mixtral", {"num_experts": 8}, "num_local_experts: need the same as num_experts; got 4"),
        ("qwen3_moe", {"mlp_only_layers": [4]}, "mlp_only_layers: need layers from 0 to 3"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step: need a whole number from"),
        ("gemma2", {"layer_types": ["full_attention"]}, "layer_types: need 4, each one of sliding"),
        ("qwen2", {"layer_types": ["sliding_attention"] * 4}, "need use_sliding_window true"),
        ("deepseek_v3", {"first_k_dense_replace": 5}, "first_k_dense_replace: need at most num_"),
        ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq: need 1"),
        ("llama4_text", {"interleave_moe_layer_step": 0}, "interleave_moe_layer_step: need"),
        ("llama4_text", {"moe_layers": [-1]}, "moe_layers: need layers from 0 to 3"),
        ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers: need 4, one for each layer"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention: need"),
        ("gemma3_text", {"rope_parameters": {"rope_theta": 1.0}}, "need full_attention and slid"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention: need False"),
        ("gpt2", {"n_head": 3}, "n_head: need a divisor of n_embd = 32"),
    ],
)
def test_what_cannot_be_right_is_one_sentence_with_the_file_and_its_field(
    kind, change, words, tmp_path
):
    rope = {"rope_parameters": {"rope_theta": 1e6}} if kind == "ministral3" else {}
    path = write(tmp_path, {**small(kind), **rope, **change})
    with pytest.raises(CourseError, match=re.escape(words)) as caught:
        read_config(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"model_type": "gemma3", **SMALL}, "need text_config"),
        ({"model_type": "llama_text", **SMALL}, "need model_type gpt2"),
        ({"model_type": "gemma3", "text_config": {"model_type": "mamba"}}, "got 'mamba'"),
        ({"model_type": "gpt2", "n_embd": 32, "n_layer": 3, "n_head": 4, "vocab_size": 40,
          "n_ctx": 64}, "n_ctx: need n_positions beside it"),
        ({"model_type": ["llama"]}, "got .'llama'"),
    ],
)  # fmt: skip
def test_a_file_that_is_not_of_a_known_architecture_says_so(values, words, tmp_path):
    with pytest.raises(CourseError, match=words):
        read_config(write(tmp_path, values))


@pytest.mark.parametrize(
    ("preset", "file"),
    [("llama-8b", "llama31_8b"), ("llama-1b", "llama32_1b"), ("llama-70b", "llama33_70b")],
)
def test_a_preset_of_llama_is_its_published_file(preset, file):
    spec = read_config(ROOT / f"tests/data/configs/{file}.json")
    assert replace(spec, name=preset, head_dim=None) == MODELS[preset]


def test_mtp_layers_are_not_counted(tmp_path):
    path = write(tmp_path, {**small("deepseek_v3"), "num_nextn_predict_layers": 1})
    without = write(tmp_path, small("deepseek_v3"))
    assert count_params(read_config(path)) == count_params(read_config(without))


def test_extras_are_what_is_on(tmp_path):
    plain = read_config(write(tmp_path, {**small("llama"), "logits_scaling": 1.0}))
    assert plain.extras == ()
    granite = {**small("granite"), "logits_scaling": 8.0, "embedding_multiplier": 12.0}
    assert set(read_config(write(tmp_path, granite)).extras) == {
        "logits_scaling",
        "embedding_multiplier",
    }
    assert "attn_temperature_tuning" in read_config(write(tmp_path, small("llama4_text"))).extras
    assert not read_config(write(tmp_path, small("qwen3_moe"))).experts.normalized
