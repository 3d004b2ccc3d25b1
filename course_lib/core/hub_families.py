"""What each architecture's `config.json` says, and what its code does without saying so.

A function per architecture turns the fields of its config into those of a `ModelSpec`; `FAMILIES`
has them by `model_type`.
"""

from collections.abc import Callable
from typing import Any

from course_lib.core.hub_fields import ACTIVATIONS, Config
from course_lib.core.plain_values import build
from course_lib.core.specs import Experts, LatentAttention, Rope


def _gpt2(config: Config) -> dict[str, Any]:
    positions = "n_positions" if config.values.get("n_positions") is not None else "n_ctx"
    config.read.update(("n_ctx", "n_positions"))
    if config.take("add_cross_attention", bool, False):
        config.refuse("add_cross_attention", "need a decoder without it")
    hidden = config.take("n_embd")
    return {
        "hidden": hidden,
        "num_layers": config.take("n_layer"),
        "num_heads": config.take("n_head"),
        "vocab": config.take("vocab_size"),
        "max_seq": config.take(positions),
        "ffn_hidden": config.take("n_inner", int, 4 * hidden),
        "activation": config.word("activation_function", ACTIVATIONS, "gelu_new"),
        "norm_eps": config.take("layer_norm_epsilon", float, 1e-5),
        "tied": config.take("tie_word_embeddings", bool, True),
    }


def _sizes(config: Config, *, kv: bool = True) -> dict[str, Any]:
    """Read the fields that all but GPT-2 share. kv: the config has heads of keys and values."""
    return {
        "hidden": config.take("hidden_size"),
        "num_layers": config.take("num_hidden_layers"),
        "num_heads": config.take("num_attention_heads"),
        "num_kv_heads": config.take("num_key_value_heads", int, None) if kv else None,
        "vocab": config.take("vocab_size"),
        "max_seq": config.take("max_position_embeddings"),
        "positions": "rope",
        "rope": _rope(config),
        "tied": config.take("tie_word_embeddings", bool, False),
    }


def _llama(config: Config, *, mlp: str = "intermediate_size", eps: float = 1e-6) -> dict[str, Any]:
    """Read a decoder with RMSNorm, rotary positions and a gated MLP, as Llama's."""
    attention = config.take("attention_bias", bool, False)
    places = (*["qkv", "out"] * attention, *["mlp"] * config.take("mlp_bias", bool, False))
    return {
        **_sizes(config),
        "ffn_hidden": config.take(mlp),
        "head_dim": config.take("head_dim", int, None),
        "gated": True,
        "activation": config.word("hidden_act", ACTIVATIONS, "silu"),
        "norm": "rms",
        "norm_eps": config.take("rms_norm_eps", float, eps),
        "bias": places or False,
    }


def _rope(config: Config, share: float = 1.0) -> Rope:
    """Read rotary positions as transformers 5 writes them, or as those before it did."""
    new = config.take("rope_parameters", dict[str, Any], None)
    old = config.take("rope_scaling", dict[str, Any], None)
    theta = config.take("rope_theta", float, 10000.0)
    share = config.take("partial_rotary_factor", float, share)
    config.read.update(("rotary_emb_base", "rotary_pct", "rope_local_base_freq"))
    rules = dict(new if new is not None else old or {})
    rules = {key: value for key, value in rules.items() if value is not None}
    theta, share = rules.pop("rope_theta", theta), rules.pop("partial_rotary_factor", share)
    if "type" in rules:
        rules["rope_type"] = rules.pop("type")
    if rules.get("rope_type", "default") == "default":
        rules.pop("rope_type", None)
    plain = {k: repr(v) if isinstance(v, list | dict) else v for k, v in rules.items()}
    where = f"{config.path}, rope"
    return Rope(
        theta=build(float, theta, f"{where}, rope_theta"),
        share=build(float, share, f"{where}, partial_rotary_factor"),
        scaling=tuple(sorted(plain.items())),
    )


def _windows(
    config: Config, num_layers: int, *, window: int | None, full: Callable[[int], bool]
) -> dict[str, Any]:
    """Read which layers have a sliding window.

    window, full   what the architecture does where config.json says nothing: the size of its
                   window, and whether layer n attends to all tokens
    """
    size = config.take("sliding_window", int, window)
    config.read.update(("use_sliding_window", "max_window_layers", "sliding_window_pattern"))
    config.read.update(("_sliding_window_pattern", "layer_types"))
    types = config.values.get("layer_types")
    if types is None:
        types = ["full_attention" if full(n) else "sliding_attention" for n in range(num_layers)]
    types = build(list[str], types, f"{config.path}, layer_types")
    kinds = {"full_attention", "sliding_attention", "chunked_attention"}
    if len(types) != num_layers or not set(types) <= kinds:
        config.refuse("layer_types", f"need {num_layers}, each one of {', '.join(sorted(kinds))}")
    limited = tuple(n for n, one in enumerate(types) if one != "full_attention")
    if not limited or size is None or config.values.get("use_sliding_window") is False:
        return {}
    return {"window": size, "window_layers": None if len(limited) == num_layers else limited}


def _mistral(config: Config) -> dict[str, Any]:
    config.take("num_key_value_heads")
    fields = _llama(config)
    window = None if "sliding_window" in config.values else 4096
    return {**fields, **_windows(config, fields["num_layers"], window=window, full=lambda n: False)}


def _qwen2(config: Config) -> dict[str, Any]:
    config.take("num_key_value_heads")
    fields = {**_llama(config), "bias": ("qkv",)}
    return {**fields, **_qwen_windows(config, fields["num_layers"])}


def _qwen3(config: Config) -> dict[str, Any]:
    config.take("num_key_value_heads")
    fields = _llama(config)
    fields |= {"qk_norm": "head", "head_dim": fields["head_dim"] or 128}
    return {**fields, **_qwen_windows(config, fields["num_layers"])}


def _qwen_windows(config: Config, num_layers: int) -> dict[str, Any]:
    first = config.take("max_window_layers", int, 28)
    if not config.take("use_sliding_window", bool, False):
        config.read.update(("sliding_window", "layer_types"))
        return {}
    return _windows(config, num_layers, window=4096, full=lambda n: n < first)


def _routed_layers(config: Config, num_layers: int) -> tuple[int, ...]:
    """Return the dense layers of a Qwen MoE: those it names, and all but every step-th."""
    named = config.take("mlp_only_layers", list[int], [])
    step = config.take("decoder_sparse_step", int, 1)
    if step < 1:
        config.refuse("decoder_sparse_step", "need 1 or more")
    return tuple(n for n in range(num_layers) if n in named or (n + 1) % step)


def _qwen3_moe(config: Config) -> dict[str, Any]:
    fields = _qwen3(config)
    if not config.values.get("head_dim"):
        fields["head_dim"] = None
    key = "num_experts" if config.values.get("num_experts") is not None else "num_local_experts"
    fields["experts"] = Experts(
        count=config.take(key),
        active=config.take("num_experts_per_tok"),
        ffn_hidden=config.take("moe_intermediate_size"),
        dense_layers=_routed_layers(config, fields["num_layers"]),
    )
    return fields


def _qwen2_moe(config: Config) -> dict[str, Any]:
    fields = _qwen2(config)
    fields["bias"] = ("qkv",) if config.take("qkv_bias", bool, True) else False
    fields["experts"] = Experts(
        count=config.take("num_experts"),
        active=config.take("num_experts_per_tok"),
        ffn_hidden=config.take("moe_intermediate_size"),
        shared_hidden=config.take("shared_expert_intermediate_size"),
        shared_gate=True,
        dense_layers=_routed_layers(config, fields["num_layers"]),
    )
    return fields


def _mixtral(config: Config) -> dict[str, Any]:
    config.take("num_key_value_heads")
    fields = _llama(config, eps=1e-5)
    fields |= _windows(config, fields["num_layers"], window=None, full=lambda n: False)
    fields["experts"] = Experts(
        count=config.take("num_local_experts"),
        active=config.take("num_experts_per_tok"),
        ffn_hidden=fields["ffn_hidden"],
    )
    return fields


def _olmoe(config: Config) -> dict[str, Any]:
    fields = {**_llama(config, eps=1e-5), "qk_norm": "whole"}
    fields["experts"] = Experts(
        count=config.take("num_experts"),
        active=config.take("num_experts_per_tok"),
        ffn_hidden=fields["ffn_hidden"],
    )
    return fields


def _gpt_oss(config: Config) -> dict[str, Any]:
    config.take("num_key_value_heads")
    attention = config.take("attention_bias", bool, True)
    fields = {**_llama(config, eps=1e-5), "bias": ("qkv", "out") if attention else False}
    fields |= _windows(config, fields["num_layers"], window=128, full=lambda n: n % 2 == 1)
    fields["experts"] = Experts(
        count=config.take("num_local_experts"),
        active=config.take("num_experts_per_tok"),
        ffn_hidden=fields["ffn_hidden"],
        bias=True,
        router_bias=True,
    )
    return {**fields, "sinks": True, "extras": ("a SwiGLU that is clamped",)}


def _nope_layers(config: Config, num_layers: int) -> tuple[int, ...]:
    """Return the layers without rotary positions: those it names, or one in so many."""
    every = config.take("no_rope_layer_interval", int, 4)
    usual = [int((n + 1) % every != 0) for n in range(num_layers)]
    rotary = config.take("no_rope_layers", list[int], None) or usual
    return tuple(n for n, on in enumerate(rotary) if not on)


def _llama4(config: Config) -> dict[str, Any]:
    config.take("num_key_value_heads")
    fields, layers = _llama(config, eps=1e-5), config.take("num_hidden_layers")
    step = config.take("interleave_moe_layer_step", int, 1)
    routed = config.take("moe_layers", list[int], None)
    if routed is None:
        routed = list(range(step - 1, layers, step)) if step else []
    nope = _nope_layers(config, layers)
    config.read.add("layer_types")
    chunk = config.take("attention_chunk_size", int, 8192)
    inner, active = fields["ffn_hidden"], config.take("num_experts_per_tok", int, 1)
    extras = ["queries and keys normed without weights"] * config.take("use_qk_norm", bool, True)
    return {
        **fields,
        "ffn_hidden": config.take("intermediate_size_mlp", int, 16384),
        "head_dim": fields["head_dim"] or None,
        "nope_layers": nope,
        "window": chunk,
        "window_layers": tuple(n for n in range(layers) if n not in nope),
        "chunked": True,
        "experts": Experts(
            count=config.take("num_local_experts", int, 16),
            active=active,
            ffn_hidden=inner,
            shared_hidden=inner,
            dense_layers=tuple(n for n in range(layers) if n not in routed),
        ),
        "extras": (*extras, "experts weighed before they compute"),
    }


def _deepseek(config: Config) -> dict[str, Any]:
    """Read DeepSeek-V2 and V3, and those that took their architecture (Kimi K2)."""
    fields = _llama(config)
    bias = fields["bias"]
    config.read.add("head_dim")
    fields |= {"num_kv_heads": None, "head_dim": None, "bias": bias}
    if config.take("moe_layer_freq", int, 1) != 1:
        config.refuse("moe_layer_freq", "need 1: experts in every layer after the dense ones")
    fields["latent"] = LatentAttention(
        q_rank=config.there("q_lora_rank").take("q_lora_rank", int, None),
        kv_rank=config.take("kv_lora_rank"),
        nope_dim=config.take("qk_nope_head_dim"),
        rope_dim=config.take("qk_rope_head_dim"),
        value_dim=config.take("v_head_dim"),
    )
    return {**fields, "experts": _shared_experts(config)}


def _shared_experts(config: Config) -> Experts:
    wide = config.take("moe_intermediate_size")
    return Experts(
        count=config.take("n_routed_experts"),
        active=config.take("num_experts_per_tok"),
        ffn_hidden=wide,
        shared_hidden=config.there("n_shared_experts").take("n_shared_experts", int, 0) * wide,
        dense_layers=tuple(range(config.take("first_k_dense_replace"))),
    )


def _glm4_moe(config: Config) -> dict[str, Any]:
    attention = config.take("attention_bias", bool, False)
    return {
        **_llama(config, eps=1e-5),
        "rope": _rope(config, 0.5),
        "bias": ("qkv",) if attention else False,
        "qk_norm": "head" if config.take("use_qk_norm", bool, False) else "none",
        "experts": _shared_experts(config),
    }


def _gemma(config: Config, num_norms: int = 2) -> dict[str, Any]:
    tied = config.take("tie_word_embeddings", bool, True)
    fields = _llama(config)
    act = "hidden_activation" if config.values.get("hidden_activation") else "hidden_act"
    config.read.update(("hidden_act", "hidden_activation"))
    return {
        **fields,
        "tied": tied,
        "head_dim": fields["head_dim"] or 256,
        "activation": config.word(act, ACTIVATIONS, "gelu_pytorch_tanh"),
        "norms_per_layer": num_norms,
        "attention_softcap": config.take("attn_logit_softcapping", float, None),
        "logit_softcap": config.take("final_logit_softcapping", float, None),
        "extras": ("an embedding that is scaled", "norms by 1 + weight"),
    }


def _gemma2(config: Config) -> dict[str, Any]:
    config.values = {
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    } | config.values
    fields = _gemma(config, num_norms=4)
    return fields | _windows(config, fields["num_layers"], window=4096, full=lambda n: n % 2 == 1)


def _gemma3(config: Config) -> dict[str, Any]:
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256}
    sizes |= {"vocab_size": 262208, "max_position_embeddings": 131072}  # files leave them out
    config.values = sizes | config.values
    fields = {**_gemma(config, num_norms=4), "qk_norm": "head"}
    every = config.take("sliding_window_pattern", int, 6)
    fields |= _windows(
        config, fields["num_layers"], window=4096, full=lambda n: (n + 1) % every == 0
    )
    return {**fields, "extras": (*fields["extras"], "rope with two speeds")}


def _gpt_neox(config: Config) -> dict[str, Any]:
    fields = _sizes(config, kv=False)
    share = config.take("rotary_pct", float, 0.25)
    theta = config.take("rotary_emb_base", float, 10000.0)
    rope = _rope(config, share)
    if "rope_theta" not in config.values and not config.values.get("rope_parameters"):
        rope = Rope(theta=theta, share=rope.share, scaling=rope.scaling)
    attention = config.take("attention_bias", bool, True)
    return {
        **fields,
        "ffn_hidden": config.take("intermediate_size"),
        "rope": rope,
        "activation": config.word("hidden_act", ACTIVATIONS, "gelu"),
        "norm_eps": config.take("layer_norm_eps", float, 1e-5),
        "parallel": config.take("use_parallel_residual", bool, True),
        "bias": True if attention else ("mlp", "norm"),
    }


def _starcoder2(config: Config) -> dict[str, Any]:
    config.take("num_key_value_heads")
    fields, bias = _sizes(config), config.take("use_bias", bool, True)
    config.read.add("norm_type")
    return {
        **fields,
        **_windows(config, fields["num_layers"], window=None, full=lambda n: False),
        "ffn_hidden": config.take("intermediate_size"),
        "activation": config.word("hidden_act", ACTIVATIONS, "gelu_pytorch_tanh"),
        "norm_eps": config.take("norm_epsilon", float, 1e-5),
        "tied": config.take("tie_word_embeddings", bool, True),
        "bias": True if bias else ("norm",),
    }


def _olmo2(config: Config) -> dict[str, Any]:
    return {**_llama(config, eps=1e-5), "qk_norm": "whole", "extras": ("norms after, not before",)}


def _phi3(config: Config) -> dict[str, Any]:
    fields = _llama(config, eps=1e-5)
    return fields | _windows(config, fields["num_layers"], window=None, full=lambda n: False)


def _smollm3(config: Config) -> dict[str, Any]:
    config.values = {"rope_theta": 2000000.0} | config.values
    fields = {**_llama(config), "tied": config.take("tie_word_embeddings", bool, True)}
    layers = fields["num_layers"]
    fields["nope_layers"] = _nope_layers(config, layers)
    return {**fields, **_qwen_windows(config, layers)}


FAMILIES: dict[str, Callable[[Config], dict[str, Any]]] = {
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "llama": _llama,
    "mistral": _mistral,
    "ministral3": _phi3,
    "mixtral": _mixtral,
    "qwen2": _qwen2,
    "qwen2_moe": _qwen2_moe,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "kimi_k2": _deepseek,
    "glm4_moe": _glm4_moe,
    "gpt_oss": _gpt_oss,
    "granite": _llama,
    "llama4": _llama4,
    "olmo2": _olmo2,
    "olmoe": _olmoe,
    "phi3": _phi3,
    "smollm3": _smollm3,
    "starcoder2": _starcoder2,
}
