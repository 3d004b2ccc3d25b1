"""Exercise 5 of 09_zero: the right answer, and the wrong ones that its check must name."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def clip_shards(grads: list[Tensor], max_norm: float) -> Tensor:
    """Sum the squares of all shards of all ranks; one root, one factor: the right answer."""
    return _scaled(grads, max_norm, _global(_squares(grads)).sqrt())


def _squares(grads: Sequence[Tensor]) -> Tensor:
    return torch.stack([(grad**2).sum() for grad in grads]).sum()


def _global(number: Tensor, op: Any = dist.ReduceOp.SUM) -> Tensor:
    dist.all_reduce(number, op)
    return number


def _scaled(grads: Sequence[Tensor], max_norm: float, norm: Tensor) -> Tensor:
    for grad in grads:
        grad.mul_(min(1.0, max_norm / (norm.item() + 1e-6)))
    return norm


def _local(grads: list[Tensor], max_norm: float) -> Tensor:
    return _scaled(grads, max_norm, _squares(grads).sqrt())


def _local_factor(grads: list[Tensor], max_norm: float) -> Tensor:
    _scaled(grads, max_norm, own := _squares(grads).sqrt())
    return _global(own**2).sqrt()


def _norms_summed(grads: list[Tensor], max_norm: float) -> Tensor:
    return _scaled(grads, max_norm, _global(_squares(grads).sqrt()))


def _mean_of_squares(grads: list[Tensor], max_norm: float) -> Tensor:
    return _scaled(grads, max_norm, (_global(_squares(grads)) / dist.get_world_size()).sqrt())


def _mean_of_norms(grads: list[Tensor], max_norm: float) -> Tensor:
    norm = _global(_squares(grads).sqrt()) / dist.get_world_size()
    return _scaled(grads, max_norm, norm)


def _largest(grads: list[Tensor], max_norm: float) -> Tensor:
    return _scaled(grads, max_norm, _global(_squares(grads).sqrt(), dist.ReduceOp.MAX))


def _no_root(grads: list[Tensor], max_norm: float) -> Tensor:
    return _scaled(grads, max_norm, _global(_squares(grads)))


def _scaled_up(grads: list[Tensor], max_norm: float) -> Tensor:
    norm = _global(_squares(grads)).sqrt()
    for grad in grads:
        grad.mul_(max_norm / norm)
    return norm


def _not_in_place(grads: list[Tensor], max_norm: float) -> Tensor:
    return _scaled([grad.clone() for grad in grads], max_norm, _global(_squares(grads)).sqrt())


def _rebound(grads: list[Tensor], max_norm: float) -> Tensor:
    norm = _global(_squares(grads)).sqrt()
    grads[:] = [grad * min(1.0, max_norm / norm.item()) for grad in grads]
    return norm


def _by_square(grads: list[Tensor], max_norm: float) -> Tensor:
    return _scaled(grads, max_norm, _global(_squares(grads))).sqrt()


def _inverted(grads: list[Tensor], max_norm: float) -> Tensor:
    norm = _global(_squares(grads)).sqrt()
    for grad in grads:
        grad.mul_(max(1.0, (norm / max_norm).item()))
    return norm


def _after(grads: list[Tensor], max_norm: float) -> Tensor:
    return clip_shards(grads, max_norm).clamp(max=max_norm)


def _only_if_large(grads: list[Tensor], max_norm: float) -> Tensor:
    own = _squares(grads).sqrt()
    return clip_shards(grads, max_norm) if own > max_norm else own


def _gathers(grads: list[Tensor], max_norm: float) -> Tensor:
    flat = torch.cat([grad.flatten() for grad in grads])
    every = flat.new_empty(dist.get_world_size() * flat.numel())
    dist.all_gather_single(every, flat)
    return _scaled(grads, max_norm, every.norm())


def _call_a_shard(grads: list[Tensor], max_norm: float) -> Tensor:
    squares = [_global((grad**2).sum()) for grad in grads]
    return _scaled(grads, max_norm, torch.stack(squares).sum().sqrt())


def mistakes(mistake: Any) -> tuple[Any, ...]:
    """Return all wrong answers, with words of the sentence that names them."""
    return (
        mistake("local norm", _local, says="this rank's own norm"),
        mistake("local factor", _local_factor, says="Scaled by this rank's own norm"),
        mistake("norms summed", _norms_summed, says="Norms do not add up"),
        mistake("mean of squares", _mean_of_squares, says="A mean of the squares"),
        mistake("mean of norms", _mean_of_norms, says="a mean of norms"),
        mistake("the largest", _largest, says="the largest norm of a rank"),
        mistake("no root", _no_root, says="The root is missing"),
        mistake("scaled up", _scaled_up, says="A small gradient is scaled up"),
        mistake("not in place", _not_in_place, says="scale in place"),
        mistake("a new list", _rebound, says="scale in place"),
        mistake("divided by the square", _by_square, says="take the root first"),
        mistake("inverted", _inverted, says="The wrong way round"),
        mistake("norm after clipping", _after, says="return what it was before"),
        mistake("only if its own is large", _only_if_large, says="call all_reduce on every rank"),
        mistake("gathers everything", _gathers, says="The squares of the shards add up"),
        mistake("a call a shard", _call_a_shard, says="sum them first"),
    )
