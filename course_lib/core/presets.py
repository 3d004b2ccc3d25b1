"""Named models: GPT-2, Llama, those of the papers that are compared with, and small ones.

`MODELS["llama-8b"]` is a ModelSpec of a GPT, `ENCODERS["bert-tiny"]` one of a BERT. A comment names
the source of each family's sizes. Models of other families are the published `config.json` files in
`course_lib/core/configs`.
"""

import difflib
import math
import re
from dataclasses import replace
from pathlib import Path

from course_lib.core.errors import CourseError
from course_lib.core.specs import Experts, ModelSpec, Rope
from course_lib.hub.config import read_config

SIZE = re.compile(r"(\d+x)?(\d+(?:\.\d+)?)([mbt])(?![a-z])")  # such as the 13b of llama2-13b
FAMILY = re.compile(r"[a-z]*")  # such as the llama of llama2-13b
MILLIONS = {"m": 1.0, "b": 1e3, "t": 1e6}
ALIKE = 1.5  # sizes whose ratio is at most that are suggested for each other


def _gpt(
    name: str,
    hidden: int,
    num_layers: int,
    num_heads: int,
    *,
    ffn_hidden: int = 0,
    vocab: int = 50257,
    max_seq: int = 1024,
) -> ModelSpec:
    return ModelSpec(
        name=name,
        hidden=hidden,
        num_layers=num_layers,
        num_heads=num_heads,
        ffn_hidden=ffn_hidden or 4 * hidden,
        vocab=vocab,
        max_seq=max_seq,
    )


def _llama(
    name: str,
    hidden: int,
    num_layers: int,
    num_heads: int,
    ffn_hidden: int,
    *,
    factor: float = 8.0,
    tied: bool = False,
) -> ModelSpec:
    longer = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_type": "llama3"}
    longer |= {"factor": factor, "original_max_position_embeddings": 8192}
    return ModelSpec(
        name=name,
        hidden=hidden,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=8,
        ffn_hidden=ffn_hidden,
        vocab=128256,
        max_seq=131072,
        tied=tied,
        gated=True,
        norm="rms",
        positions="rope",
        rope=Rope(theta=500000.0, scaling=tuple(sorted(longer.items()))),
        bias=False,
    )


# Radford et al. 2019, Table 2; 50257 tokens and 1024 positions as in its released config.json
_GPT2 = (
    _gpt("gpt2", 768, 12, 12),
    _gpt("gpt2-medium", 1024, 24, 16),
    _gpt("gpt2-large", 1280, 36, 20),
    _gpt("gpt2-xl", 1600, 48, 25),
)
# Llama 3.1 and 3.2: config.json of the released models; Llama team 2024, Table 3 (8B, 70B, 405B)
_LLAMA = (
    _llama("llama-1b", 2048, 16, 32, 8192, factor=32.0, tied=True),
    _llama("llama-3b", 3072, 28, 24, 8192, factor=32.0, tied=True),
    _llama("llama-8b", 4096, 32, 32, 14336),
    _llama("llama-70b", 8192, 80, 64, 28672),
    _llama("llama-405b", 16384, 126, 128, 53248),
)
# Touvron et al. 2023 (Llama 2): keys and values for every head, 32000 tokens
_LLAMA2 = tuple(
    replace(spec, num_kv_heads=None, vocab=32000, max_seq=4096, rope=Rope())
    for spec in (
        _llama("llama2-7b", 4096, 32, 32, 11008),
        _llama("llama2-13b", 5120, 40, 40, 13824),
    )
)
# Korthikanti et al. 2022, Table 3
_MEGATRON = (
    _gpt("megatron-22b", 6144, 48, 64, vocab=51200, max_seq=2048),
    _gpt("megatron-175b", 12288, 96, 96, vocab=51200, max_seq=2048),
    _gpt("megatron-530b", 20480, 105, 128, vocab=51200, max_seq=2048),
    _gpt("megatron-1t", 25600, 128, 160, vocab=51200, max_seq=2048),
)
# the five models of the scaling study (its cluster scripts train them)
_STUDY = (
    _gpt("study-10m", 320, 4, 8, ffn_hidden=1536, vocab=8000, max_seq=128),
    _gpt("study-100m", 768, 12, 12, vocab=8000, max_seq=512),
    _gpt("study-300m", 1024, 24, 16, vocab=8000, max_seq=1024),
    _gpt("study-500m", 1280, 24, 20, vocab=8000, max_seq=1024),
    _gpt("study-1b", 1536, 36, 24, vocab=8000, max_seq=1024),
)
# as many parameters as the GPT-2 of characters of Jin, Zhang and Huang 2023: 27.32 million. The
# sizes are this course's own; the 65 characters are those of the plays in course_lib.models.text
_CHARACTERS = _gpt("gpt2-char", 672, 5, 12, vocab=65, max_seq=200)
# small enough to train in a notebook
_TINY = (
    _gpt("tiny", 64, 2, 4, vocab=256, max_seq=64),
    _gpt("small", 256, 4, 8, vocab=2048, max_seq=256),
    replace(
        _llama("llama-tiny", 128, 4, 8, 384),
        num_kv_heads=4,
        vocab=256,
        max_seq=256,
        rope=Rope(),
    ),
    replace(
        _llama("moe-tiny", 64, 2, 8, 64),  # a small Mixtral
        num_heads=4,
        num_kv_heads=2,
        vocab=256,
        max_seq=64,
        rope=Rope(),
        experts=Experts(count=8, active=2, ffn_hidden=64),
    ),
)

_PUBLISHED = tuple(map(read_config, sorted((Path(__file__).parent / "configs").glob("*.json"))))

_DECODERS = (*_TINY, _CHARACTERS, *_STUDY, *_GPT2, *_LLAMA, *_LLAMA2, *_MEGATRON, *_PUBLISHED)
MODELS = {spec.name: spec for spec in _DECODERS}

# for course_lib.models.BERT; the larger one has as many parameters as their BERT: 46.7 million
_ENCODERS = (
    _gpt("bert-tiny", 64, 2, 4, vocab=256, max_seq=32),
    _gpt("bert-dialogues", 512, 12, 8, vocab=17200, max_seq=128),
)
ENCODERS = {spec.name: spec for spec in _ENCODERS}


def find_model(name: str) -> ModelSpec:
    """Return the preset of that name.

    Raises: CourseError that names the most similar presets
    """
    if name in ENCODERS:
        raise CourseError(
            f"model: need a model that predicts the next token; {name} is an encoder. "
            f"Try BERT(ENCODERS[{name!r}])."
        )
    if name not in MODELS:
        near = _similar(name.lower())
        hint = f"Try {' or '.join(near)}." if near else f"There are {', '.join(MODELS)}."
        raise CourseError(
            f"model: need a preset or the path of a config.json; got {name!r}. {hint}"
        )
    return MODELS[name]


def _similar(name: str) -> list[str]:
    """Return up to three presets: those of the most similar size, if the name has one.

    Of these, the ones of the same family, if there are some.
    """
    asked = _millions(name)
    sizes = {known: _millions(known) for known in MODELS} if asked else {}
    far = {known: abs(math.log(size / asked)) for known, size in sizes.items() if size}
    near = [known for known, ratio in far.items() if ratio <= math.log(ALIKE)]
    if not near:
        begun = [known for known in MODELS if known.startswith(name)]
        known_names = [*MODELS, *ENCODERS]
        return begun[:3] or difflib.get_close_matches(name, known_names, n=3, cutoff=0.3)
    related = [known for known in near if _family(known) == _family(name)]
    return sorted(related or near, key=lambda known: (far[known], -_likeness(name, known)))[:3]


def _family(name: str) -> str:
    return FAMILY.match(name)[0]  # type: ignore[index]  # it matches any text


def _millions(name: str) -> float:
    """Return the millions of parameters that a name tells; 0 if it tells none."""
    found = SIZE.search(name)
    if not found:
        return 0.0
    experts = int(found[1].rstrip("x")) if found[1] else 1
    return experts * float(found[2]) * MILLIONS[found[3]]


def _likeness(name: str, known: str) -> float:
    return difflib.SequenceMatcher(None, name, known).ratio()
