"""Exercise 4 of 07_tensor_parallel: a loss over logits that are split over the ranks."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from course_lib.checks.edits import Edit
from course_lib.checks.exercise import Cause, Exercise
from course_lib.checks.judge import ByExample
from course_lib.checks.properties import CALLERS, DIGITS, NOT_WAITED, SEEDS
from course_lib.checks.tensor_parallel.parts import APART, NOT_TRAINING, OUTSIDE, is_outside
from course_lib.checks.watch import ALWAYS, UNWAITED, Step, Watch, bits_of
from course_lib.models import IGNORED

SCALE = 7.0  # the gradient from above
NUM_CALLS = NUMBERS_PER_TOKEN = 3
ROUNDING = {torch.float64: 1e-11, torch.float32: 1e-5, torch.bfloat16: 0.05}
# facets
MEAN_LOSS, BITS, GRAD, ABOVE = "the loss", "its bits", "the gradient", "the gradient from above"
CALLS, WARNS = "calls", "PyTorch's warning that backward does not know a call"

LOCAL = Cause(
    "That is the loss over this rank's own logits: the softmax divides by the sum over all ranks' "
    "logits, and the target may be on another rank."
)
WHOSE_LOSS = Cause(
    "That is the loss of the tokens whose target is on this rank. But every rank's logits are in "
    "every token's loss: sum the logits of the targets, and each rank has the loss of each token."
)
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
NO_ENTRY = Cause(
    "A target of -100 has no loss: leave those tokens out, on every rank, and divide by the number "
    "of the others."
)
AFTER_SHIFT = Cause(
    "Ranks leave out different tokens: compare `targets` with -100, on every rank alike. Less "
    "`first`, they are other numbers on each rank."
)
FROM_RANK = Cause(
    "This rank's part begins at entry `first`, wherever that is: use the `first` of this call."
)
SUMMED = Cause("That is the sum over the tokens: return their mean.")
TIMES_P = Cause("{p} times too large: all ranks have the same loss, do not sum it.")
EPSILON = Cause("Add no epsilon: the largest exponential is 1, so the sum cannot be 0.")
NO_GRADIENT = Cause(
    "What is summed has to stay in the graph: sum with reduce_from_region, which has a backward, "
    "and use neither detach() nor item()."
)
DIVIDED = Cause("{p} times too small: every rank's logits have the whole gradient of the loss.")
SUMMED_BACK = Cause("{p} times too large: a sum in backward that nobody asked for.")
IN_GRAPH = Cause(
    "The maximum is in the graph, and its gradient flows into each rank's own logits: detach it. "
    "It cancels out, so it needs no gradient."
)
KEPT = Cause(
    "Each call alone is right, so one left something behind that the next one overwrote or used "
    "again: softmax, gradient, count. Keep what backward needs per call (in ctx)."
)
ENOUGH = Cause(
    "Only three values per token are needed: the maximum, the sum of exponentials, the target's "
    "logit. From them every rank computes the whole loss: neither logits nor losses travel."
)
EVERY_CALL = Cause(
    "Every rank makes each call, also one that has none of the targets (it contributes zeros), and "
    "with one value per token: parts of the vocabulary may differ in size."
)
WHOSE = Cause(
    "Is each target's logit counted once, from the rank that has it? Is the sum of exponentials "
    "that of all ranks? Do all subtract the same maximum, also from the target's logit? Are only "
    "targets of -100 left out?"
)
SOFTMAX = Cause(
    "The sum contributes softmax, the target's logit -1, and a token whose target is -100 nothing: "
    "does the gradient flow through both, and is it multiplied by the one from above?"
)


@dataclass(frozen=True)
class Case:
    """Whole logits and targets, the same on every rank; `backwards`: rank 0 has the last part."""

    logits: Tensor
    targets: Tensor
    backwards: bool = False
    further: Tensor | None = None  # other targets, for two more losses
    frozen: bool = False  # logits need no gradient
    no_grad: bool = False

    def given(self, rank: int) -> tuple[Tensor, Tensor, int]:
        """Return what a rank is given."""
        parts = torch.arange(self.logits.shape[1]).tensor_split(dist.get_world_size())
        mine = parts[-1 - rank if self.backwards else rank]
        logits = self.logits[:, mine].requires_grad_(not self.frozen)
        return logits, self.targets.clone(), int(mine[0])

    def total(self, loss: Callable[..., Any], logits: Tensor, targets: Tensor, *first: int) -> Any:
        """Return the loss; with further targets, other logits' and other targets' are in it.

        What a loss keeps for backward is needed after the next one was computed. Each of the three
        has another number of targets that count, or other logits of the same shape.
        """
        total = loss(logits, targets, *first)
        if self.further is not None:
            total = total + loss(logits.flip(0), targets, *first)
            total = total + loss(logits, self.further, *first)
        return total

    def whole(self) -> tuple[Tensor, Tensor]:
        """Return the loss of one process, and the gradient of its logits."""
        logits = self.logits.to(torch.double, copy=True).requires_grad_()
        with torch.enable_grad():
            loss = self.total(F.cross_entropy, logits, self.targets)
            (grad,) = torch.autograd.grad(SCALE * loss, logits)
        return loss.detach().to(self.logits.dtype), grad.to(self.logits.dtype)


def _cases() -> dict[str, Case]:
    logits = _random(6, 23)
    targets = torch.tensor([0, 22, 8, 12, 5, 17])
    ignored = torch.tensor([0, IGNORED, 8, 12, IGNORED, 17])
    further = torch.tensor([IGNORED, IGNORED, 1, IGNORED, 22, 9])
    tall = logits.clone()
    tall[:, 20] += 900.0  # no exponential of it fits, and rank 0 knows nothing of it
    apart = logits + torch.tensor([-900.0, 0.0, 900.0]).double().repeat(2)[:, None]
    return {
        "plain logits": Case(logits, targets),
        "two targets of -100": Case(logits, ignored),
        "three losses, one backward": Case(logits, ignored, further=further),
        "logits that need no gradient": Case(logits, ignored, frozen=True),
        "under torch.no_grad()": Case(logits, ignored, frozen=True, no_grad=True),
        "float32": Case(_random(40, 11).float(), torch.arange(40) % 11),
        "a logit of 900": Case(tall, targets),
        "a token near 900, one near -900": Case(apart, targets),
        "5 tokens, rank 0 has the last part of 10": Case(
            _random(5, 10), torch.tensor([3, 9, 4, 6, IGNORED]), backwards=True
        ),
        "one token, all logits zero": Case(torch.zeros(1, 9).double(), torch.tensor([4])),
        "all targets on one rank": Case(_random(3, 37), torch.tensor([36, 35, 36])),
        # these targets have the largest logit; y + (total - y) is not total on 3 ranks
        "bfloat16": Case(_random(4, 12, seed=107).bfloat16(), torch.tensor([9, 2, 3, IGNORED])),
    }


def _random(*shape: int, seed: int = 7) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=random, dtype=torch.double) * 3


def observe(rank: int, answer: Callable[..., Any]) -> dict[str, Any]:
    """Compute the loss of each case and its gradient; the first one once more, not watched."""
    watch, cases = Watch(), _cases()
    for label, case in cases.items():
        with torch.set_grad_enabled(not case.no_grad):
            _use(rank, answer, case, watch, label)
    label, case = next(iter(cases.items()))
    watch.seen[label][WARNS] = is_outside(lambda: _backward(answer(*case.given(rank))))
    return watch.seen


def _use(rank: int, answer: Callable[..., Any], case: Case, watch: Watch, label: str) -> None:
    logits, targets, first = case.given(rank)
    with watch.step(label, logits=logits, targets=targets) as step:
        loss = case.total(answer, logits, targets, first)
        step.show(loss=loss)
        above = _backward(loss)
    needed_loss, needed_grad = case.whole()
    bits = bits_of(loss.double()) if isinstance(loss, Tensor) else ""
    step.show(
        **{
            MEAN_LOSS: _settled(step.shown["loss"], needed_loss),
            BITS: [[*range(dist.get_world_size())], bits],
            GRAD: _settled(logits.grad, needed_grad[:, first : first + logits.shape[1]]),
            ABOVE: above,
            CALLS: _calls(step, len(targets), 1 if case.further is None else 3),
        }
    )


def _backward(loss: Any) -> float:
    """Run backward, if there is one; return the gradient from above as it is then."""
    above = torch.tensor(SCALE)
    if isinstance(loss, Tensor) and loss.requires_grad and not loss.dim():
        above = torch.full_like(loss, SCALE)
        loss.backward(above)
    return above.item()


def _settled(got: Any, need: Tensor) -> Any:
    """Return what is needed, where what was got is that but for rounding or a wider dtype."""
    fits = isinstance(got, Tensor) and got.shape == need.shape
    if not fits or torch.promote_types(got.dtype, need.dtype) != got.dtype:
        return got
    got, limit = got.to(need.dtype), ROUNDING[need.dtype]
    return need.where(torch.isclose(got, need, rtol=limit, atol=limit), got)


def _calls(step: Step, num_tokens: int, num_losses: int) -> str:
    """Return whether the calls are within the budget: numbers have 8 bytes at most."""
    num_calls, sizes = NUM_CALLS * num_losses, [c.work.post.num_bytes for c in step.calls.values()]
    num_bytes = NUMBERS_PER_TOKEN * 8 * num_tokens * num_losses
    if len(sizes) <= num_calls and sum(sizes) <= num_bytes:
        return f"at most {num_calls} of {num_bytes} bytes in all"
    return f"{len(sizes)} of {sum(sizes)} bytes in all"


TOP = "top = logits.detach().max(dim=-1).values"
MAX = "dist.all_reduce(top, dist.ReduceOp.MAX)"
SHIFT = "shifted = logits - top[:, None]"
TOTAL = "reduce_from_region(shifted.exp().sum(-1))"
LOSSES = "losses = total.log() - reduce_from_region(own)"
MEAN = "(losses * counts).sum() / counts.sum()"
RETURN = f"return {MEAN}"
REMEMBERED = "vars(split_cross_entropy).setdefault"

LOSS = Exercise(
    key="tensor_parallel-4",
    title="a loss over split logits",
    library=(
        "course_lib.tensor_parallel.cross_entropy:vocab_parallel_cross_entropy",
        "course_lib.tensor_parallel.cross_entropy:parallel_token_loss",
    ),
    check=ByExample(
        observe_on_rank=observe,
        facets=(UNWAITED, MEAN_LOSS, BITS, *ALWAYS, GRAD, ABOVE, CALLS, WARNS),
        equal=(BITS,),
        looks=(
            (UNWAITED, NOT_WAITED),
            (MEAN_LOSS, WHOSE),
            (BITS, APART),
            (GRAD, SOFTMAX),
            (ABOVE, CALLERS),
            (CALLS, ENOUGH),
            (WARNS, OUTSIDE),
            ("hang", EVERY_CALL),
            ("mismatch", EVERY_CALL),
        ),
        success="The loss of one process on 1 to 4 ranks; three numbers a token sent.",
    ),
    wrong=(
        Edit(LOSSES, "return F.cross_entropy(logits[here], local[here])", LOCAL),
        Edit(RETURN, "return losses[here].mean()", WHOSE_LOSS),
        Edit(LOSSES, "losses = (total.log() - own) * here", WHOSE_LOSS),
        Edit(SHIFT, "shifted = logits", OVERFLOW),
        Edit(MAX, "dist.all_reduce(top)", OVERFLOW),
        Edit(".max(dim=-1).values", ".max().expand(len(logits)).clone()", OVERFLOW),
        Edit(MAX, "pass", OWN_MAXIMUM),
        Edit(
            "local.where(here, 0)[:, None])[:, 0] * here",
            "local.clamp(0, logits.shape[1] - 1)[:, None])[:, 0]",
            NEAREST,
        ),
        Edit(LOSSES, "losses = total.log() - own", OWN_LOGIT),
        Edit(MEAN, "(losses * counts).mean()", NO_ENTRY),
        Edit(MEAN, "losses.mean()", NO_ENTRY),
        Edit("targets != -100", "targets - first >= 0", AFTER_SHIFT),
        Edit("targets != -100", "targets - first != -100", AFTER_SHIFT),
        Edit("targets - first", "targets - dist.get_rank() * logits.shape[1]", FROM_RANK),
        Edit("targets - first", f"targets - {REMEMBERED}('first', first)", FROM_RANK),
        Edit(MEAN, "(losses * counts).sum()", SUMMED),
        Edit(RETURN, f"{RETURN} * dist.get_world_size()", TIMES_P),
        Edit(TOTAL, f"{TOTAL} + 1e-6", EPSILON),
        Edit(TOP, f"logits = logits.float()\n{TOP}", DIGITS),
        Edit(TOTAL, "reduce_from_region(shifted.exp().sum(-1).bfloat16()).to(logits)", DIGITS),
        Edit(TOP, f"logits = logits.detach()\n{TOP}", NO_GRADIENT),
        Edit(RETURN, f"return ({MEAN}).item()", NO_GRADIENT),
        Edit("logits.detach().max", "logits.max", IN_GRAPH),
        Edit(RETURN, f"return copy_to_region({MEAN})", SUMMED_BACK),
        Edit(TOTAL, "shifted.exp().sum(-1) * 1.0\ndist.all_reduce(total)", OUTSIDE),
        Edit(RETURN, f"return reduce_from_region({MEAN}) / dist.get_world_size()", DIVIDED),
        Edit(RETURN, f"dist.all_reduce(top)\n{RETURN}", ENOUGH),
        Edit(TOP, f"logits = copy_to_region(logits)\n{TOP}", EVERY_CALL),
        Edit(LOSSES, f"{LOSSES}\nif not torch.is_grad_enabled():\n    losses = own", NOT_TRAINING),
        Edit(SHIFT, "logits.data.sub_(top[:, None])\nshifted = logits", CALLERS),
        Edit("/ counts.sum()", f"/ {REMEMBERED}(f'{{counts.all()}}', counts.sum())", KEPT),
        SEEDS,
    ),
)
