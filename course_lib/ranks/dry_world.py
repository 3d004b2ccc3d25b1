"""A world with one rank: what it computes and sends is recorded, and nothing is sent.

PyTorch's fake process group stands in for all others, and every tensor is on the meta device, which
has shapes and no numbers. So the code of a rank among thousands runs here in seconds.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup

from course_lib.ranks.call_board import CallBoard, Post
from course_lib.ranks.process_group import TracedGroup
from course_lib.ranks.tracer import CallTracer
from course_lib.ranks.world import BACKEND, GroupBackend

SAME = {  # a method of `ProcessGroup`, and what a backend calls it
    "all_gather_single": "_allgather_base",
    "reduce_scatter_single": "_reduce_scatter_base",
    "all_to_all_single": "alltoall_base",
}


class NoBoard(CallBoard):
    """The call board of a rank without others: no call is there to compare with."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size

    def post(self, *_: object) -> None:
        """Write nothing, as there is nobody to read it."""

    mark = drop = block = post  # type: ignore[assignment]

    def agrees(self, rank: int, post: Post) -> bool:
        """Return True: no rank has announced another call."""
        return True

    def matching(self, post: Post) -> Iterator[tuple[int, Post]]:
        """Yield nothing."""
        return iter(())


class DryGroup(TracedGroup):
    """Process group that records the calls of its one rank; the fake backend does nothing else."""

    is_dry = True

    def __init__(self, tracer: CallTracer, options: Any) -> None:
        rank, size = options.group_rank, options.group_size
        fake = FakeProcessGroup._create_internal(rank, size)
        members = tuple(options.global_ranks_in_group) or tuple(range(size))
        super().__init__(_Renamed(fake), tracer, members, options.group_id)
        self._set_default_backend(GroupBackend.CUSTOM)
        self._register_backend(torch.device("cpu"), GroupBackend.CUSTOM, fake)


class _Renamed:
    """The fake backend, with the names that a process group's methods have."""

    def __init__(self, fake: FakeProcessGroup) -> None:
        self._fake = fake

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fake, SAME.get(name, name))


@contextmanager
def dry_world(rank: int, world_size: int) -> Iterator[None]:
    """Make this process one rank of so many, without the others, until the end of the block."""
    tracer = CallTracer(rank, NoBoard(world_size))
    dist.Backend.register_backend(
        BACKEND, lambda options, _: DryGroup(tracer, options), extended_api=True, devices=["cpu"]
    )
    store = dist.HashStore()
    dist.init_process_group(BACKEND, store=store, rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
