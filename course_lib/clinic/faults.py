"""Functions of the training path as someone wrote them: each with one fault, none with a remark.

They take what the right ones take. `cases.py` says which they replace. Notebook 17_clinic.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib.mesh.clip import counted_here as counted_once_here
from course_lib.mesh.clip import held_grads
from course_lib.models import next_tokens
from course_lib.models.data import IGNORED, mixed_seed
from course_lib.tensor_parallel.finish_watch import finishing
from course_lib.tensor_parallel.layers import split_columns
from course_lib.tensor_parallel.state import partial_params
from course_lib.train.progress import Progress
from course_lib.zero.clip import clip_shards


def share(part: Tensor, whole: Tensor) -> float:
    """Return the weight of a micro-batch's mean loss."""
    return len(part) / len(whole)


def part(self: Any, whole: Tensor) -> Tensor:
    """Return this rank's part of a batch."""
    return whole.tensor_split(self.size("dp"))[0]


def shuffled_part(self: Any, whole: Tensor) -> Tensor:
    """Return this rank's part of a batch, in a shuffled order."""
    generator = torch.Generator().manual_seed(self.rank)
    order = torch.randperm(len(whole), generator=generator)
    return whole[order].tensor_split(self.size("dp"))[self.index("dp")]


def one_by_one(
    wrapped: Any, loss_fn: Any, masked: bool, micro_batches: Any, shares: Sequence[float]
) -> Tensor:
    """Compute the gradients of all micro-batches; return the loss and two zeros."""
    total = torch.zeros(3, dtype=torch.float64)
    for index, ((inputs, targets), share) in enumerate(zip(micro_batches, shares, strict=True)):
        with nullcontext() if index % len(shares) == 0 else wrapped.no_sync():
            loss = loss_fn(wrapped.model(inputs), targets) * share
            wrapped.backward(loss)
        total[0] += loss.detach()
    return total


def row_parallel(self: Any, x: Tensor) -> Tensor:
    """Return the sum over the ranks of a layer whose input is split."""
    x = x if self.input_is_split else split_columns(x, self.group)
    x, weight = (self.without_padding(one, -1) for one in (x, self.weight))
    return self.leave(nn.functional.linear(x, weight, self.bias))


def finish_gradients(model: nn.Module, held: Any = None) -> None:
    """Complete the gradients of which each rank of a tp group has a part."""
    wanted = partial_params(model)
    grads = [one.grad for one in held if one.param in wanted]
    with finishing(wanted):
        flat = torch.cat([grad.reshape(-1) for grad in grads])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        for grad, mean in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
            grad.copy_(mean.view_as(grad))


def counted_here(module: nn.Module, mesh: Any) -> set[nn.Parameter]:
    """Return the parameters whose squares this rank adds to the norm."""
    return set(module.parameters())


@contextmanager
def tied_summed(stage: Any, member: Any) -> Iterator[None]:
    """Complete the gradients of tied parameters after this context."""
    yield


def finish_over_axes(module: nn.Module, mesh: Any, held: Any, *, sums_tied: bool) -> None:
    """Complete the gradients along the axes besides dp."""
    if mesh.size("tp") > 1:
        finish_gradients(module, held)


def clip(
    module: nn.Module, mesh: Any, max_norm: float, held: Any = None, *, scaled: Any = None
) -> Tensor:
    """Scale this rank's gradients so that their norm is at most max_norm; return it before."""
    grads = held_grads(module) if held is None else held
    counted = counted_once_here(module, mesh)
    return clip_shards(
        [one.grad for one in grads if one.param in counted],
        max_norm,
        [mesh.group(axis) for axis in ("tp", "pp") if mesh.size(axis) > 1],
        scaled=[one.grad for one in grads] if scaled is None else scaled,
    )


def draws(self: Any) -> int:
    """Return which of the random streams this rank draws its dropout masks from."""
    return self.rank


def load(self: Any, state: dict[str, Any]) -> Progress:
    """Load the latest checkpoint, if there is one; return its progress."""
    if not self._has_one():
        return Progress()
    loaded = self._load({"model": state["model"]}, self.folder)
    return Progress(**loaded.values["progress"])


def lr_at(self: Any, step: int) -> float:
    """Return the learning rate of a step."""
    step *= dist.get_world_size()
    if step < self.warmup:
        return self.lr * (step + 1) / self.warmup
    done = (step - self.warmup) / max(self.steps - self.warmup, 1)
    return self.lr * (1 + torch.cos(torch.tensor(torch.pi * min(done, 1)))).item() / 2


def positions_of(self: Any, length: int) -> list[int]:
    """Return the positions of this rank's tokens."""
    return list(range(length))


def scale_grad(x: Tensor, factor: float) -> Tensor:
    """Return a tensor on its way into, or out of, the experts of this rank."""
    return x


def padded_batch(
    self: Any, n: int, *, batch: int, seq: int, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Return inputs and targets of documents of unequal lengths: the rest is padding."""
    tokens = self.source.batch(n, batch=batch, seq=seq, seed=seed)
    inputs, targets = next_tokens(tokens)
    random = torch.Generator().manual_seed(mixed_seed(seed + 2, n))
    lengths = torch.randint(4, seq + 1, (batch, 1), generator=random)
    return inputs, targets.masked_fill(torch.arange(seq) >= lengths, IGNORED)
