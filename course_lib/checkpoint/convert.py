"""Convert a checkpoint: one safetensors file, a model for transformers, or PyTorch's own format.

A model with LayerNorm, learned positions and GELU is a GPT-2 for the library transformers, one with
RMSNorm, rotary positions and SwiGLU is a Llama. Safetensors files are written one tensor at a time.
Notebook 14_checkpoint.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from course_lib.checkpoint.data_file import DTYPES, NAMES
from course_lib.checkpoint.folder import Checkpoint, Reported, read_tensor
from course_lib.checkpoint.local_state import LocalState
from course_lib.checkpoint.model_state import whole_shard
from course_lib.core.errors import CourseError
from course_lib.core.files import whole_file, write_whole
from course_lib.core.plain_values import build
from course_lib.core.specs import ModelSpec
from course_lib.models import GPT

NORM_EPS = 1e-5  # of both norms of course_lib.models

# theirs: ours. Weights of GPT-2's Conv1D are [in, out], the transposes of nn.Linear's; its queries,
# keys and values are one matrix. Llama's rotary pairs (i, i + head_dim / 2) are those of `Rotary`,
# so the rows of q and k stay in order (Meta's own files pair 2i and 2i + 1).
GPT2_MODEL = {"transformer.wte": "embedding", "transformer.wpe": "positions"}
GPT2_BLOCK = {
    "ln_1": "attention_norm",
    "attn.c_attn": "attention.q attention.k attention.v",
    "attn.c_proj": "attention.out",
    "ln_2": "mlp_norm",
    "mlp.c_fc": "mlp.up",
    "mlp.c_proj": "mlp.out",
}
LLAMA_MODEL = {"model.embed_tokens": "embedding"}
LLAMA_BLOCK = {
    "input_layernorm": "attention_norm",
    "self_attn.q_proj": "attention.q",
    "self_attn.k_proj": "attention.k",
    "self_attn.v_proj": "attention.v",
    "self_attn.o_proj": "attention.out",
    "post_attention_layernorm": "mlp_norm",
    "mlp.gate_proj": "mlp.gate",
    "mlp.up_proj": "mlp.up",
    "mlp.down_proj": "mlp.out",
}


@dataclass(frozen=True)
class Renamed:
    """A tensor of the file to write: its name there, and the saved tensors that it is made of.

    sources      joined along dim 0
    transposed   the join is transposed
    """

    name: str
    sources: tuple[str, ...]
    transposed: bool = False


def to_full(checkpoint: Checkpoint, path: Path, progress: Reported | None = None) -> None:
    """Write all tensors of a checkpoint into one safetensors file, whole or not at all.

    Its metadata holds `step`, and `run` and `values` as JSON.
    """
    about = {"run": json.dumps(checkpoint.run), "values": json.dumps(checkpoint.values)}
    tensors = [Renamed(name, (name,)) for name in sorted(checkpoint.manifest.tensors)]
    _write(checkpoint, tensors, path, {"step": str(checkpoint.step), **about}, progress)


def to_hugging_face(
    checkpoint: Checkpoint,
    folder: Path,
    spec: ModelSpec | None = None,
    progress: Reported | None = None,
) -> None:
    """Write the model as `config.json` and `model.safetensors`, for transformers.

    spec   of the model; None: the one in the checkpoint's `run`

    Raises: CourseError for a model that is neither a GPT-2 nor a Llama, or not of this spec
    """
    spec = spec or spec_of(checkpoint)
    config, names = (_gpt2 if spec.positions == "learned" else _llama)(spec)
    _check_is(checkpoint, spec)
    tensors = list(_renamed(names, checkpoint.manifest.tensors, spec))
    _write(checkpoint, tensors, folder / "model.safetensors", {"format": "pt"}, progress)
    dtype = checkpoint.manifest.tensors["model.embedding.weight"].dtype
    write_whole(folder / "config.json", json.dumps({**config, "dtype": dtype}, indent=2) + "\n")


def to_dcp(checkpoint: Checkpoint, folder: Path, progress: Reported | None = None) -> None:
    """Write a checkpoint as a folder that `torch.distributed.checkpoint.load` reads.

    Cost:    all tensors are in memory at once
    """
    from course_lib.checkpoint.dcp import write_dcp  # PyTorch's loads much

    local, done = LocalState(values=checkpoint.values), 0
    for name in checkpoint.manifest.tensors:
        tensor = read_tensor(checkpoint, name)
        local.shards[name], done = whole_shard(tensor), done + tensor.nbytes
        if progress:
            progress(done, checkpoint.num_bytes)
    write_dcp(local, folder, checkpoint.step, checkpoint.run)


def spec_of(checkpoint: Checkpoint) -> ModelSpec:
    """Return the ModelSpec in a checkpoint's `run`, under "model".

    Raises: CourseError where there is none
    """
    found = (checkpoint.run or {}).get("model")
    if not isinstance(found, Mapping):
        raise CourseError(
            f"{checkpoint.path}: need the model's sizes; its run does not tell them. Try --model, "
            "with a preset or the path of a config.json."
        )
    known = {field.name for field in fields(ModelSpec)}
    sizes = {name: value for name, value in found.items() if name in known}
    return build(ModelSpec, sizes, f"{checkpoint.path}, model")


def _gpt2(spec: ModelSpec) -> tuple[dict[str, Any], dict[str, str]]:
    """Return config.json of a GPT-2, and its names (theirs: ours)."""
    _need(
        spec,
        "a GPT-2",
        {
            "LayerNorm": spec.norm == "layer",
            "an MLP that is not gated": not spec.gated,
            "biases": spec.bias is True,
            "as many heads for keys as for queries": spec.kv_heads == spec.num_heads,
        },
    )
    config = {
        **{"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"},
        **{"vocab_size": spec.vocab, "n_positions": spec.max_seq, "n_embd": spec.hidden},
        **{"n_layer": spec.num_layers, "n_head": spec.num_heads, "n_inner": spec.ffn_hidden},
        **{"activation_function": "gelu", "layer_norm_epsilon": NORM_EPS},  # GELU without tanh
        **{"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
        **{"tie_word_embeddings": spec.tied, "bos_token_id": None, "eos_token_id": None},
    }
    blocks = _blocks("transformer.h", GPT2_BLOCK, spec)
    return config, {**GPT2_MODEL, **blocks, "transformer.ln_f": "norm"}


def _llama(spec: ModelSpec) -> tuple[dict[str, Any], dict[str, str]]:
    """Return config.json of a Llama, and its names (theirs: ours)."""
    _need(spec, "a Llama", {"RMSNorm": spec.norm == "rms", "a gated MLP": spec.gated})
    config = {
        **{"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
        **{"vocab_size": spec.vocab, "max_position_embeddings": spec.max_seq},
        **{"hidden_size": spec.hidden, "intermediate_size": spec.ffn_hidden},
        **{"num_hidden_layers": spec.num_layers, "num_attention_heads": spec.num_heads},
        **{"num_key_value_heads": spec.kv_heads, "head_dim": spec.head_size},
        **{"hidden_act": "silu", "rms_norm_eps": NORM_EPS, "rope_theta": 10000.0},
        **{"attention_bias": spec.has_bias("out"), "mlp_bias": spec.has_bias("mlp")},
        **{"tie_word_embeddings": spec.tied, "bos_token_id": None, "eos_token_id": None},
    }
    blocks = _blocks("model.layers", LLAMA_BLOCK, spec)
    return config, {**LLAMA_MODEL, **blocks, "model.norm": "norm"}


def _need(spec: ModelSpec, architecture: str, conditions: Mapping[str, bool]) -> None:
    missing = [need for need, holds in conditions.items() if not holds]
    if missing:
        raise CourseError(
            f"convert: need {architecture} for a model with {spec.positions} positions; this one "
            f"is without {' and '.join(missing)}: transformers has no class for it. Try --to full."
        )


def _blocks(prefix: str, names: Mapping[str, str], spec: ModelSpec) -> dict[str, str]:
    return {
        f"{prefix}.{n}.{theirs}": " ".join(f"blocks.{n}.{one}" for one in ours.split())
        for n in range(spec.num_layers)
        for theirs, ours in names.items()
    }


def _renamed(
    names: Mapping[str, str], saved: Mapping[str, Any], spec: ModelSpec
) -> Iterator[Renamed]:
    """Yield every tensor of the file, in the order of the layers."""
    head = {} if spec.tied else {"lm_head": "head"}
    for theirs, ours in {**names, **head}.items():
        for kind in ("weight", "bias"):
            sources = tuple(f"model.{one}.{kind}" for one in ours.split())
            if sources[0] in saved:
                is_conv1d = theirs.rpartition(".")[2].startswith("c_")
                yield Renamed(f"{theirs}.{kind}", sources, is_conv1d and kind == "weight")


def _check_is(checkpoint: Checkpoint, spec: ModelSpec) -> None:
    """Check that the tensors under `model.` are those of GPT(spec)."""
    with torch.device("meta"):
        wanted = {f"model.{name}": list(x.shape) for name, x in GPT(spec).state_dict().items()}
    saved = checkpoint.manifest.tensors
    found = {name: list(saved[name].shape) for name in saved if name.startswith("model.")}
    for name in sorted(wanted.keys() | found.keys()):
        if wanted.get(name) != found.get(name):
            raise CourseError(
                f"{checkpoint.path}: need {name} of shape {wanted.get(name, 'none at all')} for "
                f"GPT(spec); got {found.get(name, 'none')}. Try --model with the sizes of this run."
            )


def _write(
    checkpoint: Checkpoint,
    tensors: Sequence[Renamed],
    path: Path,
    metadata: Mapping[str, str],
    progress: Reported | None,
) -> None:
    """Write a safetensors file: the length of its header, the header in JSON, then all bytes."""
    saved, header, end = checkpoint.manifest.tensors, dict[str, Any](), 0
    for one in tensors:
        shape = list(saved[one.sources[0]].shape)
        shape[:1] = [sum(saved[name].shape[0] for name in one.sources)] if shape else []
        dtype = saved[one.sources[0]].dtype
        start, end = end, end + math.prod(shape) * DTYPES[dtype].itemsize
        header[one.name] = {
            "dtype": NAMES[dtype],
            "shape": shape[::-1] if one.transposed else shape,
            "data_offsets": [start, end],
        }
    text = json.dumps({"__metadata__": dict(metadata), **header}).encode()
    text += b" " * (-len(text) % 8)
    with whole_file(path, sync=True) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for one in tensors:
            file.write(_bytes_of(one, checkpoint))
            if progress:
                progress(header[one.name]["data_offsets"][1], end)


def _bytes_of(one: Renamed, checkpoint: Checkpoint) -> Any:
    parts = [read_tensor(checkpoint, name) for name in one.sources]
    whole: Tensor = parts[0] if len(parts) == 1 else torch.cat(parts)
    whole = whole.T if one.transposed else whole
    return whole.contiguous().reshape(-1).view(torch.uint8).numpy().data
