"""Exercises 3 and 4 of 02_accumulation: parts with different numbers of items, or of tokens."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from course_lib.checks.accumulation import effects, models
from course_lib.checks.accumulation.effects import OLD, EffectCase, Effects, flat_grads
from course_lib.checks.edits import Edit
from course_lib.checks.exercise import Cause, Exercise
from course_lib.checks.properties import TRAINS
from course_lib.models import IGNORED, padded_batch

VOCAB = 11
GRADIENT, ADDED, CALLS = "gradient", "what it adds to a gradient", "items at once"
SHOWN = "where the nan shows"

MEAN_OF_MEANS = Cause("A mean of means: an item of a short part counts for more.")
SUMMED = Cause("Summed: each part needs its share of the items.")
NOT_TIMES_ITEMS = Cause("A part's loss is a mean: multiply it by len(targets).")
NOT_DIVIDED = Cause("Summed over the items: divide by the number of all items.")
LIKE_THE_FIRST = Cause("Not all parts are as long as the first one.")
ONLY_LAST = Cause("Only the last part is left: zero_grad is in the loop, or backward is not.")
CLEARED = Cause("What was in param.grad before is gone: add to it. Clearing is the caller's job.")
ONCE_EACH = Cause("Call the model once on each part: not on several at once, nor item by item.")
NOT_NUMEL = Cause("A target may hold several numbers: count the items, len(targets).")
TOKEN_MEANS = Cause("A mean of means: count the tokens.")
BY_SEQUENCES = Cause("Weight by the targets that count, not by sequences.")
TOKENS_SUMMED = Cause("Summed: each part needs its share of the tokens.")
PADDING = Cause("Padding is in the total: leave out -100.")
TOKEN_0 = Cause("Token 0 is a token like any other: compare with IGNORED.")
NAN = Cause("The mean over no tokens is 0/0: leave that part out.")
NOT_SKIPPED = Cause(
    "The model ran on a part without tokens: look at the targets before you call it."
)
LOSS_OF_LAST = Cause("That is the last part's term of the mean: add up all terms.")
ONE_NUMBER = Cause("Return one number, the mean over all tokens that count.")
NAN_HIDDEN = Cause(
    "A nan that the model makes is hidden: find the parts without tokens by their targets, and "
    "keep every other nan."
)
TO_THE_FIRST_IGNORED = Cause("Padding need not be at the end: count wherever it is not IGNORED.")
LOOK = Cause("Compare with one backward of the full batch.")
OF_LABELS = {**effects.LOOKS, CALLS: ONCE_EACH}


def _observed(
    answer: Callable[..., Any], model: nn.Module, *arguments: Any, again: bool
) -> tuple[dict[str, Any], Any]:
    """Call the answer; return what it did, and the loss. Where `again`, gradients are there."""
    if again:
        effects.with_old_grads(model)
    seen, calls, loss = effects.called(answer, model, *arguments, parts=arguments[-1])
    grads = {ADDED: flat_grads(model) - OLD} if again else {GRADIENT: flat_grads(model)}
    return {**grads, **seen, CALLS: sorted(calls)}, loss


def _add(
    answer: Callable[..., Any],
    lengths: Sequence[int],
    loss_fn: Callable[..., Tensor] = F.mse_loss,
    again: bool = False,
    odd: bool = False,
    nan: bool = False,
) -> dict[str, Any]:
    """Add the gradient of parts of these lengths to nothing, or `again`, to what is there."""
    model, x, y = models.example(sum(lengths), odd)
    if nan:
        x[0] = torch.nan
    of_items = loss_fn is models.mean_of_items
    parts = models.of_two_lengths() if of_items else models.in_parts(x, y, lengths)
    return _observed(answer, model, loss_fn, parts, again=again)[0]


def _held(answer: Callable[..., Any]) -> dict[str, str]:
    def run(model: nn.Module, x: Tensor, y: Tensor, _count: int) -> None:
        answer(model, models.mean_square, models.in_parts(x, y, 4))

    return effects.held_at_once(models.thick, run)


def _cases() -> list[EffectCase]:
    lengths, two = (
        ([3], [2, 2], [2, 1], [3, 2, 2], [1, 5], [2, 3, 1, 1]),
        partial(_add, lengths=[3, 2]),
    )
    return [
        *((f"parts of {each} items", partial(_add, lengths=each)) for each in lengths),
        ("gradients are there already", partial(two, again=True)),
        ("another loss_fn", partial(_add, lengths=[4, 1], loss_fn=F.l1_loss)),
        ("a nan in the first part", partial(two, nan=True)),
        ("3 items of 5 tokens, 2 of 2", partial(two, loss_fn=models.mean_of_items)),
        (f"a model {models.ODD}", partial(two, odd=True)),
        (f"gradients are there, {models.ODD}", partial(two, odd=True, again=True)),
        ("4 parts of 4 items", _held),
    ]


def _add_tokens(
    answer: Callable[..., Any],
    counts: Sequence[int],
    empty: Sequence[int] = (),
    again: bool = False,
    in_front: bool = False,
    odd: bool = False,
    nan: bool = False,
) -> dict[str, Any]:
    """Add the gradient of parts of so many sequences; those in `empty` hold no token.

    `in_front`: the targets that do not count are the first ones, and one in the middle.
    `nan`: the model makes a nan of the first token.
    """
    x, y = padded_batch(3, batch=sum(counts), seq=6, vocab=VOCAB)
    parts = models.in_parts(x, y, counts)
    for number in empty:
        parts[number][1].fill_(IGNORED)
    if in_front:
        y.copy_(y.flip(1))
        y[:, -2] = IGNORED
    model = models.Odd(nn.Embedding(VOCAB, 3), nn.Linear(3, VOCAB)) if odd else _tiny()
    if nan:
        model.get_parameter("0.weight").data[x[0, 0]] = torch.nan
    done, loss = _observed(answer, model, parts, again=again)
    if nan:
        found = {"the loss": effects.as_number(loss), "the gradient": done[GRADIENT]}
        shown = [
            what for what, value in found.items() if torch.is_tensor(value) and value.isnan().any()
        ]
        return {SHOWN: " and ".join(shown) or "nowhere"}
    return {**effects.about_loss(loss), **done}


def _tiny(width: int = 2) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(VOCAB, width), nn.Linear(width, VOCAB)).double()


def _held_tokens(answer: Callable[..., Any]) -> dict[str, str]:
    def make(items: int) -> tuple[nn.Module, Tensor, Tensor]:
        tokens = torch.ones(items, 6, dtype=torch.long)
        return _tiny(64), tokens, tokens

    def run(model: nn.Module, x: Tensor, y: Tensor, _count: int) -> None:
        answer(model, models.in_parts(x, y, 4))

    return effects.held_at_once(make, run)


def _token_cases() -> list[EffectCase]:
    cases: tuple[tuple[str, dict[str, Any]], ...] = (
        ("2 sequences in 1 part", {"counts": [2]}),
        ("parts of 2 and 1 sequences", {"counts": [2, 1]}),
        ("parts of 2, 2 and 1 sequences", {"counts": [2, 2, 1]}),
        ("no tokens in the last part", {"counts": [2, 2], "empty": [1]}),
        ("all tokens in the last of 3 parts", {"counts": [1, 1, 2], "empty": [0, 1]}),
        ("gradients are there already", {"counts": [2, 1], "again": True}),
        ("padding in front", {"counts": [2, 2, 1], "in_front": True}),
        ("no tokens in the middle part", {"counts": [2, 1, 1], "empty": [1]}),
        (f"a model {models.ODD}", {"counts": [2, 1], "odd": True}),
        ("a model that makes a nan", {"counts": [1, 1], "nan": True}),
    )
    shown = [(text, partial(_add_tokens, **options)) for text, options in cases]
    return [*shown, ("4 parts of 4 sequences", _held_tokens)]


LOOP, WEIGHED = "for inputs, targets in parts:", "* len(targets) / num_items"
MEAN, ALL_ITEMS = "loss_fn(model(inputs), targets)", "sum(len(targets) for _, targets in parts)"
ADD = f"({MEAN} {WEIGHED}).backward()"
TOGETHER = """inputs, targets = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
parts = [(inputs, targets)]"""

ADD_UP = f"""total = total + {MEAN} {WEIGHED}
if targets is parts[-1][1]:
    total.backward()"""

UNEVEN = Exercise(
    key="accumulation-3",
    title="uneven parts",
    check=Effects(
        cases=_cases,
        looks=OF_LABELS,
        look=LOOK,
        rtol=1e-9,
        success="Every item counts the same, also in uneven parts.",
    ),
    wrong=(
        Edit(WEIGHED, "/ len(parts)", MEAN_OF_MEANS),
        Edit(WEIGHED, "", SUMMED),
        Edit(LOOP, f"{TOGETHER}\n{LOOP}", ONCE_EACH),
        Edit(WEIGHED, "/ num_items", NOT_TIMES_ITEMS),
        Edit(WEIGHED, "* len(targets)", NOT_DIVIDED),
        Edit(ALL_ITEMS, "len(parts) * len(parts[0][1])", LIKE_THE_FIRST),
        Edit(LOOP, f"{LOOP}\n    model.zero_grad()", ONLY_LAST),
        Edit(LOOP, f"model.zero_grad()\n{LOOP}", CLEARED),
        Edit(ADD, ADD_UP, effects.ALIVE, also=((LOOP, f"total = 0.0\n{LOOP}"),)),
        Edit("sum(len(targets)", "sum(targets.numel()", NOT_NUMEL),
        *TRAINS,
    ),
)

COUNT, SHARE = "int((targets != IGNORED).sum())", "* count / sum(counts)"
RUN_FIRST = "outputs = model(inputs)\nif count:"
BACK, FORWARD = "loss.backward()", "token_loss(model(inputs), targets)"

TOKENS = Exercise(
    key="accumulation-4",
    title="tokens that count",
    check=Effects(
        cases=_token_cases,
        looks={**OF_LABELS, effects.LOSS: ONE_NUMBER, SHOWN: NAN_HIDDEN},
        look=LOOK,
        rtol=1e-9,
        success="Every token counts the same, padding counts nothing.",
    ),
    wrong=(
        Edit(SHARE, "/ len(parts)", TOKEN_MEANS),
        Edit(COUNT, "targets.numel()", BY_SEQUENCES),
        Edit("sum(counts)", "sum(each.numel() for _, each in parts)", PADDING),
        Edit("if count:", "if True:", NAN),
        Edit(
            "if count:", RUN_FIRST, NOT_SKIPPED, also=((FORWARD, "token_loss(outputs, targets)"),)
        ),
        Edit(SHARE, "", TOKENS_SUMMED),
        Edit(COUNT, "int((targets > 0).sum())", TOKEN_0),
        Edit("return total", "return loss.detach()", LOSS_OF_LAST),
        Edit("total = 0.0", "total = 0.0\nmodel.zero_grad()", CLEARED),
        Edit("total = 0.0", f"total = 0.0\n{TOGETHER}", ONCE_EACH),
        Edit(BACK, effects.KEEP, effects.ALIVE),
        Edit("loss.detach()", "loss", effects.WITH_GRAPH),
        Edit(COUNT, "int((targets != IGNORED).cumprod(1).sum())", TO_THE_FIRST_IGNORED),
        Edit(BACK, f"if loss.isnan():\n    continue\n{BACK}", NAN_HIDDEN),
        *TRAINS,
    ),
)
