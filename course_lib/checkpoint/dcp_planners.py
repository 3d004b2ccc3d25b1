"""Planners that tell `torch.distributed.checkpoint` which boxes this rank saves and loads.

DCP gathers a plan from each rank, and then writes or reads what the plans say. Notebook
14_checkpoint.
"""

from collections.abc import Mapping
from dataclasses import replace
from io import BytesIO
from typing import Any

import torch
import torch.distributed.checkpoint as torch_dcp
from torch import Size, Tensor
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from course_lib.checkpoint.local_state import leaves_of
from course_lib.checkpoint.planning import WritePlan, own_pieces
from course_lib.core.shards import Box, Shard


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(Size(box.offsets), Size(box.sizes))


class BoxSavePlanner(torch_dcp.DefaultSavePlanner):
    """Tells DCP to write this rank's boxes, as all ranks have agreed who writes which."""

    def __init__(
        self, shards: Mapping[str, Shard], values: Mapping[str, Any], agreed: WritePlan, rank: int
    ) -> None:
        super().__init__(flatten_state_dict=False)
        self._values = {".".join(path): (path, value) for path, value, _ in leaves_of(values)}
        self._items = list[WriteItem]()
        self._tensors = dict[MetadataIndex, Tensor]()
        for names, shape, box, tensor in own_pieces(shards, agreed, rank):
            properties = TensorProperties.create_from_tensor(tensor)
            data = TensorWriteData(_chunk(box), properties, Size(shape))
            for index in (MetadataIndex(name, box.offsets) for name in names):
                self._tensors[index] = tensor
                self._items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))

    def set_up_planner(
        self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        """Note whether this rank writes the values, which all ranks have."""
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> SavePlan:
        """Return what this rank writes."""
        values = [WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO) for name in self._values]
        return SavePlan([*self._items, *(values if self.is_coordinator else ())])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Note how names are nested: `model.a.b` is `a.b` in the state of the model."""
        plans, metadata = super().create_global_plan(all_plans)
        nested = {name: tuple(name.split(".", 1)) for name in metadata.state_dict_metadata}
        nested |= {name: path for name, (path, _) in self._values.items()}
        return plans, replace(metadata, planner_data=nested)

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Return the tensor or value of an item."""
        return self._values[index.fqn][1] if index.offset is None else self._tensors[index]


class BoxLoadPlanner(torch_dcp.DefaultLoadPlanner):
    """Tells DCP to read where this rank's boxes intersect the saved chunks.

    values   the plain values by their names, after loading
    """

    def __init__(self, shards: Mapping[str, Shard]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._shards, self.values = shards, dict[str, Any]()
        self._tensors = {
            MetadataIndex(name, box.offsets): tensor
            for name, shard in shards.items()
            for box, tensor in shard.pieces
        }

    def set_up_planner(
        self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Note what was saved."""
        self._saved = metadata.state_dict_metadata if metadata else {}

    def create_local_plan(self) -> LoadPlan:
        """Return what this rank reads: the parts of its boxes, and all values."""
        items = list[ReadItem]()
        for name, shard in self._shards.items():
            saved = self._saved.get(name)
            if isinstance(saved, TensorStorageMetadata):
                chunks = [_chunk(box) for box, _ in shard.pieces]
                items += create_read_items_for_chunk_list(name, saved, chunks)
        for name, saved in self._saved.items():
            if isinstance(saved, BytesStorageMetadata):
                index, zero = MetadataIndex(name), Size((0,))
                items.append(ReadItem(LoadItemType.BYTE_IO, index, zero, index, zero, zero))
        return LoadPlan(items)

    def load_bytes(self, read_item: ReadItem, value: BytesIO) -> None:
        """Keep a plain value; nothing but plain values and tensors is unpickled."""
        self.values[read_item.dest_index.fqn] = torch.load(value, weights_only=True)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """Return the tensor to fill."""
        return self._tensors[index]


class SafeReader(torch_dcp.FileSystemReader):
    """Reads data files; the metadata was read before, and looked at."""

    def __init__(self, path: str, metadata: Metadata) -> None:
        super().__init__(path)
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata
