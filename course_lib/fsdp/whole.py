"""FSDP on one screen: gather a unit, use it, free it, reduce its gradients.

It says what a rank does, and nothing else. `fsdp.py` adds prefetching, mixed precision, frozen,
tied and unused parameters, hybrid sharding, clipping and checkpoints. Notebook 10_fsdp.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib.collectives.group import Group, GroupMember, member_of


class WholeUnit:
    """The parameters of a module side by side; a rank owns `shard`, the rest comes and goes."""

    def __init__(self, module: nn.Module, member: GroupMember) -> None:
        self.member = member
        self.params = [x for x in module.parameters() if not hasattr(x, "_unit")]
        self.whole = self._side_by_side([x.detach() for x in self.params])
        dist.broadcast(self.whole, member.global_rank(0), member.group)
        self.shard = nn.Parameter(self.whole.view(member.size, -1)[member.rank].clone())
        self.num_ready = 0
        start = 0
        for param in self.params:
            part, start = self.whole[start : start + param.numel()], start + param.numel()
            param.data = part.view(param.shape)  # empty and full again, with `whole`
            param._unit = self  # type: ignore[attr-defined]
            param.register_post_accumulate_grad_hook(self._mark_ready)
        self.free()

    def _side_by_side(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return one tensor of p equal shards, the last one filled up with zeros."""
        flat = torch.cat([x.flatten() for x in tensors])
        return nn.functional.pad(flat, (0, -len(flat) % self.member.size))

    @torch.no_grad()
    def gather(self, *_: Any) -> None:
        """Give `whole` its memory, and fill it with the shards of all ranks."""
        if self.whole.untyped_storage().nbytes() == 0:
            self.whole.untyped_storage().resize_(self.whole.nbytes)
            dist.all_gather_single(self.whole, self.shard.detach(), group=self.member.group)

    def free(self) -> None:
        """Take its memory: what autograd has saved of parameters is valid after the next gather."""
        self.whole.untyped_storage().resize_(0)

    @torch.no_grad()
    def _mark_ready(self, _param: Tensor) -> None:
        """With the last gradient of the unit: free it, and give each rank its part of the mean."""
        self.num_ready += 1
        if self.num_ready < len(self.params):
            return
        self.free()
        grads = self._side_by_side([x.grad for x in self.params if x.grad is not None])
        mean = torch.empty_like(self.shard)
        dist.reduce_scatter_single(mean, grads, group=self.member.group)
        mean /= self.member.size
        self.shard.grad = mean if self.shard.grad is None else self.shard.grad + mean
        for param in self.params:
            param.grad = None
        self.num_ready = 0


class WholeFSDP(nn.Module):
    """`module` in units of which every rank owns a shard; `shards` is what an optimizer steps.

    model = WholeFSDP(module, module.blocks); optimizer = AdamW(model.shards)

    Every parameter is trained, has one dtype in its unit, and is used once in forward. The rest of
    the module is a unit, too, which stays gathered from forward to backward.

    Cost:    per unit two all_gathers and one reduce_scatter; nothing overlaps
    Source:  Zhao et al. 2023 (PyTorch FSDP), section 3.2
    """

    def __init__(
        self, module: nn.Module, blocks: Sequence[nn.Module] = (), group: Group = None
    ) -> None:
        super().__init__()
        self.module, member = module, member_of(group, "WholeFSDP")
        units = [WholeUnit(block, member) for block in blocks]
        for block, unit in zip(blocks, units, strict=True):
            block.register_forward_pre_hook(unit.gather)
            block.register_forward_hook(self._after_forward)
        self.root = WholeUnit(module, member)
        self.shards = [unit.shard for unit in (self.root, *units)]

    def forward(self, *args: Any) -> Any:
        """Return the module's output."""
        self.root.free()  # a forward without a backward has left it, and the optimizer has stepped
        self.root.gather()
        return self.module(*args)

    def _after_forward(self, block: nn.Module, _args: Any, output: Tensor) -> None:
        unit = next(block.parameters())._unit  # type: ignore[attr-defined]
        unit.free()
        if output.requires_grad:
            output.register_hook(unit.gather)
