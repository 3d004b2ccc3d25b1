"""Send many tensors as few messages: group them by dtype and device, and broadcast each group."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.collectives.group import Group
from course_lib.cost.packing import fill_buckets

STATE_BYTES = 250 * 2**20  # parameters and buffers are broadcast in pieces of this size


@torch.no_grad()
def broadcast_together(tensors: Iterable[Tensor], group: Group = None) -> None:
    """Give all ranks the values that the group's first rank has, a few large messages in all."""
    tensors = list(tensors)
    root = dist.get_process_group_ranks(group)[0]
    for part in group_alike(tensors, STATE_BYTES):
        members = [tensors[number] for number in part]
        flat = torch.cat([tensor.reshape(-1) for tensor in members])
        dist.broadcast(flat, root, group)
        for tensor, values in zip(members, flat.split([t.numel() for t in members]), strict=True):
            tensor.data.copy_(values.view(tensor.shape))  # .data: backward may have kept it


def group_alike(tensors: Sequence[Tensor], most_bytes: float = math.inf) -> list[list[int]]:
    """Numbers of tensors that can lie side by side: of one dtype and device, up to most_bytes.

    Nothing is cut: a tensor that is larger than most_bytes is alone.
    """
    kinds: dict[Any, list[int]] = {}
    for number, tensor in enumerate(tensors):
        kinds.setdefault((tensor.dtype, tensor.device), []).append(number)
    return [
        [numbers[place] for place in part]
        for numbers in kinds.values()
        for part in fill_buckets([tensors[number].nbytes for number in numbers], most_bytes)
    ]
