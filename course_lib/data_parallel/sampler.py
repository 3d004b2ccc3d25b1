"""Split a data set over ranks: the indices that each rank reads in an epoch.

Notebook 05_data_parallel.
"""

from collections.abc import Iterator

import torch
from torch.utils.data import Sampler

from course_lib.core.errors import MeshError


class RankSampler(Sampler[int]):
    """Sampler of one rank: every world_size-th index of a permutation that all ranks share.

    The permutation is drawn from seed + epoch, so call `set_epoch(n)` before each epoch. Every rank
    gets equally many indices: the first ones are repeated to fill up, or with `drop_last` the last
    ones are left out.

    Raises: MeshError for a rank outside of 0 .. world_size - 1
    Source: PyTorch, torch/utils/data/distributed.py, DistributedSampler (the same indices)
    """

    def __init__(
        self,
        dataset_length: int,
        rank: int,
        world_size: int,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        if not 0 <= rank < world_size:
            raise MeshError(
                f"RankSampler: need a rank from 0 to {world_size - 1}; got {rank}. "
                "Try dist.get_rank() and dist.get_world_size()."
            )
        self.dataset_length, self.rank, self.world_size = dataset_length, rank, world_size
        self.shuffle, self.seed, self.epoch = shuffle, seed, 0
        full, rest = divmod(dataset_length, world_size)
        self._length = full + int(rest > 0 and not drop_last)

    def set_epoch(self, epoch: int) -> None:
        """Draw another permutation; pass the same number on every rank."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        n = self.dataset_length
        random = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(n, generator=random).tolist() if self.shuffle else range(n)
        positions = range(self.rank, self._length * self.world_size, self.world_size)
        return iter([order[position % n] for position in positions])

    def __len__(self) -> int:
        return self._length
