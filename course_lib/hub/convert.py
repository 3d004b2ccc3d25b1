"""Convert a checkpoint: one safetensors file, a model of transformers, or PyTorch's own format.

`loading.py` goes the other way. Safetensors files are written one tensor at a time. Notebook
14_checkpoint.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch

from course_lib.checkpoint.data_file import DTYPES, NAMES, bytes_of, header_bytes
from course_lib.checkpoint.folder import Checkpoint, Reported, read_tensor
from course_lib.checkpoint.local_state import LocalState
from course_lib.checkpoint.model_state import whole_shard
from course_lib.core.errors import CourseError
from course_lib.core.files import whole_file, write_whole
from course_lib.core.plain_values import build
from course_lib.core.specs import ModelSpec
from course_lib.hub.names import IN_FILES, Renamed, renamed
from course_lib.hub.writing import config_of
from course_lib.models import GPT


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

    Raises: CourseError for a model that transformers does not have, or that is not of this spec
    """
    spec = spec or spec_of(checkpoint)
    config = config_of(spec)
    _check_is(checkpoint, spec)
    kind = config["model_type"]
    saved = [name.removeprefix("model.") for name in checkpoint.manifest.tensors]
    tensors = [
        replace(
            one,
            name=IN_FILES.get(kind, {}).get(one.name, one.name),
            sources=tuple(f"model.{name}" for name in one.sources),
        )
        for one in renamed(kind, spec, saved)
    ]
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
    with whole_file(path, sync=True) as file:
        file.write(header_bytes({"__metadata__": dict(metadata), **header}))
        for one in tensors:
            file.write(bytes_of(one.join([read_tensor(checkpoint, x) for x in one.sources])))
            if progress:
                progress(header[one.name]["data_offsets"][1], end)
