"""Exercise 2 of 09_zero: each rank steps its own shard, and the parameters are gathered."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import SGD, Optimizer

from course_lib.checks.ddp.parts import Bag
from course_lib.checks.edits import Edit
from course_lib.checks.exercise import Cause, Exercise
from course_lib.checks.judge import ByExample, unlike
from course_lib.checks.memory_watch import MemoryWatch
from course_lib.checks.properties import HAS_STATE, NOT_WAITED, SEEDS, SHARED
from course_lib.checks.watch import CHANGED, OVERWRITTEN, UNWAITED, Watch
from course_lib.checks.zero.parts import CALLS, calls_of, flat, named, shard_numel

LR, MOMENTUM = 0.5, 0.9
# the gradients of a step are its times the slopes; float32 has not the digits of the fourth
TIMES = (1.0, 2.0, 0.0, 3.0 + 2**-30, math.nan)
# facets
STEPPED, STATE, FLAT = "what the optimizer steps", "the optimizer's state", "the flat parameter"
GRADS, BYTES = "param.grad that step() has changed", "bytes too many that it keeps"

FROZEN = Cause(
    "A frozen parameter has no gradient, and nobody steps it: lay out only what is trained, and "
    "write back into that."
)
NO_GRADIENT_YET = Cause(
    "A param.grad is None: in __init__ no backward has run yet, and a frozen parameter never gets "
    "one."
)
PARAMS_DTYPE = Cause(
    "Keep the shard in the parameters' dtype: then its gradient, its state and what is sent have "
    "it, too."
)
AS_BEFORE = Cause(
    "Nothing has changed. Step first, then gather, then write the new numbers into the parameters "
    "with copy_: `param = ...` only names another tensor."
)
NO_GRADIENT = Cause(
    "The optimizer has stepped nothing: in each step, set self.shard.grad, then call "
    "self.optimizer.step()."
)
UNSET = Cause("self.shard.grad is None until you assign it a tensor.")
NOT_GATHERED = Cause(
    "Only this rank's own shard is new: after the step, all_gather what the others have stepped."
)
NO_MOMENTUM = Cause(
    "Another optimizer knows no momentum: make one, in __init__, and let its step() change the "
    "shard."
)
SUMMED = Cause("The gradients are summed once more, {p} times too large: they are means already.")
DIVIDED = Cause("The gradients are divided by {p} once more: they are means already.")
ADDED_UP = Cause("Gradients of earlier steps are in it: do not add them up.")
SAME_SLICE = Cause(
    "Are this rank's numbers, this rank's gradients and the place where they go back the same "
    "slice of the flat parameter?"
)
EVERYTHING = Cause(
    "Give the optimizer this rank's shard of the trained parameters and nothing else, so that it "
    "has state for 1/p of the numbers."
)
ONE_GATHER = Cause(
    "One all_gather a step puts all shards together: dist.all_gather_single(flat, shard). Nothing "
    "else is sent: behind DDP, every rank knows all gradients, and they are means already."
)
ONLY_READ = Cause("Others may still read param.grad: work on a copy.")
REFERENCED = Cause(
    "Still referenced: a slice is a view, and keeps the whole flat tensor that it was cut from; so "
    "does an attribute. Clone what you keep: the shard and its gradient."
)


def train(
    rank: int,
    answer: Callable[..., Any],
    sizes: Sequence[int],
    dtype: torch.dtype = torch.float64,
    beside: bool = False,
) -> dict[str, Any]:
    """Take steps, those of an object `beside` in turn: the numbers trained are all different."""
    made, module = list[Optimizer](), Bag(sizes, odd=True).to(dtype)
    trained = [module.weights[i] for i in module.trained]
    with torch.no_grad():
        for i, param in enumerate(module.weights):
            param.copy_(module.pattern(i) + 10 * i)
    numel = sum(param.numel() for param in trained)
    share, label = shard_numel(numel, dist.get_world_size()), f"{numel} numbers in {named(dtype)}"

    def make_optimizer(params: Any) -> Optimizer:
        made.append(SGD(params, lr=LR, momentum=MOMENTUM))
        return made[-1]

    with MemoryWatch() as watch:
        with watch.step(f"{label}, at the start", module=module):
            stepper = answer(module, make_optimizer)
        step_other = _other(answer, watch, dtype) if beside else None
        for number, times in enumerate(TIMES):
            grads = [_like(module.weights[i], module.slope(i) * times) for i in module.trained]
            for param, grad in zip(trained, grads, strict=True):
                param.grad = grad.clone()
            with watch.step(f"{label}, step {number + 1}", module=module) as step:
                stepper.step()
            pairs = zip(trained, grads, strict=True)
            groups = [group for one in made for group in one.param_groups]
            stepped = {named(each.dtype) for group in groups for each in group["params"]}
            step.show(
                **{STEPPED: sorted(stepped), FLAT: flat(trained), CALLS: calls_of(step)},
                **{STATE: _state(made, share, share * rank < numel)},
                **{GRADS: [str(i) for i, pair in enumerate(pairs) if _has_changed(*pair)]},
            )
            if step_other:
                step_other()
        torch.set_grad_enabled(True)
        del grads, grad, param, pairs, step_other
        module.zero_grad()
        most = 3 * share * dtype.itemsize
        step.show(**{BYTES: watch.bytes_too_many(most, *module.parameters())})
    return watch.seen


def _other(answer: Callable[..., Any], watch: Watch, dtype: torch.dtype) -> Callable[[], None]:
    """Make an object of another module; return what takes a step of it, with gradients of 1."""
    module = Bag((1, 1, 7)).to(dtype)
    stepper = answer(module, lambda params: SGD(params, lr=LR))
    trained = [module.weights[i] for i in module.trained]

    def take_step() -> None:
        for param in module.parameters():
            param.grad = torch.ones_like(param)
        with watch.step("the 2nd object", module=module) as step:
            stepper.step()
        step.show(**{FLAT: flat(trained)})

    return take_step


def _like(param: Tensor, numbers: Tensor) -> Tensor:
    """Return these numbers with the dtype and the strides of a parameter, as autograd does."""
    return torch.empty_like(param).copy_(numbers).detach()


def _state(made: Sequence[Optimizer], share: int, owns: bool) -> str:
    """Return how much state optimizers have; on a rank that owns no number, it may be none."""
    states = [state for optimizer in made for state in optimizer.state.values()]
    numel = sum(one.numel() for state in states for one in state.values() if one is not None)
    if numel > share:
        return f"for {numel} numbers, more than a shard has"
    return "for the shard" if states or not owns else "none"


def _has_changed(param: Tensor, grad: Tensor) -> bool:
    """Return whether the gradient is another one, or was written to, the same numbers even."""
    return param.grad is None or bool(unlike(param.grad, grad)) or param.grad._version > 0


def _runs(p: int) -> list[dict[str, Any]]:
    """Return the runs on p ranks; the second one has fewer numbers than ranks."""
    sizes, few = (3, 2, 1, 4, 5), (1, 2, 1)
    runs: list[dict[str, Any]] = [
        {"sizes": sizes},
        {"sizes": few},
        {"sizes": sizes, "dtype": torch.bfloat16},
    ]
    return [*runs, *([{"sizes": sizes, "beside": True}] if p == 3 else [])]


STEPS, GATHERS = "self.optimizer.step()\n        flat", "dist.all_gather_single(flat, self.shard)"
FLATTENED = "self.layout.flatten(self.params)"
SHARD, GRADIENT = f"{FLATTENED}[self.mine].clone()", "self.layout.flatten(grads)[self.mine].clone()"
GRADS_OF = "[param.grad for param in self.params]"
GRADS_OR_ONES = "[torch.ones_like(p) if p.grad is None else p.grad for p in self.params]"
TRAINED = "[param for param in module.parameters() if param.requires_grad]"
ALL, LAST = "list(module.parameters())", "param.copy_(view)"

STEP = Exercise(
    key="zero-2",
    title="step your own shard",
    check=ByExample(
        observe_on_rank=train,
        runs=_runs,
        facets=(UNWAITED, OVERWRITTEN, STEPPED, STATE, FLAT, CHANGED, CALLS, GRADS, BYTES),
        looks=(
            *((STEPPED, PARAMS_DTYPE), (STATE, EVERYTHING), (FLAT, SAME_SLICE)),
            *((CALLS, ONE_GATHER), (GRADS, ONLY_READ), (BYTES, REFERENCED)),
        ),
        success="As one process after every step; 1/p of the state, and one all_gather a step.",
    ),
    wrong=(
        Edit(
            "[self.shard]",
            "self.params",
            EVERYTHING,
            also=((GATHERS, f"self.shard.copy_({SHARD})\n{GATHERS}"),),
        ),
        Edit(GATHERS, f"flat = {FLATTENED}\nflat[self.mine] = self.shard", NOT_GATHERED),
        Edit(STEPS, "flat", AS_BEFORE, also=((GATHERS, f"{GATHERS}\nself.optimizer.step()"),)),
        Edit("(flat, self.shard)", "(flat, self.shard, async_op=True)", NOT_WAITED),
        Edit(SHARD, SHARD.removesuffix(".clone()"), REFERENCED),
        Edit("self.shard.grad = ", "self.grad = ", NO_GRADIENT),
        Edit(TRAINED, ALL, NO_GRADIENT_YET),
        Edit("self.shard.grad = ", "self.shard.grad += ", UNSET),
        Edit(
            "self.shard.grad = ",
            "self.shard.grad = (0 if self.shard.grad is None else self.shard.grad) + ",
            ADDED_UP,
        ),
        Edit(
            "self.optimizer = make_optimizer([self.shard])",
            "self.make = make_optimizer",
            NO_MOMENTUM,
            also=(("self.optimizer.step()", "self.make([self.shard]).step()"),),
        ),
        Edit(GRADIENT, f"{GRADIENT} / dist.get_world_size()", DIVIDED),
        Edit(GRADS_OF, f"{GRADS_OF}\nfor grad in grads:\n    dist.all_reduce(grad)", SUMMED),
        Edit(SHARD, f"{SHARD}.float()", PARAMS_DTYPE, also=((GRADIENT, f"{GRADIENT}.float()"),)),
        Edit(f"{FLATTENED}[self.mine]", f"{FLATTENED}[: self.layout.shard_numel]", SAME_SLICE),
        Edit(TRAINED, ALL, FROZEN, also=((GRADS_OF, GRADS_OR_ONES),)),
        Edit(LAST, f"{LAST}\nparam.grad.mul_(0.5)", ONLY_READ),
        Edit("self.optimizer = make", "ShardedStep.optimizer = make", SHARED),
        Edit(f"self.shard = {SHARD}", f"ShardedStep.shard = {SHARD}", SHARED),
        *(*HAS_STATE, SEEDS),
    ),
)
