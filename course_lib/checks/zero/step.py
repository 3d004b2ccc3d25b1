"""Exercise 2 of 09_zero: each rank steps its own shard, and the parameters are gathered."""

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn

from course_lib.checks.edits import Edit
from course_lib.checks.exercise import Cause, Exercise
from course_lib.checks.expectations import Bytes, Calls, Demand, Numbers
from course_lib.checks.on_ranks import At, OnRanks
from course_lib.checks.zero.parts import (
    ALL_WAITED,
    BESIDE,
    DTYPE,
    LENGTHS,
    NOT_A_NAN,
    NOT_WAITED,
    OF_THE_CLASS,
    ROUNDING,
    WRONG_BUFFER,
    flat,
    lost_nan,
    shard_numel,
    unless_alone,
)
from course_lib.checks.zero.step_train import (
    BESIDE_END,
    LR,
    MODELS,
    MOMENTUM,
    TIMES,
    shard_bytes,
    train,
)

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
RENAMED = Cause(
    "Nothing has changed: `param = ...` only names another tensor. Write the new numbers into the "
    "parameters with copy_."
)
NO_GRADIENT = Cause(
    "Nothing has changed, and the optimizer has no state: in each step, set self.shard.grad, then "
    "call self.optimizer.step()."
)
UNSET = Cause("self.shard.grad is None until you assign it a tensor.")
GATHERED_FIRST = Cause("The numbers before this step: step first, then gather.")
NOT_GATHERED = Cause(
    "Only this rank's own shard is new: after the step, all_gather what the others have stepped."
)
STALE = Cause("The others' shards are from before the step: stale. Step first, then gather.")
NO_MOMENTUM = Cause(
    "The momentum is lost: make one optimizer, in __init__, and let its step() change the shard."
)
SKIPPED = Cause("A step with gradients of 0 is a step, too: the momentum goes on. Always step.")
GRAD_MODE = Cause("Autograd is off for whoever comes next: use `with torch.no_grad():`.")
SUMMED = Cause("The gradients are summed once more, {p} times too large: they are means already.")
DIVIDED = Cause("The gradients are divided by {p} once more: they are means already.")
FIRST_GRADIENTS = Cause(
    "The gradients of step 1 were used again: each backward may make new tensors, so read "
    "param.grad in each step."
)
ROUNDED_BACK = Cause(
    "Right but for the last digits: only read the gradients. What is divided and multiplied again, "
    "or converted and converted back, comes out rounded."
)
ADDED_UP = Cause("Gradients of earlier steps are in it: do not add them up.")
MOVED = Cause("The right numbers in the wrong places: rank r has to step shard r.")
SAME_SLICE = Cause(
    "Are this rank's numbers, this rank's gradients and the place where they go back the same "
    "slice of the flat parameter?"
)
EVERYTHING = Cause(
    "Give the optimizer this rank's shard of the trained parameters and nothing else, so that it "
    "has state for 1/p of the numbers."
)
SUMS_SHARDS = Cause("A sum of shards among zeros sends twice the bytes of an all_gather.")
ONE_GATHER = Cause(
    "One all_gather puts all shards together: dist.all_gather_single(flat, shard). Nothing else is "
    "sent: behind DDP, every rank knows all gradients, and they are means already."
)
A_CALL_EACH = Cause("One call a step, for the whole flat parameter: not one per parameter.")
ONLY_READ = Cause("Others may still read param.grad: work on a copy.")
REFERENCED = Cause(
    "Still referenced: a slice is a view, and keeps the whole flat tensor that it was "
    "cut from; so does an attribute. Clone what you keep: the shard and its gradient."
)


def _rows(
    at: At, *, momentum: float = MOMENTUM, times: Sequence[float] = TIMES, skip_zeros: bool = False
) -> list[Tensor]:
    """Return the trained numbers of one process, at the start and after each step."""
    module = at.seen.model.made()
    row = nn.Parameter(flat([module.weights[i] for i in module.trained]))
    slopes = flat([module.slope(i) for i in module.trained])
    optimizer, rows = torch.optim.SGD([row], lr=LR, momentum=momentum), [row.detach().clone()]
    for each in times:
        row.grad = (slopes * each).to(row.dtype)
        if each or not skip_zeros:
            optimizer.step()
        rows.append(row.detach().clone())
    return rows


def _start(at: At) -> list[Tensor]:
    return [_rows(at)[0]] * len(_rows(at))


def _behind(at: At) -> list[Tensor]:
    return [_rows(at)[0], *_rows(at)[:-1]]


def _own_and(others: Callable[[At], list[Tensor]]) -> Callable[[At], list[Tensor]]:
    """Return rows that are right in this rank's shard, and those of `others` elsewhere."""

    def rows(at: At) -> list[Tensor]:
        numel = at.seen.model.numel
        mine = torch.arange(numel) // shard_numel(numel, at.world_size) == at.rank
        return [torch.where(mine, *two) for two in zip(_rows(at), others(at), strict=True)]

    return rows


def _always(wrong: Callable[[At], list[Tensor]]) -> Callable[..., bool]:
    """Return whether these are the numbers after every step: after the first, many look alike."""

    def fits(at: At, _got: Tensor, _item: int) -> bool:
        pairs = zip(at.seen.rows, wrong(at), strict=True)
        return all(
            torch.allclose(is_now, row, rtol=ROUNDING[row.dtype], equal_nan=True)
            for is_now, row in pairs
        )

    return fits


def _times(factor: Callable[[At], float]) -> Callable[..., bool]:
    return _always(lambda at: _rows(at, times=[each * factor(at) for each in TIMES]))


def _has_moved(at: At, got: Tensor, item: int) -> bool:
    right = _rows(at)[item]
    return bool(((got != right) & torch.isin(got, right)).double().mean() > 0.7)


def _is_rounded(at: At, got: Tensor, item: int) -> bool:
    near = {"rtol": 1e-6, "atol": 1e-6}
    return torch.allclose(got.double(), _rows(at)[item].double(), equal_nan=True, **near)


def _bytes(at: At) -> int:
    return shard_bytes(at.seen.model, at.world_size)


def _share(at: At) -> int:
    return shard_numel(at.seen.model.numel, at.world_size)


def _beside_is_right(at: At) -> bool:
    return at.seen.beside is None or bool((at.seen.beside == BESIDE_END).all())


STEPS = "self.optimizer.step()\n        flat"
GATHERS = "dist.all_gather_single(flat, self.shard)"
GRADIENT = "self.layout.flatten(grads)[self.mine].clone()"
FLAT = "self.layout.flatten(self.params)"
SHARD = f"{FLAT}[self.mine].clone()"
GRADS = "[param.grad for param in self.params]"
GRADS_OR = "[torch.{}(p) if p.grad is None else p.grad for p in self.params]"
ALL = "list(module.parameters())"
TRAINED = "[param for param in module.parameters() if param.requires_grad]"
LAST = "param.copy_(view)"

STEP = Exercise(
    key="zero-2",
    title="step your own shard",
    check=OnRanks(
        observe_on_rank=train,
        runs=lambda p: [{"model": model} for model in MODELS if p == 3 or not model.beside],
        trouble=(
            ("raised", BESIDE, OF_THE_CLASS),
            ("raised", r"NoneType.*'(copy_|zero_|add_)'|for \+", UNSET),
            ("raised", "NoneType.*'(shape|detach|flatten|reshape)'", NO_GRADIENT_YET),
            *WRONG_BUFFER,
        ),
        expect=(
            ALL_WAITED,
            Demand(
                lambda at: set(at.seen.stepped) <= {at.seen.model.dtype},
                lambda at: f"the optimizer steps a tensor of {at.seen.stepped[0]}",
                PARAMS_DTYPE,
            ),
            Demand(lambda at: not at.seen.frozen_changed, "a frozen parameter has changed", FROZEN),
            Numbers(
                "rows",
                _rows,
                rtol=lambda at: ROUNDING[at.seen.model.dtype],
                what="the flat parameter",
                names=lambda _at: [
                    "before the first step",
                    *(f"after step {k}" for k in range(1, 1 + len(TIMES))),
                ],
                predicates=(
                    (lambda at, *_: at.seen.model.beside, OF_THE_CLASS),
                    (lambda at, *got: at.seen.num_state and _always(_start)(at, *got), RENAMED),
                    (_always(_start), NO_GRADIENT),
                    (_always(_behind), GATHERED_FIRST),
                    (_always(_own_and(_start)), NOT_GATHERED),
                    (_always(_own_and(_behind)), STALE),
                    (_always(lambda at: _rows(at, momentum=0.0)), NO_MOMENTUM),
                    (_times(lambda at: at.world_size), SUMMED),
                    (_times(lambda at: 1 / at.world_size), DIVIDED),
                    (_always(lambda at: _rows(at, times=[*accumulate(TIMES)])), ADDED_UP),
                    (_always(lambda at: _rows(at, skip_zeros=True)), SKIPPED),
                    (lambda at, got, k: lost_nan(got, _rows(at)[k]), NOT_A_NAN),
                    (_always(lambda at: _rows(at, times=TIMES[:1] * len(TIMES))), FIRST_GRADIENTS),
                    (_is_rounded, ROUNDED_BACK),
                    (_has_moved, MOVED),
                ),
                look=SAME_SLICE,
            ),
            Demand(_beside_is_right, "the parameters of the 2nd object are wrong", OF_THE_CLASS),
            Demand(
                lambda at: at.seen.num_state <= _share(at),
                lambda at: f"it has state for {at.seen.num_state} numbers; need {_share(at)}",
                EVERYTHING,
            ),
            Demand(
                lambda at: {call.kind for call in at.seen.calls} != {"all_reduce"},
                "calls all_reduce",
                SUMS_SHARDS,
            ),
            Calls(
                unless_alone(lambda at: [("all_gather", at.world_size * _bytes(at))] * len(TIMES)),
                other_kind=ONE_GATHER,
                symptoms=((lambda got, need: len(got) > len(need), A_CALL_EACH),),
                look=ONE_GATHER,
            ),
            Demand(lambda at: at.seen.grad_mode, "torch.is_grad_enabled() is now False", GRAD_MODE),
            Demand(lambda at: not at.seen.grads_changed, "step() changes param.grad", ONLY_READ),
            Bytes(
                "alive_bytes",
                lambda at: 3 * _bytes(at),
                REFERENCED,
                what="besides the parameters, it keeps",
            ),
        ),
        success="As one process after every step; 1/p of the state, and one all_gather a step.",
    ),
    wrong=(
        Edit(
            f"self.shard = {SHARD}",
            "self.whole = self.layout.flatten(self.params)\nself.shard = self.whole[self.mine]",
            EVERYTHING,
            also=(
                ("[self.shard]", "[self.whole]"),
                (f"self.shard.grad = {GRADIENT}", "self.whole.grad = self.layout.flatten(grads)"),
            ),
        ),
        Edit(
            "[self.shard]",
            "self.params",
            EVERYTHING,
            also=((GATHERS, f"self.shard.copy_({SHARD})\n{GATHERS}"),),
        ),
        Edit(GATHERS, f"flat = {FLAT}\nflat[self.mine] = self.shard", NOT_GATHERED),
        Edit(STEPS, "flat", GATHERED_FIRST, also=((GATHERS, f"{GATHERS}\nself.optimizer.step()"),)),
        Edit(
            STEPS,
            "flat",
            STALE,
            also=((GATHERS, f"{GATHERS}\nself.optimizer.step()\nflat[self.mine] = self.shard"),),
        ),
        Edit("(flat, self.shard)", "(flat, self.shard, async_op=True)", NOT_WAITED),
        Edit(SHARD, SHARD.removesuffix(".clone()"), REFERENCED),
        Edit(GRADIENT, GRADIENT.removesuffix(".clone()"), REFERENCED),
        Edit("flat = self.shard", "flat = self.flat = self.shard", REFERENCED),
        Edit(LAST, "param = view", RENAMED),
        Edit("self.shard.grad = ", "self.grad = ", NO_GRADIENT),
        Edit(STEPS, "flat", NO_GRADIENT),
        Edit(
            f"self.shard = {SHARD}",
            f"self.shard = {SHARD}\ngrads = {GRADS}\nself.shard.grad = {GRADIENT}",
            NO_GRADIENT_YET,
        ),
        Edit("self.shard.grad = ", "self.shard.grad += ", UNSET),
        Edit(f"self.shard.grad = {GRADIENT}", f"self.shard.grad.copy_({GRADIENT})", UNSET),
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
        Edit(GRADS, f"{GRADS}\nfor grad in grads:\n    dist.all_reduce(grad)", SUMMED),
        Edit(
            GRADIENT,
            "torch.empty_like(self.shard)\n"
            "dist.reduce_scatter_single(self.shard.grad, self.layout.flatten(grads))\n"
            "self.shard.grad /= dist.get_world_size()",
            ONE_GATHER,
        ),
        Edit(
            GRADS,
            f"{GRADS}\nfor grad in grads:\n    grad /= dist.get_world_size()\n"
            "    dist.all_reduce(grad)",
            ONE_GATHER,
        ),
        Edit(
            "new_empty",
            "new_zeros",
            SUMS_SHARDS,
            also=((GATHERS, "flat[self.mine] = self.shard\ndist.all_reduce(flat)"),),
        ),
        Edit(SHARD, f"{SHARD}.float()", PARAMS_DTYPE, also=((GRADIENT, f"{GRADIENT}.float()"),)),
        Edit("self.shard.new_empty(", "torch.empty(", DTYPE),
        Edit("self.layout.padded_numel", "self.layout.numel", LENGTHS),
        Edit("(dist.get_rank())", "((dist.get_rank() + 1) % dist.get_world_size())", MOVED),
        Edit(f"{FLAT}[self.mine]", f"{FLAT}[: self.layout.shard_numel]", SAME_SLICE),
        Edit(TRAINED, ALL, NO_GRADIENT_YET),
        Edit(TRAINED, ALL, FROZEN, also=((GRADS, GRADS_OR.format("ones_like")),)),
        Edit(TRAINED, ALL, EVERYTHING, also=((GRADS, GRADS_OR.format("zeros_like")),)),
        Edit(
            LAST,
            f"{LAST}\nflat = param.new_empty(dist.get_world_size() * param.numel())\n"
            "dist.all_gather_single(flat, param.reshape(-1))",
            A_CALL_EACH,
        ),
        Edit(
            GATHERS,
            "for rank, part in enumerate(flat.chunk(dist.get_world_size())):\n"
            "    part.copy_(self.shard)\n    dist.broadcast(part, rank)",
            ONE_GATHER,
        ),
        Edit(LAST, f"{LAST}\nparam.grad.mul_(0.5)", ONLY_READ),
        Edit(LAST, f"{LAST}\nparam.grad = None", ONLY_READ),
        Edit(LAST, f"{LAST}\nparam.grad.div_(2).mul_(2)", ONLY_READ),
        Edit(LAST, "param.detach().reshape(-1).copy_(view.reshape(-1))", SAME_SLICE),
        Edit(
            STEPS,
            "if any(map(torch.any, grads)):\n            self.optimizer.step()\n        flat",
            SKIPPED,
        ),
        Edit(GRADIENT, f"{GRADIENT}.nan_to_num()", NOT_A_NAN),
        Edit(GRADS, f"self.__dict__.setdefault('grads', {GRADS})", FIRST_GRADIENTS),
        Edit(GRADIENT, f"{GRADIENT}.div(49).mul(49)", ROUNDED_BACK),
        Edit(GRADIENT, f"{GRADIENT}.float().to(self.shard.dtype)", ROUNDED_BACK),
        Edit(
            "self.optimizer = make",
            "torch.set_grad_enabled(False)\nself.optimizer = make",
            GRAD_MODE,
        ),
        Edit(
            "self.optimizer = make",
            "ShardedStep.optimizer = make",
            OF_THE_CLASS,
        ),
        Edit(
            "self.optimizer = make_optimizer([self.shard])",
            "made = vars(ShardedStep).get('made') or make_optimizer([self.shard])\n"
            "self.optimizer = ShardedStep.made = made",
            OF_THE_CLASS,
        ),
        Edit(
            f"self.shard = {SHARD}",
            f"ShardedStep.shard = {SHARD}",
            OF_THE_CLASS,
        ),
    ),
)
