"""Specs refuse sizes that do not fit, presets have the published sizes, config.json is read."""

import json

import pytest

from course_lib.core import (
    MODELS,
    CourseError,
    MeshError,
    ModelSpec,
    ShapeError,
    find_model,
    read_config,
)
from course_lib.core.parallelism import Parallelism
from course_lib.core.recipes import RECIPES, Recipe, find_recipe
from course_lib.core.specs import spec_fields

SIZES = {"hidden": 12, "num_layers": 2, "num_heads": 3, "ffn_hidden": 48, "vocab": 7, "max_seq": 5}
LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}
GPT2 = {
    "model_type": "gpt2",
    "n_embd": 768,
    "n_layer": 12,
    "n_head": 12,
    "n_positions": 1024,
    "vocab_size": 50257,
}


def write(folder, config):
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return path


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"num_heads": 5}, "need hidden divisible by num_heads; got 12 and 5. Try num_heads=4"),
        ({"num_kv_heads": 2}, "need num_heads divisible by num_kv_heads; got 3 and 2"),
        ({"hidden": -12}, "need hidden as a whole number above 0; got -12"),
        ({"vocab": 7.5}, "need vocab as a whole number above 0; got 7.5"),
        ({"vocab": 10**12}, "need vocab of at most 1,000,000,000; got 1000000000000"),
        ({"num_layers": 10**6}, "need num_layers of at most 100,000; got 1000000"),
        ({"num_heads": 10**9 - 63}, "need hidden divisible by num_heads"),
        ({"tied": "no"}, "need tied as true or false; got 'no'"),
        ({"num_layers": True}, "need num_layers as a whole number above 0; got True"),
        ({"norm": "batch"}, "need norm out of layer, rms; got 'batch'"),
    ],
)
def test_sizes_that_do_not_fit_are_one_sentence(wrong, words):
    with pytest.raises(CourseError, match=words) as caught:
        ModelSpec(**{**SIZES, **wrong})
    assert "\n" not in str(caught.value)


def test_shape_errors_are_shape_errors():
    with pytest.raises(ShapeError):
        ModelSpec(**{**SIZES, "num_heads": 5})


def test_a_spec_is_written_down_by_what_differs():
    spec = ModelSpec(**SIZES, tied=False)
    assert spec_fields(spec) == {**SIZES, "tied": False}
    assert ModelSpec(**spec_fields(spec)) == spec


def test_config_json_of_the_hub(tmp_path):
    spec = read_config(write(tmp_path, LLAMA))
    assert spec == ModelSpec(
        **{**spec_fields(MODELS["llama-8b"]), "name": "llama", "norm_eps": 1e-6, "rope": {}}
    )
    assert read_config(write(tmp_path, GPT2)).ffn_hidden == 4 * 768


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "mamba"}, "need model_type gpt2, gpt_neox, llama, .*; got 'mamba'"),
        ({"num_attention_heads": 33}, "num_attention_heads: need a divisor of hidden_size = 4096"),
        ({"num_experts": 4}, "the field 'num_experts' .4. is not known here"),
        ({"hidden_act": "xielu"}, "hidden_act: need one of silu"),
        ({"head_dim": "128"}, "head_dim: need a whole number"),
    ],
)
def test_configs_that_are_not_counted_say_so(tmp_path, change, words):
    with pytest.raises(CourseError, match=words):
        read_config(write(tmp_path, {**LLAMA, **change}))


def test_configs_that_cannot_be_read_say_so(tmp_path):
    with pytest.raises(CourseError, match="cannot be read"):
        read_config(tmp_path / "nothing.json")
    path = write(tmp_path, {key: LLAMA[key] for key in LLAMA if key != "hidden_size"})
    with pytest.raises(CourseError, match="need the field 'hidden_size'"):
        read_config(path)
    path.write_text("[1]")
    with pytest.raises(CourseError, match="got None"):
        read_config(path)


def test_unknown_names_tell_the_nearest():
    with pytest.raises(CourseError, match=r"got 'lama-8b'\. Try llama-8b"):
        find_model("lama-8b")
    with pytest.raises(CourseError, match="need one of bf16"):
        find_recipe("int4")
    assert find_recipe(own := Recipe(weight_bytes=1, grad_bytes=1)) is own


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("gpt-13b", "Try llama2-13b."),
        ("13B", "Try llama2-13b."),
        ("gpt3-13b", "Try llama2-13b."),
        ("gpt3-175b", "Try megatron-175b."),
        ("llama-65b", "Try llama-70b."),
        ("llama-7b", "Try llama2-7b or llama-8b."),
        ("qwen-30b", "Try qwen3-30b-a3b."),
        ("qwen3", "Try qwen3-0.6b or qwen3-30b-a3b."),
        ("gemma-2b", "Try gemma2-2b."),
    ],
)
def test_a_name_with_a_size_tells_presets_of_that_size(name, hint):
    with pytest.raises(CourseError) as caught:
        find_model(name)
    assert str(caught.value).endswith(hint)


def test_recipes_cost_what_the_papers_say():
    costs = {
        name: one.weight_bytes + one.grad_bytes + one.accumulator_bytes + one.optim_bytes
        for name, one in RECIPES.items()
    }
    assert costs == {
        "bf16": 16,
        "bf16+fp32-accumulator": 20,
        "bf16+fp32-grads": 18,
        "fp32": 16,
        "pure-bf16": 8,
    }
    with pytest.raises(CourseError, match="need grad_bytes as a whole number"):
        Recipe(weight_bytes=2, grad_bytes=-2)


def test_parallelism_refuses_what_cannot_be_split():
    assert Parallelism(dp=2, tp=4, pp=3, cp=2).world_size == 48
    for wrong, words in (({"tp": 0}, "need tp"), ({"zero": 4}, "need zero as 0, 1, 2 or 3")):
        with pytest.raises(MeshError, match=words):
            Parallelism(**wrong)
    Parallelism(tp=16).check(MODELS["llama-8b"])  # each of 8 heads of keys is on two ranks
    three = ModelSpec(**{**SIZES, "hidden": 24, "num_heads": 12, "num_kv_heads": 3})
    with pytest.raises(MeshError, match="need kv_heads of own as a divisor or a multiple of tp"):
        Parallelism(tp=4).check(three)
    with pytest.raises(MeshError, match="at most the 12 layers of gpt2; got 13"):
        Parallelism(pp=13).check(MODELS["gpt2"])
