"""The sizes of a transformer, from which its parameters, bytes and FLOPs follow.

`course_lib.core.layers` lists the matrices of each layer of a spec, `course_lib.hub.config`
reads a spec from a Hugging Face `config.json`, and the presets are in `course_lib.core.presets`.
Notebook 01_memory.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from course_lib.core.errors import CourseError, ShapeError
from course_lib.core.plain_values import build

SIZES = ("hidden", "num_layers", "num_heads", "ffn_hidden", "vocab", "max_seq", "vocab_multiple")
SIZES_OR_NONE = ("num_kv_heads", "head_dim", "window")
MOST, MOST_OF_OTHERS = {"num_layers": 10**5}, 10**9  # a larger one comes from a spoilt file
WORDS = {
    "norm": ("layer", "rms"),
    "positions": ("learned", "rope", "none"),
    "qk_norm": ("none", "head", "whole"),
    "activation": ("default", "gelu", "gelu_tanh", "silu", "relu"),
}
ROUTERS = ("softmax", "sigmoid")
BIASED = ("qkv", "out", "mlp", "norm")


def check_size(where: str, field: str, size: Any) -> None:
    """Raise ShapeError when a size is no whole number above 0, or absurdly large."""
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ShapeError(f"{where}: need {field} as a whole number above 0; got {repr(size)[:60]}.")
    if size > MOST.get(field, MOST_OF_OTHERS):
        raise ShapeError(
            f"{where}: need {field} of at most "
            f"{MOST.get(field, MOST_OF_OTHERS):,}; got {repr(size)[:60]}."
        )


def check_switch(where: str, field: str, value: Any) -> None:
    """Raise CourseError when a value is neither True nor False."""
    if not isinstance(value, bool):
        raise CourseError(f"{where}: need {field} as true or false; got {repr(value)[:60]}.")


def _indices(field: str, layers: Any) -> tuple[int, ...]:
    """Return indices of layers in order, as a tuple."""
    whole = isinstance(layers, Iterable) and not isinstance(layers, str)
    found = list(layers) if whole else [layers]
    if any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in found):
        raise ShapeError(f"{field}: need indices of layers from 0; got {repr(layers)[:60]}.")
    return tuple(sorted(set(found)))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary positions: how fast each pair of a head's numbers turns.

    theta     pair i of a head turns by position * theta**(-2i / head_dim)
    share     the share of a head's numbers that turn, the first ones (GPT-NeoX: a quarter)
    scaling   the rule for sequences beyond those of pre-training and its numbers, as config.json
              has them: (("rope_type", "llama3"), ("factor", 8.0), ...); empty: none

    Source: Su et al. 2021 (RoFormer), section 3.2.2
    """

    theta: float = 10000.0
    share: float = 1.0
    scaling: tuple[tuple[str, Any], ...] = ()

    def __post_init__(self) -> None:
        if not (_is_number(self.theta) and self.theta > 0):
            raise ShapeError(f"rope: need theta above 0; got {repr(self.theta)[:60]}.")
        if not (_is_number(self.share) and 0 < self.share <= 1):
            raise ShapeError(f"rope: need share above 0, at most 1; got {repr(self.share)[:60]}.")
        object.__setattr__(self, "scaling", tuple((key, value) for key, value in self.scaling))


@dataclass(frozen=True, kw_only=True)
class Experts:
    """Mixture of experts in place of the MLP: a router sends each token to `active` of `count`.

    ffn_hidden     width of one expert
    shared_hidden  width of the shared experts together, which every token uses; 0: there are none
    shared_gate    a sigmoid of one more row weighs the shared experts (Qwen2-MoE)
    dense_layers   indices of the layers that keep the dense MLP of the spec's ffn_hidden
    bias           the experts' matrices have biases
    router_bias    the router has one
    capacity       an expert takes at most capacity * tokens * active / count tokens and drops the
                   others; None: none is dropped
    router         "softmax" over the experts, or a "sigmoid" each and a bias that only selects
    normalized     the weights of a token's experts are divided by their sum; with active 1 the
                   loss then has no gradient for the router

    Source: Shazeer et al. 2017; Fedus et al. 2021 (Switch), section 2.2, for the capacity
    """

    count: int
    active: int
    ffn_hidden: int
    shared_hidden: int = 0
    shared_gate: bool = False
    dense_layers: tuple[int, ...] = ()
    bias: bool = False
    router_bias: bool = False
    capacity: float | None = None
    router: str = "softmax"
    normalized: bool = True

    def __post_init__(self) -> None:
        for field in ("count", "active", "ffn_hidden"):
            check_size("experts", field, getattr(self, field))
        if self.shared_hidden != 0:
            check_size("experts", "shared_hidden", self.shared_hidden)
        if self.active > self.count:
            raise ShapeError(
                f"experts: need active of at most count; got {self.active} and {self.count}."
            )
        if self.router not in ROUTERS:
            raise CourseError(
                f"experts: need router {' or '.join(ROUTERS)}; got {repr(self.router)[:60]}."
            )
        for field in ("shared_gate", "bias", "router_bias", "normalized"):
            check_switch("experts", field, getattr(self, field))
        object.__setattr__(self, "dense_layers", _indices("dense_layers", self.dense_layers))
        if self.capacity is not None and not (_is_number(self.capacity) and self.capacity > 0):
            raise ShapeError(f"experts: need capacity above 0; got {repr(self.capacity)[:60]}.")


def capacity_of(copies: int, num_experts: int, factor: float) -> int:
    """Return the most tokens that an expert takes: ceil(factor * copies / num_experts).

    copies   of all tokens: each is sent to `active` experts

    Source: Fedus et al. 2021 (Switch), equation 3, for one expert per token
    """
    return math.ceil(factor * copies / num_experts)


@dataclass(frozen=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention (MLA): keys and values of all heads from one small vector.

    q_rank     size of the vector from which queries are computed; None: straight from the input
    kv_rank    size of the vector from which keys and values are computed
    nope_dim   numbers of a head's query and key without positions
    rope_dim   numbers with rotary positions; that part of the key is the same for all heads
    value_dim  numbers of a head's value

    Source: DeepSeek-AI 2024 (DeepSeek-V2), section 2.1
    """

    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int

    def __post_init__(self) -> None:
        for field in ("kv_rank", "nope_dim", "rope_dim", "value_dim"):
            check_size("latent attention", field, getattr(self, field))
        if self.q_rank is not None:
            check_size("latent attention", "q_rank", self.q_rank)


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Sizes of a decoder-only transformer, with attention and an MLP or experts in each layer.

    num_kv_heads      heads of keys and values; None: as many as num_heads
    head_dim          size of one head; None: hidden / num_heads (read it as `head_size`)
    ffn_hidden        width of the MLP; with experts, of the layers that are dense
    vocab_multiple    the tables of tokens have rows up to a multiple of it (read: `padded_vocab`)
    tied              the output projection is the embedding's own matrix
    gated             the MLP has three matrices (such as SwiGLU) instead of two
    activation        of the MLP; "default": SiLU if gated, else GELU
    norm              "layer" (weight, and bias if there are biases of norms) or "rms" (weight)
    norms_per_layer   2: before attention and MLP; 1: both share it; 4: after them, too (Gemma 2)
    qk_norm           queries and keys are normed: "head" (each head), "whole" (all heads at once)
    parallel          attention and MLP of a layer get the same input, and both are added to it
    positions         "learned" (a [max_seq, hidden] table), "rope" or "none"
    nope_layers       indices of the layers that do without rotary positions
    bias              True: linear layers and norms have biases; False: none has; or those that
                      have, out of qkv, out, mlp, norm (the output projection has none)
    window            a token attends to at most that many tokens, itself the last one; None: to all
    window_layers     indices of the layers with the window; None: all
    chunked           the window does not slide: the sequence is cut into pieces of its size
    attention_softcap, logit_softcap
                      scores and logits x become cap * tanh(x / cap); None: they stay
    sinks             each head has a learned score more, which takes weight away from the tokens
    latent            multi-head latent attention in place of q, k and v
    experts           mixture of experts in place of the MLP
    extras            what the model computes besides, without parameters: it changes no size, but
                      `course_lib.models.GPT` does not build it

    Raises: ShapeError when the sizes do not fit each other
    """

    name: str = "own"
    hidden: int
    num_layers: int
    num_heads: int
    num_kv_heads: int | None = None
    head_dim: int | None = None
    ffn_hidden: int
    vocab: int
    vocab_multiple: int = 1
    max_seq: int
    tied: bool = True
    gated: bool = False
    activation: str = "default"
    norm: str = "layer"
    norms_per_layer: int = 2
    norm_eps: float = 1e-5
    qk_norm: str = "none"
    parallel: bool = False
    positions: str = "learned"
    rope: Rope = Rope()
    nope_layers: tuple[int, ...] = ()
    bias: bool | tuple[str, ...] = True
    window: int | None = None
    window_layers: tuple[int, ...] | None = None
    chunked: bool = False
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    sinks: bool = False
    latent: LatentAttention | None = None
    experts: Experts | None = None
    extras: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        where = f"model {self.name}"
        self._restore()
        for field in (*SIZES, *SIZES_OR_NONE):
            if getattr(self, field) is not None or field in SIZES:
                check_size(where, field, getattr(self, field))
        if self.norms_per_layer not in (1, 2, 4):
            raise ShapeError(
                f"{where}: need norms_per_layer as 1, 2 or 4; got "
                f"{repr(self.norms_per_layer)[:60]}."
            )
        if self.head_dim is None and self.latent is None:
            self._check_divides("num_heads", self.num_heads, "hidden", self.hidden)
        self._check_divides("num_kv_heads", self.kv_heads, "num_heads", self.num_heads)
        for field in ("tied", "gated", "parallel", "chunked", "sinks"):
            check_switch(where, field, getattr(self, field))
        for field in WORDS:
            if getattr(self, field) not in WORDS[field]:
                raise CourseError(
                    f"{where}: need {field} out of {', '.join(WORDS[field])}; "
                    f"got {getattr(self, field)!r}."
                )
        for field in ("norm_eps", "attention_softcap", "logit_softcap"):
            value = getattr(self, field)
            if not (value is None and "cap" in field) and not (_is_number(value) and value > 0):
                raise ShapeError(f"{where}: need {field} above 0; got {repr(value)[:60]}.")
        self._check_parts()
        if self.head_dim is not None and self.q_hidden == self.hidden:  # one way to say it
            object.__setattr__(self, "head_dim", None)

    def _restore(self) -> None:
        """Make tuples and parts of what JSON gives: lists and mappings."""
        for field, kind in PARTS.items():
            if (value := getattr(self, field)) is not None:
                where = f"model {self.name}, {field}"
                object.__setattr__(self, field, build(kind, value, where))
        for field in ("nope_layers", "window_layers"):
            if (value := getattr(self, field)) is not None:
                object.__setattr__(self, field, _indices(field, value))
        object.__setattr__(self, "extras", tuple(self.extras))
        if self.activation == ("silu" if self.gated else "gelu"):  # one way to say it
            object.__setattr__(self, "activation", "default")
        if not isinstance(self.bias, bool):
            words = tuple(self.bias) if isinstance(self.bias, list | tuple) else (self.bias,)
            possible = BIASED[: len(BIASED) - (self.norm == "rms")]  # an RMSNorm has none
            if not set(map(str, words)) <= set(BIASED):
                raise CourseError(
                    f"model {self.name}: need bias as true, false or some of {', '.join(BIASED)}; "
                    f"got {repr(self.bias)[:60]}."
                )
            words = tuple(word for word in possible if word in words)
            object.__setattr__(
                self, "bias", words if 0 < len(words) < len(possible) else bool(words)
            )

    def _check_parts(self) -> None:
        """Check what belongs together, and that named layers exist."""
        where, latent = f"model {self.name}", self.latent
        named = {"nope_layers": self.nope_layers, "window_layers": self.window_layers or ()}
        if self.experts is not None:
            named["experts.dense_layers"] = self.experts.dense_layers
        for field, layers in named.items():
            if max(layers, default=0) >= self.num_layers:
                raise ShapeError(
                    f"{where}: need {field} below {self.num_layers} layers; got {max(layers)}."
                )
        if latent is not None and (self.head_dim is not None or self.kv_heads != self.num_heads):
            raise ShapeError(
                f"{where}: need no head_dim and no num_kv_heads with latent attention, which has "
                f"sizes of its own; got {self.head_dim} and {self.num_kv_heads}."
            )
        if self.window is None and (self.window_layers is not None or self.chunked):
            raise ShapeError(f"{where}: need window with window_layers or chunked; got none.")
        if self.norms_per_layer == 1 and not self.parallel:
            raise ShapeError(f"{where}: need parallel with norms_per_layer 1; got neither.")

    @property
    def kv_heads(self) -> int:
        """Number of heads of keys and values."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def head_size(self) -> int:
        """Size of one head's query and key."""
        if self.latent is not None:
            return self.latent.nope_dim + self.latent.rope_dim
        return self.hidden // self.num_heads if self.head_dim is None else self.head_dim

    @property
    def value_size(self) -> int:
        """Size of one head's value."""
        return self.head_size if self.latent is None else self.latent.value_dim

    @property
    def q_hidden(self) -> int:
        """Size of all queries of one token."""
        return self.num_heads * self.head_size

    @property
    def mixed_hidden(self) -> int:
        """Size of what attention mixes for one token, all heads: the input of `out`."""
        return self.num_heads * self.value_size

    @property
    def kv_hidden(self) -> int:
        """Size of all keys of one token: less than the queries' with grouped-query attention."""
        return self.kv_heads * self.head_size

    @property
    def padded_vocab(self) -> int:
        """Rows of the tables of tokens: vocab, up to a multiple of vocab_multiple."""
        return -(-self.vocab // self.vocab_multiple) * self.vocab_multiple

    @property
    def mlp_activation(self) -> str:
        """Activation of the MLP, by name."""
        if self.activation != "default":
            return self.activation
        return "silu" if self.gated else "gelu"

    def has_bias(self, where: str) -> bool:
        """Return whether there are biases in "qkv", "out", "mlp" or "norm"."""
        return self.bias if isinstance(self.bias, bool) else where in self.bias

    def _check_divides(self, parts: str, count: int, whole: str, size: int) -> None:
        if size % count:
            low = [n for n in range(1, math.isqrt(size) + 1) if size % n == 0]
            near = max(n for one in low for n in (one, size // one) if n <= count)
            raise ShapeError(
                f"model {self.name}: need {whole} divisible by {parts}; got {size} and {count}. "
                f"Try {parts}={near}."
            )


PARTS = {"rope": Rope, "latent": LatentAttention, "experts": Experts}


def spec_fields(spec: Any) -> dict[str, Any]:
    """Return the fields that differ from their defaults, ready for JSON.

    `ModelSpec(**fields)` restores the spec.
    """
    found = {field.name: getattr(spec, field.name) for field in fields(spec)}
    defaults = {field.name: field.default for field in fields(spec)}
    return {
        name: spec_fields(value) if is_dataclass(value) else value
        for name, value in found.items()
        if value != defaults[name]
    }
