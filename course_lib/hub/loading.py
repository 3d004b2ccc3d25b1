"""Read a model of transformers (config.json and safetensors) into a checkpoint of the course.

Notebook 14_checkpoint.
"""

import re
import stat
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from course_lib.checkpoint.folder import Checkpoint, Folder, Reported
from course_lib.checkpoint.saving import save
from course_lib.core.errors import CourseError
from course_lib.core.files import read_json
from course_lib.core.specs import ModelSpec
from course_lib.hub.config import read_config
from course_lib.hub.names import IN_FILES, NAMES, Renamed, renamed
from course_lib.models import GPT

ONE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
# what files have besides the weights: the buffers of older versions
NO_WEIGHT = re.compile(r".*(\.(attn|attention)\.(masked_)?bias|rotary_emb\.inv_freq)")


def from_hugging_face(folder: Path, out: Folder, progress: Reported | None = None) -> Checkpoint:
    """Save the weights of a model of transformers as a checkpoint of step 0.

    `load` reads them into a GPT; `--resume` refuses them, as they have no optimizer state.

    folder   with config.json, and model.safetensors or several files with their index

    Cost:    the model is in memory twice
    Raises:  CourseError for a model that GPT does not build, and for files that are not this model
    """
    spec, state = load_hugging_face(folder, progress)
    with torch.device("meta"):
        model = GPT(spec)
    model.load_state_dict(state, assign=True)
    if spec.tied:
        model.head.weight = model.embedding.weight
    return save({"model": model}, out, step=0, run={"model": asdict(spec)})


def load_hugging_face(
    folder: Path, progress: Reported | None = None
) -> tuple[ModelSpec, dict[str, Tensor]]:
    """Return the spec of a model of transformers, and the state dict of its GPT.

    Raises: CourseError as `from_hugging_face`
    """
    spec = read_config(folder / "config.json")
    family = str(read_json(folder / "config.json", "a config.json")["model_type"])
    with torch.device("meta"):
        own = GPT(spec).state_dict()
    if family not in NAMES:
        raise CourseError(
            f"{folder}: need model_type {', '.join(NAMES)}, whose names are known; got {family!r}."
        )
    names = IN_FILES.get(family, {})
    where, state = _tensors_in(folder, NAMES[family].blocks.split(".")[0]), dict[str, Tensor]()
    total = sum(one.nbytes for one in own.values())
    for done, one in enumerate(wanted := renamed(family, spec, own), 1):
        name = names.get(one.name, one.name)
        if name not in where:
            raise CourseError(f"{folder}: need the tensor {name}; no file has it.")
        state |= _split(one, _read(where.pop(name)), own, folder)
        if progress:
            progress(total * done // len(wanted), total)
    if spec.tied:
        state["head.weight"] = state["embedding.weight"]
        head = where.pop("lm_head.weight", None)  # some files have the tied matrix twice
        if head is not None and not torch.equal(_read(head), state["head.weight"]):
            raise CourseError(
                f"{folder}: need lm_head.weight equal to the embedding, as config.json ties them; "
                "got another matrix. Try tie_word_embeddings false in a copy of config.json."
            )
    if rest := [name for name in where if not NO_WEIGHT.fullmatch(name)]:
        raise CourseError(
            f"{folder}: need the tensors of a {family} with these sizes; {rest[0]} is none of them."
        )
    return spec, state


def _tensors_in(folder: Path, prefix: str) -> dict[str, tuple[Path, str]]:
    """Return where each tensor is: its file, and its name there.

    Some files leave out the name of the model without its head, the prefix.
    """
    files = [folder / ONE_FILE]
    if not files[0].exists() and (folder / INDEX).exists():
        found = read_json(folder / INDEX, "an index of safetensors")
        parts = found.get("weight_map") if isinstance(found, Mapping) else None
        if not isinstance(parts, Mapping):
            raise CourseError(f"{folder / INDEX}: need a weight_map; got none.")
        files = [folder / Path(str(name)).name for name in sorted(set(map(str, parts.values())))]
    where: dict[str, tuple[Path, str]] = {}
    for path in files:
        try:
            if not stat.S_ISREG(path.stat().st_mode):  # reading a pipe would block
                raise OSError("a folder, a pipe or a device")
            with safe_open(path, framework="pt") as file:
                where |= {name: (path, name) for name in file.keys()}  # noqa: SIM118, no mapping
        except (OSError, ValueError, SafetensorError) as problem:
            raise CourseError(f"{path}: need a safetensors file; got {problem}.") from None
    if any(name.startswith(f"{prefix}.") for name in where):
        return where
    heads = ("lm_head.weight", "embed_out.weight")
    return {name if name in heads else f"{prefix}.{name}": at for name, at in where.items()}


def _read(at: tuple[Path, str]) -> Tensor:
    with safe_open(at[0], framework="pt") as file:
        return file.get_tensor(at[1])


def _split(
    one: Renamed, tensor: Tensor, own: Mapping[str, Tensor], folder: Path
) -> dict[str, Tensor]:
    """Return our tensors from theirs. Raises: CourseError for another shape"""
    rows = [len(own[name]) for name in one.sources]
    shape: Any = [sum(rows), *own[one.sources[0]].shape[1:]]
    shape = shape[::-1] if one.transposed else shape
    if list(tensor.shape) != shape:
        raise CourseError(
            f"{folder}: need {one.name} of shape {shape}, as config.json says; got "
            f"{list(tensor.shape)}."
        )
    return dict(zip(one.sources, one.split(tensor, rows), strict=True))
