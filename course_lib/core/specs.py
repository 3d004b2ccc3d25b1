"""The sizes of a transformer, from which its parameters, bytes and FLOPs follow.

`read_config` reads them from a Hugging Face `config.json`; the presets are in
`course_lib.core.presets`. Notebook 01_memory.
"""

import math
import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from course_lib.core.errors import CourseError, ShapeError
from course_lib.core.files import read_json
from course_lib.core.plain_values import build

SIZES = ("hidden", "num_layers", "num_heads", "num_kv_heads", "ffn_hidden", "vocab", "max_seq")
MOST, MOST_OF_OTHERS = {"num_layers": 10**5}, 10**9  # a larger one comes from a spoilt file
NORMS = ("layer", "rms")
POSITIONS = ("learned", "rope")


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Sizes of a decoder-only transformer, pre-norm, with attention and an MLP in each layer.

    num_kv_heads   heads of keys and values; None: as many as num_heads
    tied           the output projection is the embedding's own matrix
    gated          the MLP is SwiGLU (three matrices) instead of GELU (two)
    norm           "layer" (weight, and bias if `bias`) or "rms" (weight)
    positions      "learned" (a [max_seq, hidden] table) or "rope" (no parameters)
    bias           linear layers have biases (the output projection has none)

    Raises: ShapeError when the sizes do not fit each other
    """

    name: str = "own"
    hidden: int
    num_layers: int
    num_heads: int
    num_kv_heads: int | None = None
    ffn_hidden: int
    vocab: int
    max_seq: int
    tied: bool = True
    gated: bool = False
    norm: str = "layer"
    positions: str = "learned"
    bias: bool = True

    def __post_init__(self) -> None:
        for field in SIZES:
            self._check_size(field, getattr(self, field))
        self._check_divides("num_heads", self.num_heads, "hidden", self.hidden)
        self._check_divides("num_kv_heads", self.kv_heads, "num_heads", self.num_heads)
        for field in ("tied", "gated", "bias"):
            self._check_switch(field, getattr(self, field))
        self._check_word("norm", NORMS)
        self._check_word("positions", POSITIONS)

    @property
    def kv_heads(self) -> int:
        """Number of heads of keys and values."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def head_dim(self) -> int:
        """Size of one head."""
        return self.hidden // self.num_heads

    @property
    def kv_hidden(self) -> int:
        """Size of all keys of one token: hidden, or less with grouped-query attention."""
        return self.kv_heads * self.head_dim

    def _check_size(self, field: str, size: Any) -> None:
        if field == "num_kv_heads" and size is None:
            return
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ShapeError(
                f"model {self.name}: need {field} as a whole number above 0; got {repr(size)[:60]}."
            )
        if size > MOST.get(field, MOST_OF_OTHERS):
            raise ShapeError(
                f"model {self.name}: need {field} of at most "
                f"{MOST.get(field, MOST_OF_OTHERS):,}; got {repr(size)[:60]}."
            )

    def _check_divides(self, parts: str, count: int, whole: str, size: int) -> None:
        if size % count:
            low = [n for n in range(1, math.isqrt(size) + 1) if size % n == 0]
            near = max(n for one in low for n in (one, size // one) if n <= count)
            raise ShapeError(
                f"model {self.name}: need {whole} divisible by {parts}; got {size} and {count}. "
                f"Try {parts}={near}."
            )

    def _check_switch(self, field: str, value: Any) -> None:
        if not isinstance(value, bool):
            raise CourseError(
                f"model {self.name}: need {field} as true or false; got {repr(value)[:60]}."
            )

    def _check_word(self, field: str, words: tuple[str, ...]) -> None:
        if getattr(self, field) not in words:
            raise CourseError(
                f"model {self.name}: need {field} out of {', '.join(words)}; "
                f"got {getattr(self, field)!r}."
            )


_LLAMA = {
    "hidden": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "ffn_hidden": "intermediate_size",
    "vocab": "vocab_size",
    "max_seq": "max_position_embeddings",
}
_GPT2 = {
    "hidden": "n_embd",
    "num_layers": "n_layer",
    "num_heads": "n_head",
    "vocab": "vocab_size",
    "max_seq": "n_positions",
}


def read_config(path: str | os.PathLike[str]) -> ModelSpec:
    """Read the spec in a Hugging Face `config.json` of a gpt2, llama or mistral model.

    Raises: CourseError for a file that cannot be read, or a model of another architecture
    """
    path = Path(path)
    config = read_json(path, "a config.json")
    kind = config.get("model_type") if isinstance(config, dict) else None
    readers = {"gpt2": _gpt2, "llama": _llama, "mistral": _llama}
    if not isinstance(kind, str) or kind not in readers:
        raise CourseError(
            f"{path}: need model_type {', '.join(readers)}; got {repr(kind)[:60]}. "
            "Try ModelSpec(...) with the sizes yourself."
        )
    try:
        return readers[kind](path.stem if path.stem != "config" else kind, config)
    except KeyError as missing:
        raise CourseError(f"{path}: need the field {missing}; it is not there.") from missing


def _sizes(config: dict[str, Any], keys: dict[str, str]) -> dict[str, Any]:
    return {field: build(int, config[key], f"config.json, {key}") for field, key in keys.items()}


def _gpt2(name: str, config: dict[str, Any]) -> ModelSpec:
    sizes = _sizes(config, _GPT2)
    return ModelSpec(
        name=name,
        **sizes,
        ffn_hidden=config.get("n_inner") or 4 * sizes["hidden"],
        tied=config.get("tie_word_embeddings", True),
    )


def _llama(name: str, config: dict[str, Any]) -> ModelSpec:
    sizes = _sizes(config, _LLAMA)
    spec = ModelSpec(
        name=name,
        **sizes,
        num_kv_heads=config.get("num_key_value_heads"),
        tied=config.get("tie_word_embeddings", False),
        gated=True,
        norm="rms",
        positions="rope",
        bias=config.get("attention_bias", False) is True and config.get("mlp_bias") is True,
    )
    head_dim = config.get("head_dim") or spec.head_dim
    if head_dim != spec.head_dim or config.get("attention_bias", False) != spec.bias:
        raise CourseError(
            f"model {name}: need heads of hidden / num_heads = {spec.head_dim} and biases "
            f"everywhere or nowhere; got heads of {repr(head_dim)[:60]} and attention_bias "
            f"{repr(config.get('attention_bias', False))[:60]}. This build is not counted here."
        )
    return spec


def spec_fields(spec: ModelSpec) -> dict[str, Any]:
    """Return the fields that differ from their defaults; `ModelSpec(**fields)` restores it."""
    return {
        field.name: getattr(spec, field.name)
        for field in fields(spec)
        if getattr(spec, field.name) != field.default
    }
