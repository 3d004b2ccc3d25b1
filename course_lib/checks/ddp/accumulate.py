"""Exercise 4 of 06_ddp: micro-batches with one synchronization."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from course_lib.checks.ddp.accumulate_steps import (
    AGAIN,
    BUCKET_BYTES,
    INFINITE,
    ITEMS,
    SIZES,
    accumulate_on_rank,
    runs_of,
)
from course_lib.checks.ddp.parts import ROUNDING, Bag, digits, one_a_bucket
from course_lib.checks.edits import Edit, Own
from course_lib.checks.exercise import Cause, Exercise
from course_lib.checks.expectations import Demand, Numbers
from course_lib.checks.on_ranks import At, OnRanks
from course_lib.ddp.ddp import DDP

Loss = Callable[[Tensor, Tensor], Tensor]
MicroBatches = Sequence[tuple[Tensor, Tensor]]

ONCE = Cause(
    "Only the last backward may send: put all the others inside `with model.no_sync():`, and call "
    "finish() once, after the last one."
)
LOST = Cause(
    "The ranks were never brought together: the last backward belongs outside of no_sync(), and "
    "model.finish() after it."
)
ALIVE = Cause(
    "No memory is saved (lesson 02): forward and backward for one micro-batch, then for the next."
)
CLEARED = Cause("Only one micro-batch is in it: who cleared the others?")
SOME_OWN = Cause(
    "Are some micro-batches this rank's own only? Only the last backward may send: it sends what "
    "all of them have added to param.grad."
)
EACH_ONCE = Cause("All ranks are in it: is each micro-batch in it once, divided by their number?")
WEIGHTED = Cause(
    "Micro-batches are weighted by their numbers of items: give all of them equal weights."
)
UNFROZEN = Cause("The caller froze it: leave requires_grad as it is.")
FROZEN = Cause("A frozen parameter gets no gradient: its grad stays None.")
BATCH = Cause(
    "The batch is the caller's: index the list rather than pop from it, and ask no x for its "
    "gradient."
)
RANDOM = Cause("Dropout draws from the random state, with other numbers each time: do not seed it.")
HOOKED = Cause(
    "What you register on a model or a parameter acts in all later steps, too: divide the loss, "
    "that needs no hook."
)
LEFT_BEHIND = Cause(
    "The first call was right, this one is not: keep nothing from one call to the next, on the "
    "model or elsewhere."
)
HIDDEN = Cause("inf and nan have to show: they tell that a step went wrong. Leave them.")
BYPASSED = Cause(
    "Call model(x): model.module(x) goes past DDP, which sends the buffers before a forward."
)
ONE_FORWARD = Cause(
    "One forward for each micro-batch: every other one takes time, and counts in the statistics of "
    "BatchNorm."
)
FORWARD_OUTSIDE = Cause(
    "The forward belongs into no_sync(), too: outside of it, ours sends the buffers, and PyTorch's "
    "the gradients."
)
LAST_INSIDE = Cause(
    "The last forward belongs outside of no_sync(), like its backward: it notes that buffers have "
    "to be sent in the next step."
)
MODE = Cause(
    "train() and eval() switch dropout and BatchNorm, in every part; the caller may keep a part in "
    "eval mode. Call neither."
)
STAYS_ON = Cause("Use no_sync() in a `with` block: it ends with the block.")
SUMMED = Cause("Summed over the micro-batches, not averaged: divide each loss.")
BY_RANKS = Cause("Divided by the number of ranks once more: finish() has done that.")
TWICE = Cause("Divide by len(micro_batches), and only once.")
NO_OVERLAP = Cause("No overlap: call the last backward outside of no_sync().")


def _times(factor: Callable[[At], float]) -> Callable[[At], list[Tensor]]:
    module = Bag(SIZES)
    return lambda at: [module.slope(i) * factor(at) for i in module.trained]


def _total(at: At) -> float:
    """Return the mean over the ranks of the sum over the micro-batches."""
    if at.label == INFINITE:
        return float("inf")
    return digits(at.world_size) / at.world_size * sum(range(1, at.seen.count + 1))


def _mean(at: At) -> float:
    return _total(at) / at.seen.count


def _weighted(at: At) -> float:
    """Return the mean over all items."""
    items = ITEMS[: at.seen.count]
    total = sum(n * (k + 1) for k, n in enumerate(items)) / sum(items)
    return digits(at.world_size) / at.world_size * total


def _is_finite(grad: Tensor | None) -> bool:
    return grad is not None and bool(grad.isfinite().any())


def _own(at: At) -> float:
    return 10.0**at.rank * sum(range(1, at.seen.count + 1)) / at.seen.count


def _one_only(at: At, got: Tensor, item: int) -> bool:
    """Return whether the gradient is that of one micro-batch alone: the k-th gives k."""
    one = _times(lambda at: digits(at.world_size) / at.world_size / at.seen.count)(at)[item]
    k = (got / one).flatten()[0]
    return bool(1 <= k <= at.seen.count) and torch.allclose(got, one * k.round(), rtol=ROUNDING)


def _all_ranks_are_in_it(at: At, got: Tensor, item: int) -> bool:
    if not at.seen.calls:
        return False
    times = (got / _times(_mean)(at)[item]).flatten()[0] * sum(range(1, at.seen.count + 1))
    return bool(abs(times - times.round()) < 1e-9)


def _first_one_synced(model: DDP, loss_fn: Loss, micro_batches: MicroBatches) -> None:
    for number, (x, y) in enumerate(micro_batches):
        loss = loss_fn(model(x), y) / len(micro_batches)
        if number == 0:
            loss.backward()
            model.finish()
        else:
            with model.no_sync():
                loss.backward()


def _one_backward(model: DDP, loss_fn: Loss, micro_batches: MicroBatches) -> None:
    losses = [loss_fn(model(x), y) / len(micro_batches) for x, y in micro_batches]
    torch.stack(losses).sum().backward()
    model.finish()


def _forwards_outside(model: DDP, loss_fn: Loss, micro_batches: MicroBatches) -> None:
    for left, (x, y) in zip(reversed(range(len(micro_batches))), micro_batches, strict=True):
        loss = loss_fn(model(x), y) / len(micro_batches)
        with model.no_sync() if left else nullcontext():
            loss.backward()
    model.finish()


def _by_items(model: DDP, loss_fn: Loss, micro_batches: MicroBatches) -> None:
    items = sum(len(x) for x, _ in micro_batches)
    for left, (x, y) in zip(reversed(range(len(micro_batches))), micro_batches, strict=True):
        with model.no_sync() if left else nullcontext():
            (loss_fn(model(x), y) * len(x) / items).backward()
    model.finish()


EARLY, LAST = "in early:\n            (loss_fn(model(x), y)", "= last\n    (loss_fn(model(x), y)"
BY = " / len(micro_batches)"
INSIDE = (LAST, "= last\n    with model.no_sync():\n        (loss_fn(model(x), y)")


def _scaled(by: str, cause: Cause) -> Edit:
    """Return the right answer with every loss scaled once more."""
    return Edit(EARLY, f"{EARLY} {by}", cause, also=((LAST, f"{LAST} {by}"),))


def _at_the_end(does: str, cause: Cause) -> Edit:
    """Return the right answer with something done to every parameter at the end."""
    each = f"for param in model.parameters():\n    {does}"
    return Edit("model.finish()", f"model.finish()\n{each}", cause)


ACCUMULATE = Exercise(
    key="ddp-4",
    title="accumulate, then synchronize once",
    check=OnRanks(
        observe_on_rank=accumulate_on_rank,
        runs=runs_of,
        trouble=(("hang", "", LOST), ("raised", "requires_grad_", UNFROZEN)),
        expect=(
            Demand(
                lambda at: at.label != INFINITE or not any(map(_is_finite, at.seen.grads)),
                "the gradients are finite",
                HIDDEN,
            ),
            Demand(
                lambda at: not at.seen.other_modes,
                "a forward in another mode than the caller's",
                MODE,
            ),
            Demand(
                lambda at: not at.seen.bypassed,
                lambda at: f"{at.seen.bypassed} forwards past DDP",
                BYPASSED,
            ),
            Demand(lambda at: not at.seen.unfrozen, "parameter 1 is no longer frozen", UNFROZEN),
            Demand(
                lambda at: not at.seen.frozen_grad,
                "parameter 1 is frozen, and has a gradient",
                FROZEN,
            ),
            Demand(
                lambda at: not at.seen.changed,
                lambda at: at.seen.changed[0],
                BATCH,
            ),
            Demand(
                lambda at: not at.seen.random_changed,
                "the global random state has changed",
                RANDOM,
            ),
            Demand(
                lambda at: at.seen.most_alive <= 1,
                lambda at: f"the graphs of {at.seen.most_alive} micro-batches are alive at once",
                ALIVE,
            ),
            Demand(
                lambda at: len(at.seen.calls) <= len(BUCKET_BYTES),
                lambda at: (
                    f"{len(at.seen.calls)} all_reduces of "
                    f"{sum(call.num_bytes for call in at.seen.calls)} bytes; need "
                    f"{len(BUCKET_BYTES)} of {sum(BUCKET_BYTES)} bytes"
                ),
                ONCE,
            ),
            Demand(
                lambda at: not at.seen.unfinished,
                lambda at: f"{at.seen.unfinished} buckets are sent, and nobody waits for them",
                LOST,
            ),
            Numbers(
                "grads",
                _times(_mean),
                rtol=ROUNDING,
                what="the mean gradient",
                names=lambda _at: [f"parameter {i}" for i in Bag(SIZES).trained],
                predicates=((lambda at, _got, _i: at.label == AGAIN, LEFT_BEHIND),),
                causes=(
                    (SUMMED, _times(_total)),
                    (WEIGHTED, _times(_weighted)),
                    (BY_RANKS, _times(lambda at: _mean(at) / at.world_size)),
                    (TWICE, _times(lambda at: _mean(at) / at.seen.count)),
                    (LOST, _times(_own)),
                ),
                otherwise=(
                    (_one_only, CLEARED),
                    (_all_ranks_are_in_it, EACH_ONCE),
                    (lambda at, _got, _i: bool(at.seen.calls), SOME_OWN),
                ),
                look=LOST,
            ),
            Demand(
                lambda at: len(at.seen.forwards) == at.seen.count,
                lambda at: f"{len(at.seen.forwards)} forwards for {at.seen.count} micro-batches",
                ONE_FORWARD,
            ),
            one_a_bucket(lambda _at: BUCKET_BYTES),
            Demand(
                lambda at: at.seen.calls[0].start_s < at.seen.backward_end_s,
                "the numbers are right, but nothing was sent before the last backward ended",
                NO_OVERLAP,
            ),
            Demand(
                lambda at: at.seen.forwards.count(False) >= at.seen.backwards.count(False),
                "the numbers are right, but forwards were outside of no_sync()",
                FORWARD_OUTSIDE,
            ),
            Demand(
                lambda at: at.seen.forwards[-1],
                "the numbers are right, but the last forward was inside no_sync()",
                LAST_INSIDE,
            ),
            Demand(lambda at: at.seen.modes_after, "a part is left in another mode", MODE),
            Demand(
                lambda at: not at.seen.hooks,
                lambda at: (
                    f"the numbers are right, but {at.seen.hooks} more "
                    f"hook{'s stay' if at.seen.hooks > 1 else ' stays'} on the model"
                ),
                HOOKED,
            ),
            Demand(lambda at: at.seen.syncs_after, "no_sync() is still on afterwards", STAYS_ON),
        ),
        success=(
            "The mean over ranks and micro-batches, each bucket sent once, in the last backward."
        ),
    ),
    wrong=(
        Edit(
            "with model.no_sync():",
            "if True:",
            ONCE,
            also=((").backward()\n    x", ").backward()\n            model.finish()\n    x"),),
        ),
        Edit(*INSIDE, LOST, also=(("model.finish()", "pass"),)),
        Edit("model.finish()", "pass", LOST),
        Edit(*INSIDE, NO_OVERLAP),
        Own(_first_one_synced, SOME_OWN),
        Own(_one_backward, ALIVE),
        Edit("x, y = last", "model.zero_grad()\nx, y = last", CLEARED),
        Edit(LAST + " / len(micro_batches)", LAST, EACH_ONCE),
        Edit("in early:", "in [*early, early[0]] if early else []:", EACH_ONCE),
        Own(_forwards_outside, FORWARD_OUTSIDE),
        Own(_by_items, WEIGHTED),
        Edit(
            LAST + " / len(micro_batches)).backward()",
            "= last\n    with model.no_sync():\n        loss = loss_fn(model(x), y)\n"
            "    (loss / len(micro_batches)).backward()",
            LAST_INSIDE,
        ),
        Edit(LAST, LAST.replace("model", "model.module"), BYPASSED),
        Edit(
            "*early, last",
            "graphs = []\n*early, last",
            ALIVE,
            also=(
                (
                    EARLY + " / len(micro_batches)).backward()",
                    EARLY.replace("(loss", "graphs.append(loss")
                    + " / len(micro_batches))\n            graphs[-1].backward(retain_graph=True)",
                ),
            ),
        ),
        Edit(
            "*early, last",
            "outputs = []\n*early, last",
            ALIVE,
            also=(
                (
                    EARLY,
                    "in early:\n            outputs.append(model(x))\n"
                    "            (loss_fn(outputs[-1], y)",
                ),
            ),
        ),
        Edit("x, y = last", "x, y = last\nmodel(x)", ONE_FORWARD),
        Edit(
            "*early, last",
            "with torch.no_grad():\n    for x, _ in micro_batches:\n        model(x)\n*early, last",
            ONE_FORWARD,
        ),
        Edit("*early, last", "model.eval()\n*early, last", MODE),
        Edit("model.finish()", "model.finish()\nmodel.eval()", MODE),
        Edit(
            "model.finish()",
            "model.finish()\nmodel.on = model.no_sync()\nmodel.on.__enter__()",
            STAYS_ON,
        ),
        Edit("*early, last", "model.train()\n*early, last", MODE),
        Edit("model.finish()", "model.finish()\nmodel.train(False).train()", MODE),
        Edit("*early, last", "model.requires_grad_()\n*early, last", UNFROZEN),
        _at_the_end(
            "param.grad = torch.zeros_like(param) if param.grad is None else param.grad", FROZEN
        ),
        _at_the_end(
            "param.grad = None if param.grad is None else param.grad.nan_to_num_()", HIDDEN
        ),
        Edit(
            "*early, last = micro_batches",
            "last = micro_batches.pop()\nearly, m = micro_batches, len(micro_batches) + 1",
            BATCH,
            also=((f"{EARLY}{BY}", f"{EARLY} / m"), (f"{LAST}{BY}", f"{LAST} / m")),
        ),
        Edit(EARLY, EARLY.replace("model(x)", "model(x.requires_grad_())"), BATCH),
        Edit("*early, last", "torch.manual_seed(0)\n*early, last", RANDOM),
        Edit(
            "*early, last",
            "for param in model.buckets[0].params:\n"
            "    param.register_hook(lambda grad: grad / 1)\n"
            "*early, last",
            HOOKED,
        ),
        Edit(
            "*early, last",
            "model.register_forward_hook(lambda *_: None)\n*early, last",
            HOOKED,
        ),
        Edit(
            "*early, last",
            'model.m = getattr(model, "m", len(micro_batches))\n*early, last',
            LEFT_BEHIND,
            also=((f"{EARLY}{BY}", f"{EARLY} / model.m"), (f"{LAST}{BY}", f"{LAST} / model.m")),
        ),
        _scaled("* len(micro_batches)", SUMMED),
        _scaled("/ len(micro_batches)", TWICE),
        Edit(EARLY + BY, f"{EARLY} / 4", TWICE, also=((LAST + BY, f"{LAST} / 4"),)),
        _scaled("/ dist.get_world_size()", BY_RANKS),
    ),
)
