"""Exercise 2 of 10_fsdp: the hooks of a unit, from the gather before forward to the gradients."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib.checks.edits import Edit
from course_lib.checks.exercise import Cause, Exercise
from course_lib.checks.fsdp.parts import num_rows, rows_of
from course_lib.checks.judge import ByExample
from course_lib.checks.memory_watch import MemoryWatch, held_bytes
from course_lib.checks.properties import HAS_STATE, NOT_WAITED, SEEDS
from course_lib.checks.watch import ALWAYS, ORDER, UNWAITED, Watch

WIDTH, TOKENS = 3, 2
STEP = 0.5  # what an optimizer adds before the third pass

GATHER = Cause("Forward computed without its parameters: gather() in before_forward.")
NEVER_FREED = Cause("Not freed between forward and backward: free() in after_forward.")
AGAIN = Cause(
    "Backward computed with freed parameters (the check fills them with NaN): gather again when "
    "the output's gradient is there, with output.register_hook, and free after the last gradient."
)
FREE_LAST = Cause("The unit is still whole: free() after its last gradient.")
EVALUATE = Cause(
    "In evaluation, too, gather once and free; but hook nothing where no gradient is wanted: "
    "output.requires_grad."
)
SUMMED = Cause("{p} times too large: summed, not averaged. Divide by the number of ranks.")
OWN = Cause("Only this rank's own tokens are in it: the others' come with a reduce_scatter.")
OVERWRITTEN = Cause("Only the last backward is in it: shard.grad adds up until it is cleared.")
ANEW = Cause("`missing` begins anew with each backward: fill it again when everything is sent.")
TAIL = Cause(
    "Those are numbers of the padded tail, or of the next parameter: a rank with fewer rows has "
    "padding between its gradients. unit.unpack(line) cuts it off."
)
MEAN = Cause(
    "Need the mean over the ranks of the gradients of all unit.params, packed in their order when "
    "the last one is there, whichever that is; two backward passes add up."
)
FREE = Cause(
    "A unit is whole while it computes: free() after forward, and after its last gradient."
)
CALLS = Cause(
    "In forward, one gather; in backward, one when the output's gradient is there, then one "
    "reduce_scatter of all gradients. (An all_reduce sends twice the bytes.)"
)
WHOLE_GRADS = Cause(
    "The whole gradients are still there, and the next backward would add to them: "
    "param.grad = None for each."
)
NESTED = Cause(
    "A layer of this module is a unit of its own, whose gradients never come here: count those of "
    "unit.params, not of module.parameters()."
)
KEEPS_BUFFER = Cause(
    "A shard's gradient is a view of a larger buffer, and keeps all of that alive: unpack a line "
    "that has memory of its own."
)
LEFT = Cause("Who holds whole gradients: an attribute, a list, a view?")


class TiedPair(nn.Module):
    """Three layers; the first two have one weight, which backward needs twice.

    The last one is the first by name, so that neither end of the list gets its gradient last.
    """

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(WIDTH, WIDTH - 1)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.second(torch.tanh(self.first(x)))))


class Small(nn.Module):
    """A module with one number: fewer than there are ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.only = nn.Linear(1, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.only(x[:, :1]))


class WatchedUnit:
    """The unit that the answer is given: free() fills its parameters with NaN."""

    def __init__(self, params: Sequence[nn.Parameter], watch: Watch) -> None:
        self.params, self.p, self._watch = list(params), dist.get_world_size(), watch
        self.whole = [param.detach().clone() for param in self.params]
        rows = (rows_of(whole, dist.get_rank(), self.p) for whole in self.whole)
        self.shards = [nn.Parameter(mine.clone()) for mine in rows]
        self.free()

    def gather(self) -> None:
        """Fill the parameters."""
        self._watch.mark("gather")
        self.state = "whole"
        for param, whole in zip(self.params, self.whole, strict=True):
            param.data.copy_(whole)

    def free(self) -> None:
        """Make the parameters useless."""
        self.state = "freed"
        for param in self.params:
            param.data.fill_(torch.nan)

    def step(self) -> None:
        """Change parameters and shards, and clear the gradients, as an optimizer does."""
        for tensor in (*self.whole, *self.shards):
            tensor.data.add_(STEP)
        for shard in self.shards:
            shard.grad = None

    @property
    def whole_bytes(self) -> int:
        """The bytes of a buffer with everything."""
        return self.pack(self.whole).nbytes

    def pack(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return whole tensors as one [p, n]: row r has what rank r keeps of each, padded."""
        parts = []
        for tensor in tensors:
            padded = tensor.new_zeros(self.p * num_rows(tensor, self.p), *tensor.shape[1:])
            padded[: len(tensor)] = tensor
            parts.append(padded.view(self.p, -1))
        return torch.cat(parts, dim=1)

    def unpack(self, line: Tensor) -> list[Tensor]:
        """Return a row of `pack`, [n], as tensors of the shards' shapes."""
        widths = [num_rows(param, self.p) * param[:1].numel() for param in self.params]
        parts = zip(self.shards, line.split(widths), strict=True)
        return [part[: shard.numel()].view_as(shard) for shard, part in parts]


class WatchedModel:
    """A module with the answer's hooks: one unit, or two, of which one is its last layer."""

    def __init__(
        self, answer: Callable[..., Any], watch: Watch, kind: type[nn.Module], nested: bool = False
    ) -> None:
        self.module, random = kind().double(), torch.Generator().manual_seed(7)
        self.params = [*self.module.parameters()]
        for param in self.params:
            param.data = torch.randn(param.shape, generator=random, dtype=torch.double)
        parts = [self.module, *([self.module.get_submodule("last")] if nested else [])]
        inner = {*parts[1].parameters()} if nested else set()
        lists = ([x for x in self.params if (x in inner) is within] for within in (False, True))
        self.units = [WatchedUnit(params, watch) for params in lists if params]
        self.hooks = [answer(*pair) for pair in zip(parts, self.units, strict=True)]
        self.shards = [shard for unit in self.units for shard in unit.shards]

    @property
    def grads(self) -> dict[str, Any]:
        """The gradient of each shard."""
        return {f"of shard {number}": shard.grad for number, shard in enumerate(self.shards)}

    @property
    def tensors(self) -> list[Tensor]:
        """Those that the check needs itself."""
        return [*self.params, *self.shards, *(x for unit in self.units for x in unit.whole)]


def passes(
    rank: int, answer: Callable[..., Any], kind: type[nn.Module] = TiedPair, use: str = ""
) -> dict[str, Any]:
    """Train with three batches, the last one after a step of the optimizer, and evaluate.

    `use`: with a part that is a unit of its own (nested), with another module that trains between
    forward and backward (beside), or with two forwards before two backwards (twice).
    """
    batches = [_batch(rank, number) for number in range(6)]
    with MemoryWatch() as watch:
        model = WatchedModel(answer, watch, kind, use == "nested")
        other = WatchedModel(answer, watch, TiedPair) if use == "beside" else model
        for numbers in [(0, 1)] if use == "twice" else [(0,), (1,), (2,)]:
            if 2 in numbers:
                for unit in model.units:
                    unit.step()
            outs = [_forward(watch, model, batches[n][0], f"batch {n + 1}") for n in numbers]
            if other is not model:
                (x, above), label = (
                    batches[numbers[0] + 3],
                    f"batch {numbers[0] + 1}, another module",
                )
                _backward(watch, other, _forward(watch, other, x, label), x, above, label)
            for n in numbers:
                _backward(watch, model, outs.pop(0), *batches[n], f"batch {n + 1}")
        if use != "twice":
            with torch.no_grad():
                _forward(watch, model, batches[2][0], "evaluation")
        if dist.get_world_size() > 1:  # alone, a line is whole
            whole = sum(one.units[0].whole_bytes for one in {model, other})
            kept = watch.left_bytes(model.tensors, other.tensors, batches, enough=whole - 1)
            watch.seen["at the end"] = {"bytes kept": kept if kept >= whole else 0}
    return watch.seen


def _batch(rank: int, number: int) -> tuple[Tensor, Tensor]:
    """Return x of a rank, and the gradient from above for three numbers per token."""
    random = torch.Generator().manual_seed(100 + 10 * number + rank)
    x, above = torch.randn(2, TOKENS, WIDTH, generator=random, dtype=torch.double)
    return x.clone().requires_grad_(), above


def _forward(watch: Watch, model: WatchedModel, x: Tensor, label: str) -> Tensor:
    """Watch a forward."""
    with watch.step(f"{label}, forward", module=model.module, x=x) as step:
        out: Tensor = model.module(x)
    step.show(output=out, units=", ".join(unit.state for unit in model.units))
    if len(model.units) > 1:  # which of the two gathers first is free
        step.show(**{ORDER: []})
    return out


def _backward(
    watch: Watch, model: WatchedModel, out: Tensor, x: Tensor, above: Tensor, label: str
) -> None:
    """Watch a backward."""
    with watch.step(f"{label}, backward", module=model.module, shards=model.shards) as step:
        out.backward(above[:, : out.shape[1]])
    grads = [shard.grad for shard in model.shards]
    line = sum(unit.pack(unit.whole)[0].nbytes for unit in model.units)
    step.show(
        gradients=model.grads,
        units=", ".join(unit.state for unit in model.units),
        **{
            "gradient of x": x.grad,
            "parameters with a gradient": sum(param.grad is not None for param in model.params),
            "bytes of gradients": max(line, held_bytes(*grads)),
        },
    )
    if len(model.units) > 1:
        step.show(**{ORDER: []})
    elif dist.get_world_size() == 1:  # then it may do without any call
        step.show(**{UNWAITED: [], ORDER: [one for one in step.shown[ORDER] if one == "gather"]})


def _runs(p: int) -> list[dict[str, Any]]:
    uses = ("beside", "twice", "nested") if p == WORLDS[0] else ("beside",)
    return [{}, {"kind": Small}, *({"use": use} for use in uses)]


WORLDS = (3, 2, 5, 1)
SENDS = "dist.reduce_scatter_single(mean, sent.flatten())"
DIVIDES = "mean /= dist.get_world_size()"
PACKS = "unit.pack([param.grad for param in unit.params])"
REGATHERS = "output.register_hook(lambda grad: self.unit.gather())"
FILLS = "self.unit, self.missing = unit, set(unit.params)"
REFILLS = "            self.missing = set(unit.params)\n"

HOOKS = Exercise(
    key="fsdp-2",
    title="the hooks of a unit",
    check=ByExample(
        observe_on_rank=passes,
        worlds=WORLDS,
        runs=_runs,
        facets=(
            *(UNWAITED, "output", "units", "gradient of x", "gradients", ORDER),
            *("parameters with a gradient", *ALWAYS, "bytes of gradients", "bytes kept"),
        ),
        rtol=1e-11,
        looks=(
            (UNWAITED, NOT_WAITED),
            ("gradients", MEAN),
            ("units", FREE),
            (ORDER, CALLS),
            ("parameters with a gradient", WHOLE_GRADS),
            ("bytes of gradients", KEEPS_BUFFER),
            ("bytes kept", LEFT),
        ),
        success="Gathered, used, freed, twice; then shards of the mean, one message, nothing left.",
    ),
    wrong=(
        Edit("self.unit.gather()\n\n", "pass\n\n", GATHER),
        Edit("self.unit.free()\n        if output", "if output", NEVER_FREED),
        Edit(
            "self.unit.free()\n        if output.requires_grad:",
            "if output.requires_grad:\n            self.unit.free()",
            EVALUATE,
        ),
        Edit("if output.requires_grad:", "if True:", EVALUATE),
        Edit(REGATHERS, "pass", AGAIN),
        Edit("            unit.free()", "            pass", FREE_LAST),
        Edit(DIVIDES, "pass", SUMMED),
        Edit(SENDS, "mean = sent[dist.get_rank()].clone()", OWN),
        Edit(SENDS, SENDS.replace("flatten()", "flatten(), async_op=True"), NOT_WAITED),
        Edit(SENDS, "dist.all_reduce(sent)\nmean = sent[dist.get_rank()].clone()", CALLS),
        Edit("grad if shard.grad is None else shard.grad + grad", "grad", OVERWRITTEN),
        Edit(REFILLS, "", ANEW),
        Edit(
            "self.unit.gather()\n\n",
            "self.unit.gather()\n        self.missing = set(self.unit.params)\n\n",
            ANEW,
            also=((REFILLS, ""),),
        ),
        Edit("param.grad = None", "pass", WHOLE_GRADS),
        Edit(
            "unit.unpack(mean)",
            "[part.view_as(shard) for shard, part in zip(unit.shards, mean.split([*[s.numel() for "
            "s in unit.shards], len(mean) - sum(s.numel() for s in unit.shards)]))]",
            TAIL,
        ),
        Edit(PACKS, f"{PACKS}\nself.__dict__.setdefault('all', []).append(sent)", LEFT),
        Edit(
            FILLS,
            "self.unit, self.module, self.missing = unit, module, set(module.parameters())",
            NESTED,
            also=((REFILLS, "            self.missing = set(self.module.parameters())\n"),),
        ),
        *(*HAS_STATE, SEEDS),
    ),
)
