"""Broadcast many tensors as few messages: group them by dtype and device, send each group flat."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.collectives.group import Group, group_of
from course_lib.cost.packing import fill_buckets

STATE_BYTES = 250 * 2**20  # parameters and buffers are broadcast in pieces of this size


@torch.no_grad()
def broadcast_together(tensors: Iterable[Tensor], group: Group = None) -> None:
    """Copy the tensors of the group's first rank to all ranks, in place, in few messages.

    Those with a group of their own (`average_over`) are those of its first rank.
    """
    tensors = list(tensors)
    for part in group_alike(tensors, STATE_BYTES):
        alike = [tensors[index] for index in part]
        flat = torch.cat([tensor.reshape(-1) for tensor in alike])  # [sum of numels]
        own = group_of(alike[0], group)
        dist.broadcast(flat, dist.get_process_group_ranks(own)[0], own)
        for tensor, values in zip(alike, flat.split([t.numel() for t in alike]), strict=True):
            overwrite(tensor, values.view(tensor.shape))


def overwrite(tensor: Tensor, values: Tensor) -> None:
    """Copy values into a tensor; an expanded one, whose numbers share memory, gets its own."""
    if torch._debug_has_internal_overlap(tensor) == 1:
        tensor.data = tensor.data.contiguous()
    tensor.data.copy_(values)  # .data: backward may have saved it


def group_alike(tensors: Sequence[Tensor], most_bytes: float = math.inf) -> list[list[int]]:
    """Group tensors that can share a flat tensor: one dtype, device and group, up to `most_bytes`.

    Return the indices of each group's tensors. Nothing is split: a tensor larger than `most_bytes`
    has a group of its own.
    """
    kinds: dict[Any, list[int]] = {}
    for index, tensor in enumerate(tensors):
        kinds.setdefault((tensor.dtype, tensor.device, group_of(tensor, None)), []).append(index)
    return [
        [indices[i] for i in part]
        for indices in kinds.values()
        for part in fill_buckets([tensors[index].nbytes for index in indices], most_bytes)
    ]
