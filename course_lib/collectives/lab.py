"""Time collectives on real ranks: each of several rivals, at each of several sizes.

Notebook 04_collectives.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise, product

import torch
from torch import Tensor

from course_lib.ranks import Ranks
from course_lib.ranks.progress import in_turns

Rivals = Mapping[str, Callable[[Tensor], object]]
WARM_UPS = 2


def race(
    ranks: Ranks, rivals: Rivals, sizes: Sequence[int], times: int = 3
) -> dict[str, list[list[float]]]:
    """Return the seconds of each rival and size on rank 0: a list of `times` repetitions each.

    Calls follow one another without a barrier; the first ones of each size warm up.
    """
    found: dict[str, list[list[float]]] = {name: [] for name in rivals}
    for name, num_bytes in in_turns(product(rivals, sizes), 1):
        found[name].append(ranks.run(seconds, rivals[name], num_bytes, times)[0])
    return found


def seconds(rank: int, call: Callable[[Tensor], object], num_bytes: int, times: int) -> list[float]:
    """Return the seconds of `times` calls on fp32 numbers of so many bytes, after the warm-up."""
    x, ends_s = torch.ones(num_bytes // 4), list[float]()
    for _ in range(times + WARM_UPS):
        call(x)
        ends_s.append(time.perf_counter())
    return [end_s - start_s for start_s, end_s in pairwise(ends_s)][WARM_UPS - 1 :]
