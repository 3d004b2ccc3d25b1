"""The course's weights in Megatron-Core's layout, and back.

Megatron-Core fuses q, k and v into one matrix: the rows of one group of heads after the other, in
each group those of its queries, its key, its value. A gated MLP fuses gate and up the same way, a
group per rank of the tensor-parallel group. A column-parallel matrix is split by rows of its
weight (PyTorch stores it transposed), a row-parallel one by columns.

Source:  Megatron-Core 0.16.1, `transformer/attention.py` and `transformer/mlp.py`
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from course_lib.core.specs import ModelSpec

Weights = dict[str, Tensor]
_OUTSIDE = {  # the layers: the course's name, and the dim along which it is split
    "embedding.word_embeddings.weight": ("embedding.weight", 0),
    "embedding.position_embeddings.weight": ("positions.weight", None),
    "decoder.final_layernorm.weight": ("norm.weight", None),
    "decoder.final_layernorm.bias": ("norm.bias", None),
    "output_layer.weight": ("head.weight", 0),
}
_IN_LAYER = {
    "input_layernorm": ("attention_norm",),
    "self_attention.linear_qkv": ("attention.q", "attention.k", "attention.v"),
    "self_attention.linear_proj": ("attention.out",),
    "pre_mlp_layernorm": ("mlp_norm",),
    "mlp.linear_fc1": ("mlp.up",),
    "mlp.linear_fc2": ("mlp.out",),
}
_ROWS, _COLUMNS = ("linear_qkv", "linear_fc1"), ("linear_proj", "linear_fc2")


@dataclass(frozen=True)
class Source:
    """The course's tensors from which one of Megatron-Core's is made.

    names    the course's tensors that are fused, each `groups` times in turn
    dim      along which the tensor-parallel ranks split it; None: it is replicated
    """

    names: tuple[str, ...]
    groups: int = 1
    dim: int | None = None

    def shard(self, whole: Mapping[str, Tensor], rank: int, tp: int) -> Tensor:
        """Return the shard of a tensor-parallel rank."""
        parts = [whole[name].unflatten(0, (self.groups, -1)) for name in self.names]
        fused = torch.cat(parts, dim=1).flatten(0, 1)
        return fused if self.dim is None else fused.chunk(tp, self.dim)[rank]

    def whole(self, shards: Sequence[Tensor], like: Mapping[str, Tensor]) -> Weights:
        """Return the course's tensors from the shards of all ranks; `like` has their shapes."""
        fused = shards[0] if self.dim is None else torch.cat(list(shards), self.dim)
        rows = [like[name].shape[0] // self.groups for name in self.names]
        parts = fused.unflatten(0, (self.groups, -1)).split(rows, dim=1)
        return {n: part.flatten(0, 1) for n, part in zip(self.names, parts, strict=True)}


def source_of(name: str, spec: ModelSpec, tp: int) -> Source:
    """Return the source of a tensor, whose layer number is that in the whole model."""
    if name in _OUTSIDE:
        ours, dim = _OUTSIDE[name]
        if ours == "head.weight" and spec.tied:
            ours = "embedding.weight"  # the last stage's copy
        return Source((ours,), dim=dim)
    _, _, layer, rest = name.split(".", 3)  # decoder.layers.0.mlp.linear_fc1.weight
    module, _, kind = rest.rpartition(".")
    parts, groups = _IN_LAYER[module], 1
    if module == "self_attention.linear_qkv":
        groups = spec.kv_heads
    if module == "mlp.linear_fc1" and spec.gated:
        parts, groups = ("mlp.gate", "mlp.up"), tp
    names = tuple(f"blocks.{layer}.{part}.{kind}" for part in parts)
    if module.endswith(_ROWS):
        return Source(names, groups, 0)
    return Source(names, groups, 1 if module.endswith(_COLUMNS) and kind == "weight" else None)


def whole_weights(
    shards: Iterable[tuple[int, Weights]], spec: ModelSpec, tp: int, like: Mapping[str, Tensor]
) -> Weights:
    """Return the course's tensors from those of all ranks.

    shards   of each rank: its tensor-parallel rank, and its tensors by name
    like     the course's tensors, for their shapes; a tied head is not among them
    """
    by_name: dict[str, dict[int, Tensor]] = {}
    for rank, own in shards:
        for name, tensor in own.items():
            by_name.setdefault(name, {})[rank] = tensor
    found: Weights = {}
    for name, by_rank in by_name.items():
        found |= source_of(name, spec, tp).whole([by_rank[rank] for rank in range(tp)], like)
    return {name: found[name] for name in like}
