"""The plan of a save: which rank writes which box of which tensor.

Ranks offer what they hold; a box that several hold (the copies of DDP) is written by the one that
has the fewest bytes to write so far. All ranks compute the same plan from the same offers.
Notebook 14_checkpoint.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from course_lib.checkpoint.data_file import DTYPES, NAMES
from course_lib.checkpoint.local_state import LocalState, dtype_name
from course_lib.core.errors import CourseError
from course_lib.core.shards import Box, Shape, Shard, covers_once


@dataclass(frozen=True)
class Offer:
    """Tensors that a rank could write: of each its names, dtype, shape and boxes."""

    tensors: list[tuple[tuple[str, ...], str, Shape, list[Box]]]
    values: dict[str, Any]


@dataclass(frozen=True)
class PlaceInFile:
    """The place of a box: the rank that writes it, and the tensor of its file."""

    rank: int
    key: int


WritePlan = dict[tuple[str, ...], tuple[str, Shape, dict[Box, PlaceInFile]]]


def offer_of(local: LocalState) -> Offer:
    """Return what a rank could write. Names that share a Shard are offered as one tensor."""
    names: dict[int, list[str]] = defaultdict(list)
    for name, shard in local.shards.items():
        names[id(shard)].append(name)
    shards = {id(shard): shard for shard in local.shards.values()}
    tensors = []
    for key, shard in shards.items():
        if shard.pieces:
            boxes, parts = zip(*shard.pieces, strict=True)
            dtype = dtype_name(parts[0].dtype)
            tensors.append((tuple(names[key]), dtype, shard.shape, list(boxes)))
    return Offer(tensors, local.values)


def plan(offers: list[Offer]) -> WritePlan:
    """Return who writes which box of which tensor: of its holders, the one with the fewest bytes.

    Raises:  CourseError for a tensor that is not covered exactly once, or has two shapes
    """
    holders: dict[tuple[str, ...], dict[Box, list[int]]] = {}
    metas: dict[tuple[str, ...], tuple[str, Shape]] = {}
    for rank, offer in enumerate(offers):
        for names, dtype, shape, boxes in offer.tensors:
            if metas.setdefault(names, (dtype, shape)) != (dtype, shape):
                raise CourseError(
                    f"save: need one dtype and shape of {names[0]} on all ranks; rank {rank} has "
                    f"{dtype} {list(shape)}, another one {metas[names]}."
                )
            for box in boxes:
                holders.setdefault(names, {}).setdefault(box, []).append(rank)
    load, counts = [0] * len(offers), [0] * len(offers)
    found: WritePlan = {}
    for names, boxes_of in holders.items():
        dtype, shape = metas[names]
        if dtype not in NAMES:
            need = f"save: need a dtype out of {', '.join(NAMES)}"
            raise CourseError(f"{need}; got {dtype} for {names[0]}.")
        if not covers_once(shape, list(boxes_of)):
            raise CourseError(
                f"save: need shards that cover {names[0]}, of {list(shape)}, exactly once; got "
                f"{len(boxes_of)} boxes of {sum(box.numel for box in boxes_of)} elements. "
                "Try it with all ranks that hold a part."
            )
        places = {}
        for box, ranks in boxes_of.items():
            rank = min(ranks, key=lambda rank: (load[rank], rank))
            places[box] = PlaceInFile(rank, counts[rank])
            load[rank] += box.numel * DTYPES[dtype].itemsize
            counts[rank] += 1
        found[names] = (dtype, shape, places)
    return found


def own_pieces(
    shards: Mapping[str, Shard], agreed: WritePlan, rank: int
) -> Iterator[tuple[tuple[str, ...], Shape, Box, Tensor]]:
    """Yield what this rank writes in the order of the keys: names and shape, box and elements."""
    for names, (_, shape, places) in agreed.items():
        pieces = dict(shards[names[0]].pieces) if names[0] in shards else {}
        for box, place in places.items():
            if place.rank == rank:
                yield names, shape, box, pieces[box]


def merge_values(values: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the values of all ranks; under one name, the lowest rank's."""
    merged: dict[str, Any] = {}
    for one in reversed(values):
        for key, value in one.items():
            both = isinstance(value, dict) and isinstance(merged.get(key), dict)
            merged[key] = merge_values([value, merged[key]]) if both else value
    return merged
