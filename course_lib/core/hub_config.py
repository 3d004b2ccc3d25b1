"""Read a `ModelSpec` from a Hugging Face `config.json`.

`FAMILIES` says what each architecture's code does that its config.json does not say. A field that
is neither read here nor known to change no size is refused: ignored, it could make every count
wrong without a word. Notebook 01_memory.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from course_lib.core.errors import CourseError
from course_lib.core.files import read_json
from course_lib.core.plain_values import build
from course_lib.core.specs import Experts, LatentAttention, ModelSpec, Rope

REQUIRED: Any = object()
# they belong to tokenizers, generation, losses, files, heads of other tasks, dropout and start
NO_SIZE = """
    _attn_implementation _attn_implementation_autoset _name_or_path architectures attention_dropout
    attn_pdrop attn_scale auto_map aux_loss_alpha bos_token_id cache_implementation
    chunk_size_feed_forward classifier_dropout cross_attention_hidden_size dtype embd_pdrop
    embedding_dropout eos_token_id ep_size experts_per_token finetuning_task floor_scale
    for_llm_class gradient_checkpointing hidden_dropout id2label initial_context_length
    initializer_factor initializer_range is_decoder is_llama_config keys_to_ignore_at_inference
    label2id max_length mm_tokens_per_image n_group name_or_path norm_topk_prob
    num_logits_to_keep num_nextn_predict_layers original_max_position_embeddings
    output_attentions output_hidden_states output_router_logits pad_token_id prefix pretraining_tp
    problem_type qk_head_dim quantization_config reorder_and_upcast_attn resid_pdrop
    residual_dropout return_dict rope_interleave routed_scaling_factor router_aux_loss_coef
    router_dtype router_jitter_noise router_z_loss_coef scoring_func sep_token_id seq_aux
    summary_activation summary_first_dropout summary_proj_to_labels summary_type summary_use_proj
    task_specific_params temperature tie_encoder_decoder tokenizer_class topk_group topk_method
    torch_dtype torchscript transformers.js_config transformers_version unsloth_fixed
    unsloth_version use_bfloat16 use_cache use_mambapy
"""
# they change what is computed, but no size; the value at which they change nothing
EXTRAS: dict[str, Any] = {
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": 1.0,
    "logits_scaling": 1.0,
    "logit_scale": 1.0,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "attn_temperature_tuning": False,
    "swiglu_limit": None,
    "swiglu_alpha": None,
    "query_pre_attn_scalar": None,
    "clip_qkv": None,
    "use_bidirectional_attention": False,
}
ACTIVATIONS = {
    **{"silu": "silu", "swish": "silu", "gelu": "gelu", "relu": "relu"},
    **{"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh"},
}


class Config:
    """The fields of a config.json, and which of them were read."""

    def __init__(self, path: Path, values: dict[str, Any]) -> None:
        self.path, self.values = path, values
        self.read = {"model_type", "text_config"}

    def take(self, key: str, kind: Any = int, default: Any = REQUIRED) -> Any:
        """Return the value of a field as `kind`; what is missing or null is the default.

        Raises: CourseError when the field is not there and has no default, or is of another kind
        """
        self.read.add(key)
        value = self.values.get(key)
        if value is not None:
            return build(kind, value, f"{self.path}, {key}")
        if default is REQUIRED:
            raise CourseError(f"{self.path}: need the field {key!r}; it is not there.")
        return default

    def word(self, key: str, allowed: dict[str, str], default: str) -> str:
        """Return what one of the allowed words stands for."""
        found = self.take(key, str, default)
        if found not in allowed:
            raise CourseError(
                f"{self.path}, {key}: need one of {', '.join(allowed)}; got {found[:60]!r}."
            )
        return allowed[found]

    def refuse(self, key: str, why: str) -> None:
        """Raise the error of a value that this reader cannot count."""
        got = repr(self.values.get(key))[:60]
        raise CourseError(f"{self.path}, {key}: {why}; got {got}.")

    def refuse_unread(self) -> None:
        """Raise CourseError for a field that is switched on, and that nobody has read."""
        for key, value in self.values.items():
            off = value is None or value is False or value in ([], {}, "")
            if not off and key not in self.read and key not in NO_SIZE.split():
                raise CourseError(
                    f"{self.path}: the field {str(key)[:60]!r} ({repr(value)[:60]}) is not known "
                    "here: if it changes the model's sizes, every count would be wrong. Take it "
                    "out of a copy of the file if it changes none."
                )


def read_config(path: str | os.PathLike[str]) -> ModelSpec:
    """Read the spec in a Hugging Face `config.json`: of the model of text, where it has others too.

    Raises: CourseError for a file that cannot be read, an architecture or a field that is not known
    """
    path = Path(path)
    found = read_json(path, "a config.json")
    values = found if isinstance(found, dict) else {}
    kind = values.get("model_type")
    if isinstance(inner := values.get("text_config"), dict):
        outer = {k: v for k, v in values.items() if k in ("tie_word_embeddings",)}
        kind = inner.get("model_type") or kind
        values = {**outer, **inner}
    kind = kind.removesuffix("_text") if isinstance(kind, str) else kind
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise CourseError(
            f"{path}: need model_type {', '.join(FAMILIES)}; got {repr(kind)[:60]}. "
            "Try ModelSpec(...) with the sizes yourself."
        )
    config = Config(path, values)
    fields = FAMILIES[kind](config)
    fields["extras"] = (*fields.get("extras", ()), *_extras(config))
    config.refuse_unread()
    return ModelSpec(name=path.stem if path.stem != "config" else kind, **fields)


def _extras(config: Config) -> list[str]:
    """Return the fields of EXTRAS that are on."""
    given = {key: config.values.get(key) for key in EXTRAS}
    config.read.update(EXTRAS)
    return [key for key, value in given.items() if value is not None and value != EXTRAS[key]]


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


def _llama4(config: Config) -> dict[str, Any]:
    config.take("num_key_value_heads")
    fields, layers = _llama(config, eps=1e-5), config.take("num_hidden_layers")
    step = config.take("interleave_moe_layer_step", int, 1)
    routed = config.take("moe_layers", list[int], None)
    if routed is None:
        routed = list(range(step - 1, layers, step)) if step else []
    every = config.take("no_rope_layer_interval", int, 4)
    rotary = config.take("no_rope_layers", list[int], None) or [
        int((n + 1) % every != 0) for n in range(layers)
    ]
    nope = tuple(n for n, on in enumerate(rotary) if not on)
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
        q_rank=config.take("q_lora_rank", int, None),
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
        shared_hidden=(config.take("n_shared_experts", int, None) or 0) * wide,
        dense_layers=tuple(range(config.take("first_k_dense_replace", int, 0))),
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
    layers, every = fields["num_layers"], config.take("no_rope_layer_interval", int, 4)
    rotary = config.take("no_rope_layers", list[int], None) or [
        int((n + 1) % every != 0) for n in range(layers)
    ]
    fields["nope_layers"] = tuple(n for n, on in enumerate(rotary) if not on)
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
