"""The exercises of 02_accumulation: batch arithmetic, one step, uneven parts, tokens, clipping."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from course_lib.checks.accumulation import counts
from course_lib.checks.accumulation import steps_answers as planted
from course_lib.checks.accumulation.parts import (
    FULL_BATCH,
    OLD,
    batch_of,
    clip,
    expect_low_peak,
    expect_near,
    flat_grads,
    gradient,
    line,
    near,
    one_step,
    parts_of,
    split,
)
from course_lib.checks.exercise import Exercise, Mistake
from course_lib.checks.expect import Cause
from course_lib.core.specs import ModelSpec
from course_lib.models import GPT, IGNORED, padded_batch, token_loss

_Parts = Sequence[tuple[Tensor, Tensor]]


def check_step(answer: Callable[..., Any]) -> str:
    """Check one SGD step with lr 1, which moves the parameters by the gradient that it used."""
    for items, count in ((2, 1), (4, 2), (6, 3), (8, 8)):
        batch, where = batch_of(items), parts_of(items, count)
        expected, last = gradient(batch), gradient(split(batch, count)[-1])
        loss, used = one_step(answer, where, batch, count)
        only_last = "Only the last micro-batch is left: zero_grad is in the loop, or backward not."
        causes: list[Cause] = [
            (near(expected + OLD), "The old gradient is still in it: zero_grad comes first."),
            (near(expected * count), "Gradients are summed, not averaged: divide each loss."),
            (near(expected / count), "Divided twice: each loss by num_micro_batches, once."),
            (near(last / count), only_last),
            (near(last), only_last),
            (
                near(expected * 0),
                "No gradient is left: zero_grad stands between backward and step.",
            ),
            (
                near(expected * count / items),
                "Divided by the items: each loss is a mean already. Divide by num_micro_batches.",
            ),
        ]
        expect_near(used, expected, f"{where}, gradient used", causes, FULL_BATCH)
        full = _loss(batch)
        loss_causes: list[Cause] = [
            (near(full * count), "That is the sum of the losses: return their mean."),
            (near(_loss(split(batch, count)[-1])), "That is the loss of the last micro-batch."),
            (near(_loss(split(batch, count)[-1]) / count), "That is the last micro-batch's part."),
        ]
        expect_near(loss, full, f"{where}, loss", loss_causes)
    expect_low_peak(answer)
    return "The full batch's gradient and loss, one step, one micro-batch in memory."


def check_uneven(answer: Callable[..., Any]) -> str:
    """Check micro-batches of any lengths: the gradient of the mean over all items."""
    for lengths in ([3], [2, 2], [2, 1], [3, 2, 2], [1, 5]):
        inputs, targets = batch_of(sum(lengths))
        parts = list(zip(inputs.split(lengths), targets.split(lengths), strict=True))
        model = line()
        answer(model, F.mse_loss, parts)
        grads = [gradient(part) for part in parts]
        mean_of_means, num_items = sum(grads) / len(grads), sum(lengths)
        first = sum(g * n for g, n in zip(grads, lengths, strict=True)) / lengths[0] / len(lengths)
        causes: list[Cause] = [
            (near(mean_of_means), "A mean of means: an item of a short part counts for more."),
            (near(mean_of_means * len(grads)), "Summed: each part needs its share of the items."),
            (near(sum(grads) / num_items), "A part's loss is a mean: times its own items, too."),
            (
                near(gradient((inputs, targets)) * num_items),
                "Summed over the items: divide by the number of all items.",
            ),
            (
                near(grads[-1] * lengths[-1] / num_items),
                "Only the last part is left: zero_grad is in the loop.",
            ),
            (near(first), "Not all parts are as long as the first one."),
        ]
        where = f"parts of {lengths} items"
        expect_near(flat_grads(model), gradient((inputs, targets)), where, causes, FULL_BATCH)
    expect_low_peak(
        lambda model, loss_fn, _, batch, count: answer(model, loss_fn, split(batch, count))
    )
    return "Every item counts the same, in parts of any length."


def check_tokens(answer: Callable[..., Any]) -> str:
    """Check padded sequences: the gradient of the mean over the tokens that have a loss."""
    for batch, count, padded in ((2, 1, 0), (3, 2, 0), (5, 3, 0), (4, 2, 2)):
        inputs, targets = padded_batch(3, batch=batch, seq=6, vocab=11)
        targets[batch - padded :] = IGNORED
        parts = split((inputs, targets), count)
        where = f"{batch} sequences in {count} part{'s' if count > 1 else ''}"
        where += ", one without tokens" if padded else ""
        model, right = _tiny_gpt(), _tiny_gpt()
        loss = answer(model, parts)
        (full := token_loss(right(inputs), targets)).backward()
        tokens = [int((part != IGNORED).sum()) for _, part in parts]
        equal, items = [1 / count] * count, [len(part) / batch for _, part in parts]
        padding = [num_tokens / targets.numel() for num_tokens in tokens]
        causes: list[Cause] = [
            (near(_token_grads(parts, equal)), "A mean of means: count the tokens."),
            (near(_token_grads(parts, items)), "Weigh targets that count, not sequences."),
            (near(_token_grads(parts, [1.0] * count)), "Summed: each part needs its share."),
            (near(_token_grads(parts, padding)), "Padding is in the total: leave out -100."),
        ]
        expect_near(flat_grads(model), flat_grads(right), where, causes, FULL_BATCH)
        nan: list[Cause] = [(torch.isnan, "The mean over no tokens is 0/0: leave that part out.")]
        look = "The gradient is right: give the losses the same shares."
        expect_near(loss, full.detach(), f"{where}, loss", nan, look)
    return "Every token counts the same, padding counts nothing."


def check_clipped(answer: Callable[..., Any]) -> str:
    """Check that the whole gradient is clipped once, just before the step."""
    for items, count, max_norm in ((2, 1, 0.5), (4, 2, 1e3), (4, 2, 0.5), (6, 3, 0.1)):
        batch = batch_of(items)
        where = f"{parts_of(items, count)}, max_norm {max_norm:g}"
        parts = [gradient(part) / count for part in split(batch, count)]
        whole, running = torch.stack(parts).sum(0), torch.zeros(3).double()
        for part in parts:
            running = clip(running + part, max_norm)
        own = torch.cat([clip(piece, max_norm) for piece in whole.split([2, 1])])
        _, used = one_step(answer, where, batch, count, max_norm)
        causes: list[Cause] = [
            (near(whole), "Nothing was clipped before the step."),
            (near(clip(whole + OLD, max_norm)), "The old gradient is still in it."),
            (near(clip(whole * count, max_norm)), "Summed, not averaged: divide each loss."),
            (near(running), "Clipped after each micro-batch: clip once, when all are in."),
            (
                near(sum(clip(part, max_norm) for part in parts)),
                "Each micro-batch was clipped by itself: clip their sum.",
            ),
            (near(own), "Each parameter was clipped by itself: the norm is that of all."),
            (near(whole.clamp(-max_norm, max_norm)), "Numbers were cut off: scale the gradient."),
        ]
        expect_near(used, clip(whole, max_norm), f"{where}, gradient used", causes, FULL_BATCH)
    expect_low_peak(lambda *step: answer(*step, 1e3))
    return "The accumulated gradient is clipped, once, by its whole norm."


def _loss(batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.mse_loss(line()(batch[0]), batch[1]).detach()


def _tiny_gpt() -> GPT:
    torch.manual_seed(0)
    spec = ModelSpec(hidden=8, num_layers=1, num_heads=2, ffn_hidden=8, vocab=11, max_seq=6)
    return GPT(spec).double()


def _token_grads(parts: _Parts, shares: Sequence[float]) -> Tensor:
    model = _tiny_gpt()
    for (inputs, targets), share in zip(parts, shares, strict=True):
        if (targets != IGNORED).any():
            (token_loss(model(inputs), targets) * share).backward()
    return flat_grads(model)


EXERCISES = (
    Exercise(
        key="accumulation-1",
        title="how many micro-batches",
        check=counts.check_count,
        reference=counts.count,
        mistakes=(
            Mistake("in tokens", counts.count_tokens, says="a micro-batch holds sequences"),
            Mistake("one rank", counts.count_of_one_rank, says="The ranks share the work"),
            Mistake("a float", counts.count_as_float, says="a count is an int"),
            Mistake("rounds up", counts.count_rounded, says="need a ValueError"),
            Mistake("uneven ranks", counts.count_ranks_uneven, says="4 at a time on 2 ranks"),
            Mistake("uneven tokens", counts.count_tokens_uneven, says="100 tokens"),
        ),
    ),
    Exercise(
        key="accumulation-2",
        title="one step from micro-batches",
        check=check_step,
        reference=planted.step,
        mistakes=(
            Mistake("not divided", planted.not_divided, says="summed, not averaged"),
            Mistake("divided twice", planted.divided_twice, says="Divided twice"),
            Mistake("zero_grad inside", planted.zero_grad_inside, says="zero_grad is in the loop"),
            Mistake("backward after", planted.backward_after, says="or backward not"),
            Mistake("no zero_grad", planted.no_zero_grad, says="zero_grad comes first"),
            Mistake("step inside", planted.step_inside, says="It stands inside the loop"),
            Mistake("no step", planted.no_step, says="Did you forget it?"),
            Mistake("cleared late", planted.zero_grad_late, says="No gradient is left"),
            Mistake("one backward", planted.one_backward, says="call backward in the loop"),
            Mistake("full batch", planted.full_batch, says="call backward in the loop"),
            Mistake("sums losses", planted.sums_losses, says="return their mean"),
        ),
    ),
    Exercise(
        key="accumulation-3",
        title="uneven parts",
        check=check_uneven,
        reference=planted.uneven,
        mistakes=(
            Mistake("mean of means", planted.mean_of_means, says="A mean of means"),
            Mistake("summed", planted.sum_of_means, says="needs its share"),
            Mistake("one batch", planted.put_together, says="call backward in the loop"),
            Mistake("not times its items", planted.divided_only, says="times its own items"),
            Mistake("all like the first", planted.like_the_first, says="as long as the first"),
        ),
    ),
    Exercise(
        key="accumulation-4",
        title="tokens that count",
        check=check_tokens,
        reference=planted.tokens,
        mistakes=(
            Mistake("mean of means", planted.token_mean_of_means, says="A mean of means"),
            Mistake("by sequences", planted.by_sequences, says="not sequences"),
            Mistake("counts padding", planted.counts_padding, says="Padding is in the total"),
            Mistake("nothing over nothing", planted.nan_of_no_tokens, says="0/0"),
        ),
    ),
    Exercise(
        key="accumulation-5",
        title="clip what was accumulated",
        check=check_clipped,
        reference=planted.clipped,
        mistakes=(
            Mistake("in the loop", planted.clips_running, says="clip once, when all are in"),
            Mistake("each by itself", planted.clips_each, says="clip their sum"),
            Mistake("after the step", planted.clips_late, says="Nothing was clipped before"),
            Mistake("each parameter", planted.clips_parameters, says="the norm is that of all"),
            Mistake("numbers", planted.clips_numbers, says="scale the gradient"),
            Mistake("full batch", planted.clips_full, says="call backward in the loop"),
            Mistake("not divided", planted.clips_sum, says="Summed, not averaged"),
        ),
    ),
)
