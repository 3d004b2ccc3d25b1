"""Exercise 2 of 07_tensor_parallel: an MLP that is split over the ranks."""

import functools
import gc
import weakref
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from course_lib.checks.edits import Edit
from course_lib.checks.exercise import Cause, Exercise
from course_lib.checks.expectations import DTYPE, Bytes, Demand, Untouched
from course_lib.checks.on_ranks import At, OnRanks, calls_of, copied
from course_lib.checks.tensor_parallel.parts import OUTSIDE, changed, close, is_outside, one_sum
from course_lib.checks.tensor_parallel.whole_mlp import (
    CASES,
    NAMES,
    Case,
    bias_of,
    grads_of,
    of_summed_x,
    out_of,
    params_of,
    whole_of,
    without_gelu,
    without_up_bias,
    x_grad_of,
)
from course_lib.core import Event
from course_lib.ranks import record

PARAMETERS = Cause("Wrap your part in nn.Parameter, and keep it under that name.")
WHOLE = Cause("That is the whole of it: keep your part.")
UNEVEN = Cause(
    "A width need not divide by p: tensor_split gives the first ranks one more. A rank's outputs "
    "of up are its inputs of down."
)
UP_ROWS = Cause(
    "Give each rank whole outputs of up: GELU of a part of a sum is no part of GELU. weight is "
    "[out, in], so those are rows of up.weight, and one number each of up.bias."
)
DOWN_COLUMNS = Cause(
    "The inputs of down are the outputs of up that this rank has: columns of down.weight, which "
    "is [out, in]. Its bias is added after the sum, so whole on every rank."
)
TRANSPOSED = Cause("Transposed: keep a weight as [out, in], as nn.Linear and F.linear have it.")
BIAS_PARTS = Cause(
    "Each rank keeps a part of it, or all but one keep zeros: that adds up now, but all get the "
    "whole gradient, so a step of SGD changes the sum {p} times too much. Keep the whole bias on "
    "every rank, add it after the sum."
)
MINE = Cause("A rank keeps its numbers of the hidden layer, those in `mine`, in order.")
SWAPPED = Cause(
    "f and g are swapped: copy_to_region (f) lets x in, reduce_from_region (g) sums at the end."
)
NO_GELU = Cause("That is without GELU, which stands between up and down.")
NO_UP_BIAS = Cause("The bias of up is missing, in front of GELU.")
BIAS_EACH = Cause(
    "The bias of down is in it {p} times: each rank adds it to its part, and then the parts are "
    "summed. Add it once, after the sum."
)
NO_BIAS = Cause("The bias of down is missing.")
MEAN = Cause("That is a mean: the parts are terms of one sum.")
NOT_SUMMED = Cause("Nothing was summed: every rank has a part of each output.")
ORDER = Cause("First up and its bias, then GELU, then down; then the sum, then the bias of down.")
SHAPES = Cause(
    "What is summed has the same shape on every rank. The ranks' parts of the hidden layer have "
    "not: f stands in front of up, and g behind down."
)
CALLERS = Cause("It belongs to the caller, who still needs it: work on a copy.")
BETWEEN = Cause("Nothing has to be sent between up and down: their parts fit.")
NO_GRADIENT = Cause("Did forward leave the graph, by detach or no_grad?")
NO_F = Cause(
    "That is this rank's part of it: x goes into the MLP on every rank. Let it in through "
    "copy_to_region, whose backward adds up the parts."
)
SUMS_TWICE = Cause("{p} times too large: who sums twice?")
WHICH = Cause("Which ranks' parts are in it?")
X_ONLY = Cause("x's gradient, and no more: that of a bias behind the sum is whole on every rank.")
TOO_LARGE = Cause("{p} times too large: g hands its gradient on as it is.")
TOO_SMALL = Cause("{p} times too small: divide nothing; add the whole bias, after the sum.")
NOT_TRAINED = Cause("It has no gradient: every rank has to train it, or ranks drift apart.")
VIEW = Cause("A view keeps the whole matrix it was cut from: clone it; and keep nothing else.")
ALIVE = Cause("Somewhere your module still holds the whole layer: do not keep up and down.")


@dataclass
class Used:
    """What one rank saw of one split MLP."""

    params: list[Any]
    others: list[str] = field(default_factory=list)
    out: Any = None
    grads: list[Any] = field(default_factory=list)
    x_grad: Any = None
    forward: list[Event] = field(default_factory=list)
    backward: list[Event] = field(default_factory=list)
    changed: tuple[str, ...] = ()
    kept_bytes: int = 0
    alive: list[str] = field(default_factory=list)
    outside: bool = False


def _use(rank: int, answer: Callable[..., Any]) -> dict[str, Used]:
    """Split each case's MLP; run it forward and backward."""
    del rank
    return {name: _use_one(answer, case) for name, case in CASES.items()}


def _use_one(answer: Callable[..., Any], case: Case) -> Used:
    (up, down), x, above = case.layers, case.x.requires_grad_(), case.above
    model = answer(up, down)
    params: list[Any] = [getattr(model, name, None) for name in NAMES]
    used = Used(copied(params))
    used.others = [
        f"{name} as an nn.Parameter; got {'nothing' if param is None else type(param).__name__}"
        for name, param in zip(NAMES, params, strict=True)
        if not isinstance(param, nn.Parameter)
    ]
    if used.others:
        return used
    with record() as forward:
        out = model(x)
    used.out = copied(out)
    with record() as backward:
        if isinstance(out, Tensor) and out.requires_grad:
            used.outside = is_outside(functools.partial(out.backward, above))
    used.forward, used.backward = calls_of(forward.events), calls_of(backward.events)
    used.x_grad, used.grads = x.grad, [param.grad for param in params]
    used.changed = changed(
        x=(x, case.x),
        the_gradient_from_above=(above, case.above),
        up_or_down=(_vector(up, down), _vector(*case.layers)),
    )
    storages = (tensor.untyped_storage() for tensor in _floats_in(model))
    used.kept_bytes = sum({one.data_ptr(): one.nbytes() for one in storages}.values())
    weights = {"up": weakref.ref(up.weight), "down": weakref.ref(down.weight)}
    del up, down
    if any(weight() is not None for weight in weights.values()):
        gc.collect()
    used.alive = [name for name, weight in weights.items() if weight() is not None]
    return used


def _vector(*layers: nn.Linear) -> Tensor:
    return torch.cat([param.detach().flatten() for layer in layers for param in layer.parameters()])


def _floats_in(thing: Any) -> list[Tensor]:
    """Return the tensors of a module, its submodules, and lists and dicts of them; no indices."""
    if isinstance(thing, Tensor):
        return [thing] if thing.is_floating_point() else []
    thing = vars(thing) if isinstance(thing, nn.Module) else thing
    things = thing.values() if isinstance(thing, dict) else thing
    inside = isinstance(things, Collection) and not isinstance(things, str)
    return [tensor for each in things for tensor in _floats_in(each)] if inside else []


def _part_bytes(at: At) -> int:
    """Return the bytes of this rank's part, and of one more bias."""
    return sum(param.nbytes for param in params_of(at)) + bias_of(at).nbytes


def _is_whole(at: At, got: Tensor, item: int) -> bool:
    return params_of(at)[item].shape != got.shape == whole_of(at).params[item].shape


def _is_uneven(at: At, got: Tensor, item: int) -> bool:
    need = params_of(at)[0]
    return item == 0 and got.shape[1] == need.shape[1] and got.shape[0] != need.shape[0]


UP = "x = F.gelu(F.linear(copy_to_region(x), self.up_weight, self.up_bias))"
DOWN = "return reduce_from_region(F.linear(x, self.down_weight)) + self.down_bias"
TAKE_UP = "up.weight.detach()[mine]"
TAKE = "torch.arange(up.out_features).tensor_split(p)[rank]"
KEEP = "self.up_weight = nn"
ADD_EACH = "return reduce_from_region(F.linear(x, self.down_weight, self.down_bias))"

MLP = Exercise(
    key="tensor_parallel-2",
    title="a split MLP",
    check=OnRanks(
        observe_on_rank=_use,
        trouble=(
            ("mismatch", "", SHAPES),
            ("hang", "", SHAPES),
            ("raised", "dtype", DTYPE),
            ("raised", "shapes cannot be multiplied|size of tensor", UNEVEN),
        ),
        expect=(
            Demand(
                lambda at: not at.seen.others,
                lambda at: f"need {at.seen.others[0]}",
                PARAMETERS,
            ),
            close(
                "params",
                params_of,
                names=lambda _at: NAMES,
                predicates=(
                    (_is_whole, WHOLE),
                    (_is_uneven, UNEVEN),
                    (
                        lambda at, got, i: got.mT.shape == params_of(at)[i].shape != got.shape,
                        TRANSPOSED,
                    ),
                    (lambda at, got, i: got.shape != params_of(at)[i].shape and i < 2, UP_ROWS),
                    (lambda at, got, i: got.shape != params_of(at)[i].shape, DOWN_COLUMNS),
                ),
                causes=(
                    (TRANSPOSED, lambda at: [param.t() for param in params_of(at)]),
                    (BIAS_PARTS, lambda at: [param / at.world_size for param in params_of(at)]),
                    (BIAS_PARTS, lambda at: [param * 0.0 for param in params_of(at)]),
                ),
                look=MINE,
            ),
            close(
                "out",
                out_of,
                what="the output",
                causes=(
                    (SWAPPED, of_summed_x),
                    (NO_GELU, without_gelu),
                    (NO_UP_BIAS, without_up_bias),
                    (BIAS_EACH, lambda at: out_of(at) + (at.world_size - 1) * bias_of(at)),
                    (NO_BIAS, lambda at: out_of(at) - bias_of(at)),
                    (MEAN, lambda at: (out_of(at) - bias_of(at)) / at.world_size + bias_of(at)),
                ),
                otherwise=((lambda at, *_: not at.seen.forward, NOT_SUMMED),),
                look=ORDER,
            ),
            Untouched(CALLERS),
            one_sum("forward", lambda at: out_of(at).nbytes, BETWEEN),
            Demand(lambda at: at.seen.x_grad is not None, "no gradient arrives at x", NO_GRADIENT),
            close(
                "x_grad",
                x_grad_of,
                what="the gradient of x",
                causes=((SUMS_TWICE, lambda at: x_grad_of(at) * at.world_size),),
                otherwise=((lambda at, *_: not at.seen.backward, NO_F),),
                look=WHICH,
            ),
            one_sum("backward", lambda at: x_grad_of(at).nbytes, X_ONLY),
            close(
                "grads",
                grads_of(),
                what="the gradient",
                names=lambda _at: NAMES,
                predicates=((lambda _at, got, _item: got is None, NOT_TRAINED),),
                causes=(
                    (TOO_LARGE, grads_of(lambda at: at.world_size)),
                    (TOO_SMALL, grads_of(lambda at: 1 / at.world_size)),
                ),
                look=WHICH,
            ),
            Demand(
                lambda at: not at.seen.alive,
                lambda at: f"the whole of {' and '.join(at.seen.alive)} is still in memory",
                ALIVE,
            ),
            Bytes("kept_bytes", _part_bytes, VIEW),
            Demand(
                lambda at: not at.seen.outside,
                "all_reduce got a tensor that requires a gradient",
                OUTSIDE,
            ),
        ),
        success="As one process on 1 to 4 ranks, also uneven; a part of the weights on each.",
    ),
    wrong=(
        Edit(DOWN, ADD_EACH, BIAS_EACH),
        Edit(
            DOWN,
            ADD_EACH.replace("self.down_bias", "self.down_bias / dist.get_world_size()"),
            TOO_SMALL,
        ),
        Edit(
            DOWN,
            ADD_EACH.replace("self.down_bias", "None if dist.get_rank() else self.down_bias"),
            NOT_TRAINED,
        ),
        Edit(
            TAKE_UP,
            "up.weight.detach()[:, self.of_x]",
            UP_ROWS,
            also=(
                (
                    "mine = ",
                    "self.of_x = torch.arange(up.in_features).tensor_split(p)[rank]\nmine = ",
                ),
                ("up.bias.detach()[mine]", "up.bias.detach().clone()"),
                ("down.weight.detach()[:, mine]", "down.weight.detach().clone()"),
                ("copy_to_region(x)", "copy_to_region(x)[..., self.of_x]"),
            ),
        ),
        Edit("copy_to_region(x)", "x", NO_F),
        Edit(DOWN, DOWN.replace("reduce_from_region", ""), NOT_SUMMED),
        Edit(
            UP,
            "x = copy_to_region(F.gelu(F.linear(x, self.up_weight, self.up_bias)))",
            SHAPES,
        ),
        Edit(
            UP,
            "x = F.gelu(F.linear(copy_to_region(x), self.up_weight)) + self.up_bias",
            ORDER,
        ),
        Edit(" + self.down_bias", " / dist.get_world_size() + self.down_bias", MEAN),
        Edit(
            KEEP,
            f"self.mine, self.width = mine, up.out_features\n{KEEP}",
            BETWEEN,
            also=(
                (
                    UP,
                    f"{UP}\n"
                    "whole = x.new_zeros(*x.shape[:-1], self.width).index_copy(-1, self.mine, x)\n"
                    "x = reduce_from_region(whole)[..., self.mine]",
                ),
            ),
        ),
        Edit(TAKE, "torch.arange(up.out_features // p) + rank * (up.out_features // p)", UNEVEN),
        Edit(TAKE_UP, "up.weight.detach()[mine[0] : mine[-1] + 1]", VIEW),
        Edit(KEEP, f"self.layers = [up, down]\n{KEEP}", ALIVE),
        Edit(KEEP, f"self.both = [nn.Linear(8, 8).double()]\n{KEEP}", VIEW),
        Edit(KEEP, f"self.whole = lambda: (up, down)\n{KEEP}", ALIVE),
        Edit(
            KEEP,
            f"self.mine = mine\n{KEEP}",
            WHOLE,
            also=(
                (TAKE_UP, "up.weight.detach().clone()"),
                ("up.bias.detach()[mine]", "up.bias.detach().clone()"),
                (UP, f"{UP}[..., self.mine]"),
            ),
        ),
        Edit(
            DOWN,
            ADD_EACH,
            BIAS_PARTS,
            also=(("down.bias.detach().clone()", "down.bias.detach() / p"),),
        ),
        Edit(
            DOWN,
            ADD_EACH,
            BIAS_PARTS,
            also=(("down.bias.detach().clone()", "down.bias.detach() * (rank == 0)"),),
        ),
        Edit(
            TAKE_UP,
            f"{TAKE_UP}.T.contiguous()",
            TRANSPOSED,
            also=((UP, UP.replace("_weight", "_weight.T")),),
        ),
        Edit(TAKE, "torch.arange(rank, up.out_features, p)", MINE),
        Edit(UP, UP.replace("F.gelu", ""), NO_GELU),
        Edit(UP, UP.replace(", self.up_bias", ""), NO_UP_BIAS),
        Edit(
            "copy_to_region",
            "reduce_from_region",
            SWAPPED,
            also=((DOWN, DOWN.replace("reduce_from", "copy_to")),),
        ),
        Edit("def forward(self, x):", "@torch.no_grad()\ndef forward(self, x):", NO_GRADIENT),
        Edit(
            DOWN,
            "x = F.linear(x, self.down_weight)\ndist.all_reduce(x)\nreturn x + self.down_bias",
            OUTSIDE,
        ),
        Edit(f"nn.Parameter({TAKE_UP})", TAKE_UP, PARAMETERS),
        Edit(UP, f"given = x.data\n{UP}\ngiven.zero_()", CALLERS),
        Edit(
            DOWN,
            "out = reduce_from_region(F.linear(x, self.down_weight)) + self.down_bias\n"
            "out.register_hook(lambda grad: [grad.clone(), grad.zero_()][0])\n"
            "return out",
            CALLERS,
        ),
        Edit(
            f"self.up_weight = nn.Parameter({TAKE_UP})",
            f"up.weight.data = {TAKE_UP}\nself.up_weight = up.weight",
            CALLERS,
        ),
        Edit(TAKE_UP, f"{TAKE_UP}.float()", DTYPE),
        Edit(" + self.down_bias", " + self.down_bias.double()", DTYPE),
        Edit(" + self.down_bias", ".float() + self.down_bias.float()", DTYPE),
    ),
)
