"""Readers of parts of a `config.json` that several architectures share: heads, rope, windows."""

from collections.abc import Callable
from typing import Any

from course_lib.core.plain_values import build
from course_lib.core.specs import Experts, Rope
from course_lib.hub.fields import ACTIVATIONS, Config, Fields


def sizes(config: Config, rope: Rope) -> Fields:
    """Read the fields that all but GPT-2 share."""
    return {
        "hidden": config.size("hidden_size"),
        "num_layers": config.size("num_hidden_layers"),
        "num_heads": config.size("num_attention_heads"),
        "ffn_hidden": config.size("intermediate_size"),
        "vocab": config.size("vocab_size"),
        "max_seq": config.size("max_position_embeddings"),
        "positions": "rope",
        "rope": rope,
        "tied": config.take("tie_word_embeddings", bool),
    }


def heads(config: Config, *, own_size: bool = True) -> Fields:
    """Read the heads of keys and values. own_size: the code knows head_dim."""
    size = config.size("head_dim", int | None) if own_size else None
    if size is None:
        config.divides("num_attention_heads", "hidden_size")
    groups = config.size("num_key_value_heads", int | None)
    if groups is not None:
        config.divides("num_key_value_heads", "num_attention_heads")
    return {"num_kv_heads": groups, "head_dim": size}


def rms_decoder(config: Config, *, rope: Rope | None = None, act: str = "hidden_act") -> Fields:
    """Read a decoder with RMSNorm, rotary positions and a gated MLP, as far as its heads."""
    return {
        **sizes(config, rope or rotary(config)),
        "gated": True,
        "activation": config.word(act, ACTIVATIONS),
        "norm": "rms",
        "norm_eps": config.take("rms_norm_eps", float),
        "bias": False,
    }


def biases(config: Config, *places: str, mlp: bool = False) -> tuple[str, ...] | bool:
    """Return which of these places have biases. mlp: the code knows mlp_bias, too."""
    found = places if config.take("attention_bias", bool) else ()
    return (*found, *["mlp"] * (mlp and config.take("mlp_bias", bool))) or False


def rotary(config: Config, theta: str = "rope_theta", share: str = "partial_rotary_factor") -> Rope:
    """Read rotary positions as transformers 5 writes them, or as those before it did.

    theta, share   names of these two numbers where they are no part of the rules
    """
    old = config.take("rope_scaling", dict[str, Any] | None)
    new = config.take("rope_parameters", dict[str, Any] | None)
    return rope_rules(
        config, old or new or {}, config.take(theta, float), config.take(share, float)
    )


def rope_rules(config: Config, given: dict[str, Any], theta: float, share: float) -> Rope:
    rules = {key: value for key, value in given.items() if value is not None}
    theta, share = rules.pop("rope_theta", theta), rules.pop("partial_rotary_factor", share)
    kind = rules.pop("type", None)  # the older name
    if kind is not None and rules.setdefault("rope_type", kind) != kind:
        config.refuse("rope_scaling", "need the same type and rope_type")
    if rules.get("rope_type", "default") == "default":
        rules.pop("rope_type", None)
    plain = {k: repr(v) if isinstance(v, list | dict) else v for k, v in rules.items()}
    where = f"{config.path}, rope"
    return Rope(
        theta=build(float, theta, f"{where}, rope_theta"),
        share=build(float, share, f"{where}, partial_rotary_factor"),
        scaling=tuple(sorted(plain.items())),
    )


def windows(config: Config, limited: Callable[[int], bool], size: str = "sliding_window") -> Fields:
    """Read which layers have a window.

    limited   where config.json has no layer_types: whether layer n has one
    """
    layers, window = config.size("num_hidden_layers"), config.size(size, int | None)
    kinds = ("chunked" if "chunk" in size else "sliding") + "_attention", "full_attention"
    types = config.take("layer_types", list[str] | None)
    if types is None:
        types = [kinds[0] if limited(n) else kinds[1] for n in range(layers)]
    if len(types) != layers or not set(types) <= set(kinds):
        config.refuse("layer_types", f"need {layers}, each one of {', '.join(kinds)}")
    found = tuple(n for n, one in enumerate(types) if one == kinds[0])
    if not found or window is None:
        return {}
    return {"window": window, "window_layers": None if len(found) == layers else found}


def switched_windows(config: Config, limited: Callable[[int], bool]) -> Fields:
    """Read windows that there are with use_sliding_window only."""
    if config.take("use_sliding_window", bool):
        return windows(config, limited)
    config.read.add("sliding_window")
    if "sliding_attention" in (config.take("layer_types", list[str] | None) or ()):
        config.refuse("layer_types", "need use_sliding_window true beside sliding_attention")
    return {}


def one_window(config: Config) -> Fields:
    """Read the window that all layers have."""
    return {"window": config.size("sliding_window", int | None)}


def experts(config: Config, count: tuple[str, ...], ffn_hidden: int, **more: Any) -> Experts:
    """Return experts of that width. count: the names that their number may have"""
    number, active = config.size_of(*count), config.size("num_experts_per_tok")
    if active > number:
        config.refuse("num_experts_per_tok", f"need at most {count[0]} = {number}")
    if "norm_topk_prob" in config.values:
        more["normalized"] = config.take("norm_topk_prob", bool)
    return Experts(count=number, active=active, ffn_hidden=ffn_hidden, **more)


def nope_layers(config: Config) -> tuple[int, ...]:
    """Return the layers without rotary positions: those it names, or one in so many."""
    layers, every = config.size("num_hidden_layers"), config.size("no_rope_layer_interval")
    usual = [int((n + 1) % every != 0) for n in range(layers)]
    rotary = config.take("no_rope_layers", list[int] | None) or usual
    if len(rotary) != layers:
        config.refuse("no_rope_layers", f"need {layers}, one for each layer")
    return tuple(n for n, on in enumerate(rotary) if not on)
