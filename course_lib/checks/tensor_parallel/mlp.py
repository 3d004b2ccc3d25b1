"""Exercise 2 of 07_tensor_parallel: an MLP that is split over the ranks."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib.checks.edits import Edit
from course_lib.checks.exercise import Cause, Exercise
from course_lib.checks.judge import ByExample
from course_lib.checks.properties import CALLERS, TRAINS
from course_lib.checks.tensor_parallel.parts import (
    APART,
    NOT_TRAINING,
    OUTSIDE,
    backward,
    bits_on_all,
    bytes_beyond,
    is_outside,
)
from course_lib.checks.watch import ALWAYS, ORDER, UNWAITED, Watch

NAMES = ("up_weight", "up_bias", "down_weight", "down_bias")
KINDS, PART, KEPT = "nn.Parameters", "part", "bytes kept beyond the four parts"
LAYERS = "gradients of up and down"
OUTPUT, X_GRAD, GRADS, BITS = "output", "gradient of x", "gradients", "bits"
EVAL, STEPPED = "output where no gradient is needed", "output after a step of SGD"
WARNS = "PyTorch warns of a wrong gradient"

PARAMETERS = Cause("Wrap your part in nn.Parameter, and keep it under that name.")
MINE = Cause(
    "A rank keeps whole outputs of up, those in `mine`, in order: GELU needs complete sums. weight "
    "is [out, in], so they are rows of up.weight and values of up.bias, and as inputs of down "
    "columns of down.weight. The bias of down stays whole."
)
BIAS_PARTS = Cause(
    "A part of it on each rank: the sum is right now, but all ranks get the whole gradient, so a "
    "step of SGD changes the sum {p} times too much. Keep the whole bias on every rank, and add it "
    "after the sum."
)
SWAPPED = Cause(
    "f and g are swapped: copy_to_region (f) belongs in front, reduce_from_region (g) at the end."
)
BIAS_EACH = Cause(
    "The bias of down was added {p} times: each rank adds it to its partial sum, and then those "
    "are summed. Add it once, after the sum."
)
MEAN = Cause("That is the mean. The parts are terms of one sum, so do not divide.")
NOT_SUMMED = Cause("Nothing was summed: every rank has only a partial sum of each output.")
COMPUTES = Cause("First up with its bias, GELU and down; then the sum, then the bias of down.")
SHAPES = Cause(
    "What is summed must have the same shape on every rank, and the ranks' parts of the hidden "
    "layer have not: put f in front of up, and g behind down."
)
BUDGET = Cause(
    "One all_reduce in each pass, of an activation in its own dtype: the output in forward, the "
    "gradient of x in backward. Nothing between up and down: their parts match."
)
NO_GRADIENT = Cause("Did detach or no_grad in forward cut the graph?")
NO_F = Cause(
    "x is used on every rank, so its gradient is the sum of all ranks' terms, each once: pass x "
    "through copy_to_region, whose backward does that."
)
WHOLE_GRADS = Cause(
    "A rank trains all four. g passes its gradient on unchanged, so they get their whole gradient; "
    "the bias of down is added whole, on every rank, after the sum."
)
STALE = Cause(
    "The weights have changed, the output has not: compute with the parameters as they are now, "
    "keep no copy of them."
)
ONLY_PARTS = Cause(
    "Keep four parts only: no whole layer, in whatever place, and no view, which keeps its whole "
    "matrix alive: clone it."
)


@dataclass(frozen=True)
class Case:
    """An MLP and a batch, the same on every rank."""

    width: int  # outputs of up
    num_out: int
    shape: tuple[int, ...]  # of x
    dtype: torch.dtype = torch.double

    def layers(self) -> tuple[nn.Linear, nn.Linear]:
        """Return up and down, new ones: one in eval mode, both in the middle of a step."""
        up, down = nn.Linear(self.shape[-1], self.width), nn.Linear(self.width, self.num_out)
        for seed, param in enumerate([*up.parameters(), *down.parameters()]):
            param.data = self.numbers(seed, *param.shape)
        up.bias.grad, down.weight.grad = torch.ones_like(up.bias), torch.ones_like(down.weight)
        return up.train(self.width % 2 == 0), down.train(self.width % 2 == 1)

    def x(self) -> Tensor:
        """Return the batch."""
        return self.numbers(10, *self.shape)

    def above(self) -> Tensor:
        """Return the gradient of the output."""
        return self.numbers(11, *self.shape[:-1], self.num_out)

    def numbers(self, seed: int, *shape: int) -> Tensor:
        """Return numbers of both signs; in float32 positive ones, whose sums lose no digits."""
        random = torch.Generator().manual_seed(seed)
        if self.dtype == torch.double:
            return torch.randn(shape, generator=random, dtype=torch.double)
        return (torch.rand(shape, generator=random) / 2 + 0.5).to(self.dtype)

    def shown(self, x: Any) -> Any:
        """Return a tensor; in bfloat16, where it depends on the order of sums, its dtype."""
        return f"dtype {getattr(x, 'dtype', x)}" if self.dtype == torch.bfloat16 else x


CASES = {
    "7 outputs of up": Case(7, 3, (2, 3, 3)),  # 7 is not divisible by 2, 3 or 4
    "8 outputs of up": Case(8, 3, (2, 3, 3)),
    "x of [2, 3] in float32": Case(5, 2, (2, 3), torch.float32),
    "x of [1, 1, 4] in bfloat16": Case(5, 2, (1, 1, 4), torch.bfloat16),
}


def _observe(_rank: int, answer: Callable[..., Any], forward: bool) -> dict[str, Any]:
    """Split each case's MLP; then, if that was right everywhere, run it `forward` and backward."""
    watch = Watch()
    if forward:
        for label, case in CASES.items():
            _use(watch, label, case, answer)
    else:
        _make(watch, answer)
    for seen in watch.seen.values():
        seen.setdefault(BITS, bits_on_all(None))
        if dist.get_world_size() == 1:  # then it may do without any call
            seen |= {UNWAITED: [], ORDER: []}
    return watch.seen


def _make(watch: Watch, answer: Callable[..., Any]) -> None:
    first, *_ = CASES.values()
    kept = bytes_beyond(_allowed, lambda: answer(*first.layers()))
    for label, case in CASES.items():
        up, down = case.layers()
        with watch.step(label, up=up, down=down) as step:
            parts = _parts_of(answer(up, down))
        kinds = [name for name, one in parts.items() if isinstance(one, nn.Parameter)]
        grads = {"up.bias": up.bias.grad, "down.weight": down.weight.grad}
        step.show(**{KINDS: kinds, PART: parts, LAYERS: grads})
    with watch.step("at the end") as step:
        step.show(**{KEPT: kept})


def _parts_of(model: Any) -> dict[str, Any]:
    return {name: getattr(model, name, None) for name in NAMES}


def _allowed(model: Any) -> int:
    """Return the bytes of the parts, and of one more bias."""
    sizes = [one.nbytes for one in _parts_of(model).values() if isinstance(one, Tensor)]
    return sum([*sizes, *sizes[3:]])


def _use(watch: Watch, label: str, case: Case, answer: Callable[..., Any]) -> None:
    (up, down), above = case.layers(), case.above()
    model, layers = answer(up, down), {"up": up, "down.weight": down.weight}

    def forward(when: str, x: Tensor, facet: str = OUTPUT) -> Any:
        with watch.step(f"{label}, {when}", x=x, **layers) as step:
            out = model(x)
        step.show(**{facet: case.shown(out), BITS: bits_on_all(out)})
        return out

    x = case.x().requires_grad_()
    out = forward("forward", x)
    given = {"x": x, "the output": out, "the gradient from above": above}
    with watch.step(f"{label}, backward", **given, **layers) as step:
        backward(out, above)
    step.show(**{GRADS: {name: case.shown(one.grad) for name, one in _parts_of(model).items()}})
    step.show(**{X_GRAD: case.shown(x.grad), BITS: bits_on_all(x.grad)})
    with torch.no_grad():
        forward("in eval mode under no_grad", model.eval() and case.x(), EVAL)
        with watch.step(f"{label}, a step of SGD", **layers):
            for param in _parts_of(model).values():
                if param.grad is not None:
                    param -= param.grad / 256
        forward("after a step of SGD, in eval mode under no_grad", case.x(), STEPPED)
    model.train()
    forward("after a step of SGD", case.x().requires_grad_(), STEPPED)
    forward("with an x that needs no gradient", case.x(), EVAL)
    warns = is_outside(lambda: backward(model(x), above))
    with watch.step(f"{label}, once more") as step:
        step.show(**{WARNS: warns})


OF_LAYERS = ("eval mode", "train mode", "leaves a hook", "zeroes its input", "seeds")
UP = "x = F.gelu(F.linear(copy_to_region(x), self.up_weight, self.up_bias))"
INNER = UP.removeprefix("x = ").replace("copy_to_region(x)", "x")
DOWN = "return reduce_from_region(F.linear(x, self.down_weight)) + self.down_bias"
TAKE_UP, TAKE_DOWN = "up.weight.detach()[mine]", "down.weight.detach()[:, mine]"
TAKE = "torch.arange(up.out_features).tensor_split(p)[rank]"
KEEP = "self.up_weight = nn"
ADD_EACH = "return reduce_from_region(F.linear(x, self.down_weight, self.down_bias))"
ALONE = f"return F.linear({INNER}, self.down_weight, self.down_bias)"

MLP = Exercise(
    key="tensor_parallel-2",
    title="a split MLP",
    check=ByExample(
        observe_on_rank=_observe,
        runs=lambda _p: ({"forward": False}, {"forward": True}),
        facets=(
            *(KINDS, PART, LAYERS, OUTPUT, X_GRAD, GRADS, EVAL, STEPPED, BITS),
            *(*ALWAYS, KEPT, ORDER, WARNS),
        ),
        equal=(BITS,),
        looks=(
            *((KINDS, PARAMETERS), (PART, MINE), (LAYERS, CALLERS), (KEPT, ONLY_PARTS)),
            *((OUTPUT, COMPUTES), (X_GRAD, NO_F), (GRADS, WHOLE_GRADS), (EVAL, NOT_TRAINING)),
            *((STEPPED, STALE), (BITS, APART), (ORDER, BUDGET), (WARNS, OUTSIDE)),
            ("mismatch", SHAPES),
        ),
        success="As one process on 1 to 4 ranks, also uneven; a part of the weights on each.",
    ),
    wrong=(
        Edit(DOWN, ADD_EACH, BIAS_EACH),
        Edit(
            DOWN,
            ADD_EACH,
            BIAS_PARTS,
            also=(("down.bias.detach().clone()", "down.bias.detach() / p"),),
        ),
        Edit(DOWN, ADD_EACH.replace("bias)", "bias / dist.get_world_size())"), WHOLE_GRADS),
        Edit(TAKE, "torch.arange(up.out_features // p) + rank * (up.out_features // p)", MINE),
        Edit(TAKE_DOWN, "down.weight.detach()[mine]", MINE),
        Edit(f"nn.Parameter({TAKE_UP})", TAKE_UP, PARAMETERS),
        Edit("copy_to_region(x)", "x", NO_F),
        Edit(DOWN, DOWN.replace("reduce_from_region", ""), NOT_SUMMED),
        Edit(UP, f"x = copy_to_region({INNER})", SHAPES),
        Edit(UP, UP.replace("F.gelu", ""), COMPUTES),
        Edit(" + self.down_bias", " / dist.get_world_size() + self.down_bias", MEAN),
        Edit(
            "copy_to_region",
            "reduce_from_region",
            SWAPPED,
            also=((DOWN, DOWN.replace("reduce_from", "copy_to")),),
        ),
        Edit(DOWN, DOWN.replace("weight))", "weight).double()).to(x.dtype)"), BUDGET),
        Edit(TAKE_UP, "up.weight.detach()[mine[0] : mine[-1] + 1]", ONLY_PARTS),
        Edit(KEEP, f"self.layers = [up, down]\n{KEEP}", ONLY_PARTS),
        Edit("def forward(self, x):", "@torch.no_grad()\ndef forward(self, x):", NO_GRADIENT),
        Edit(
            DOWN,
            "x = F.linear(x, self.down_weight)\ndist.all_reduce(x)\nreturn x + self.down_bias",
            OUTSIDE,
        ),
        Edit(UP, f"if not torch.is_grad_enabled():\n    {ALONE}\n{UP}", NOT_TRAINING),
        Edit(UP, f"given = x.data\n{UP}\ngiven.zero_()", CALLERS),
        Edit(KEEP, f"down.zero_grad()\n{KEEP}", CALLERS),
        *(one for one in TRAINS if one.name in OF_LAYERS),
    ),
)
