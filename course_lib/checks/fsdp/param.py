"""Exercise 1 of 10_fsdp: one parameter, sharded on dim 0 as torch.chunk does, and gathered."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib.checks.edits import Edit
from course_lib.checks.exercise import Cause, Exercise
from course_lib.checks.fsdp.parts import num_rows
from course_lib.checks.judge import ByExample
from course_lib.checks.memory_watch import MemoryWatch, held_bytes
from course_lib.checks.properties import CALLERS, NOT_WAITED, SHARED
from course_lib.checks.watch import ALWAYS, ORDER, UNWAITED, Watch

A_PARAM = Cause("An optimizer steps it: self.shard is an nn.Parameter.")
ROWS = Cause(
    "Rank r keeps rows r * m to (r + 1) * m - 1, m = ceil(n / p), without padding, as torch.chunk "
    "splits: the last ranks may have fewer, or none: [0, ...]."
)
SPLIT = Cause(
    "tensor_split makes the shards as even as they can be; torch.chunk, and fully_shard, give each "
    "rank ceil(n / p) rows until there are none."
)
DROPS = Cause("The rest is lost: n // p rows on each rank are too few. Round up.")
VIEW = Cause(
    "The shard is a view, and keeps the whole parameter alive: its rows need memory of their own. "
    "Try clone()."
)
TRAINED = Cause("The shard of a frozen parameter is frozen, that of a trained one trained.")
GATHERED = Cause(
    "The shards are right: does gather() send self.shard, and return rows in rank order, with the "
    "parameter's shape and dtype?"
)
OWN = Cause("Only this rank's own rows are there: the others' come with an all_gather.")
TAIL = Cause("The padding is still there: cut it off, the parameter has as many rows as before.")
STRIDES = Cause(
    "What gather() returns is contiguous, also where the parameter lay transposed: copy the rows "
    "into a new buffer."
)
FOLLOWED = Cause("What gather() returns needs no grad: send self.shard.detach().")
STALE = Cause(
    "That is what the shard was before it changed, by a step or by loading into shard.data: gather "
    "self.shard, each time anew."
)
KEEPS = Cause("A later call has changed what this one returned: return a new tensor each time.")
ONE_GATHER = Cause("One all_gather is enough, with equal messages, which all ranks pad to m rows.")
PADDED = Cause(
    "Every rank makes the same call, one without rows, too, and the messages of an all_gather are "
    "equally long: pad the rows to ceil(n / p)."
)
HOLDS = Cause(
    "More than the shard is kept: in an attribute, a list or a buffer? Keep only self.shard and "
    "sizes."
)
CHANGE = 3  # what rank r adds to its shard between the two gathers: this plus r


@dataclass(frozen=True)
class Given:
    """A parameter; the one beside it has the same shape, and its numbers are below zero."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float64
    trained: bool = True
    transposed: bool = False

    def param(self, sign: int = 1) -> nn.Parameter:
        """Return it: its numbers are all different."""
        numbers = sign * (1 + torch.arange(math.prod(self.shape))).view(self.shape).to(self.dtype)
        return nn.Parameter(numbers.t().contiguous().t() if self.transposed else numbers)

    def __str__(self) -> str:
        words = "trained" if self.trained else "frozen"
        words += ", transposed" if self.transposed else ""
        return f"{list(self.shape)} in {str(self.dtype).removeprefix('torch.')}, {words}"


PARAMS = (
    Given((5, 3)),  # 2, 2, 1 rows on three ranks, 1 on each of five
    Given((6, 2), torch.float32),  # 2, 2, 2, 0, 0 rows on five ranks
    Given((7,)),
    Given((1, 4)),
    Given((3, 2, 2), torch.float16, trained=False),
    Given((4, 3), transposed=True),
    Given((2, 3), torch.bfloat16, trained=False),
)


def use(rank: int, answer: Callable[..., Any], gathers: bool) -> dict[str, Any]:
    """Shard every parameter, and one beside it; in another run, gather them, twice."""
    values, sharded = dict[str, Any](), list[Any]()
    with MemoryWatch() as watch:
        for given in PARAMS:
            name, (param, other) = str(given), (given.param(sign) for sign in (1, -1))
            for one in (param, other):
                one.requires_grad_(given.trained)
            with watch.step(name, param=param) as step:
                first, beside = answer(param), answer(other)
            sharded += [first, beside]
            step.show(**_of_shard(getattr(first, "shard", None), param))
            del param, other, one
            if gathers:
                _gather(watch, name, rank, first, beside, values)
        with watch.step("at the end") as step:
            step.show(result=values)
        if gathers:
            shards = [(one.shard, one.shard.grad) for one in sharded]
            watch.seen["at the end"]["bytes kept"] = watch.left_bytes(shards, values)
    return watch.seen


def _of_shard(shard: Any, param: Tensor) -> dict[str, Any]:
    """Return the facets of a shard; it may lie in a buffer for a full one."""
    p, held = dist.get_world_size(), held_bytes(shard)
    full = num_rows(param, p) * param[:1].nbytes
    place = shard.untyped_storage().data_ptr() if isinstance(shard, Tensor) else None
    shares = place == param.untyped_storage().data_ptr()
    return {
        "shard": shard,
        "kind of shard": "a parameter" if isinstance(shard, nn.Parameter) else str(type(shard)),
        "requires_grad of shard": getattr(shard, "requires_grad", None),
        "memory of shard": "the parameter's" if shares else f"{max(held, full)} bytes",
    }


def _gather(
    watch: Watch, name: str, rank: int, one: Any, beside: Any, values: dict[str, Any]
) -> None:
    """Gather a parameter, and again after all ranks have changed their shards."""
    trained = one.shard.requires_grad
    one.shard.grad = one.shard.detach().clone() if trained else None
    for label in (f"{name}, gathered", f"{name}, after a change"):
        with watch.step(label, shard=one.shard) as step:
            values[label] = result = one.gather()
        is_tensor = isinstance(result, Tensor)
        step.show(
            result=result,
            contiguous=is_tensor and result.is_contiguous(),
            grad=one.shard.grad,
            **{"requires_grad of result": is_tensor and result.requires_grad},
        )
        if dist.get_world_size() == 1:  # then it may do without any call
            step.show(**{UNWAITED: [], ORDER: []})
        beside.gather()
        one.shard.data = one.shard.data + (CHANGE + rank)  # as of a checkpoint: in other memory


GATHERS = "dist.all_gather_single(whole, padded)"
COPIES = "padded[: len(self.shard)] = self.shard.detach()"
NEW = "padded.new_empty(self.p * self.rows, *self.shape[1:])"
CUT = "return whole[: self.shape[0]]"
MAKES = "self.shard = nn.Parameter(mine"

PARAM = Exercise(
    key="fsdp-1",
    title="one parameter, sharded on dim 0",
    check=ByExample(
        observe_on_rank=use,
        worlds=(3, 2, 5, 1),  # five: more than the text shows, and more than there are rows
        runs=lambda _p: ({"gathers": False}, {"gathers": True}),
        facets=(
            *("kind of shard", "shard", "requires_grad of shard", "memory of shard"),
            *(*ALWAYS, "result", ORDER, "contiguous", "requires_grad of result", "grad"),
            "bytes kept",
        ),
        looks=(
            ("mismatch", PADDED),
            ("hang", PADDED),
            (UNWAITED, NOT_WAITED),
            ("kind of shard", A_PARAM),
            ("shard", ROWS),
            ("requires_grad of shard", TRAINED),
            ("memory of shard", VIEW),
            ("result", GATHERED),
            (ORDER, ONE_GATHER),
            ("contiguous", STRIDES),
            ("requires_grad of result", FOLLOWED),
            ("grad", CALLERS),
            ("bytes kept", HOLDS),
        ),
        success="Rows as torch.chunk splits, on 1, 2, 3, 5 ranks; one all_gather; no copy stays.",
    ),
    wrong=(
        Edit("-(-len(param) // self.p)", "len(param) // self.p", DROPS),
        Edit(MAKES, f"mine = param.detach().tensor_split(self.p)[dist.get_rank()]\n{MAKES}", SPLIT),
        Edit("mine.clone()", "mine.clone() if len(mine) else param.new_empty(0)", ROWS),
        Edit("mine.clone()", "mine", VIEW),
        Edit("mine.clone(), param.requires_grad", "mine.clone(), param.is_leaf", TRAINED),
        Edit("nn.Parameter(mine.clone(), param.requires_grad)", "mine.clone()", A_PARAM),
        Edit(GATHERS, "whole.zero_()[dist.get_rank() * self.rows :][: self.rows] = padded", OWN),
        Edit(CUT, "return whole", TAIL),
        Edit(CUT, f"{CUT}.t().contiguous().t() if whole.dim() == 2 else {CUT[7:]}", STRIDES),
        Edit(CUT, f"{CUT}.requires_grad_(self.shard.requires_grad)", FOLLOWED),
        Edit(
            COPIES,
            "self.first = getattr(self, 'first', self.shard.detach().clone())\n"
            "padded[: len(self.shard)] = self.first",
            STALE,
        ),
        Edit(
            "whole = padded.new_empty",
            "self.whole = getattr(self, 'whole', None)\n"
            "whole = self.whole = self.whole if self.whole is not None else padded.new_empty",
            KEEPS,
        ),
        Edit(MAKES, f"self.param = param\n{MAKES}", HOLDS),
        Edit(CUT, f"self.last = whole\n{CUT}.clone()", HOLDS),
        Edit(
            GATHERS,
            "for rank, rows in enumerate(whole.view(self.p, -1)):\n"
            "    rows.copy_(padded.flatten())\n    dist.broadcast(rows, rank)",
            ONE_GATHER,
        ),
        Edit(GATHERS, "dist.all_gather_single(whole, padded, async_op=True)", NOT_WAITED),
        Edit(GATHERS, f"if len(self.shard):\n    {GATHERS}", PADDED),
        Edit(GATHERS, "dist.all_gather_single(whole, self.shard.detach())", PADDED),
        Edit(
            MAKES,
            "ShardedParam.latest = nn.Parameter(mine",
            SHARED,
            also=(
                (
                    "def gather(self):",
                    "shard = property(lambda self: self.latest)\n\ndef gather(self):",
                ),
            ),
        ),
        Edit(GATHERS, f"self.shard.grad = None\n{GATHERS}", CALLERS),
    ),
)
