"""Exercise 4 of 10_fsdp: the groups of hybrid sharding, and how a gradient goes through them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.checks.edits import Edit
from course_lib.checks.exercise import Cause, Exercise
from course_lib.checks.expectations import Calls, Demand, Lasting, Numbers, Untouched
from course_lib.checks.on_ranks import At, Observed, OnRanks, watch
from course_lib.checks.zero.parts import (
    ALL_WAITED,
    NOT_WAITED,
    ROUNDED,
    named,
    nearly,
    unwaited_calls,
)
from course_lib.core import Event

ROWS, ROUNDS = 3, 2  # numbers in a shard; calls of reduce
SHARD_SIZES = {1: (1,), 4: (2, 1, 4), 6: (2, 3)}

SWAPPED = Cause(
    "Swapped: the ranks of a node shard; the ranks at one position of all nodes replicate."
)
MEMBERS = Cause(
    "A shard group is `shard_size` ranks in a row; a replicate group has one rank of each node, "
    "all at the same place."
)
NOT_EVERY_RANK = Cause(
    "new_group is a call of all ranks, members or not: every rank makes every group, in one order, "
    "the same on all of them."
)
SUMMED = Cause("{p} times too large: summed, not averaged. Divide by the number of all ranks.")
BY_NODE = Cause("Divided by the ranks of one group: all ranks have tokens of their own.")
NODE_ONLY = Cause("Only this node's gradients are in it: all-reduce the shard across the nodes.")
ACROSS_ONLY = Cause("Only the ranks at this place are in it: reduce-scatter inside the node first.")
DIVIDED_TWICE = Cause("Divide only once, by the number of all ranks.")
SHARD = Cause("What comes back is this rank's shard: len(grad) / shard_size numbers.")
OTHER_SHARD = Cause(
    "That is another rank's shard: a rank keeps the part at its place in the shard group, not at "
    "its rank in the world."
)
WHOLE_ACROSS = Cause(
    "Reduce-scatter the gradient inside the node, then all-reduce its shard across the nodes."
)
THROUGH_WORLD = Cause("Each call goes through its own group: group=... .")
DIGITS = Cause("Multiply by the number of ranks: the digits say which ranks are in it.")
DTYPE = Cause("Reduced in the wrong dtype: make the shard with grad.new_empty(...).")


@dataclass
class HybridStep(Observed):
    """One call of reduce; the members of the groups, None where a group is none."""

    shard_ranks: Any = None
    replicate_ranks: Any = None
    unwaited: list[str] = field(default_factory=list)


def _grad(rank: int, number: int, shard_size: int, dtype: torch.dtype) -> Tensor:
    """Return a rank's gradient: other numbers at each index, times 10**rank."""
    return (1 + number + torch.arange(shard_size * ROWS)) * torch.tensor(10.0**rank, dtype=dtype)


def _observe(
    rank: int, answer: Callable[..., Any], shard_size: int, dtype: torch.dtype
) -> dict[str, HybridStep]:
    hybrid, found = answer(shard_size), {}
    members = [_members(getattr(hybrid, f"{name}_group", None)) for name in ("shard", "replicate")]
    for number in range(ROUNDS):
        grad = _grad(rank, number, shard_size, dtype)
        with unwaited_calls() as unwaited:
            seen = watch(hybrid.reduce, grad, grad=grad)
        found[f"shard_size {shard_size}, {named(dtype)}, call {number + 1}"] = HybridStep(
            **vars(seen), shard_ranks=members[0], replicate_ranks=members[1],
            unwaited=list(unwaited.values()),
        )  # fmt: skip
    return found


def _members(group: Any) -> list[int] | None:
    """Return the global ranks of a group."""
    return None if group is None else dist.get_process_group_ranks(group)


def _runs(p: int) -> list[dict[str, Any]]:
    runs: list[dict[str, Any]] = [
        {"shard_size": size, "dtype": torch.float64} for size in SHARD_SIZES[p]
    ]
    return [*runs, {"shard_size": SHARD_SIZES[p][0], "dtype": torch.float32}]


def _node(at: At) -> list[int]:
    """Return the ranks that shard together with this one."""
    size = at.options["shard_size"]
    first = at.rank - at.rank % size
    return list(range(first, first + size))


def _across(at: At) -> list[int]:
    """Return the ranks that keep the same shard as this one."""
    size = at.options["shard_size"]
    return list(range(at.rank % size, at.world_size, size))


def _sum_of(at: At, ranks: list[int], place: int | None = None) -> Tensor:
    """Return the sum of some ranks' gradients at this rank's shard, or at another place."""
    size, dtype = at.options["shard_size"], at.options["dtype"]
    total = torch.stack([_grad(rank, at.number, size, dtype) for rank in ranks]).sum(0)
    begin = ROWS * (_place(at) if place is None else place)
    return total[begin : begin + ROWS]


def _place(at: At) -> int:
    """Return this rank's place in its node."""
    return int(at.rank % at.options["shard_size"])


def _everyone(at: At) -> list[int]:
    return list(range(at.world_size))


def _mean(at: At) -> Tensor:
    return _sum_of(at, _everyone(at)) / at.world_size


def _of_some(ranks: Callable[[At], list[int]]) -> list[Callable[[At], Tensor]]:
    """Return what comes of the gradients of some ranks only, however they are divided."""
    return [
        lambda at: _sum_of(at, ranks(at)) / at.world_size,
        lambda at: _sum_of(at, ranks(at)) / len(ranks(at)),
        lambda at: _sum_of(at, ranks(at)),
    ]


def _calls(at: At) -> list[Event]:
    """Return the calls among several ranks."""
    return [call for call in at.seen.calls if len(call.group) > 1]


def _needed(at: At) -> list[tuple[str, int]]:
    size, number_bytes = at.options["shard_size"], at.options["dtype"].itemsize
    inside = [("reduce_scatter", size * ROWS * number_bytes)] if size > 1 else []
    return inside + ([("all_reduce", ROWS * number_bytes)] if size < at.world_size else [])


def _groups_fit(at: At) -> bool:
    """Return whether every call goes through the group that it is for."""
    right = {"reduce_scatter": _node(at), "all_reduce": _across(at)}
    return all(list(call.group) == right[call.kind] for call in _calls(at))


def _demand_groups(at: At) -> None:
    """Demand the members of both groups."""
    shard, replicate = at.seen.shard_ranks, at.seen.replicate_ranks
    if (shard, replicate) == (_node(at), _across(at)):
        return
    swapped = (shard, replicate) == (_across(at), _node(at))
    at.fail(
        f"shards with {shard} and replicates with {replicate}; need {_node(at)} and {_across(at)}",
        SWAPPED if swapped else MEMBERS,
    )


GROUPS = "[*nodes, *zip(*nodes, strict=True)]"
SCATTERS = "dist.reduce_scatter_single(shard, grad, group=self.shard_group)"
ADDS = "dist.all_reduce(shard, group=self.replicate_group)"
MEAN = "shard / dist.get_world_size()"
MAKES = "group = dist.new_group(list(ranks))"

HYBRID = Exercise(
    key="fsdp-4",
    title="hybrid sharding",
    check=OnRanks(
        observe_on_rank=_observe,
        worlds=(4, 6, 1),
        runs=_runs,
        trouble=(
            *((kind, "", NOT_EVERY_RANK) for kind in ("hang", "mismatch")),
            ("raised", "dtype", DTYPE),
            ("raised", "not part of group|default_pg|new_group|size of the output|output", SHARD),
        ),
        expect=(
            ALL_WAITED,
            Untouched(),
            _demand_groups,
            Numbers(
                "value",
                _mean,
                rtol=lambda at: 1e-12 if at.options["dtype"] == torch.float64 else 1e-6,
                what="the shard",
                shape=SHARD,
                dtype=DTYPE,
                causes=(
                    (SUMMED, lambda at: _mean(at) * at.world_size),
                    (DIVIDED_TWICE, lambda at: _mean(at) / at.world_size),
                    (BY_NODE, lambda at: _sum_of(at, _everyone(at)) / at.options["shard_size"]),
                    (BY_NODE, lambda at: _sum_of(at, _everyone(at)) / len(_across(at))),
                    *((NODE_ONLY, wrong) for wrong in _of_some(_node)),
                    *((ACROSS_ONLY, wrong) for wrong in _of_some(_across)),
                    (
                        OTHER_SHARD,
                        lambda at: (
                            _sum_of(at, _everyone(at), at.options["shard_size"] - 1 - _place(at))
                            / at.world_size
                        ),
                    ),
                ),
                otherwise=((lambda at, got, _: nearly(got, _mean(at)), ROUNDED),),
                look=DIGITS,
            ),
            Lasting(),
            Calls(
                _needed,
                other_kind=WHOLE_ACROSS,
                symptoms=((lambda got, need: sum(got) > sum(need), WHOLE_ACROSS),),
                look=WHOLE_ACROSS,
                value=_calls,
            ),
            Demand(_groups_fit, "a call goes through another group", THROUGH_WORLD),
        ),
        success="Sharded in a node, replicated across; only shards cross, on 1, 4 and 6 ranks.",
    ),
    wrong=(
        Edit(
            "self.shard_group, self.replicate_group =",
            "self.replicate_group, self.shard_group =",
            SWAPPED,
        ),
        Edit(
            "list(range(first, first + shard_size))",
            "list(range(first // shard_size, p := dist.get_world_size(), p // shard_size))",
            SWAPPED,
        ),
        Edit(GROUPS, "[*nodes, range(dist.get_world_size())]", MEMBERS),
        Edit(GROUPS, "[*zip(*nodes, strict=True), *nodes]", SWAPPED),
        Edit(MAKES, "if dist.get_rank() not in ranks:\n    continue\n" + MAKES, NOT_EVERY_RANK),
        Edit(
            GROUPS,
            f"sorted({GROUPS}[: len(nodes)], key=lambda one: dist.get_rank() not in one)"
            f" + {GROUPS}[len(nodes) :]",
            NOT_EVERY_RANK,
        ),
        Edit(MEAN, "shard", SUMMED),
        Edit(MEAN, f"{MEAN} ** 2", DIVIDED_TWICE),
        Edit(MEAN, "shard / dist.get_world_size(self.shard_group)", BY_NODE),
        Edit(MEAN, "shard / dist.get_world_size(self.replicate_group)", BY_NODE),
        Edit(ADDS, "pass", NODE_ONLY),
        Edit(
            SCATTERS,
            "shard.copy_(grad.view(-1, len(shard))[dist.get_rank(self.shard_group)])",
            ACROSS_ONLY,
        ),
        Edit(
            SCATTERS,
            "dist.all_reduce(grad, group=self.shard_group)\n" + SCATTERS,
            Untouched().cause,
        ),
        Edit(
            SCATTERS,
            "grad = grad.clone()\ndist.all_reduce(grad, group=self.replicate_group)\n" + SCATTERS,
            WHOLE_ACROSS,
            also=((ADDS, "pass"),),
        ),
        Edit(
            SCATTERS,
            "whole = grad.clone()\ndist.all_reduce(whole)\n"
            "shard.copy_(whole.view(-1, len(shard))[dist.get_rank(self.shard_group)])",
            WHOLE_ACROSS,
            also=((ADDS, "pass"),),
        ),
        Edit(
            SCATTERS,
            "whole = grad.clone()\ndist.all_reduce(whole)\n"
            "shard.copy_(whole.view(-1, len(shard))[-1 - dist.get_rank(self.shard_group)])",
            OTHER_SHARD,
            also=((ADDS, "pass"),),
        ),
        Edit(
            SCATTERS,
            "dist.reduce_scatter_single(shard, grad, group=self.shard_group, async_op=True)",
            NOT_WAITED,
        ),
        Edit(MEAN, "(shard / dist.get_world_size()).repeat(2)", SHARD),
        Edit("grad.new_empty(", "torch.empty(", DTYPE),
        Edit(MEAN, "(shard / dist.get_world_size()).float()", DTYPE),
        Edit(MEAN, "(shard / dist.get_world_size()).bfloat16().to(grad.dtype)", ROUNDED),
        Edit(
            "shard = grad.new_empty",
            "self.kept = getattr(self, 'kept', None)\n"
            "shard = self.kept = self.kept if self.kept is not None else grad.new_empty",
            Lasting().cause,
            also=((MEAN, "shard.div_(dist.get_world_size())"),),
        ),
    ),
)
