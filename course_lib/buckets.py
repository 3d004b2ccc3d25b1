"""Buckets: which tensors travel together as one message.

Many small messages pay the latency many times, one large message cannot leave before the last
gradient is there; buckets are in between. Their gradients lie side by side in one flat tensor, and
every `param.grad` is a view of its place there. Notebook 06_ddp.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib.core.errors import CourseError
from course_lib.cost.overlap import fill_buckets
from course_lib.point_to_point import Group

STATE_BYTES = 250 * 2**20  # parameters and buffers are broadcast in pieces of this size


class Bucket:
    """Parameters whose gradients travel as one message; each gradient has its view of `flat`."""

    def __init__(self, named_params: list[tuple[str, nn.Parameter]]) -> None:
        self.names = [name for name, _ in named_params]
        self.params = [param for _, param in named_params]
        sizes = [param.numel() for param in self.params]
        self.flat = self.params[0].detach().new_zeros(sum(sizes))
        parts = zip(self.flat.split(sizes), self.params, strict=True)
        self.views = [part.view(param.shape) for part, param in parts]
        self.missing = set(range(len(sizes)))  # gradients that are not in `flat` yet

    @property
    def num_bytes(self) -> int:
        """Bytes of the message."""
        return self.flat.nbytes

    def take(self, index: int) -> None:
        """Copy a gradient into the bucket, and let `param.grad` be its view from now on."""
        param, view = self.params[index], self.views[index]
        if param.grad is not None and param.grad.is_sparse:
            raise CourseError(
                f"DDP: need dense gradients; got a sparse one for {self.names[index]}. "
                "Try sparse=False in its nn.Embedding."
            )
        if param.grad is not view:
            view.zero_() if param.grad is None else view.copy_(param.grad)
            param.grad = view
        self.missing.discard(index)


def make_buckets(module: nn.Module, bucket_bytes: float) -> list[Bucket]:
    """The buckets of a module's trainable parameters, in the order in which they will be full.

    The last parameter comes first, as backward gets there first; tied parameters come once. A
    bucket has one dtype and one device, and leaves when the last one of its parameters is there.
    """
    if not bucket_bytes > 0:
        raise CourseError(
            f"DDP: need bucket_bytes above 0; got {bucket_bytes}. Try 1, a bucket a parameter."
        )
    named = [(name, param) for name, param in module.named_parameters() if param.requires_grad]
    named.reverse()
    parts = sorted(group_alike([param for _, param in named], bucket_bytes), key=max)
    return [Bucket([named[number] for number in part]) for part in parts]


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
