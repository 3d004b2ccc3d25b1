"""The exercises of 03_recompute: recompute by hand, segments, 16-bit steps, the loss scale."""

import math
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from course_lib.checks.accumulation.parts import expect_near
from course_lib.checks.exercise import CheckFailed, Exercise, Mistake
from course_lib.checks.expect import Cause, expect_equal
from course_lib.checks.recompute import half_step
from course_lib.checks.recompute import recompute_answers as planted
from course_lib.memory.saved_tensors import activation_ledger


def check_redo(answer: Callable[..., Any]) -> str:
    """Check the backward half of recompute: gradients of x and of parameters, random numbers."""
    for where, layer in (("a linear layer", nn.Linear(4, 4)), ("dropout", nn.Dropout(0.5))):
        grad, x = torch.arange(8.0).view(2, 4), torch.ones(2, 4, requires_grad=True)
        random = torch.random.manual_seed(3).get_state()
        (layer(x) * grad).sum().backward()
        expected = [param.grad.clone() for param in layer.parameters() if param.grad is not None]
        layer.zero_grad()
        before = torch.random.manual_seed(7).get_state()
        earlier = torch.ones(2, 4, requires_grad=True)
        saved = earlier * 1  # came out of something, as in a model
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            got = _redone(answer, where, layer, saved, random, grad)
        says = "Other masks: restore the random state."
        masks: list[Cause] = [(lambda _, w=where: w == "dropout", says)]
        look = "Go back from grad, through what fn made of x; return the gradient of x."
        expect_near(got, _there(x.grad), f"{where}, gradient of x", masks, look)
        if earlier.grad is not None:
            raise CheckFailed(
                f"{where}: backward went on to what came before x. Detach the saved x."
            )
        for param, right in zip(layer.parameters(), expected, strict=True):
            if param.grad is None:
                raise CheckFailed(
                    f"{where}: its parameters have no gradient. torch.autograd.grad reaches x "
                    "only; torch.autograd.backward reaches everything."
                )
            expect_near(param.grad, right, f"{where}, parameter", [])
        if not torch.equal(before, torch.get_rng_state()):
            raise CheckFailed(f"{where}: backward moved the random numbers on. Use fork_rng.")
    return "The same gradients, the same masks, and the random numbers go on as they were."


def _redone(answer: Callable[..., Any], where: str, *args: Any) -> Any:
    try:
        got = answer(*args)
    except RuntimeError as error:
        if "does not require grad" not in str(error):
            raise
        raise CheckFailed(
            f"{where}: there is nothing to go back through. Inside backward autograd is off: what "
            "is to be recorded has to run under torch.enable_grad(), on an x that requires_grad_()."
        ) from None
    if got is None:
        raise CheckFailed(
            f"{where}: no gradient of x came back. Return x.grad. Is it None? Detach the saved x "
            "and let it require a gradient: only a leaf has a .grad, and what came before x is not "
            "yours to walk."
        )
    return got


def _there(grad: Tensor | None) -> Tensor:
    if grad is None:
        raise CheckFailed("x has no gradient.")
    return grad


# (24, 1, 1) has three best k; in (24, 6, 6) and (24, 4, 24) an input is more than one byte
BEST = (
    (1, 1, 1), (16, 1, 1), (64, 1, 1), (24, 1, 6), (24, 1, 17), (24, 1, 1), (24, 4, 24), (7, 2, 3)
)  # fmt: skip


def check_best(answer: Callable[..., Any]) -> str:
    """Check the number of blocks per segment that needs least memory."""
    for layers, block_input, block in BEST:
        sizes = [(math.ceil(layers / k) * block_input + k * block, k) for k in range(1, layers + 1)]
        least, best = min(sizes)
        down = min((layers // k * block_input + k * block, k) for _, k in sizes)[1]
        swapped = min((math.ceil(layers / k) * block + k * block_input, k) for _, k in sizes)[1]
        got = answer(layers, block_input, block)
        where = f"num_layers {layers}, input_bytes {block_input}, block_bytes {block}"
        if isinstance(got, float) and got == best:
            raise CheckFailed(f"{where}: need an int, a number of blocks; got {got}.")
        roots = (math.isqrt(layers), round(math.sqrt(layers)))
        if block > block_input and got in roots and got != best:
            raise CheckFailed(
                f"{where}: need {best}; got {got}, the root of the layers. That holds if a block "
                "keeps as much as its input; here it keeps more."
            )
        causes: list[Cause] = [
            (lambda got, s=sizes, n=least: (n, got) in s, "As low: the smallest."),
            (least, "Those are the bytes: return the number of blocks."),
            (down, "Round up: the last segment may be shorter, and has an input too."),
            (swapped, "Swapped: forward keeps inputs, backward redoes k blocks."),
            (0, "An index begins at 0, a segment at 1 block."),
            (layers, "One segment recomputes everything at once: as large as no recompute."),
        ]
        expect_equal(got, best, where=where, causes=causes, look="Try every k from 1 to layers.")
    return "The root of the layers for thin blocks, 1 for those of a transformer."


def check_segments(answer: Callable[..., Any]) -> str:
    """Check blocks in segments: numbers, calls, and saved bytes."""
    for layers, k in ((1, 1), (4, 2), (6, 3), (5, 2), (4, 1)):
        where, calls = f"num_layers {layers}, k {k}", list[int]()
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(layers)]
        for index, block in enumerate(blocks):
            block.register_forward_pre_hook(
                lambda *_, index=index, calls=calls: calls.append(index)
            )
        given = [param for block in blocks for param in block.parameters()]
        x, y = torch.ones(4, 8), torch.ones(4, 8)
        for block in blocks:
            y = block(y)
        calls.clear()
        got: list[Tensor] = []
        forward = partial(_append, got, answer, blocks, k, x)
        held = activation_ledger(forward, given=given)
        fewer = "Not every block ran: the last segment may be shorter."
        causes: list[Cause] = [(_not_all(calls, layers), fewer)]
        look = "Each segment's output is the next one's input."
        expect_near(got[0], y.detach(), f"{where}, output", causes, look)
        inputs = math.ceil(layers / k)
        if held.totals()[-1] > inputs * x.nbytes:
            raise CheckFailed(
                f"{where}: {held.totals()[-1] // x.nbytes} tensors are held after forward; "
                f"need {inputs}, the input of each segment. Recompute whole segments of k blocks."
            )
        got[0].sum().backward()
        _expect_all_ran(where, calls[layers:], layers)
        _expect_segments(where, calls[layers:], layers, k)
    return "One tensor a segment, and every block runs twice."


def _append(to: list[Any], fn: Callable[..., Any], *args: Any) -> None:
    to.append(fn(*args))


def _not_all(calls: list[int], layers: int) -> Callable[[Any], bool]:
    return lambda _: sorted(set(calls)) != list(range(layers))


def _expect_all_ran(where: str, again: list[int], layers: int) -> None:
    missing = sorted(set(range(layers)) - set(again))
    if missing:
        raise CheckFailed(
            f"{where}: backward runs the blocks {again}, and never {missing}. A lambda looks its "
            "names up when it is called, in backward: hand the blocks over as an argument."
        )


def _expect_segments(where: str, again: list[int], layers: int, k: int) -> None:
    starts = reversed(range(0, layers, k))
    right = [index for start in starts for index in range(start, min(start + k, layers))]
    if again != right:
        raise CheckFailed(
            f"{where}: backward runs the blocks {again}; need {right}. It goes back segment by "
            "segment, k blocks each, every block once."
        )


EXERCISES = (
    Exercise(
        key="recompute-1",
        title="run again in backward",
        check=check_redo,
        reference=planted.redo,
        mistakes=(
            Mistake("RNG not restored", planted.other_masks, says="restore the random state"),
            Mistake("under no_grad", planted.without_gradients, says="torch.enable_grad()"),
            Mistake("x only", planted.reaches_x, says="its parameters have no gradient"),
            Mistake("RNG moved on", planted.moves_on, says="Use fork_rng"),
            Mistake("not detached", planted.not_detached, says="Detach the saved x"),
            Mistake("walks on", planted.walks_on, says="what came before x"),
        ),
    ),
    Exercise(
        key="recompute-2",
        title="the best segment",
        check=check_best,
        reference=planted.best,
        mistakes=(
            Mistake("always the root", planted.root, says="the root of the layers"),
            Mistake("bytes", planted.least_bytes, says="return the number of blocks"),
            Mistake("one segment", planted.fewest_inputs, says="as large as no recompute"),
            Mistake("a float", planted.best_as_float, says="need an int"),
            Mistake("a formula", planted.rounded_root, says="As low"),
            Mistake("rounded down", planted.best_rounded_down, says="Round up"),
            Mistake("an index", planted.best_index, says="begins at 0"),
            Mistake("inputs of one byte", planted.inputs_of_one, says="Try every k"),
            Mistake("the last of equals", planted.last_best, says="the smallest"),
        ),
    ),
    Exercise(
        key="recompute-3",
        title="every k-th input",
        check=check_segments,
        reference=planted.segments,
        mistakes=(
            Mistake("each block", planted.each_block, says="Recompute whole segments"),
            Mistake("some blocks", planted.some_blocks, says="tensors are held after forward"),
            Mistake("names looked up late", planted.late_names, says="A lambda looks its names up"),
            Mistake("one segment", planted.one_segment, says="segment by segment"),
            Mistake("drops the rest", planted.drops_the_rest, says="last segment may be shorter"),
        ),
    ),
    Exercise(
        key="recompute-4",
        title="a 16-bit step",
        check=half_step.check_half_step,
        reference=planted.half_step,
        mistakes=(
            Mistake("clips first", planted.clips_scaled, says="Clipped before the scale was out"),
            Mistake("never unscales", planted.never_unscales, says="The scale is still in it"),
            Mistake("unscales in fp16", planted.unscales_in_half, says="Divide and step in fp32"),
            Mistake("master in 16 bits", planted.half_master, says="rounded to 16 bits"),
            Mistake("steps anyway", planted.steps_anyway, says="must be left out"),
            Mistake("parameter stays", planted.stale_param, says="Copy the master"),
            Mistake("no step", planted.never_steps, says="The master did not move"),
            Mistake("never clips", planted.never_clips, says="Nothing was clipped"),
            Mistake("any is finite", planted.any_finite, says="must be left out"),
        ),
    ),
    Exercise(
        key="recompute-5",
        title="the loss scale",
        check=half_step.check_scale,
        reference=half_step.next_scale,
        mistakes=(
            Mistake("no reset", half_step.forgets_overflow, says="Too early"),
            Mistake("only grows", half_step.only_grows, says="An overflow halves"),
            Mistake("never grows", half_step.never_grows, says="Three good steps"),
            Mistake("grows once", half_step.grows_once, says="Three good steps in a row"),
        ),
    ),
)
