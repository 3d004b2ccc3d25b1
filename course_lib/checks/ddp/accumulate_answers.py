"""Exercise 4 of 06_ddp: the right answer, and the wrong ones that its check must name."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from course_lib.ddp.ddp import DDP

Loss = Callable[[Tensor, Tensor], Tensor]
_MicroBatches = Sequence[tuple[Tensor, Tensor]]


def accumulate(model: DDP, loss_fn: Loss, micro_batches: _MicroBatches) -> None:
    """Accumulate all micro-batches but the last inside no_sync: the right answer."""
    *early, last = micro_batches
    with model.no_sync():
        for x, y in early:
            (loss_fn(model(x), y) / len(micro_batches)).backward()
    x, y = last
    (loss_fn(model(x), y) / len(micro_batches)).backward()
    model.finish()


def parts(model: DDP, loss_fn: Loss, micro_batches: _MicroBatches) -> Iterator[Tensor]:
    for x, y in micro_batches:
        yield loss_fn(model(x), y) / len(micro_batches)


def every_time(model: DDP, loss_fn: Loss, micro_batches: _MicroBatches) -> None:
    for loss in parts(model, loss_fn, micro_batches):
        loss.backward()
        model.finish()


def last_sync_lost(model: DDP, loss_fn: Loss, micro_batches: _MicroBatches) -> None:
    with model.no_sync():
        for loss in parts(model, loss_fn, micro_batches):
            loss.backward()


def no_finish(model: DDP, loss_fn: Loss, micro_batches: _MicroBatches) -> None:
    *early, last = micro_batches
    with model.no_sync():
        for loss in parts(model, loss_fn, early):
            (loss * len(early) / len(micro_batches)).backward()
    (loss_fn(model(last[0]), last[1]) / len(micro_batches)).backward()


def all_inside(model: DDP, loss_fn: Loss, micro_batches: _MicroBatches) -> None:
    last_sync_lost(model, loss_fn, micro_batches)
    model.finish()


def first_one_synced(model: DDP, loss_fn: Loss, micro_batches: _MicroBatches) -> None:
    for number, (x, y) in enumerate(micro_batches):
        loss = loss_fn(model(x), y) / len(micro_batches)
        if number == 0:
            loss.backward()
            model.finish()
        else:
            with model.no_sync():
                loss.backward()


def last_not_divided(model: DDP, loss_fn: Loss, micro_batches: _MicroBatches) -> None:
    *early, last = micro_batches
    with model.no_sync():
        for x, y in early:
            (loss_fn(model(x), y) / len(micro_batches)).backward()
    loss_fn(model(last[0]), last[1]).backward()
    model.finish()


def one_backward(model: DDP, loss_fn: Loss, micro_batches: _MicroBatches) -> None:
    torch.stack(list(parts(model, loss_fn, micro_batches))).sum().backward()
    model.finish()


def cleared(model: DDP, loss_fn: Loss, micro_batches: _MicroBatches) -> None:
    model.zero_grad()
    accumulate(model, lambda *args: loss_fn(*args) / len(micro_batches), micro_batches[-1:])


def times(factor: Callable[[int], float]) -> Callable[..., None]:
    """Return the right answer, its loss scaled by a function of the number of micro-batches."""

    def scaled(model: DDP, loss_fn: Loss, micro_batches: _MicroBatches) -> None:
        by = factor(len(micro_batches))
        accumulate(model, lambda output, y: loss_fn(output, y) * by, micro_batches)

    return scaled
