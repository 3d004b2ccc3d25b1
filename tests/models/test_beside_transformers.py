"""A GPT built from a config.json has the logits of transformers' own model, weight for weight."""

import json
from dataclasses import replace

import pytest
import torch

from course_lib.hub.config import read_config
from course_lib.hub.names import renamed
from course_lib.models import GPT, token_batch

transformers = pytest.importorskip("transformers")

SIZES = {
    **{"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64},
}
SCALED = {
    **{"rope_type": "llama3", "rope_theta": 300.0, "factor": 8.0, "low_freq_factor": 1.0},
    **{"high_freq_factor": 4.0, "original_max_position_embeddings": 16},
}
NEOX = {key: value for key, value in SIZES.items() if key != "num_key_value_heads"}
CASES = {
    "gpt2": (
        "GPT2",
        {"vocab_size": 96, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4},
    ),
    "llama": ("Llama", {**SIZES, "rope_parameters": {"rope_theta": 1e5, "rope_type": "default"}}),
    "llama, scaled": ("Llama", {**SIZES, "rope_parameters": SCALED, "rms_norm_eps": 1e-3}),
    "llama, biased": ("Llama", {**SIZES, "head_dim": 12, "attention_bias": True, "mlp_bias": True}),
    "mistral": ("Mistral", {**SIZES, "sliding_window": 5, "head_dim": 16}),
    "qwen2": ("Qwen2", SIZES),
    "qwen2, window": (
        "Qwen2",
        {**SIZES, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {**SIZES, "head_dim": 16, "tie_word_embeddings": True}),
    "phi3": ("Phi3", {**SIZES, "sliding_window": 7, "pad_token_id": 0}),
    "smollm3": ("SmolLM3", {**SIZES, "no_rope_layer_interval": 2, "pad_token_id": 0}),
    "starcoder2": ("Starcoder2", {**SIZES, "sliding_window": 6, "hidden_act": "gelu_pytorch_tanh"}),
    "gpt_neox": ("GPTNeoX", {**NEOX, "hidden_act": "relu"}),
    "gpt_neox, in turn": ("GPTNeoX", {**NEOX, "use_parallel_residual": False, "rotary_pct": 0.5}),
}

EXPERTS = {  # in memory, transformers has all experts of a layer in one tensor: compared from files
    "mixtral": ("Mixtral", {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": (
        "Qwen3Moe",
        {**SIZES, "num_experts": 4, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
        | {"mlp_only_layers": [1], "norm_topk_prob": False},
    ),
}


def theirs(kind, settings):
    """A model of transformers whose norms and biases are not those of the start, either."""
    config = getattr(transformers, f"{kind}Config")(**settings, attn_implementation="eager")
    torch.manual_seed(0)
    name = f"{kind}LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM"
    model = getattr(transformers, name)(config).eval()
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param), alpha=0.1)
    return model


@pytest.mark.parametrize("case", CASES)
def test_the_logits_are_those_of_transformers(case, tmp_path):
    other = theirs(*CASES[case])
    other.config.save_pretrained(tmp_path)
    spec = read_config(tmp_path / "config.json")
    family = json.loads((tmp_path / "config.json").read_text())["model_type"]
    model, state = GPT(spec).eval(), other.state_dict()
    shapes, own = {name: len(x) for name, x in model.state_dict().items()}, {}
    for one in renamed(family, spec, shapes):
        tensor = state.pop(one.name)
        rows = [shapes[name] for name in one.sources]
        own |= dict(zip(one.sources, one.split(tensor, rows), strict=True))
        assert torch.equal(one.join([own[name] for name in one.sources]), tensor)
    assert list(state) == ["lm_head.weight"] * spec.tied
    if spec.tied:
        own["head.weight"] = own["embedding.weight"]
    model.load_state_dict(own)
    tokens = token_batch(0, batch=2, seq=40, vocab=96)
    written_out = GPT(spec, flash=False).eval()
    written_out.load_state_dict(own)
    with torch.no_grad():
        wanted = other(tokens).logits
        assert wanted.std() > 0.3
        torch.testing.assert_close(model(tokens), wanted, rtol=0, atol=1e-5)
        torch.testing.assert_close(written_out(tokens), wanted, rtol=0, atol=1e-5)


# what a model would be without one of its parts: the test above sees every one of them
WITHOUT = {
    "llama": {"rope": {"theta": 1e4}},
    "llama, scaled": {"rope": {"theta": 300.0}},
    "mistral": {"window": None},
    "qwen2, window": {"window_layers": None},
    "smollm3": {"nope_layers": ()},
    "gpt2": {"activation": "gelu"},
    "gpt_neox": {"parallel": False},
    "gpt_neox, in turn": {"rope": {}},
    "starcoder2": {"window": 7},
}


@pytest.mark.parametrize("case", WITHOUT)
def test_each_part_of_a_spec_changes_the_logits(case, tmp_path):
    theirs(*CASES[case]).config.save_pretrained(tmp_path)
    spec = read_config(tmp_path / "config.json")
    tokens, found = token_batch(0, batch=2, seq=40, vocab=96), []
    for one in (spec, replace(spec, **WITHOUT[case])):
        torch.manual_seed(0)
        model = GPT(one).eval()
        with torch.no_grad():
            for param in model.parameters():
                param.add_(torch.randn_like(param), alpha=0.1)
            found.append(model(tokens))
    assert (found[0] - found[1]).abs().max() > 1e-4
