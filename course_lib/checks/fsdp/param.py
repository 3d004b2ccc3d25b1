"""Exercise 1 of 10_fsdp: one parameter, sharded on dim 0 as torch.chunk does, and gathered."""

from collections.abc import Callable

import torch
from torch import Tensor

from course_lib.checks.edits import Edit
from course_lib.checks.exercise import Cause, Exercise
from course_lib.checks.expectations import Bytes, Calls, Demand, Lasting, Numbers, Untouched
from course_lib.checks.fsdp.param_use import CHANGE, WORLDS, use_params
from course_lib.checks.on_ranks import At, OnRanks
from course_lib.checks.zero.parts import ALL_WAITED, NOT_WAITED, OF_THE_CLASS, unless_alone

A_PARAM = Cause("An optimizer steps it: self.shard is an nn.Parameter.")
ROWS = Cause(
    "Rank r keeps rows r * m to (r + 1) * m - 1, m = ceil(n / p), as torch.chunk splits: the last "
    "ranks may have fewer, or none."
)
GATHERED = Cause(
    "The shards are right: does gather() send self.shard, and return rows in rank order?"
)
SPLIT = Cause(
    "tensor_split makes the shards as even as they can be; torch.chunk, and fully_shard, give each "
    "rank ceil(n / p) rows until there are none."
)
DROPS = Cause("The rest is lost: n // p rows on each rank are too few. Round up.")
REVERSED = Cause("The order of the ranks is reversed: rank 0 keeps the first rows.")
IN_TURNS = Cause("Those are every p-th row: a shard is rows that stand one after the other.")
OTHER_DIM = Cause("That is split on the last dim: cut the rows, dim 0.")
SHAPE = Cause(
    "A shard has only this rank's rows, without padding, and all other dims; without rows, it is "
    "[0, ...]."
)
VIEW = Cause(
    "The shard is a view, and keeps the whole parameter alive: its rows need memory of their own. "
    "Try clone()."
)
TRAINED = Cause("The shard of a frozen parameter is frozen, that of a trained one trained.")
OWN = Cause("Only this rank's own rows are there: the others' come with an all_gather.")
TAIL = Cause("The padding is still there: cut it off, the parameter has as many rows as before.")
WHOLE_SHAPE = Cause("Give the rows the parameter's shape again.")
DTYPE = Cause(
    "Keep the parameter's dtype in self.shard and in each buffer (new_empty), and convert nothing."
)
STRIDES = Cause(
    "What gather() returns is contiguous, also where the parameter lay transposed: copy the rows "
    "into a new buffer."
)
FOLLOWED = Cause("What gather() returns needs no grad: send self.shard.detach().")
STALE = Cause(
    "That is what the shard was before it changed, by a step or by loading into shard.data: gather "
    "self.shard, each time anew."
)
ONE_GATHER = Cause(
    "One all_gather is enough, with equal messages: each rank pads its rows to ceil(n / p)."
)
NOT_PADDED = Cause(
    "Messages of an all_gather are equally long: pad the rows to ceil(n / p), also where a rank "
    "has none."
)
EVERY_RANK = Cause("Not every rank makes the call: one without rows has to take part, too.")
HOLDS = Cause(
    "More than the shard is kept: in an attribute, a list or a buffer? Keep only self.shard and "
    "sizes."
)


def _whole(at: At) -> Tensor:
    whole: Tensor = at.seen.sharding.numbers()
    return whole


def _rows(at: At, rank: int) -> slice:
    rows: slice = at.seen.sharding.rows_of(rank, at.world_size)
    return rows


def _mine(at: At) -> Tensor:
    return _whole(at)[_rows(at, at.rank)]


def _changed(at: At) -> Tensor:
    """Return the parameter after every rank has changed its shard."""
    whole = _whole(at)
    for rank in range(at.world_size):
        whole[_rows(at, rank)] += CHANGE + rank
    return whole


def _dropped(at: At) -> Tensor:
    rows = len(_whole(at)) // at.world_size
    return _whole(at)[at.rank * rows : (at.rank + 1) * rows]


def _last_dim(at: At) -> Tensor:
    parts = _whole(at).chunk(at.world_size, dim=-1)
    return parts[at.rank] if at.rank < len(parts) else parts[0][..., :0]


def _padded(at: At) -> Tensor:
    whole, rows = _whole(at), at.seen.sharding.num_rows(at.world_size)
    padding = whole.new_zeros(rows * at.world_size - len(whole), *whole.shape[1:])
    return torch.cat([whole, padding])


def _only_own(at: At) -> Tensor:
    own = torch.zeros_like(_whole(at))
    own[_rows(at, at.rank)] = _mine(at)
    return own


def _needed(at: At) -> list[tuple[str, int]]:
    return [("all_gather", at.seen.sharding.padded_bytes(at.world_size))]


def _of_another(_at: At, got: Tensor, _item: int | None) -> bool:
    """Return whether these are numbers of the parameter beside: they are below zero."""
    return got.numel() > 0 and bool((got < 0).all())


ANOTHER = ((_of_another, OF_THE_CLASS),)
GATHERS = "dist.all_gather_single(whole, padded)"
COPIES = "padded[: len(self.shard)] = self.shard.detach()"
NEW = "padded.new_empty(self.p * self.rows, *self.shape[1:])"
CUT = "return whole[: self.shape[0]]"
ROUNDED_UP = "-(-len(param) // self.p)"
BEGIN = "self.rows * dist.get_rank()"


def _judge_shards(at: At) -> None:
    """Judge the shard of every rank, before anything that is gathered from them."""
    for other in at.everyone:
        for expectation in SHARD:
            expectation(other)


SHARD: tuple[Callable[[At], None], ...] = (
    Demand(lambda at: at.seen.is_param, "self.shard is not a parameter", A_PARAM),
    Numbers(
        "shard",
        _mine,
        what="the shard",
        shape=SHAPE,
        dtype=DTYPE,
        predicates=ANOTHER,
        causes=(
            (SPLIT, lambda at: _whole(at).tensor_split(at.world_size)[at.rank]),
            (DROPS, _dropped),
            (REVERSED, lambda at: _whole(at)[_rows(at, at.world_size - 1 - at.rank)]),
            (IN_TURNS, lambda at: _whole(at)[at.rank :: at.world_size]),
            (OTHER_DIM, _last_dim),
        ),
        look=ROWS,
    ),
    Demand(
        lambda at: at.seen.trained == at.seen.sharding.trained,
        lambda at: f"requires_grad of the shard is {at.seen.trained}",
        TRAINED,
    ),
    Demand(lambda at: not at.seen.shares, "the shard is the parameter's memory", VIEW),
    Bytes(
        "shard_bytes",
        lambda at: at.seen.sharding.padded_bytes(at.world_size) // at.world_size,
        VIEW,
        what="the shard keeps",
    ),
)

PARAM = Exercise(
    key="fsdp-1",
    title="one parameter, sharded on dim 0",
    check=OnRanks(
        observe_on_rank=use_params,
        worlds=WORLDS,
        trouble=(
            ("hang", "", EVERY_RANK),
            ("mismatch", lambda trouble: len(set(trouble.mismatched)) > 1, EVERY_RANK),
            ("mismatch", "", NOT_PADDED),
            ("raised", "dtype", DTYPE),
            ("raised", "tensor size|outputShape|same size|equal size", NOT_PADDED),
        ),
        expect=(
            ALL_WAITED,
            Untouched(),
            _judge_shards,
            Numbers(
                "value",
                _whole,
                what="the parameter",
                shape=WHOLE_SHAPE,
                dtype=DTYPE,
                predicates=ANOTHER,
                causes=((TAIL, _padded), (OWN, _only_own)),
                look=GATHERED,
            ),
            Demand(lambda at: at.seen.contiguous, "the parameter is not contiguous", STRIDES),
            Demand(lambda at: not at.seen.followed, "the result requires grad", FOLLOWED),
            Lasting(),
            Numbers(
                "again",
                _changed,
                what="the parameter after a change",
                dtype=DTYPE,
                predicates=ANOTHER,
                causes=((STALE, _whole),),
                look=STALE,
            ),
            Calls(unless_alone(_needed), other_kind=ONE_GATHER, look=ONE_GATHER),
            Bytes("left_bytes", lambda _at: 0, HOLDS),
        ),
        success="Rows as torch.chunk splits, on 1, 2, 3, 5 ranks; one all_gather; no copy stays.",
    ),
    wrong=(
        Edit(ROUNDED_UP, "len(param) // self.p", DROPS),
        Edit(
            "self.shard = nn.Parameter(mine",
            "mine = param.detach().tensor_split(self.p)[dist.get_rank()]\n"
            "self.shard = nn.Parameter(mine",
            SPLIT,
        ),
        Edit(BEGIN, "self.rows * (self.p - 1 - dist.get_rank())", REVERSED),
        Edit(f"[{BEGIN} :][: self.rows]", "[dist.get_rank() :: self.p]", IN_TURNS),
        Edit(
            "self.shard = nn.Parameter(mine",
            "mine = [*param.detach().chunk(self.p, -1), *[param[..., :0]] * self.p]"
            "[dist.get_rank()]\nself.shard = nn.Parameter(mine",
            OTHER_DIM,
        ),
        Edit("mine.clone()", "mine.clone() if len(mine) else param.new_empty(0)", SHAPE),
        Edit("mine.clone()", "mine.flatten()", SHAPE),
        Edit("mine.clone()", "mine", VIEW),
        Edit("mine.clone()", "mine if self.p == 1 else mine.clone()", VIEW),
        Edit(GATHERS, f"self.shard.grad = None\n{GATHERS}", Untouched().cause),
        Edit(
            "mine.clone(), param.requires_grad", "mine.clone(), mine.is_floating_point()", TRAINED
        ),
        Edit("nn.Parameter(mine.clone(), param.requires_grad)", "mine.clone()", A_PARAM),
        Edit(GATHERS, f"whole.zero_()\nwhole[{BEGIN} :][: self.rows] = padded", OWN),
        Edit(CUT, "return whole", TAIL),
        Edit(CUT, "return whole[: self.shape[0]].flatten()", WHOLE_SHAPE),
        Edit(CUT, "return whole[: self.shape[0]].float()", DTYPE),
        Edit(NEW, "torch.empty(self.p * self.rows, *self.shape[1:])", DTYPE),
        Edit(
            "mine.clone()",
            "mine.clone().bfloat16()",
            DTYPE,
            also=(("param.requires_grad", "param.is_floating_point() and param.requires_grad"),),
        ),
        Edit(CUT, f"{CUT}.t().contiguous().t() if whole.dim() == 2 else {CUT[7:]}", STRIDES),
        Edit(
            CUT,
            f"{CUT}.requires_grad_(self.shard.requires_grad)",
            FOLLOWED,
        ),
        Edit(
            COPIES,
            "self.first = getattr(self, 'first', self.shard.detach().clone())\n"
            "padded[: len(self.shard)] = self.first",
            STALE,
        ),
        Edit(
            COPIES,
            "self.rows_here = getattr(self, 'rows_here', self.shard.detach())\n"
            "padded[: len(self.shard)] = self.rows_here",
            STALE,
        ),
        Edit(
            GATHERS,
            "if not hasattr(self, 'rows_of_all'):\n"
            f"    {GATHERS}\n    self.rows_of_all = whole.tolist()\n"
            "whole = torch.tensor(self.rows_of_all, dtype=whole.dtype)",
            STALE,
        ),
        Edit(
            "whole = padded.new_empty",
            "self.whole = getattr(self, 'whole', None)\n"
            "whole = self.whole = self.whole if self.whole is not None else padded.new_empty",
            Lasting().cause,
        ),
        Edit(
            "self.shard = nn.Parameter(mine",
            "self.param = param\nself.shard = nn.Parameter(mine",
            HOLDS,
        ),
        Edit(CUT, f"self.last = whole\n{CUT}.clone()", HOLDS),
        Edit(
            GATHERS,
            "for rank, rows in enumerate(whole.view(self.p, -1)):\n"
            "    rows.copy_(padded.flatten())\n    dist.broadcast(rows, rank)",
            ONE_GATHER,
        ),
        Edit(GATHERS, "dist.all_gather_single(whole, padded, async_op=True)", NOT_WAITED),
        Edit(GATHERS, f"if len(self.shard):\n    {GATHERS}", EVERY_RANK),
        Edit(GATHERS, "dist.all_gather_single(whole, self.shard.detach())", NOT_PADDED),
        Edit(
            "self.shard = nn.Parameter(mine",
            "ShardedParam.latest = nn.Parameter(mine",
            OF_THE_CLASS,
            also=(
                (
                    "def gather(self):",
                    "shard = property(lambda self: self.latest)\n\ndef gather(self):",
                ),
            ),
        ),
        Edit(
            "self.rows = -(",
            "param.requires_grad_(False)\nself.rows = -(",
            Untouched().cause,
            also=(("param.requires_grad)", "mine.is_floating_point())"),),
        ),
    ),
)
