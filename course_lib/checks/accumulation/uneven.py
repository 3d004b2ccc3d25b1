"""Exercises 3 and 4 of 02_accumulation: parts with different numbers of items, or of tokens."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from course_lib.checks.accumulation.effects import (
    ALIVE,
    GRAPH,
    IN_EVAL,
    LOOKS,
    NO_GRADIENT,
    OLD,
    WITH_GRAPH,
    EffectCase,
    Effects,
    as_number,
    batch_of,
    calls_of,
    flat,
    flat_grads,
    graph_of,
    held_at_once,
    line,
    thick,
    watched,
    with_old_grads,
)
from course_lib.checks.edits import Edit, Own
from course_lib.checks.exercise import Cause, Exercise
from course_lib.checks.expectations import CALLERS
from course_lib.models import IGNORED, padded_batch, token_loss

VOCAB = 11
GRADIENT, ADDED, LOSS, CALLS = "gradient", "what it adds to a gradient", "loss", "items at once"
MOVED = "parameters have moved"

MEAN_OF_MEANS = Cause("A mean of means: an item of a short part counts for more.")
SUMMED = Cause("Summed: each part needs its share of the items.")
NOT_TIMES_ITEMS = Cause("A part's loss is a mean: times its own items, too.")
NOT_DIVIDED = Cause("Summed over the items: divide by the number of all items.")
LIKE_THE_FIRST = Cause("Not all parts are as long as the first one.")
ONLY_LAST = Cause("Only the last part is left: zero_grad is in the loop, or backward is not.")
CLEARED = Cause(
    "What was in param.grad before is gone: add to it. Clearing is for whoever begins a step."
)
OTHER_LOSS = Cause("That is the gradient of another loss: use loss_fn, whatever it is.")
STEPPED = Cause("The parameters have moved: only add to param.grad, and leave the step to others.")
TOO_MANY = Cause("The model saw more than one part at once: call it on each part by itself.")
TOKEN_MEANS = Cause("A mean of means: count the tokens.")
BY_SEQUENCES = Cause("Weigh targets that count, not sequences.")
TOKENS_SUMMED = Cause("Summed: each part needs its share of the tokens.")
PADDING = Cause("Padding is in the total: leave out -100.")
TOKEN_0 = Cause("Token 0 is a token like any other: compare with IGNORED.")
NAN = Cause("The mean over no tokens is 0/0: leave that part out.")
STOPPED = Cause("A part without tokens ended the loop: go on with the next part.")
LOSS_OF_LAST = Cause("That is the last part's loss: add up the losses of all parts.")
ONE_NUMBER = Cause("Return one number, the mean over all tokens that count.")
MEAN_LOSS = Cause("The gradient is right, the loss a mean of means: give it the same shares.")
LOOK = Cause("Compare with one backward of the full batch.")


def _add(
    answer: Callable[..., Any],
    lengths: Sequence[int],
    loss_fn: Callable[..., Tensor] = F.mse_loss,
    again: bool = False,
) -> dict[str, Any]:
    """Add the gradient of parts of these lengths to nothing, or `again`, to what is there."""
    (x, y), model = batch_of(sum(lengths)), line()
    calls, before = calls_of(model), flat(line().parameters())
    if again:
        with_old_grads(model)
    parts = list(zip(x.split(lengths), y.split(lengths), strict=True))
    with watched(model, inputs=x, targets=y, parts=parts) as seen:
        answer(model, loss_fn, parts)
    moved = not torch.equal(before, flat(model.parameters()))
    grads = {ADDED: flat_grads(model) - OLD} if again else {GRADIENT: flat_grads(model)}
    return {MOVED: moved, **grads, CALLS: sorted(calls), **seen}


def _held(answer: Callable[..., Any]) -> dict[str, str]:
    def step(items: int, count: int) -> tuple[Callable[[], Any], list[Tensor]]:
        model, x = thick(), torch.ones(items, 2)
        parts = [(part, part[:, :1]) for part in x.chunk(count)]
        return partial(answer, model, F.mse_loss, parts), [*model.parameters(), x]

    return held_at_once(step)


def _cases() -> list[EffectCase]:
    lengths = ([3], [2, 2], [2, 1], [3, 2, 2], [1, 5], [2, 3, 1, 1])
    return [
        *((f"parts of {each} items", partial(_add, lengths=each)) for each in lengths),
        ("gradients are there already", partial(_add, lengths=[3, 2], again=True)),
        ("another loss_fn", partial(_add, lengths=[4, 1], loss_fn=F.l1_loss)),
        ("4 parts of 4 items", _held),
    ]


def _add_tokens(
    answer: Callable[..., Any],
    counts: Sequence[int],
    empty: Sequence[int] = (),
    again: bool = False,
) -> dict[str, Any]:
    """Add the gradient of parts of so many sequences; those in `empty` hold no token."""
    x, y = padded_batch(3, batch=sum(counts), seq=6, vocab=VOCAB)
    parts = list(zip(x.split(counts), y.split(counts), strict=True))
    for number in empty:
        parts[number][1].fill_(IGNORED)
    model = _tiny()
    calls = calls_of(model)
    if again:
        with_old_grads(model)
    with watched(model, inputs=x, targets=y, parts=parts) as seen:
        loss = answer(model, parts)
    grads = {ADDED: flat_grads(model) - OLD} if again else {GRADIENT: flat_grads(model)}
    done = {**grads, LOSS: as_number(loss), GRAPH: graph_of(loss)}
    return {**done, CALLS: max(calls, default=0), **seen}


def _tiny(width: int = 2) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(VOCAB, width), nn.Linear(width, VOCAB)).double()


def _held_tokens(answer: Callable[..., Any]) -> dict[str, str]:
    def step(items: int, count: int) -> tuple[Callable[[], Any], list[Tensor]]:
        model, tokens = _tiny(64), torch.ones(items, 6, dtype=torch.long)
        parts = [(part, part) for part in tokens.chunk(count)]
        return partial(answer, model, parts), [*model.parameters(), tokens]

    return held_at_once(step)


def _token_cases() -> list[EffectCase]:
    return [
        ("2 sequences in 1 part", partial(_add_tokens, counts=[2])),
        ("parts of 2 and 1 sequences", partial(_add_tokens, counts=[2, 1])),
        ("parts of 2, 2 and 1 sequences", partial(_add_tokens, counts=[2, 2, 1])),
        ("no tokens in the last part", partial(_add_tokens, counts=[2, 2], empty=[1])),
        ("all tokens in the last of 3 parts", partial(_add_tokens, counts=[1, 1, 2], empty=[0, 1])),
        ("gradients are there already", partial(_add_tokens, counts=[2, 1], again=True)),
        ("4 parts of 4 sequences", _held_tokens),
    ]


def _put_together(
    model: nn.Module, loss_fn: Callable[..., Tensor], parts: Sequence[tuple[Tensor, Tensor]]
) -> None:
    inputs, targets = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    loss_fn(model(inputs), targets).backward()


def _tokens_together(model: nn.Module, parts: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    inputs, targets = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    loss = token_loss(model(inputs), targets)
    loss.backward()
    return loss.detach()


LOOP, WEIGHED = "for inputs, targets in parts:", "* len(targets) / num_items"
MEAN = "loss_fn(model(inputs), targets)"
ADD = f"({MEAN} {WEIGHED}).backward()"

UNEVEN = Exercise(
    key="accumulation-3",
    title="uneven parts",
    check=Effects(
        cases=_cases,
        looks={**LOOKS, MOVED: STEPPED, CALLS: TOO_MANY},
        look=LOOK,
        success="Every item counts the same, in parts of any length.",
    ),
    wrong=(
        Edit(WEIGHED, "/ len(parts)", MEAN_OF_MEANS),
        Edit(WEIGHED, "", SUMMED),
        Own(_put_together, TOO_MANY),
        Edit(WEIGHED, "/ num_items", NOT_TIMES_ITEMS),
        Edit(WEIGHED, "* len(targets)", NOT_DIVIDED),
        Edit(
            "sum(len(targets) for _, targets in parts)",
            "len(parts) * len(parts[0][1])",
            LIKE_THE_FIRST,
        ),
        Edit(LOOP, f"{LOOP}\n    model.zero_grad()", ONLY_LAST),
        Edit(LOOP, f"model.zero_grad()\n{LOOP}", CLEARED),
        Edit(MEAN, MEAN.replace("loss_fn", "F.mse_loss"), OTHER_LOSS),
        Edit(
            ADD,
            f"total = total + {MEAN} {WEIGHED}\nif targets is parts[-1][1]:\n    total.backward()",
            ALIVE,
            also=((LOOP, f"total = 0.0\n{LOOP}"),),
        ),
        Edit(ADD, f"{ADD}\ntargets.zero_()", CALLERS),
        Edit(LOOP, f"model.eval()\n{LOOP}", IN_EVAL),
        Edit(
            ADD,
            f"{ADD}\nparts.clear()",
            CALLERS,
            also=((LOOP, "for inputs, targets in list(parts):"),),
        ),
        Edit(ADD, MEAN, NO_GRADIENT),
        Edit(ADD, f"{ADD}\nfor p in model.parameters():\n    p.data -= 0.1 * p.grad", STEPPED),
    ),
)

COUNTS, SHARE = "int((targets != IGNORED).sum())", "* count / sum(counts)"

TOKENS = Exercise(
    key="accumulation-4",
    title="tokens that count",
    check=Effects(
        cases=_token_cases,
        looks={**LOOKS, CALLS: TOO_MANY, LOSS: ONE_NUMBER},
        look=LOOK,
        success="Every token counts the same, padding counts nothing.",
    ),
    wrong=(
        Edit(SHARE, "/ len(parts)", TOKEN_MEANS),
        Edit(SHARE, "/ sum(map(bool, counts))", TOKEN_MEANS),
        Edit(SHARE, "* len(targets) / sum(len(each) for _, each in parts)", BY_SEQUENCES),
        Edit("sum(counts)", "sum(each.numel() for _, each in parts)", PADDING),
        Edit(COUNTS, "targets.numel()", BY_SEQUENCES),
        Edit("loss.backward()", "pass", NO_GRADIENT),
        Edit("if count:", "if True:", NAN),
        Edit(SHARE, "", TOKENS_SUMMED),
        Edit(COUNTS, "int((targets > 0).sum())", TOKEN_0),
        Edit("if count:", "if not count:\n    break\nelse:", STOPPED),
        Edit("return total", "return loss.detach()", LOSS_OF_LAST),
        Edit(
            "loss.detach()", "token_loss(model(inputs), targets).detach() / len(parts)", MEAN_LOSS
        ),
        Edit("total = 0.0", "total = 0.0\nmodel.zero_grad()", CLEARED),
        Own(_tokens_together, TOO_MANY),
        Edit(
            "loss.backward()",
            "pass",
            ALIVE,
            also=(
                ("total += loss.detach()", "total += loss"),
                ("return total", "total.backward()\nreturn total.detach()"),
            ),
        ),
        Edit("return total", "parts.clear()\nreturn total", CALLERS),
        Edit("return total", "model.eval()\nreturn total", IN_EVAL),
        Edit("loss.detach()", "loss", WITH_GRAPH),
        Edit("return total", "parts[0][1].clamp_(min=0)\nreturn total", CALLERS),
    ),
)
