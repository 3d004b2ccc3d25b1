"""Exercises 3 and 4 of 02_accumulation: parts with different numbers of items, or of tokens."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from course_lib.checks.accumulation import models
from course_lib.checks.accumulation.effects import (
    ALIVE,
    FEWER_BITS,
    FROZEN,
    LEFTOVERS,
    LOOKS,
    LOSS,
    NAN_LEFT_OUT,
    NO_GRADIENT,
    OLD,
    OTHER_LOSS,
    SWITCHED,
    TIED,
    WITH_GRAPH,
    EffectCase,
    Effects,
    about_loss,
    as_number,
    called,
    flat,
    flat_grads,
    held_at_once,
    with_old_grads,
)
from course_lib.checks.edits import Edit, Own
from course_lib.checks.exercise import Cause, Exercise
from course_lib.checks.expectations import CALLERS
from course_lib.models import IGNORED, padded_batch, token_loss

VOCAB = 11
GRADIENT, ADDED, CALLS = "gradient", "what it adds to a gradient", "items at once"
MOVED, SHOWN = "parameters have moved", "where the nan shows"
EMPTY = "a part without tokens"

MEAN_OF_MEANS = Cause("A mean of means: an item of a short part counts for more.")
SUMMED = Cause("Summed: each part needs its share of the items.")
NOT_TIMES_ITEMS = Cause("A part's loss is a mean: multiply it by len(targets).")
NOT_DIVIDED = Cause("Summed over the items: divide by the number of all items.")
LIKE_THE_FIRST = Cause("Not all parts are as long as the first one.")
ONLY_LAST = Cause("Only the last part is left: zero_grad is in the loop, or backward is not.")
CLEARED = Cause("What was in param.grad before is gone: add to it. Clearing is the caller's job.")
STEPPED = Cause(
    "The parameters have changed: only add to param.grad, and leave the step to the caller."
)
ONCE_EACH = Cause("Call the model once on each part: not on several at once, nor item by item.")
TOKEN_MEANS = Cause("A mean of means: count the tokens.")
BY_SEQUENCES = Cause("Weight by the targets that count, not by sequences.")
TOKENS_SUMMED = Cause("Summed: each part needs its share of the tokens.")
PADDING = Cause("Padding is in the total: leave out -100.")
TOKEN_0 = Cause("Token 0 is a token like any other: compare with IGNORED.")
NAN = Cause("The mean over no tokens is 0/0: leave that part out.")
NOT_SKIPPED = Cause(
    "The model ran on a part without tokens, which costs a forward, and moves its buffers and "
    "random numbers: look at the targets before you call it."
)
STOPPED = Cause("A part without tokens ended the loop: go on with the next part.")
LOSS_OF_LAST = Cause("That is the last part's term of the mean: add up all terms.")
ONE_NUMBER = Cause("Return one number, the mean over all tokens that count.")
MEAN_LOSS = Cause("The gradient is right, the loss a mean of means: give it the same shares.")
NAN_HIDDEN = Cause(
    "A nan that the model makes is hidden: find the parts without tokens by their targets, and "
    "keep every other nan."
)
TO_THE_FIRST_IGNORED = Cause(
    "Padding need not be at the end: count the targets that are not IGNORED, wherever they are."
)
NOT_NUMEL = Cause("A target may hold several numbers: count the items, len(targets).")
ASKS_ALL = Cause(
    "Not every parameter needs a gradient, and autograd.grad refuses those that do not: "
    "loss.backward() skips them."
)
LOOK = Cause("Compare with one backward of the full batch.")


def _observed(
    answer: Callable[..., Any],
    model: nn.Module,
    *arguments: Any,
    again: bool,
    **inputs: Tensor | list[Any],
) -> tuple[dict[str, Any], list[int], Any]:
    """Call the answer; return what it did to gradients and inputs, the model's calls, the loss."""
    if again:
        with_old_grads(model)
    seen, calls, loss = called(answer, model, *arguments, **inputs)
    grads = {ADDED: flat_grads(model) - OLD} if again else {GRADIENT: flat_grads(model)}
    return {**grads, **seen}, calls, loss


def _add(
    answer: Callable[..., Any],
    lengths: Sequence[int],
    loss_fn: Callable[..., Tensor] = F.mse_loss,
    again: bool = False,
    odd: bool = False,
    nan: bool = False,
) -> dict[str, Any]:
    """Add the gradient of parts of these lengths to nothing, or `again`, to what is there."""
    model = models.Odd(nn.Linear(2, 3), nn.Linear(3, 2)) if odd else models.line()
    (x, y), before = models.batch_of(sum(lengths), width=2 if odd else 1), flat(model.parameters())
    if nan:
        x[0] = torch.nan
    parts = list(zip(x.split(lengths), y.split(lengths), strict=True))
    parts = models.of_two_lengths() if loss_fn is models.mean_of_items else parts
    done, calls, _ = _observed(
        answer, model, loss_fn, parts, again=again, inputs=x, targets=y, parts=parts
    )
    moved = not torch.equal(before, flat(model.parameters()))
    return {MOVED: moved, **done, CALLS: sorted(calls)}


def _held(answer: Callable[..., Any]) -> dict[str, str]:
    def run(model: nn.Module, x: Tensor, y: Tensor, count: int) -> None:
        answer(model, models.mean_square, list(zip(x.chunk(count), y.chunk(count), strict=True)))

    return held_at_once(models.thick, run)


def _cases() -> list[EffectCase]:
    lengths = ([3], [2, 2], [2, 1], [3, 2, 2], [1, 5], [2, 3, 1, 1])
    return [
        *((f"parts of {each} items", partial(_add, lengths=each)) for each in lengths),
        ("gradients are there already", partial(_add, lengths=[3, 2], again=True)),
        ("another loss_fn", partial(_add, lengths=[4, 1], loss_fn=F.l1_loss)),
        ("a nan in the first part", partial(_add, lengths=[3, 2], nan=True)),
        (
            "3 items of 5 tokens, 2 of 2",
            partial(_add, lengths=[3, 2], loss_fn=models.mean_of_items),
        ),
        (f"a model {models.ODD}", partial(_add, lengths=[3, 2], odd=True)),
        (f"gradients are there, {models.ODD}", partial(_add, lengths=[3, 2], odd=True, again=True)),
        ("4 parts of 4 items", _held),
    ]


def _add_tokens(
    answer: Callable[..., Any],
    counts: Sequence[int],
    empty: Sequence[int] = (),
    again: bool = False,
    in_front: bool = False,
    odd: bool = False,
) -> dict[str, Any]:
    """Add the gradient of parts of so many sequences; those in `empty` hold no token.

    `in_front`: the targets that do not count are the first ones, and one in the middle.
    """
    x, y, parts = _token_parts(counts)
    for number in empty:
        parts[number][1].fill_(IGNORED)
    if in_front:
        y.copy_(y.flip(1))
        y[:, -2] = IGNORED
    model = models.Odd(nn.Embedding(VOCAB, 3), nn.Linear(3, VOCAB)) if odd else _tiny()
    done, calls, loss = _observed(
        answer, model, parts, again=again, inputs=x, targets=y, parts=parts
    )
    return {**done, **about_loss(loss), CALLS: max(calls, default=0)}


def _token_parts(counts: Sequence[int]) -> tuple[Tensor, Tensor, list[Any]]:
    x, y = padded_batch(3, batch=sum(counts), seq=6, vocab=VOCAB)
    return x, y, list(zip(x.split(counts), y.split(counts), strict=True))


def _makes_nan(answer: Callable[..., Any]) -> dict[str, Any]:
    """Add the gradient of a model that makes a nan of the first token."""
    model, (x, _, parts) = _tiny(), _token_parts([1, 1])
    model.get_parameter("0.weight").data[x[0, 0]] = torch.nan
    loss = as_number(answer(model, parts))
    found = {"the loss": loss, "the gradient": flat_grads(model)}
    shown = [what for what, value in found.items() if not _is_finite(value)]
    return {SHOWN: " and ".join(shown) or "nowhere"}


def _skips(answer: Callable[..., Any]) -> dict[str, Any]:
    """Add the gradient of three parts, of which the second one holds no token."""
    model, (_, _, parts), seen = _tiny(), _token_parts([1, 1, 1]), list[Tensor]()
    parts[1][1].fill_(IGNORED)
    model.register_forward_pre_hook(lambda _module, given: seen.append(given[0]))
    answer(model, parts)
    ran = any(torch.equal(parts[1][0], inputs) for inputs in seen)
    return {EMPTY: "seen by the model" if ran else "skipped"}


def _is_finite(value: Any) -> bool:
    return not isinstance(value, Tensor) or bool(value.isfinite().all())


def _tiny(width: int = 2) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(VOCAB, width), nn.Linear(width, VOCAB)).double()


def _held_tokens(answer: Callable[..., Any]) -> dict[str, str]:
    def make(items: int) -> tuple[nn.Module, Tensor, Tensor]:
        tokens = torch.ones(items, 6, dtype=torch.long)
        return _tiny(64), tokens, tokens

    def run(model: nn.Module, x: Tensor, y: Tensor, count: int) -> None:
        answer(model, list(zip(x.chunk(count), y.chunk(count), strict=True)))

    return held_at_once(make, run)


def _token_cases() -> list[EffectCase]:
    return [
        ("2 sequences in 1 part", partial(_add_tokens, counts=[2])),
        ("parts of 2 and 1 sequences", partial(_add_tokens, counts=[2, 1])),
        ("parts of 2, 2 and 1 sequences", partial(_add_tokens, counts=[2, 2, 1])),
        ("no tokens in the last part", partial(_add_tokens, counts=[2, 2], empty=[1])),
        ("all tokens in the last of 3 parts", partial(_add_tokens, counts=[1, 1, 2], empty=[0, 1])),
        ("gradients are there already", partial(_add_tokens, counts=[2, 1], again=True)),
        ("padding in front", partial(_add_tokens, counts=[2, 2, 1], in_front=True)),
        ("no tokens in the middle part", partial(_add_tokens, counts=[2, 1, 1], empty=[1])),
        (f"a model {models.ODD}", partial(_add_tokens, counts=[2, 1], odd=True)),
        ("a model that makes a nan", _makes_nan),
        ("no tokens in the second part", _skips),
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
MEAN, BY_NUMEL = "loss_fn(model(inputs), targets)", "* targets.numel() / num_items"
ADD = f"({MEAN} {WEIGHED}).backward()"

DIVIDE_LAYERS = f"""{ADD.replace(WEIGHED, "* len(targets)")}
if targets is parts[-1][1]:
    for module in model.modules():
        for param in module.parameters(recurse=False):
            if param.grad is not None:
                param.grad /= num_items"""

SKIP_NAN = f"loss = {MEAN} {WEIGHED}\nif loss.isfinite():\n    loss.backward()"

SET_ASIDE = """old = {param: param.grad for param in model.parameters()}
model.zero_grad()"""

OLD_LATER = f"""{ADD}
if targets is parts[-1][1]:
    for module in model.modules():
        for param in module.parameters(recurse=False):
            if old[param] is not None:
                param.grad = old[param] if param.grad is None else param.grad + old[param]"""

ASK = f"""params = list(model.parameters())
grads = torch.autograd.grad({MEAN} {WEIGHED}, params)
for param, grad in zip(params, grads, strict=True):
    param.grad = grad if param.grad is None else param.grad + grad"""

UNEVEN = Exercise(
    key="accumulation-3",
    title="uneven parts",
    check=Effects(
        cases=_cases,
        looks={**LOOKS, MOVED: STEPPED, CALLS: ONCE_EACH},
        look=LOOK,
        success="Every item counts the same, also in uneven parts.",
    ),
    wrong=(
        Edit(WEIGHED, "/ len(parts)", MEAN_OF_MEANS),
        Edit(WEIGHED, "", SUMMED),
        Own(_put_together, ONCE_EACH),
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
        Edit(LOOP, f"model.eval()\n{LOOP}", SWITCHED),
        Edit(
            ADD,
            f"{ADD}\nparts.clear()",
            CALLERS,
            also=((LOOP, "for inputs, targets in list(parts):"),),
        ),
        Edit(ADD, MEAN, NO_GRADIENT),
        Edit(ADD, f"{ADD}\nfor p in model.parameters():\n    p.data -= 0.1 * p.grad", STEPPED),
        Edit(LOOP, f"model.requires_grad_(True)\n{LOOP}", FROZEN),
        Edit(ADD, DIVIDE_LAYERS, TIED),
        Edit(ADD, OLD_LATER, TIED, also=((LOOP, f"{SET_ASIDE}\n{LOOP}"),)),
        Edit(ADD, ASK, ASKS_ALL),
        Edit(LOOP, f"model.train()\n{LOOP}", SWITCHED),
        Edit(ADD, SKIP_NAN, NAN_LEFT_OUT),
        Edit("sum(len(targets)", "sum(targets.numel()", NOT_NUMEL),
        Edit(WEIGHED, BY_NUMEL, NOT_NUMEL),
        Edit("sum(len(targets)", "sum(targets.numel()", NOT_NUMEL, also=((WEIGHED, BY_NUMEL),)),
        Edit(
            ADD,
            f"outputs.append(model(inputs))\n{ADD.replace('model(inputs)', 'outputs[-1]')}",
            LEFTOVERS,
            also=((LOOP, f"outputs = []\n{LOOP}"),),
        ),
    ),
)

COUNTS, SHARE = "int((targets != IGNORED).sum())", "* count / sum(counts)"

TOKENS = Exercise(
    key="accumulation-4",
    title="tokens that count",
    check=Effects(
        cases=_token_cases,
        looks={**LOOKS, CALLS: ONCE_EACH, LOSS: ONE_NUMBER, SHOWN: NAN_HIDDEN, EMPTY: NOT_SKIPPED},
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
        Edit(
            "if count:",
            "outputs = model(inputs)\nif count:",
            NOT_SKIPPED,
            also=(("token_loss(model(inputs), targets) *", "token_loss(outputs, targets) *"),),
        ),
        Edit("total = 0.0", "total = 0.0\nmodel.train()", SWITCHED),
        Edit("total = 0.0", "total = torch.zeros(())", FEWER_BITS),
        Edit(SHARE, "", TOKENS_SUMMED),
        Edit(COUNTS, "int((targets > 0).sum())", TOKEN_0),
        Edit("if count:", "if not count:\n    break\nelse:", STOPPED),
        Edit("return total", "return loss.detach()", LOSS_OF_LAST),
        Edit(
            "loss.detach()", "token_loss(model(inputs), targets).detach() / len(parts)", MEAN_LOSS
        ),
        Edit("total = 0.0", "total = 0.0\nmodel.zero_grad()", CLEARED),
        Own(_tokens_together, ONCE_EACH),
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
        Edit("return total", "model.eval()\nreturn total", SWITCHED),
        Edit("loss.detach()", "loss", WITH_GRAPH),
        Edit("return total", "parts[0][1].clamp_(min=0)\nreturn total", CALLERS),
        Edit(COUNTS, "int((targets != IGNORED).cumprod(1).sum())", TO_THE_FIRST_IGNORED),
        Edit("if count:", "if targets[0, 0] != IGNORED:", TO_THE_FIRST_IGNORED),
        Edit(
            SHARE,
            f"{SHARE}\nloss = loss.nan_to_num()",
            NAN_HIDDEN,
            also=(("if count:", "if True:"),),
        ),
        Edit("loss.backward()", "if loss.isnan():\n    continue\nloss.backward()", NAN_HIDDEN),
        Edit("total = 0.0", "total = 0.0\nmodel.requires_grad_(True)", FROZEN),
        Edit(
            "loss = token_loss(model(inputs), targets)",
            "outputs.append(model(inputs))\nloss = token_loss(outputs[-1], targets)",
            LEFTOVERS,
            also=(("total = 0.0", "total, outputs = 0.0, []"),),
        ),
    ),
)
