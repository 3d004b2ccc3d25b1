"""Exercise 4 of 06_ddp: micro-batches with one synchronization."""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from course_lib.checks.ddp.parts import Bag, grads_of
from course_lib.checks.edits import Edit, Own
from course_lib.checks.exercise import Cause, Exercise
from course_lib.checks.judge import ByExample
from course_lib.checks.properties import CALLERS, TRAINS
from course_lib.checks.watch import ALWAYS, ORDER, UNWAITED, Watch
from course_lib.ddp.ddp import DDP

Loss = Callable[[Tensor, Tensor], Tensor]
MicroBatches = Sequence[tuple[Tensor, Tensor]]

ITEMS = (2, 1, 3, 1)  # of each micro-batch
FINE = 1 + 2**-30  # what float32 loses

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
EACH_ONCE = Cause("All ranks are in it: is each micro-batch in it once, divided by their number?")
WEIGHTED = Cause(
    "Micro-batches are weighted by their numbers of items: give all of them equal weights."
)
LEFT_BEHIND = Cause(
    "The first call was right, this one is not: keep nothing from one call to the next, on the "
    "model or elsewhere."
)
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
MODE = Cause("train() and eval() switch dropout and BatchNorm, in every part: call neither.")
STAYS_ON = Cause("Use no_sync() in a `with` block: it ends with the block.")
SUMMED = Cause("Summed over the micro-batches, not averaged: divide each loss.")
BY_RANKS = Cause("Divided by the number of ranks once more: finish() has done that.")
TWICE = Cause("Divide by len(micro_batches), and only once.")
NO_OVERLAP = Cause("No overlap: call the last backward outside of no_sync().")


def accumulate_on_rank(rank: int, answer: Callable[..., Any], again: bool) -> dict[str, Any]:
    """Accumulate other numbers of micro-batches, `again` with the same model, at last with inf."""
    watch, model = Watch(), _model()
    for number, count in enumerate((2, 3, 2) if again else (4, 2, 1, 3)):
        model = model if again else _model()
        model.zero_grad()
        ones = [torch.ones(ITEMS[k]).double() for k in range(count)]
        batch = [(one * FINE * 10.0**rank, one * (k + 1)) for k, one in enumerate(ones)]
        if again and number == 2 and rank == 0:
            batch[0][0].fill_(torch.inf)
        label = f"{count} micro-batch{'es' if count > 1 else ''}"
        label += f", call {number + 1} with this model" if again else ""
        with _marked(model, watch), watch.step(label, model=model, micro_batches=batch) as step:
            answer(model, lambda output, y: (output * y).mean(), batch)
        step.show(gradients=grads_of(model.module), synchronizes=f"{model._syncs} at the end")
    return watch.seen


def _model() -> Any:
    """Return a model in train mode, of which one part is in eval mode."""
    module = Bag((4, 2, 2, 1, 4))
    module.weights.eval()
    return DDP(module, bucket_bytes=40)


class _Saved:
    """Tensor that a graph saves for backward: as long as it is there, so is the graph."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


@contextmanager
def _marked(model: Any, watch: Watch) -> Iterator[None]:
    """Mark each forward and the end of each backward, and what is wrong with it."""
    graphs, outputs = list[tuple[int, Any]](), list[Any]()
    modes = [part.training for part in model.modules()]
    inside = [False]  # of DDP's forward

    def save(tensor: Tensor) -> _Saved:
        kept = _Saved(tensor)
        graphs.append((len(outputs), weakref.ref(kept)))
        return kept

    def begin(_module: Any, _inputs: Any) -> None:
        others = len({number for number, kept in graphs if kept() is not None})
        others = max(others, sum(output() is not None for output in outputs) - 1)
        watch.mark(
            f"forward{'' if model._syncs else ' in no_sync'}"
            f"{'' if inside[0] else ' past DDP'}"
            f"{'' if [part.training for part in model.modules()] == modes else ' in another mode'}"
            f"{f' with {others} more graphs or outputs alive' if others > 0 else ''}"
        )

    hooks = [
        model.register_forward_pre_hook(lambda *_: inside.__setitem__(0, True)),
        model.register_forward_hook(lambda *_: inside.__setitem__(0, False)),
        model.module.register_forward_pre_hook(begin),
        model.module.register_forward_hook(lambda *given: outputs.append(weakref.ref(given[2]))),
        model.module.weights[0].register_post_accumulate_grad_hook(
            lambda _: watch.mark(f"backward{'' if model._syncs else ' in no_sync'} ends")
        ),
    ]
    with torch.autograd.graph.saved_tensors_hooks(save, lambda kept: kept.tensor):
        yield
    for hook in hooks:
        hook.remove()


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


EARLY, LAST = "in early:\n            (loss_fn(model(x), y)", "= last\n    (loss_fn(model(x), y)"
BY = " / len(micro_batches)"
INSIDE = (LAST, "= last\n    with model.no_sync():\n        (loss_fn(model(x), y)")


def _scaled(by: str, cause: Cause) -> Edit:
    """Return the right answer with every loss scaled once more."""
    return Edit(EARLY, f"{EARLY} {by}", cause, also=((LAST, f"{LAST} {by}"),))


ACCUMULATE = Exercise(
    key="ddp-4",
    title="accumulate, then synchronize once",
    check=ByExample(
        observe_on_rank=accumulate_on_rank,
        runs=lambda _p: ({"again": False}, {"again": True}),
        facets=(UNWAITED, ORDER, *ALWAYS, "gradients", "synchronizes"),
        looks=((UNWAITED, LOST),),
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
        Own(_one_backward, ALIVE),
        Edit("x, y = last", "model.zero_grad()\nx, y = last", CLEARED),
        Edit(LAST + BY, LAST, EACH_ONCE),
        Own(_forwards_outside, FORWARD_OUTSIDE),
        _scaled("* len(x) * len(micro_batches) / sum(len(b) for b, _ in micro_batches)", WEIGHTED),
        Edit(
            LAST + " / len(micro_batches)).backward()",
            "= last\n    with model.no_sync():\n        loss = loss_fn(model(x), y)\n"
            "    (loss / len(micro_batches)).backward()",
            LAST_INSIDE,
        ),
        Edit(LAST, LAST.replace("model", "model.module"), BYPASSED),
        Edit("x, y = last", "x, y = last\nmodel(x)", ONE_FORWARD),
        Edit(
            "*early, last",
            "with torch.no_grad():\n    for x, _ in micro_batches:\n        model(x)\n*early, last",
            ONE_FORWARD,
        ),
        Edit("in early:", "in [*early, early[0]] if early else []:", EACH_ONCE),
        Edit(f"{EARLY}{BY}", f"{EARLY} / 4", TWICE, also=((f"{LAST}{BY}", f"{LAST} / 4"),)),
        Edit("*early, last", "model.requires_grad_()\n*early, last", CALLERS),
        Edit(
            "*early, last",
            "graphs = []\n*early, last",
            ALIVE,
            also=(
                (
                    f"{EARLY}{BY}).backward()",
                    f"{EARLY.replace('(loss', 'graphs.append(loss')}{BY})\n"
                    "            graphs[-1].backward(retain_graph=True)",
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
        Edit("*early, last", "model.eval()\n*early, last", MODE),
        Edit(
            "model.finish()",
            "model.finish()\nmodel.on = model.no_sync()\nmodel.on.__enter__()",
            STAYS_ON,
        ),
        Edit(
            "*early, last",
            'model.m = getattr(model, "m", len(micro_batches))\n*early, last',
            LEFT_BEHIND,
            also=((f"{EARLY}{BY}", f"{EARLY} / model.m"), (f"{LAST}{BY}", f"{LAST} / model.m")),
        ),
        _scaled("* len(micro_batches)", SUMMED),
        _scaled("/ len(micro_batches)", TWICE),
        _scaled("/ dist.get_world_size()", BY_RANKS),
        *TRAINS,
    ),
)
