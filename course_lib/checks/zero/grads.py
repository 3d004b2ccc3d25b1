"""Exercise 3 of 09_zero: gradients are reduced in buckets during backward, and only shards stay.

On odd ranks, gradients become ready in another order; buckets are full in the same order. One is
sent at once if its call starts before the hook that filled it ends.
"""

from collections.abc import Callable
from operator import truediv
from typing import Any

import torch
from torch import Tensor

from course_lib.checks.ddp.parts import Bag, digits
from course_lib.checks.edits import Edit
from course_lib.checks.exercise import Cause, Exercise
from course_lib.checks.expect import difference
from course_lib.checks.expectations import Bytes, Calls, Demand, Numbers
from course_lib.checks.on_ranks import At, OnRanks
from course_lib.checks.zero.grads_train import (
    BUCKETS,
    FULL,
    NUMELS,
    OTHER_BUCKETS_OF,
    OTHER_SIZES,
    ROUNDS,
    SIZES,
    scale,
    shard_bytes,
    train,
)
from course_lib.checks.zero.parts import (
    ALL_WAITED,
    BESIDE,
    DTYPE,
    LENGTHS,
    NOT_A_NAN,
    NOT_WAITED,
    OF_THE_CLASS,
    ROUNDED,
    ROUNDING,
    UNEQUAL,
    WRONG_BUFFER,
    flat,
    lost_nan,
    nearly,
    shard_numel,
    shard_of,
    unless_alone,
)

NO_LIST = Cause("`shards` is a list with one item a bucket: None, or this rank's shard of it.")
AT_ONCE = Cause("Send it in the hook of its last gradient: that is when the memory is needed.")
LOST = Cause("No shard: was this bucket sent, and its part kept in `shards`?")
OTHER_BUCKETS = Cause(
    "Not every rank sends the same buckets: gradients become ready in different orders. A bucket "
    "that is sent takes only its own parameters out of `ready`: others may have come already. "
    "Send one of zeros, too."
)
FIRST = Cause(
    "An item of `shards` is None until its bucket is sent: keep the first shard as it is."
)
LENGTH = Cause("A shard is this rank's part of the flat gradient, and no more.")
EARLY = Cause(
    "A bucket was sent before all of its gradients had come in this backward. Their order may "
    "differ from rank to rank: note each parameter that comes, send when none is missing, and then "
    "take them out of `ready`, for the next backward begins anew."
)
AVERAGED_TWICE = Cause("Averaged twice: divide each new shard by the number of ranks once.")
SUMMED = Cause("{p} times too large: summed, not averaged. Divide by the number of ranks.")
SUM_DIVIDED = Cause("The sum so far is divided again: only divide what is new.")
HALVED = Cause("The shards add up; there is no mean of backward passes.")
OVERWRITTEN = Cause(
    "Only the last backward is in it: a shard that is there already has to be added to, as "
    "backward adds to param.grad."
)
OWN = Cause("Only this rank's own gradient is in it: the others' come with a reduce_scatter.")
NOT_CLEARED = Cause(
    "Gradients of the step before are in it: where an item of `shards` is None again, begin anew."
)
PADDING = Cause("The end of the flat gradient is padding: fill it with zeros.")
FACTOR = Cause("Only the factor is wrong: divide each new shard by the number of ranks, once.")
OTHER_RANK = Cause("That is the shard of another rank.")
FLATTEN = Cause(
    "The bucket's gradients in the order of its parameters, then zeros: layout.flatten(grads)."
)
WHOLE_MEAN = Cause(
    "An all_reduce leaves the whole mean on every rank: twice the bytes, and memory for all of it. "
    "reduce_scatter leaves a shard."
)
ONE_EACH = Cause("One message a bucket, when it is full: flatten its gradients into one tensor.")
IN_TURN = Cause(
    "One reduce_scatter a bucket, of its flat gradient, in the order in which they become full."
)
WHOLE = Cause(
    "Whole gradients outlive their bucket: set param.grad = None for each of its parameters as "
    "soon as it is sent. (zero_() keeps the memory.)"
)
REFERENCED = Cause(
    "Still referenced: something else keeps whole gradients, such as a list of flat "
    "buckets, or a shard that is a view of one."
)


def _runs(p: int) -> list[dict[str, Any]]:
    """Return the runs on p ranks: three ranks are enough for a second object."""
    runs = [(torch.float64, False), (torch.float64, True), (torch.bfloat16, False)]
    return [{"dtype": dtype, "beside": two} for dtype, two in runs if p == 3 or not two]


def _times(
    factor: Callable[[At], float], owner: Callable[[At], int] = lambda at: at.rank
) -> Callable[[At], list[Tensor]]:
    """Return the shards of an owner, with `factor` times the gradients for a scale of 1."""

    def shards(at: At) -> list[Tensor]:
        module = Bag(SIZES)
        rows = [flat([module.slope(i) for i in bucket]) for bucket in BUCKETS]
        parts = [shard_of(row * factor(at), owner(at), at.world_size) for row in rows]
        return [part.to(at.options["dtype"]) for part in parts]

    return shards


def _of_another(k: int) -> Callable[[At], list[Tensor]]:
    return _times(_mean, lambda at: (at.rank + k) % at.world_size)


def _mean(at: At) -> float:
    p = at.world_size
    return sum(scale(k, rank, p) for k in ROUNDS[at.number] for rank in range(p)) / p


def _of_ranks(at: At) -> float:
    return digits(at.world_size) / at.world_size


def _own(at: At) -> float:
    return sum(scale(k, at.rank, at.world_size) for k in ROUNDS[at.number])


def _pairs(at: At) -> list[tuple[float, tuple[float, float]]]:
    """Return when each call started, and when the hook that filled its bucket ran."""
    return list(zip((call.start_s for call in at.seen.calls), at.seen.filled_s, strict=False))


def _is_multiple(at: At, got: Tensor, n: int) -> bool:
    need = _times(_mean)(at)[n]
    return torch.allclose(got * need.sum(), need * got.sum())


def _right(at: At) -> list[Tensor]:
    return _times(_mean)(at)


def _is_padding(at: At, got: Tensor, n: int) -> bool:
    """Return whether only the numbers that fill up the flat gradient are wrong."""
    numel = shard_numel(NUMELS[n], at.world_size)
    kept = max(0, min(numel, NUMELS[n] - at.rank * numel))
    return kept < numel and torch.allclose(got[:kept], _right(at)[n][:kept])


def _beside_is_right(at: At) -> bool:
    """Return whether the shards of the other object, if there is one, have all of its passes."""
    if not at.options["beside"]:
        return True
    got, module, times = at.seen.beside, Bag(OTHER_SIZES), at.number + 1
    rows = [flat([module.slope(i) for i in bucket]) * times for bucket in OTHER_BUCKETS_OF]
    need = [shard_of(row, at.rank, at.world_size) for row in rows]
    is_list = isinstance(got, list) and len(got) == len(need)
    return is_list and not any(difference(*two, 1e-12)[0] for two in zip(got, need, strict=True))


def _is_early(at: At) -> bool:
    return any(start_s < filled_s for start_s, (filled_s, _) in _pairs(at))


def _needed(at: At) -> list[tuple[str, int]]:
    p, itemsize = at.world_size, at.options["dtype"].itemsize
    return [("reduce_scatter", shard_numel(NUMELS[n], p) * p * itemsize) for n in FULL]


IS_FULL = "self.ready.issuperset(bucket)"
MEAN = "mean = shard / dist.get_world_size()"
SENDS = "dist.reduce_scatter_single(shard, flat)"
KEEPS = "self.shards[n] = mean if self.shards[n] is None else self.shards[n] + mean"
FREES = "param.grad = None"
ADDS = "self.shards[n] + mean"
CLEARS = "self.ready.difference_update(bucket)"
FLATTENS = "layout.flatten([param.grad for param in bucket])"
ALL_GRADS = "[param.grad for param in bucket]"

GRADS = Exercise(
    key="zero-3",
    title="shards of gradients",
    check=OnRanks(
        observe_on_rank=train,
        runs=_runs,
        trouble=(
            ("raised", BESIDE, OF_THE_CLASS),
            ("raised", r"for \+|NoneType.*'(add_|copy_)'", FIRST),
            ("raised", "NoneType.*'(shape|detach|flatten|reshape)'", EARLY),
            *WRONG_BUFFER,
            *((kind, "", OTHER_BUCKETS) for kind in ("mismatch", "hang")),
        ),
        expect=(
            Demand(
                lambda at: isinstance(at.seen.shards, list) and len(at.seen.shards) == len(BUCKETS),
                lambda at: f"need {len(BUCKETS)} items in `shards`; got {at.seen.shards!r}",
                NO_LIST,
            ),
            ALL_WAITED,
            Numbers(
                "shards",
                _times(_mean),
                rtol=lambda at: ROUNDING[at.options["dtype"]],
                what="the shard",
                names=lambda _at: [f"bucket {n}" for n in range(len(BUCKETS))],
                shape=LENGTH,
                dtype=DTYPE,
                predicates=(
                    (lambda at, *_: at.options["beside"], OF_THE_CLASS),
                    (lambda at, got, _n: got is None and not at.seen.calls, AT_ONCE),
                    (lambda _at, got, _n: got is None, LOST),
                    (lambda at, _got, _n: any(map(_is_early, at.everyone)), EARLY),
                    (lambda at, got, n: lost_nan(got, _right(at)[n]), NOT_A_NAN),
                ),
                causes=(
                    (AVERAGED_TWICE, _times(lambda at: _mean(at) / at.world_size)),
                    (SUMMED, _times(lambda at: _mean(at) * at.world_size)),
                    (SUM_DIVIDED, _times(lambda at: _of_ranks(at) * (1 / at.world_size + 2))),
                    (HALVED, _times(lambda at: _mean(at) / 2)),
                    (OVERWRITTEN, _times(lambda at: _of_ranks(at) * ROUNDS[at.number][-1])),
                    (NOT_CLEARED, _times(lambda at: _of_ranks(at) * (1 + 2 + 3))),
                    (OWN, _times(lambda at: _own(at) / at.world_size)),
                    (OWN, _times(_own)),
                    *((OTHER_RANK, _of_another(k)) for k in (1, 2, 3)),
                ),
                otherwise=(
                    (_is_padding, PADDING),
                    (lambda at, got, n: nearly(got, _right(at)[n]), ROUNDED),
                    (_is_multiple, FACTOR),
                ),
                look=FLATTEN,
            ),
            Demand(_beside_is_right, "the shards of the 2nd object are wrong", OF_THE_CLASS),
            Demand(
                lambda at: all(start <= end for start, (_, end) in _pairs(at)),
                "a bucket is full, and backward goes on before it is sent",
                AT_ONCE,
            ),
            Demand(
                lambda at: all(call.kind != "all_reduce" for call in at.seen.calls),
                "calls all_reduce",
                WHOLE_MEAN,
            ),
            Calls(
                unless_alone(_needed),
                other_kind=IN_TURN,
                symptoms=(
                    (lambda got, need: len(got) > len(need), ONE_EACH),
                    (lambda got, need: len(set(map(truediv, got, need))) == 1, DTYPE),
                ),
                look=IN_TURN,
            ),
            Demand(
                lambda at: not at.seen.num_kept,
                lambda at: f"a bucket is sent, and {at.seen.num_kept} param.grad are still there",
                WHOLE,
            ),
            Bytes(
                "alive_bytes",
                lambda at: shard_bytes(at.world_size, at.options["dtype"]),
                REFERENCED,
                what="besides the parameters, it keeps",
            ),
        ),
        success="Shards of the mean, added up over passes; no whole gradient outlives its bucket.",
    ),
    wrong=(
        Edit(FREES, "pass", WHOLE),
        Edit(FREES, "param.grad.zero_()", WHOLE),
        Edit(SENDS, f"{SENDS}\nself.sent = [*getattr(self, 'sent', []), flat]", REFERENCED),
        Edit(
            SENDS,
            "dist.all_reduce(flat)\nshard = flat[layout.shard_slice(dist.get_rank())]",
            WHOLE_MEAN,
        ),
        Edit(
            "shard = flat.new_empty(layout.shard_numel)",
            "shard = flat[layout.shard_slice(dist.get_rank())]",
            REFERENCED,
            also=(
                (MEAN, "mean = shard.div_(dist.get_world_size())"),
                (ADDS, "self.shards[n].add_(mean)"),
            ),
        ),
        Edit(SENDS, "dist.reduce_scatter_single(shard, flat, async_op=True)", NOT_WAITED),
        Edit(MEAN, f"{MEAN} ** 2", AVERAGED_TWICE),
        Edit(MEAN, "mean = shard", SUMMED),
        Edit(MEAN, "mean = shard / 3", FACTOR),
        Edit(KEEPS, "self.shards[n] = mean", OVERWRITTEN),
        Edit(
            KEEPS,
            "self.sums = getattr(self, 'sums', {})\nself.sums[n] = self.sums.get(n, 0) + mean\n"
            "self.shards[n] = self.sums[n]",
            NOT_CLEARED,
        ),
        Edit(ADDS, "(self.shards[n] + shard) / dist.get_world_size()", SUM_DIVIDED),
        Edit(ADDS, f"({ADDS}) / 2", HALVED),
        Edit(ADDS, "self.shards[n] + flat / dist.get_world_size()", UNEQUAL),
        Edit(SENDS, "shard = flat[layout.shard_slice(dist.get_rank())].clone()", OWN),
        Edit(SENDS, f"{SENDS}\nfor _ in bucket[1:]:\n    {SENDS}", ONE_EACH),
        Edit(CLEARS, "pass", EARLY),
        Edit(CLEARS, "self.ready.clear()", OTHER_BUCKETS),
        Edit(KEEPS, "self.mean = mean", LOST),
        Edit(KEEPS, "self.shards[n] += mean", FIRST),
        Edit(IS_FULL, "bucket[-1] in self.ready", EARLY),
        Edit(
            IS_FULL,
            "bucket[-1] in self.ready",
            EARLY,
            also=(
                (ALL_GRADS, "[torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]"),
            ),
        ),
        Edit(
            IS_FULL,
            "len(self.ready) == sum(map(len, self.buckets))",
            AT_ONCE,
            also=((CLEARS, "if n == len(self.buckets) - 1:\n    self.ready.clear()"),),
        ),
        Edit(
            IS_FULL,
            f"{IS_FULL} and (param not in set(bucket) or self.ready == set(bucket))",
            AT_ONCE,
        ),
        Edit(IS_FULL, "False", AT_ONCE),
        Edit(SENDS, "dist.all_reduce(flat)\nshard = flat", LENGTH),
        Edit(FLATTENS, f"{FLATTENS}.float()", DTYPE),
        Edit("flat.new_empty(", "torch.empty(", DTYPE),
        Edit("flat.new_empty(layout.shard_numel)", "flat.new_empty(layout.numel)", LENGTHS),
        Edit(
            FLATTENS,
            f"{FLATTENS}.float()",
            DTYPE,
            also=((MEAN, "mean = shard.to(param.dtype) / dist.get_world_size()"),),
        ),
        Edit(SENDS, f"flat[layout.numel :] = 1\n{SENDS}", PADDING),
        Edit(SENDS, f"flat = flat.nan_to_num()\n{SENDS}", NOT_A_NAN),
        Edit(SENDS, f"if flat.any():\n    {SENDS}\nelse:\n    shard.zero_()", OTHER_BUCKETS),
        Edit(MEAN, "mean = (shard / dist.get_world_size()).bfloat16().to(shard.dtype)", ROUNDED),
        Edit(
            "[None] * len(buckets), set()",
            "vars(ShardedGrads).get('lists', [None] * len(buckets)), set()\n"
            "ShardedGrads.lists = self.shards",
            OF_THE_CLASS,
        ),
        Edit(
            FLATTENS,
            "torch.cat([param.grad.as_strided((param.numel(),), (1,)) for param in bucket])\n"
            "flat = F.pad(flat, (0, layout.padded_numel - layout.numel))",
            FLATTEN,
        ),
        Edit(SENDS, "dist.reduce_scatter_single(shard, flat.roll(layout.shard_numel))", OTHER_RANK),
        Edit(
            FLATTENS,
            "torch.cat([param.grad.flatten() for param in bucket[::-1]])\n"
            "flat = F.pad(flat, (0, layout.padded_numel - layout.numel))",
            FLATTEN,
        ),
    ),
)
