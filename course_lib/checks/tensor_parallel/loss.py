"""Exercise 4 of 07_tensor_parallel: a loss over logits that are split over the ranks."""

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from course_lib.checks.edits import Edit
from course_lib.checks.exercise import Cause, Exercise
from course_lib.checks.expectations import Demand, Untouched
from course_lib.checks.on_ranks import At, OnRanks, Trouble
from course_lib.checks.tensor_parallel.parts import (
    APART,
    NEARLY,
    NOT_TRAINING,
    NOT_WAITED,
    OUTSIDE,
    close,
    same_bits,
)
from course_lib.checks.tensor_parallel.seen_loss import use
from course_lib.checks.tensor_parallel.whole_logits import (
    SCALE,
    case_of,
    from_last_call,
    from_rank,
    grad_of,
    is_own_tokens,
    is_unmasked,
    left_out_after_shift,
    loss_of,
    mean_maximum,
    nearest,
    own_logit,
    own_maximum,
    own_tokens,
    own_vocabulary,
    through_maximum,
)
from course_lib.core import Event

NUM_CALLS = NUMBERS_PER_TOKEN = 3

A_NUMBER = Cause("Backward starts from it, so it has to keep its graph: no item() or float().")
NO_MEAN = Cause("Return the mean over the tokens: one number, without any dims.")
NARROW = Cause("Compute in the dtype of the logits, or in a wider one: nothing else is wrong yet.")
LOCAL = Cause(
    "That is the loss over this rank's own logits: the softmax divides by the sum over all ranks' "
    "logits, and the target may be on another rank."
)
WHOSE_LOSS = Cause(
    "That is the loss of the tokens whose target is on this rank. But every rank's logits are in "
    "every token's loss: sum the logits of the targets, and each rank has the loss of each token."
)
UNSHIFTED = Cause("Subtract the largest from the target's logit, too, or add it back.")
ALL_TOKENS = Cause("A target of -100 has no loss: divide by the number of the others.")
SUMMED = Cause("That is the sum over the tokens: return their mean.")
TIMES_P = Cause("{p} times too large: all ranks have the same loss, do not sum it.")
OVERFLOW = Cause(
    "exp overflows, or is 0 everywhere: subtract the largest logit first, for each token its own, "
    "the largest of all ranks (with ReduceOp.MAX; all_reduce alone is a sum)."
)
OWN_MAXIMUM = Cause(
    "Each rank subtracted the largest of its own logits, so the sums do not fit together: all have "
    "to subtract the same maximum."
)
NEAREST = Cause(
    "A rank that does not have the target added another entry's logit: only the rank that has it "
    "contributes its logit, the others contribute 0."
)
OWN_LOGIT = Cause("The target's logit is missing on the ranks that do not have it: sum it, too.")
NO_ENTRY = Cause("Leave out the tokens whose target is -100, on every rank, and no other tokens.")
AFTER_SHIFT = Cause(
    "Ranks leave out different tokens: compare `targets` with -100, on every rank alike. Less "
    "`first`, they are other numbers on each rank."
)
FROM_RANK = Cause(
    "This rank's part begins at entry `first`, wherever that is: use the `first` of this call."
)
WHOSE = Cause(
    "Is each target's logit counted once, from the rank that has it? Is the sum of exponentials "
    "that of all ranks? Do all subtract the same maximum? Are only targets of -100 left out?"
)
CALLERS = Cause("It belongs to the caller, who still needs it: work on a copy.")
NO_GRADIENT = Cause(
    "What is summed has to stay in the graph: sum with reduce_from_region, which has a backward."
)
SUMMED_BACK = Cause("{p} times too large: a sum in backward that nobody asked for.")
DIVIDED = Cause("{p} times too small: every rank's logits have the whole gradient of the loss.")
ABOVE = Cause("The gradient that comes from above is missing: multiply by it.")
IN_GRAPH = Cause(
    "The maximum is in the graph, and its gradient flows into each rank's own logits: detach it. "
    "It cancels out, so it needs no gradient."
)
SOFTMAX = Cause(
    "The sum contributes softmax, the target's logit -1: does the gradient flow through both?"
)
UNMASKED = Cause(
    "This token's target is -100: it has no loss, so its whole row has gradient 0. Is the mask "
    "missing in backward?"
)
KEPT = Cause(
    "Each call alone is right, so one left something behind that the next one overwrote or used "
    "again: softmax, gradient, count. Keep what backward needs per call (in ctx)."
)
STAY = Cause("Logits stay where they are: only sums and maxima over the vocabulary travel.")
ENOUGH = Cause(
    "Only three values per token are needed: the maximum, the sum of exponentials, the target's "
    "logit. From them every rank computes the whole loss; no more sums are needed."
)
ALIKE = Cause(
    "What is summed must have the same shape on every rank: one value per token. The parts of the "
    "vocabulary may differ in size."
)
SOME_RANKS = Cause(
    "Only some ranks made a call. A rank that has none of the targets has to make each call, too, "
    "and contribute zeros."
)

SIZES = Cause("Was a size taken for granted? Ask logits.shape and len(targets) for it.")


def _budget(at: At) -> int:
    """Return the bytes of three numbers a token, of 8 bytes at most."""
    return NUMBERS_PER_TOKEN * 8 * len(case_of(at).targets) * case_of(at).num_losses


def _num_calls(at: At) -> int:
    return NUM_CALLS * case_of(at).num_losses


def _few(calls_of_rank: Callable[[At], list[Event]]) -> Demand:
    """Demand that calls are within the budget."""

    def sent(at: At) -> tuple[int, int]:
        calls = calls_of_rank(at)
        return len(calls), sum(call.num_bytes for call in calls)

    return Demand(
        lambda at: sent(at)[0] <= _num_calls(at) and sent(at)[1] <= _budget(at),
        lambda at: (
            f"{sent(at)[0]} calls of {sent(at)[1]} bytes in all; the budget is {_num_calls(at)} "
            f"calls of {_budget(at)} bytes, {NUMBERS_PER_TOKEN} numbers a token"
        ),
        ENOUGH,
    )


def _is_missing(trouble: Trouble) -> bool:
    """Return whether the ranks made calls of different kinds: one of them left a call out."""
    return len(set(re.findall(r"calls? (\S+)", trouble.text))) > 1


def _narrowed(at: At) -> Any:
    """Return the loss; in the dtype of the logits, if it came in a wider one."""
    got, need = at.seen.loss, loss_of(at).dtype
    wide = isinstance(got, Tensor) and torch.promote_types(got.dtype, need) == got.dtype
    return got.to(need) if wide else got


def _times(factor: Callable[[At], Any]) -> Callable[[At], Tensor]:
    return lambda at: loss_of(at) * factor(at)


TOP = "top = logits.detach().max(dim=-1).values"
MAX = "dist.all_reduce(top, dist.ReduceOp.MAX)"
SHIFT = "shifted = logits - top[:, None]"
TOTAL = "reduce_from_region(shifted.exp().sum(-1))"
LOSSES = "losses = total.log() - reduce_from_region(own)"
MEAN = "(losses * counts).sum() / counts.sum()"
RETURN = f"return {MEAN}"
IF_FROZEN = "if not logits.requires_grad:"
REMEMBERED = "vars(split_cross_entropy).setdefault"

LOSS = Exercise(
    key="tensor_parallel-4",
    title="a loss over split logits",
    library=(
        "course_lib.tensor_parallel.cross_entropy:vocab_parallel_cross_entropy",
        "course_lib.tensor_parallel.cross_entropy:parallel_token_loss",
    ),
    check=OnRanks(
        observe_on_rank=use,
        trouble=(
            ("mismatch", _is_missing, SOME_RANKS),
            ("mismatch", "", ALIKE),
            ("hang", "", SOME_RANKS),
            ("raised", "num_classes|must match|shape", SIZES),
        ),
        expect=(
            Demand(
                lambda at: all(call.num_bytes <= _budget(at) for call in at.seen.forward),
                "a call is larger than all the numbers that have to be sent",
                STAY,
            ),
            _few(lambda at: at.seen.forward),
            close(
                _narrowed,
                loss_of,
                what="the loss",
                shape=NO_MEAN,
                dtype=NARROW,
                predicates=(
                    (lambda _at, got, _: not isinstance(got, Tensor | None), A_NUMBER),
                    (lambda at, got, _: at.seen.never_waited and got.dtype, NOT_WAITED),
                    (lambda at, got, _: case_of(at).frozen and got.dtype, NOT_TRAINING),
                    (lambda at, got, _: case_of(at).num_losses > 1 and got.dtype, KEPT),
                ),
                causes=(
                    *((LOCAL, wrong) for wrong in own_vocabulary),
                    *((WHOSE_LOSS, wrong) for wrong in own_tokens),
                    (UNSHIFTED, lambda at: loss_of(at) - mean_maximum(at)),
                    (ALL_TOKENS, _times(lambda at: case_of(at).counted.double().mean())),
                    (SUMMED, _times(lambda at: case_of(at).counted.sum())),
                    (TIMES_P, _times(lambda at: at.world_size)),
                    (OWN_MAXIMUM, own_maximum),
                    (NEAREST, nearest),
                    (FROM_RANK, from_rank),
                    (FROM_RANK, from_last_call),
                    (OWN_LOGIT, own_logit),
                    *((AFTER_SHIFT, wrong) for wrong in left_out_after_shift),
                ),
                otherwise=(
                    (lambda _at, got, _: not got.isfinite(), OVERFLOW),
                    (lambda at, *_: not case_of(at).counted.all(), NO_ENTRY),
                ),
                look=WHOSE,
            ),
            same_bits("loss", "the loss"),
            Untouched(CALLERS),
            Demand(
                lambda at: at.seen.grad is not None or case_of(at).frozen,
                "no gradient arrives at the logits",
                NO_GRADIENT,
            ),
            close(
                "grad",
                grad_of,
                what="the gradient of the logits",
                predicates=((lambda at, *_: case_of(at).num_losses > 1, KEPT),),
                causes=(
                    (SUMMED_BACK, lambda at: grad_of(at) * at.world_size),
                    (DIVIDED, lambda at: grad_of(at) / at.world_size),
                    (ABOVE, lambda at: grad_of(at) / SCALE),
                    (IN_GRAPH, through_maximum),
                ),
                otherwise=((is_own_tokens, WHOSE_LOSS), (is_unmasked, UNMASKED)),
                look=SOFTMAX,
            ),
            _few(lambda at: [*at.seen.forward, *at.seen.backward]),
            Demand(
                lambda at: not at.seen.outside,
                "all_reduce got a tensor that requires a gradient",
                OUTSIDE,
            ),
        ),
        success="The loss of one process on 1 to 4 ranks; three numbers a token sent.",
    ),
    wrong=(
        Edit(
            TOTAL,
            "shifted.exp().sum(-1)",
            LOCAL,
            also=((MAX, "top.zero_()"), (LOSSES, "losses = total.log() - own")),
        ),
        Edit(
            TOTAL,
            "shifted.exp().sum(-1)",
            LOCAL,
            also=((MAX, "pass"), (LOSSES, "losses = total.log() - own")),
        ),
        Edit(LOSSES, "return F.cross_entropy(logits[here], local[here])", LOCAL),
        Edit(
            TOP,
            "vocab = torch.tensor(first + logits.shape[1])\n"
            "dist.all_reduce(vocab, dist.ReduceOp.MAX)\n"
            "whole = logits.new_zeros(len(logits), int(vocab))\n"
            "whole[:, first : first + logits.shape[1]] = logits\n"
            "return F.cross_entropy(reduce_from_region(whole), targets)",
            STAY,
        ),
        Edit(SHIFT, "shifted = logits", OVERFLOW),
        Edit(MAX, "pass", OWN_MAXIMUM),
        Edit(MAX, "dist.all_reduce(top, dist.ReduceOp.MAX, async_op=True)", NOT_WAITED),
        Edit(
            "local.where(here, 0)[:, None])[:, 0] * here",
            "local.clamp(0, logits.shape[1] - 1)[:, None])[:, 0]",
            NEAREST,
        ),
        Edit(MEAN, "(losses * counts).mean()", ALL_TOKENS),
        Edit(MEAN, "losses.mean()", NO_ENTRY),
        Edit(MEAN, "(losses * counts).sum()", SUMMED),
        Edit("targets != -100", "targets - first != -100", AFTER_SHIFT),
        Edit("targets != -100", "targets - first >= 0", AFTER_SHIFT),
        Edit(
            TOTAL,
            "reduce_from_region(copy_to_region(shifted.exp().sum(-1)))",
            SUMMED_BACK,
            also=((LOSSES, LOSSES.replace("(own)", "(copy_to_region(own))")),),
        ),
        Edit(TOP, f"logits = logits.detach()\n{TOP}", NO_GRADIENT),
        Edit(RETURN, f"targets[targets == -100] = 0\n{RETURN}", CALLERS),
        Edit(SHIFT, "logits.data.sub_(top[:, None])\nshifted = logits", CALLERS),
        Edit(
            RETURN,
            f"loss = {MEAN}\n"
            "if loss.requires_grad:\n"
            "    loss.register_hook(lambda grad: [grad.clone(), grad.zero_()][0])\n"
            "return loss",
            CALLERS,
        ),
        Edit(
            RETURN,
            f"loss = {MEAN}\n"
            "if loss.requires_grad:\n    loss.register_hook(torch.ones_like)\n"
            "return loss",
            ABOVE,
        ),
        Edit(
            "own = shifted.gather(-1, local.where(here, 0)[:, None])[:, 0] * here",
            "hot = F.one_hot(targets.clamp(min=0), 23)[:, first : first + logits.shape[1]]\n"
            "own = (shifted * hot).sum(-1)",
            SIZES,
        ),
        Edit(LOSSES, "losses = total.log() - own", OWN_LOGIT),
        Edit(MAX, "dist.all_reduce(top)", OVERFLOW),
        Edit(".max(dim=-1).values", ".max().expand(len(logits)).clone()", OVERFLOW),
        Edit(MAX, "dist.broadcast(top, 0)", OVERFLOW),
        Edit(".max(dim=-1).values", ".max(dim=-1).values.clamp(min=0)", OVERFLOW),
        Edit("logits.detach().max", "logits.max", IN_GRAPH),
        Edit("own = shifted.gather", "own = logits.gather", UNSHIFTED),
        Edit(LOSSES, "losses = (total.log() - own) * here", WHOSE_LOSS),
        Edit(RETURN, "return losses[here].mean()", WHOSE_LOSS),
        Edit(
            LOSSES,
            "losses = (total.log() - own) * here",
            WHOSE_LOSS,
            also=((RETURN, f"return reduce_from_region({MEAN})"),),
        ),
        Edit(RETURN, f"return ({MEAN}).item()", A_NUMBER),
        Edit(RETURN, "return losses", NO_MEAN),
        Edit(RETURN, f"return reduce_from_region({MEAN}) / dist.get_world_size()", ENOUGH),
        Edit(RETURN, f"{RETURN} * dist.get_world_size()", TIMES_P),
        Edit(TOP, f"logits = copy_to_region(logits)\n{TOP}", ALIKE),
        Edit(
            TOTAL,
            "shifted.exp().sum(-1) * 1.0\ndist.all_reduce(total)",
            OUTSIDE,
            also=((LOSSES, "own = own * 1.0\ndist.all_reduce(own)\nlosses = total.log() - own"),),
        ),
        Edit(TOP, f"logits = logits.float()\n{TOP}", NARROW),
        Edit("targets - first", "targets - dist.get_rank() * logits.shape[1]", FROM_RANK),
        Edit(
            LOSSES,
            "losses = total.log() - (reduce_from_region(own) if here.any() else own)",
            SOME_RANKS,
        ),
        Edit("targets - first", f"targets - {REMEMBERED}('first', first)", FROM_RANK),
        Edit(
            LOSSES,
            LOSSES.replace("(own)", "(own) if logits.requires_grad else total.log() - own"),
            NOT_TRAINING,
        ),
        Edit(LOSSES, f"{LOSSES}\nif not torch.is_grad_enabled():\n    losses = own", NOT_TRAINING),
        Edit(RETURN, f"{IF_FROZEN}\n    logits.sub_(top[:, None])\n{RETURN}", CALLERS),
        Edit(RETURN, f"{IF_FROZEN}\n    targets.sub_(first)\n{RETURN}", CALLERS),
        Edit(
            TOTAL,
            "shifted.exp().sum(-1)\n"
            "low = total.bfloat16() if total.dtype == torch.float32 else total\n"
            "total = reduce_from_region(low).to(total.dtype)",
            NEARLY,
        ),
        Edit(TOTAL, f"{TOTAL} + 1e-6", NEARLY),
        Edit(
            TOTAL,
            "shifted.exp().sum(-1)\n"
            "total = total + (reduce_from_region(total.detach()) - total.detach())",
            APART,
        ),
        Edit(MEAN, "(losses - (losses * ~counts).detach()).sum() / counts.sum()", UNMASKED),
        Edit(
            MEAN,
            MEAN.replace("/ ", f"/ {REMEMBERED}(f'{{len(targets)}} {{counts.all()}}', ") + ")",
            KEPT,
        ),
        Edit(
            TOP,
            f"kept = {REMEMBERED}(logits.shape, torch.empty_like(logits))\n"
            "logits = logits.view_as(logits)\n"
            "if logits.requires_grad:\n"
            f"    logits.register_hook(kept.copy_)\n{TOP}",
            KEPT,
        ),
    ),
)
