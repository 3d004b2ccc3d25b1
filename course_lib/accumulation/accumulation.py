"""Gradient accumulation: backward on each micro-batch adds to the gradients, then one step.

Autograd sums the micro-batches' gradients, so each loss is weighted by its share of the whole
batch. Then the gradient is that of the full batch, and only one micro-batch's activations are in
memory. Notebook 02_accumulation.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from course_lib.core.errors import CourseError, ShapeError
from course_lib.models.data import IGNORED

Share = Callable[[Tensor, Tensor], float]


def split_micro_batches(batch: Any, num_micro_batches: int) -> list[Any]:
    """Split a batch into micro-batches along dim 0; the first ones get one item more if needed.

    A batch is a tensor, or nested tuples, lists and dicts of tensors; each micro-batch has the same
    structure. Values that are no tensors are passed on to every micro-batch.

    Shapes:  [batch, ...] -> num_micro_batches times [batch / num_micro_batches, ...] (views)
    Raises:  ShapeError unless all tensors have the same length, at least num_micro_batches
    """
    lengths = sorted({len(tensor) if tensor.dim() else 0 for tensor in _tensors(batch)})
    if len(lengths) != 1 or 0 in lengths:
        raise ShapeError(
            "split_micro_batches: need tensors of one length above 0 along dim 0; got "
            f"{' and '.join(map(str, lengths)) or 'no tensor'}. Try batch = (inputs, targets)."
        )
    most = lengths[0]
    if not 1 <= num_micro_batches <= most:
        raise ShapeError(
            f"split_micro_batches: need 1 to {most} micro-batches for {most} items; "
            f"got {num_micro_batches}. Try {min(max(1, num_micro_batches), most)}."
        )
    return [_part(batch, index, num_micro_batches) for index in range(num_micro_batches)]


def by_items(part: Tensor, whole: Tensor) -> float:
    """Return the share of a micro-batch if the loss is a mean over items: part / whole."""
    return len(part) / len(whole)


def by_tokens(part: Tensor, whole: Tensor) -> float:
    """Return the share if the loss is a mean over the targets that are not IGNORED (-100).

    Raises: CourseError if all targets of the batch are IGNORED
    """
    num_tokens = int((whole != IGNORED).sum())
    if num_tokens == 0:
        raise CourseError("by_tokens: need a target that is not IGNORED; got none in this batch.")
    return int((part != IGNORED).sum()) / num_tokens


def as_sum(part: Tensor, whole: Tensor) -> float:
    """Return the share if the loss is a sum: 1, as sums are added unweighted."""
    return 1.0


def accumulate_gradients(
    model: nn.Module,
    loss_fn: Callable[[Any, Tensor], Tensor],
    batch: tuple[Any, Tensor],
    num_micro_batches: int,
    *,
    share: Share = by_items,
) -> Tensor:
    """Add the gradient of a whole batch to every `param.grad`; return the batch's loss, detached.

    loss_fn   of (model(inputs), targets): a mean over what `share` counts
    share     weight of a micro-batch; one with share 0 (all targets IGNORED, its mean is 0 / 0) is
              skipped

    Only one micro-batch's activations are in memory at a time.

    Raises: CourseError unless batch is a pair (inputs, targets)
    """
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise CourseError(
            "accumulate_gradients: need batch = (inputs, targets); got "
            f"{type(batch).__name__}. Try batch = (tokens[:, :-1], tokens[:, 1:])."
        )
    targets = batch[1]
    total = torch.zeros((), device=targets.device)
    for part_inputs, part_targets in split_micro_batches(tuple(batch), num_micro_batches):
        part_share = share(part_targets, targets)
        if part_share == 0:
            continue
        loss = loss_fn(model(part_inputs), part_targets) * part_share
        loss.backward()  # adds to param.grad
        total = total + loss.detach()
    return total


def accumulated_step(
    model: nn.Module,
    loss_fn: Callable[[Any, Tensor], Tensor],
    optimizer: torch.optim.Optimizer,
    batch: tuple[Any, Tensor],
    num_micro_batches: int,
    *,
    share: Share = by_items,
    max_norm: float | None = None,
) -> Tensor:
    """Take one optimizer step on a whole batch, one micro-batch at a time; return the batch's loss.

    The parameters become those of a step on the full batch. Gradients are cleared before the step,
    not after it. With `max_norm` the accumulated gradient is clipped once. Layers that depend on
    the whole batch differ: batch norm sees one micro-batch at a time, and dropout draws its masks
    in another order.
    """
    optimizer.zero_grad()
    loss = accumulate_gradients(model, loss_fn, batch, num_micro_batches, share=share)
    if max_norm is not None:
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
    return loss


def count_micro_batches(global_batch: int, micro_batch: int, dp: int = 1) -> int:
    """Return the number of micro-batches per rank and step: global_batch / (micro_batch * dp).

    Raises: ShapeError unless that is a whole number above 0
    """
    if min(global_batch, micro_batch, dp) < 1 or global_batch % (micro_batch * dp):
        raise ShapeError(
            f"count_micro_batches: need global_batch divisible by micro_batch * dp; got "
            f"{global_batch} and {micro_batch} * {dp}. Try another micro_batch."
        )
    return global_batch // (micro_batch * dp)


def _tensors(batch: Any) -> Iterator[Tensor]:
    """Yield all tensors of a batch."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, tuple | list | Mapping):
        for part in batch.values() if isinstance(batch, Mapping) else batch:
            yield from _tensors(part)


def _part(batch: Any, index: int, count: int) -> Any:
    """Return micro-batch `index` of `count`, with the structure of the batch."""
    if isinstance(batch, Tensor):
        return batch.tensor_split(count)[index]
    if isinstance(batch, Mapping):
        return {name: _part(part, index, count) for name, part in batch.items()}
    if isinstance(batch, tuple | list):
        parts = [_part(part, index, count) for part in batch]
        named = hasattr(batch, "_fields")  # a named tuple takes its fields one by one
        return type(batch)(*parts) if named else type(batch)(parts)
    return batch
