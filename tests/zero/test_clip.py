"""Clipping of sharded gradients: the norm and the numbers of one process."""

import sys

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from course_lib.zero.clip import clip_shards

cloudpickle.register_pickle_by_value(sys.modules[__name__])

WHOLE = torch.tensor([3.0, -4.0, 12.0, 84.0, 5.0], dtype=torch.float64)


def clipped(rank, max_norm):
    """This rank's shard after clipping, and the norm; the last rank has none."""
    shards = [*WHOLE.clone().tensor_split(dist.get_world_size() - 1), None]
    mine = [shards[rank]] if shards[rank] is not None else []
    norm = clip_shards(mine, max_norm, None)
    return norm, mine


@pytest.mark.parametrize("max_norm", [0.5, 1000.0])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_shards_are_clipped_by_the_norm_of_all_of_them(pools, world_size, max_norm):
    by_rank = pools(world_size).run(clipped, max_norm)
    wanted = torch.nn.Parameter(WHOLE.clone())
    wanted.grad = WHOLE.clone()
    norm = torch.nn.utils.clip_grad_norm_([wanted], max_norm)
    torch.testing.assert_close([found for found, _ in by_rank], [norm] * world_size)
    torch.testing.assert_close(torch.cat([x for _, mine in by_rank for x in mine]), wanted.grad)


def test_what_holds_more_than_the_shards_is_scaled_in_their_place(pools):
    def whole(rank):
        grad = WHOLE.clone()
        half = grad.tensor_split(2)[rank]
        clip_shards([half], 0.5, None, scaled=[grad])
        return grad.norm().item()

    assert pools(2).run(whole) == [pytest.approx(0.5)] * 2
