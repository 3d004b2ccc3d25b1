"""The config.json of a spec, for transformers: of the first architecture that is the same model.

Whether it is the same model is not argued but tried: what is written has to be read back as the
same spec. Notebook 14_checkpoint.
"""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from course_lib.core.errors import CourseError
from course_lib.core.layers import layers
from course_lib.core.specs import Experts, ModelSpec
from course_lib.hub.config import read_values

ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "silu": "silu", "relu": "relu"}
CLASSES = {
    **{"gpt2": "GPT2LMHeadModel", "gpt_neox": "GPTNeoXForCausalLM", "llama": "LlamaForCausalLM"},
    **{"mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"},
    **{"smollm3": "SmolLM3ForCausalLM", "starcoder2": "Starcoder2ForCausalLM"},
    **{"mixtral": "MixtralForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"},
}


def config_of(spec: ModelSpec) -> dict[str, Any]:
    """Return the config.json of a model, as a mapping.

    Raises: CourseError where no architecture of transformers is this model; it names the fields in
            which the nearest one differs
    """
    wanted = replace(spec, vocab=spec.padded_vocab, vocab_multiple=1)
    differs: dict[str, list[str]] = {}
    for kind in CLASSES:
        config = _written(wanted, kind)
        found = _read(config)
        if found is not None:
            fields_of = (field.name for field in fields(ModelSpec) if field.name != "name")
            differs[kind] = [f for f in fields_of if _plain(found, f) != _plain(wanted, f)]
            if not differs[kind]:
                return config
    kind = min(differs, key=lambda one: len(differs[one]), default="llama")
    raise CourseError(
        f"convert: need a model that transformers has; {spec.name} is nearest to {kind}, which "
        f"has other {', '.join(differs.get(kind, ['sizes']))}. Try --to full."
    )


def _read(config: dict[str, Any]) -> ModelSpec | None:
    """Return the spec that a config.json is read as; None where it fits no model."""
    try:
        return read_values(Path("config.json"), config)
    except CourseError:
        return None


def _plain(spec: ModelSpec, field: str) -> Any:
    """Return the value of a field in the one of its forms that all specs have."""
    all_layers = tuple(range(spec.num_layers))
    if field == "num_kv_heads":
        return spec.kv_heads
    if field == "head_dim":
        return spec.head_size
    if field == "bias":
        return [
            spec.has_bias(where) for where in ("qkv", "out", "mlp", "norm")[: 3 + _biased(spec)]
        ]
    if field == "window_layers":
        return spec.window_layers or all_layers if spec.window else ()
    return getattr(spec, field)


def _biased(spec: ModelSpec) -> bool:
    return spec.norm == "layer"  # the norms of the others have no bias


def _written(spec: ModelSpec, kind: str) -> dict[str, Any]:
    """Return the config.json of an architecture with a spec's sizes, whether it fits or not."""
    about = {
        **{"architectures": [CLASSES[kind]], "model_type": kind},
        **{"vocab_size": spec.vocab, "tie_word_embeddings": spec.tied},
        **{"bos_token_id": None, "eos_token_id": None},
    }
    if kind == "gpt2":
        return {**about, **_gpt2(spec)}
    common = {
        **{"hidden_size": spec.hidden, "intermediate_size": spec.ffn_hidden},
        **{"num_hidden_layers": spec.num_layers, "num_attention_heads": spec.num_heads},
        **{"max_position_embeddings": spec.max_seq, "rope_theta": spec.rope.theta},
        **{"rope_scaling": dict(spec.rope.scaling) or None},
        **{"hidden_act": ACTIVATIONS[spec.mlp_activation]},
    }
    if kind == "gpt_neox":
        common |= {"rotary_emb_base": common.pop("rope_theta"), "rotary_pct": spec.rope.share}
        common |= {"layer_norm_eps": spec.norm_eps, "use_parallel_residual": spec.parallel}
        return {**about, **common, "attention_bias": spec.has_bias("qkv")}
    common |= {"num_key_value_heads": spec.kv_heads, "head_dim": spec.head_size}
    if kind == "starcoder2":
        window = {"norm_epsilon": spec.norm_eps, "sliding_window": spec.window}
        return {**about, **common, **window, "use_bias": spec.has_bias("qkv")}
    return {**about, **common, "rms_norm_eps": spec.norm_eps, **_own(spec, kind)}


def _gpt2(spec: ModelSpec) -> dict[str, Any]:
    return {
        **{"n_positions": spec.max_seq, "n_embd": spec.hidden},
        **{"n_layer": spec.num_layers, "n_head": spec.num_heads, "n_inner": spec.ffn_hidden},
        **{"activation_function": ACTIVATIONS[spec.mlp_activation]},
        **{"layer_norm_epsilon": spec.norm_eps},
        **{"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
    }


def _experts(spec: ModelSpec, experts: Experts, kind: str) -> dict[str, Any]:
    own = {"num_experts_per_tok": experts.active, "sliding_window": spec.window}
    if kind == "mixtral":
        wide = {"intermediate_size": experts.ffn_hidden}
        return {**own, **wide, "num_local_experts": experts.count}
    return {
        **{**own, "num_experts": experts.count, "moe_intermediate_size": experts.ffn_hidden},
        **{"norm_topk_prob": experts.normalized, "mlp_only_layers": list(experts.dense_layers)},
        **{"use_sliding_window": spec.window is not None},
    }


def _own(spec: ModelSpec, kind: str) -> dict[str, Any]:
    """Return the fields that only one of Llama's relatives has."""
    if kind == "llama":
        return {"attention_bias": spec.has_bias("qkv"), "mlp_bias": spec.has_bias("mlp")}
    if kind == "mistral":
        return {"sliding_window": spec.window}
    if spec.experts is not None and kind in ("mixtral", "qwen3_moe"):
        return _experts(spec, spec.experts, kind)
    rotary = [int(layer.rotary) for layer in layers(spec)]
    own = {"no_rope_layers": rotary} if kind == "smollm3" else {}
    if spec.window is None:
        return own
    windows = [layer.window for layer in layers(spec)]
    types = ["full_attention" if one is None else "sliding_attention" for one in windows]
    return {**own, "use_sliding_window": True, "sliding_window": spec.window, "layer_types": types}
