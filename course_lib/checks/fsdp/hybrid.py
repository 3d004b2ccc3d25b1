"""Exercise 4 of 10_fsdp: the groups of hybrid sharding, and how a gradient goes through them."""

import re
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from course_lib.checks.edits import Edit
from course_lib.checks.exercise import Cause, Exercise
from course_lib.checks.judge import ByExample
from course_lib.checks.properties import (
    CALLERS,
    DIGITS,
    IN_A_GROUP,
    KEEPS_DTYPE,
    NOT_WAITED,
    SEEDS,
)
from course_lib.checks.watch import ALWAYS, ORDER, UNWAITED, WAIT, Watch

ROWS = 3  # numbers in a shard
FINE = 1 + 2**-30  # what float32 loses
SHARD_SIZES = {1: (1,), 4: (2, 1, 4), 6: (2, 3)}

SWAPPED = Cause(
    "Swapped: the ranks of a node shard; the ranks at one position of all nodes replicate."
)
MEMBERS = Cause(
    "A shard group is `shard_size` ranks in a row; a replicate group has one rank of each node, "
    "all at the same place."
)
NOT_EVERY_RANK = Cause(
    "new_group is a call of all ranks, members or not: every rank makes every group, and every "
    "call of its groups, in one order, the same on all of them."
)
SUMMED = Cause("{p} times too large: summed, not averaged. Divide by the number of all ranks.")
BY_GROUP = Cause("Divided by the ranks of one group: all ranks have tokens of their own.")
NODE_ONLY = Cause("Only this node's gradients are in it: all-reduce the shard across the nodes.")
ACROSS_ONLY = Cause("Only the ranks at this place are in it: reduce-scatter inside the node first.")
OTHER_SHARD = Cause(
    "That is another rank's shard: a rank keeps the part at its place in the shard group, not at "
    "its rank in the world."
)
SHARD = Cause(
    "What comes back is this rank's shard of the mean, len(grad) / shard_size numbers, of grad's "
    "dtype. The digits say which ranks are in it: multiply by the number of ranks."
)
WHOLE_ACROSS = Cause(
    "Reduce-scatter the gradient inside the node, then all-reduce its shard across the nodes, each "
    "call through its own group: group=... ."
)
KEEPS = Cause("A later call has changed what this one returned: return a new tensor each time.")


def reduce(
    rank: int, answer: Callable[..., Any], shard_size: int, dtype: torch.dtype = torch.float64
) -> dict[str, Any]:
    """Make the groups, and reduce two gradients: other numbers at each index, times 10**rank."""
    watch, found = Watch(), list[Any]()
    with watch.step(f"shard_size {shard_size}, the groups") as step:
        hybrid = answer(shard_size)
    groups = (getattr(hybrid, f"{name}_group", None) for name in ("shard", "replicate"))
    members = [group and dist.get_process_group_ranks(group) for group in groups]
    step.show(**{"shard group": members[0], "replicate group": members[1], UNWAITED: [], ORDER: []})
    for number in range(2):
        numbers = FINE * 10.0**rank * (1 + number + torch.arange(shard_size * ROWS)).double()
        grad, kind = numbers.to(dtype), str(dtype).removeprefix("torch.")
        label = f"shard_size {shard_size}, {kind}, gradient {number + 1}"
        with watch.step(label, grad=grad) as step:
            found.append(hybrid.reduce(grad))
        order = [line for line in step.shown[ORDER] if _is_among_several(line)]
        step.show(result=found[-1], **{ORDER: order})
        if dist.get_world_size() == 1:
            step.show(**{UNWAITED: []})
    with watch.step("at the end") as step:
        step.show(result=found)
    return watch.seen


def _is_among_several(line: str) -> bool:
    """Return whether a line of the order is a call that has to be made: not in a group of one."""
    alone = dist.get_world_size() == 1 or re.search(r" in the group \d+$", line)
    return not alone and not line.endswith(WAIT)


def _runs(p: int) -> list[dict[str, Any]]:
    sizes = SHARD_SIZES[p]
    return [*({"shard_size": n} for n in sizes), {"shard_size": sizes[0], "dtype": torch.float32}]


def _sum_first(scatters: str) -> str:
    """Return code that sums the whole gradient over all ranks, and takes a part of that."""
    part = "whole.view(-1, len(shard))"
    return f"whole = grad.clone()\ndist.all_reduce(whole)\nshard.copy_({part}[{scatters}])"


GROUPS = "[*nodes, *zip(*nodes, strict=True)]"
SCATTERS = "dist.reduce_scatter_single(shard, grad, group=self.shard_group)"
ADDS = "dist.all_reduce(shard, group=self.replicate_group)"
MEAN = "shard / dist.get_world_size()"
MAKES = "group = dist.new_group(list(ranks))"
PLACE = "dist.get_rank(self.shard_group)"

HYBRID = Exercise(
    key="fsdp-4",
    title="hybrid sharding",
    check=ByExample(
        observe_on_rank=reduce,
        worlds=(4, 6, 1),
        runs=_runs,
        facets=("shard group", "replicate group", *ALWAYS, "result", ORDER),
        looks=(
            ("hang", NOT_EVERY_RANK),
            ("mismatch", NOT_EVERY_RANK),
            (UNWAITED, NOT_WAITED),
            ("shard group", MEMBERS),
            ("replicate group", MEMBERS),
            ("result", SHARD),
            (ORDER, WHOLE_ACROSS),
        ),
        success="Sharded in a node, replicated across; only shards cross, on 1, 4 and 6 ranks.",
    ),
    wrong=(
        Edit(
            "self.shard_group, self.replicate_group =",
            "self.replicate_group, self.shard_group =",
            SWAPPED,
        ),
        Edit(GROUPS, "[*nodes, range(dist.get_world_size())]", MEMBERS),
        Edit(MAKES, f"if dist.get_rank() not in ranks:\n    continue\n{MAKES}", NOT_EVERY_RANK),
        Edit(MEAN, "shard", SUMMED),
        Edit(MEAN, "shard / dist.get_world_size(self.shard_group)", BY_GROUP),
        Edit(ADDS, "pass", NODE_ONLY),
        Edit(SCATTERS, f"shard.copy_(grad.view(-1, len(shard))[{PLACE}])", ACROSS_ONLY),
        Edit(SCATTERS, f"dist.all_reduce(grad, group=self.shard_group)\n{SCATTERS}", CALLERS),
        Edit(SCATTERS, _sum_first(PLACE), WHOLE_ACROSS, also=((ADDS, "pass"),)),
        Edit(SCATTERS, _sum_first(f"-1 - {PLACE}"), OTHER_SHARD, also=((ADDS, "pass"),)),
        Edit(SCATTERS, SCATTERS.replace(")", ", async_op=True)"), NOT_WAITED),
        Edit(MEAN, f"({MEAN}).repeat(2)", SHARD),
        Edit(MEAN, f"({MEAN}).float().to(grad.dtype)", DIGITS),
        Edit(
            "shard = grad.new_empty",
            "self.kept = getattr(self, 'kept', None)\n"
            "shard = self.kept = self.kept if self.kept is not None else grad.new_empty",
            KEEPS,
            also=((MEAN, "shard.div_(dist.get_world_size())"),),
        ),
        *(*IN_A_GROUP[:1], *KEEPS_DTYPE, SEEDS),
    ),
)
