"""Helpers of tests of pools: a job that works, one that has to fail, a process that has ended."""

import psutil
import pytest
import torch
import torch.distributed as dist

from course_lib.ranks import RankError


def sum_of_powers(rank):
    tensor = torch.tensor([10.0**rank])
    dist.all_reduce(tensor)
    return tensor.item()


def fails(ranks, fn, *args) -> RankError:
    """Run a function that has to fail; prove that the ranks still work afterwards."""
    with pytest.raises(RankError) as caught:
        ranks.run(fn, *args)
    assert ranks.run(sum_of_powers) == [float("1" * ranks.world_size)] * ranks.world_size
    return caught.value


def is_running(pid):
    """Is there such a process, and has it not ended already (and waits to be counted out)?"""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
