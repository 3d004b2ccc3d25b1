"""What each architecture's `config.json` says, and what its code does without saying so.

A function per architecture turns the fields of its config into those of a `ModelSpec`; `FAMILIES`
has them by `model_type`. What the code takes for fields that a file does not have is in
`course_lib.hub.usual`.

Source: the configuration and the model of each architecture in transformers 5
"""

from collections.abc import Callable
from typing import Any

from course_lib.core.specs import Experts, LatentAttention, Rope
from course_lib.hub import parts as part
from course_lib.hub.fields import ACTIVATIONS, Config, Fields


def _gpt2(config: Config) -> Fields:
    config.read.add("n_ctx")  # the name of n_positions in old files
    if "n_positions" not in config.values:
        if config.size("n_ctx") != 1024:
            config.refuse("n_ctx", "need n_positions beside it: without, the code takes 1024")
        config.values["n_positions"] = 1024
    hidden, heads = config.size("n_embd"), config.size("n_head")
    config.divides("n_head", "n_embd")
    return {
        "hidden": hidden,
        "num_layers": config.size("n_layer"),
        "num_heads": heads,
        "vocab": config.size("vocab_size"),
        "max_seq": config.size("n_positions"),
        "ffn_hidden": config.size("n_inner", int | None) or 4 * hidden,
        "activation": config.word("activation_function", ACTIVATIONS),
        "norm_eps": config.take("layer_norm_epsilon", float),
        "tied": config.take("tie_word_embeddings", bool),
    }


def _llama(config: Config) -> Fields:
    return {
        **part.rms_decoder(config),
        **part.heads(config),
        "bias": part.biases(config, "qkv", "out", mlp=True),
    }


def _mistral(config: Config) -> Fields:
    return {**part.rms_decoder(config), **part.heads(config), **part.one_window(config)}


def _ministral3(config: Config) -> Fields:
    if not config.take("rope_parameters", dict[str, Any] | None):
        config.refuse("rope_parameters", "need its numbers")
    return _mistral(config)


def _mixtral(config: Config) -> Fields:
    fields = _mistral(config)
    names = ("num_local_experts", "num_experts")
    return {**fields, "experts": part.experts(config, names, fields["ffn_hidden"])}


def _qwen2(config: Config) -> Fields:
    first = config.size("max_window_layers", least=0)
    windows = part.switched_windows(config, lambda n: n >= first)
    return {**part.rms_decoder(config), **part.heads(config), **windows, "bias": ("qkv",)}


def _qwen3(config: Config) -> Fields:
    bias = part.biases(config, "qkv", "out")
    return {**_qwen2(config), "bias": bias, "qk_norm": "head"}


def _qwen2_moe(config: Config) -> Fields:
    last = config.size("max_window_layers", least=0)
    return {
        **part.rms_decoder(config),
        **part.heads(config),
        **part.switched_windows(config, lambda n: n % 2 == 0 and n < last),
        "bias": ("qkv",) if config.take("qkv_bias", bool) else False,
        "experts": part.experts(
            config,
            ("num_experts",),
            config.size("moe_intermediate_size"),
            shared_hidden=config.size("shared_expert_intermediate_size"),
            shared_gate=True,
            dense_layers=_dense_layers(config),
        ),
    }


def _qwen3_moe(config: Config) -> Fields:
    config.read.add("max_window_layers")
    wide, dense = config.size("moe_intermediate_size"), _dense_layers(config)
    names = ("num_experts", "num_local_experts")
    return {
        **part.rms_decoder(config),
        **part.heads(config),
        **(part.one_window(config) if config.take("use_sliding_window", bool) else {}),
        "bias": part.biases(config, "qkv", "out"),
        "qk_norm": "head",
        "experts": part.experts(config, names, wide, dense_layers=dense),
    }


def _dense_layers(config: Config) -> tuple[int, ...]:
    """Return the dense layers of a Qwen MoE: those it names, and all but every step-th."""
    layers = config.size("num_hidden_layers")
    named = config.layers("mlp_only_layers", layers) or ()
    step = config.size("decoder_sparse_step")
    return tuple(n for n in range(layers) if n in named or (n + 1) % step)


def _olmo2(config: Config) -> Fields:
    return {
        **part.rms_decoder(config),
        **part.heads(config),
        "bias": part.biases(config, "qkv", "out"),
        "qk_norm": "whole",
        "extras": ("norms after, not before",),
    }


def _olmoe(config: Config) -> Fields:
    fields = part.rms_decoder(config)
    return {
        **fields,
        **part.heads(config, own_size=False),
        "bias": part.biases(config, "qkv", "out"),
        "qk_norm": "whole",
        "experts": part.experts(config, ("num_experts", "num_local_experts"), fields["ffn_hidden"]),
    }


def _gpt_oss(config: Config) -> Fields:
    fields, names = part.rms_decoder(config), ("num_local_experts", "num_experts")
    config.size_of("num_experts_per_tok", "experts_per_token")
    return {
        **fields,
        **part.heads(config),
        **part.windows(config, lambda n: n % 2 == 0),
        "bias": part.biases(config, "qkv", "out"),
        "experts": part.experts(config, names, fields["ffn_hidden"], bias=True, router_bias=True),
        "sinks": True,
        "extras": ("a SwiGLU that is clamped",),
    }


def _llama4(config: Config) -> Fields:
    fields, nope = part.rms_decoder(config), part.nope_layers(config)
    layers, wide = fields["num_layers"], fields["ffn_hidden"]
    step, named = config.size("interleave_moe_layer_step"), config.layers("moe_layers", layers)
    routed = range(step - 1, layers, step) if named is None else named
    windows = part.windows(config, lambda n: n not in nope, "attention_chunk_size")
    extras = ["queries and keys normed without weights"] * config.take("use_qk_norm", bool)
    return {
        **fields,
        **part.heads(config),
        **windows,
        "chunked": bool(windows),
        "ffn_hidden": config.size("intermediate_size_mlp"),
        "bias": part.biases(config, "qkv", "out"),
        "nope_layers": nope,
        "experts": part.experts(
            config,
            ("num_local_experts", "num_experts"),
            wide,
            shared_hidden=wide,
            dense_layers=tuple(n for n in range(layers) if n not in routed),
        ),
        "extras": (*extras, "experts weighed before they compute"),
    }


def _deepseek_v3(config: Config) -> Fields:
    """Read DeepSeek-V3 and models of its architecture; its MTP layers are not counted."""
    config.read.update(("head_dim", "num_key_value_heads"))  # its code does without
    return {
        **part.rms_decoder(config),
        "bias": part.biases(config, "qkv", "out"),
        "latent": LatentAttention(
            q_rank=config.size("q_lora_rank", int | None),
            kv_rank=config.size("kv_lora_rank"),
            nope_dim=config.size("qk_nope_head_dim"),
            rope_dim=config.size("qk_rope_head_dim"),
            value_dim=config.size("v_head_dim"),
        ),
        "experts": _shared_experts(config),
        "extras": ("a router of sigmoids with a bias that is not trained",),
    }


def _deepseek_v2(config: Config) -> Fields:
    return {
        **_deepseek_v3(config),
        "bias": part.biases(config, "qkv", "out", mlp=True),
        "extras": (),
    }


def _shared_experts(config: Config) -> Experts:
    wide, layers = config.size("moe_intermediate_size"), config.size("num_hidden_layers")
    dense = config.size("first_k_dense_replace", least=0)
    if dense > layers:
        config.refuse("first_k_dense_replace", f"need at most num_hidden_layers = {layers}")
    shared = config.size("n_shared_experts", int | None, least=0) or 0
    return part.experts(
        config,
        ("n_routed_experts",),
        wide,
        shared_hidden=shared * wide,
        dense_layers=tuple(range(dense)),
        bias=False,
    )


def _glm4_moe(config: Config) -> Fields:
    return {
        **part.rms_decoder(config),
        **part.heads(config),
        "bias": part.biases(config, "qkv"),
        "qk_norm": "head" if config.take("use_qk_norm", bool) else "none",
        "experts": _shared_experts(config),
        "extras": ("a router of sigmoids with a bias that is not trained",),
    }


def _gemma(config: Config) -> Fields:
    config.read.add("hidden_activation")
    activation = config.word("hidden_act", {**ACTIVATIONS, "gelu": "gelu_tanh"})
    return {
        **part.rms_decoder(config),
        **part.heads(config),
        "bias": part.biases(config, "qkv", "out"),
        "activation": activation,
        "extras": ("an embedding that is scaled", "norms by 1 + weight"),
    }


def _gemma2(config: Config, rope: Rope | None = None, every: int = 2) -> Fields:
    config.read.update(("hidden_act", "sliding_window_size"))  # transformers reads neither
    return {
        **part.rms_decoder(config, rope=rope, act="hidden_activation"),
        **part.heads(config),
        **part.windows(config, lambda n: (n + 1) % every != 0),
        "bias": part.biases(config, "qkv", "out"),
        "norms_per_layer": 4,
        "attention_softcap": config.take("attn_logit_softcapping", float | None),
        "logit_softcap": config.take("final_logit_softcapping", float | None),
        "extras": ("an embedding that is scaled", "norms by 1 + weight"),
    }


def _gemma3(config: Config) -> Fields:
    old = config.take("rope_scaling", dict[str, Any] | None) or {}
    new = config.take("rope_parameters", dict[str, Any] | None)
    if new and not isinstance(new.get("full_attention"), dict):
        config.refuse("rope_parameters", "need full_attention and sliding_attention inside")
    rules = {**(new["full_attention"] if new else {}), **old}
    rope = part.rope_rules(config, rules, config.take("rope_theta", float), 1.0)
    config.read.update(("rope_local_base_freq", "_sliding_window_pattern"))
    fields = _gemma2(config, rope, config.size("sliding_window_pattern"))
    return {**fields, "qk_norm": "head", "extras": (*fields["extras"], "rope with two speeds")}


def _gpt_neox(config: Config) -> Fields:
    fields = part.sizes(config, part.rotary(config, "rotary_emb_base", "rotary_pct"))
    config.divides("num_attention_heads", "hidden_size")
    return {
        **fields,
        "activation": config.word("hidden_act", ACTIVATIONS),
        "norm_eps": config.take("layer_norm_eps", float),
        "parallel": config.take("use_parallel_residual", bool),
        "bias": True if config.take("attention_bias", bool) else ("mlp", "norm"),
    }


def _starcoder2(config: Config) -> Fields:
    return {
        **part.sizes(config, part.rotary(config)),
        **part.heads(config),
        **part.one_window(config),
        "activation": config.word("hidden_act", ACTIVATIONS),
        "norm_eps": config.take("norm_epsilon", float),
        "bias": True if config.take("use_bias", bool) else ("norm",),
    }


def _smollm3(config: Config) -> Fields:
    config.read.add("max_window_layers")
    nope = part.nope_layers(config)
    windows = part.switched_windows(config, lambda n: n in nope)
    return {**_llama(config), **windows, "nope_layers": nope}


FAMILIES: dict[str, Callable[[Config], Fields]] = {
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "llama": _llama,
    "mistral": _mistral,
    "ministral3": _ministral3,
    "mixtral": _mixtral,
    "qwen2": _qwen2,
    "qwen2_moe": _qwen2_moe,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
    "kimi_k2": _deepseek_v3,
    "glm4_moe": _glm4_moe,
    "gpt_oss": _gpt_oss,
    "granite": _llama,
    "llama4_text": _llama4,
    "olmo2": _olmo2,
    "olmoe": _olmoe,
    "phi3": _mistral,
    "smollm3": _smollm3,
    "starcoder2": _starcoder2,
}
