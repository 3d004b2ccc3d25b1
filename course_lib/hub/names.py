"""The names of a GPT's tensors in the library transformers, and how they are laid out there.

`renamed` lists the tensors of an architecture and those of `course_lib.models.GPT` that each is
made of; `Renamed.join` and `Renamed.split` convert the numbers, one way and the other. Notebook
14_checkpoint.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from course_lib.core.errors import CourseError
from course_lib.core.specs import ModelSpec


@dataclass(frozen=True)
class Renamed:
    """A tensor of transformers: its name there, and the tensors of a GPT that it is made of.

    sources      joined along dim 0
    pieces       in so many pieces, in turn: the first one of each source, then the second ones
    transposed   the join is transposed
    """

    name: str
    sources: tuple[str, ...]
    pieces: int = 1
    transposed: bool = False

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return their tensor from ours, which are in the order of `sources`."""
        whole = tensors[0]
        if len(tensors) > 1:
            parts = [one.unflatten(0, (self.pieces, -1)) for one in tensors]
            whole = torch.cat(parts, dim=1).flatten(0, 1)
        return whole.T if self.transposed else whole

    def split(self, tensor: Tensor, rows: Sequence[int]) -> list[Tensor]:
        """Return ours from their tensor; `rows` is the size of dim 0 of each source."""
        whole = tensor.T if self.transposed else tensor
        sizes = [size // self.pieces for size in rows]
        parts = whole.unflatten(0, (self.pieces, -1)).split(sizes, dim=1)
        return [part.flatten(0, 1).contiguous() for part in parts]


@dataclass(frozen=True)
class Names:
    """Names of modules of an architecture, theirs to ours; several of ours are joined there.

    outside      the blocks: embedding, positions and the last norm
    blocks       where they are
    block        in one of them; {} stands for the number of an expert
    by_head      modules in which the heads of the sources take turns
    transposed   modules whose weights are transposes: GPT-2's Conv1D are [in, out]
    """

    outside: Mapping[str, str]
    blocks: str
    block: Mapping[str, str]
    by_head: Collection[str] = ()
    transposed: Collection[str] = field(default=())


# Llama's rotary pairs (i, i + head_dim / 2) are those of `Rotary`, so the rows of q and k stay in
# order (Meta's own files pair 2i and 2i + 1)
_OUTSIDE = {"model.embed_tokens": "embedding", "model.norm": "norm"}
_ATTENTION = {
    "input_layernorm": "attention_norm",
    "self_attn.q_proj": "attention.q",
    "self_attn.k_proj": "attention.k",
    "self_attn.v_proj": "attention.v",
    "self_attn.q_norm": "attention.q_norm",
    "self_attn.k_norm": "attention.k_norm",
    "self_attn.o_proj": "attention.out",
    "post_attention_layernorm": "mlp_norm",
}
_GATED = {"mlp.gate_proj": "mlp.gate", "mlp.up_proj": "mlp.up", "mlp.down_proj": "mlp.out"}
# of an expert in files; in memory, newer versions have all experts of a layer in one tensor
_MIXTRAL = {
    "block_sparse_moe.gate": "mlp.router.linear",
    "block_sparse_moe.experts.{}.w1": "mlp.experts.{}.gate",
    "block_sparse_moe.experts.{}.w3": "mlp.experts.{}.up",
    "block_sparse_moe.experts.{}.w2": "mlp.experts.{}.out",
}
_QWEN_MOE = {
    "mlp.gate": "mlp.router.linear",
    "mlp.experts.{}.gate_proj": "mlp.experts.{}.gate",
    "mlp.experts.{}.up_proj": "mlp.experts.{}.up",
    "mlp.experts.{}.down_proj": "mlp.experts.{}.out",
}
_LLAMA = Names(_OUTSIDE, "model.layers", {**_ATTENTION, **_GATED})
_GPT2 = Names(
    {"transformer.wte": "embedding", "transformer.wpe": "positions", "transformer.ln_f": "norm"},
    "transformer.h",
    {
        "ln_1": "attention_norm",
        "attn.c_attn": "attention.q attention.k attention.v",
        "attn.c_proj": "attention.out",
        "ln_2": "mlp_norm",
        "mlp.c_fc": "mlp.up",
        "mlp.c_proj": "mlp.out",
    },
    transposed=("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"),
)
_GPT_NEOX = Names(
    {"gpt_neox.embed_in": "embedding", "gpt_neox.final_layer_norm": "norm"},
    "gpt_neox.layers",
    {
        "input_layernorm": "attention_norm",
        "attention.query_key_value": "attention.q attention.k attention.v",
        "attention.dense": "attention.out",
        "post_attention_layernorm": "mlp_norm",
        "mlp.dense_h_to_4h": "mlp.up",
        "mlp.dense_4h_to_h": "mlp.out",
    },
    by_head=("attention.query_key_value",),
)
_STARCODER2 = Names(
    _OUTSIDE, "model.layers", {**_ATTENTION, "mlp.c_fc": "mlp.up", "mlp.c_proj": "mlp.out"}
)
_PHI3 = Names(
    _OUTSIDE,
    "model.layers",
    {
        "input_layernorm": "attention_norm",
        "self_attn.qkv_proj": "attention.q attention.k attention.v",
        "self_attn.o_proj": "attention.out",
        "post_attention_layernorm": "mlp_norm",
        "mlp.gate_up_proj": "mlp.gate mlp.up",
        "mlp.down_proj": "mlp.out",
    },
)
NAMES = {
    "gpt2": _GPT2,
    "gpt_neox": _GPT_NEOX,
    **dict.fromkeys(("llama", "mistral", "ministral3", "qwen2", "qwen3", "smollm3"), _LLAMA),
    "phi3": _PHI3,
    "starcoder2": _STARCODER2,
    "mixtral": Names(_OUTSIDE, "model.layers", {**_ATTENTION, **_MIXTRAL}),
    "qwen3_moe": Names(_OUTSIDE, "model.layers", {**_ATTENTION, **_GATED, **_QWEN_MOE}),
}
IN_FILES = {"gpt_neox": {"lm_head.weight": "embed_out.weight"}}


def renamed(family: str, spec: ModelSpec, ours: Collection[str]) -> list[Renamed]:
    """Return every tensor of an architecture, in the order of the layers.

    family   its `model_type`
    ours     the names in the state dict of GPT(spec): they tell which biases and norms there are

    The output layer is `lm_head` there, but some files have another name for it: IN_FILES.

    Raises: CourseError for an architecture whose names are not here
    """
    if family not in NAMES:
        raise CourseError(f"renamed: need model_type {', '.join(NAMES)}; got {family!r}.")
    names = NAMES[family]
    modules = [*names.outside.items(), *([] if spec.tied else [("lm_head", "head")])]
    found = [_tensor(*pair, kind, names, spec) for pair in modules for kind in ("weight", "bias")]
    for n in range(spec.num_layers):
        for theirs, one in _in_each_expert(names.block, spec):
            mine = " ".join(f"blocks.{n}.{name}" for name in one.split())
            for kind in ("weight", "bias"):
                tensor = _tensor(theirs, mine, kind, names, spec)
                found.append(_in_block(tensor, f"{names.blocks}.{n}"))
    return [one for one in found if one.sources[0] in ours]


def _in_each_expert(block: Mapping[str, str], spec: ModelSpec) -> Iterator[tuple[str, str]]:
    for theirs, ours in block.items():
        for expert in range(spec.experts.count if spec.experts and "{}" in ours else 1):
            yield theirs.format(expert), ours.format(expert)


def _tensor(theirs: str, ours: str, kind: str, names: Names, spec: ModelSpec) -> Renamed:
    return Renamed(
        name=f"{theirs}.{kind}",
        sources=tuple(f"{one}.{kind}" for one in ours.split()),
        pieces=spec.num_heads if theirs in names.by_head else 1,
        transposed=theirs in names.transposed and kind == "weight",
    )


def _in_block(tensor: Renamed, block: str) -> Renamed:
    return Renamed(f"{block}.{tensor.name}", tensor.sources, tensor.pieces, tensor.transposed)
