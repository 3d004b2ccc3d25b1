"""Exercise 3 of 16_experts: whose gradients are averaged with whom."""

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any

import torch
import torch.distributed as dist

from course_lib.checks.edits import Edit
from course_lib.checks.exercise import Cause, Exercise
from course_lib.checks.judge import ByExample
from course_lib.checks.properties import SEEDS
from course_lib.checks.watch import ALWAYS, Watch

DENSE, EXPERTS, CALLS = "dense", "experts", "the calls"

LARGE = Cause(
    "Experts' gradients are ep times too large: each is already a sum over the losses of ep ranks. "
    "Divide by the number of all ranks."
)
SMALL = Cause(
    "Experts' gradients are too small: one division by the number of all ranks is enough."
)
OTHERS = Cause(
    "Gradients of different experts were added: ranks with the same rank % ep hold the same ones."
)
NOT_SUMMED = Cause("Each expert's gradient is summed over all ranks that hold this expert.")
DENSE_SMALL_GROUP = Cause(
    "All ranks hold the dense parameters: sum them over all ranks, and divide by their number."
)
EACH = Cause(
    "Every rank that holds an expert takes part in its sum, also where its gradient is 0 because "
    "no token came."
)
ALL_OF_THEM = Cause("There may be more experts than dense parameters: average all of both lists.")
SUMMED = Cause(
    "Those are sums: divide them by the number of all ranks, in place, as in grad /= dp."
)
IN_PLACE = Cause(
    "Gradients are as before: write each average into its tensor, as in grad.copy_(average)."
)
BUDGET = Cause("At most one all_reduce per gradient, and no other call.")
LOOK = Cause("Write down for one expert which ranks' losses its gradient comes from.")


def _runs(p: int) -> Sequence[Mapping[str, Any]]:
    """Return the options: several ep on 4 and 6 ranks, on fewer ranks ep = p."""
    return [{"eps": {4: (2, 1, 4), 6: (2, 3)}.get(p, (p,))}]


def _observe(rank: int, answer: Callable[..., Any], eps: Sequence[int]) -> dict[str, Any]:
    """Return the facets of two calls for each ep: rank r contributes multiples of 10**r / 3.

    There is one expert more than dense parameters; on rank 0 its gradient is 0.
    """
    watch, p = Watch(), dist.get_world_size()
    made = {(*range(p),): dist.group.WORLD}
    for ep in eps:
        for first in range(ep if ep > 1 else 0):
            made[(*range(first, p, ep),)] = dist.new_group(list(range(first, p, ep)))

    def group_of(ranks: Any) -> Any:
        wanted = (*sorted(map(int, ranks)),)
        if wanted not in made:
            raise ValueError(f"group_of: need all ranks that hold an expert; got {[*wanted]}")
        return made[wanted]

    for ep, call in product(eps, (0, 1)):
        sizes = [(2, 2), (3,), ()][: 2 + call]
        dense, experts = (
            [
                torch.full(size, (n + 1 + call + kind) * 10**rank).double() / 3
                for n, size in enumerate([*sizes, *more])
            ]
            for kind, more in ((0, []), (4, [(2,)]))
        )
        experts[-1] *= rank > 0
        lists = [*dense], [*experts]
        with watch.step(f"ep {ep}, call {call}") as step:
            answer(*lists, ep, group_of)
        calls = sorted(line for line in step.order if line != "wait")
        most = len([*dense, *experts])  # one flat buffer for several is fine
        fits = len(calls) <= most and all(line.startswith("all_reduce ") for line in calls)
        alone = p in (1, ep)  # then no call is needed for experts
        made_calls = f"at most {most} all_reduce" if fits or alone else calls
        kept = [len(one) for one in lists] == [len(dense), len(experts)]
        given: Any = experts if kept else "your function has changed its lists"
        step.show(**{DENSE: dense, EXPERTS: given, CALLS: made_calls})
    return watch.seen


CLONED = "grad = grad.clone()\ndist.all_reduce(grad, group=group)"
SAME = "[other for other in range(dp) if other % ep == rank % ep]"

GRADIENTS = Exercise(
    key="experts-3",
    title="average the gradients",
    check=ByExample(
        observe_on_rank=_observe,
        facets=(DENSE, EXPERTS, *ALWAYS, CALLS),
        worlds=(4, 2, 1, 6),
        runs=_runs,
        rtol=1e-12,  # ranks may be added in another order
        looks=((DENSE, DENSE_SMALL_GROUP), (EXPERTS, LOOK), (CALLS, BUDGET), ("hang", EACH)),
        success="All ranks' dense parameters, and each expert's, on 1, 2, 4 and 6 ranks.",
    ),
    wrong=(
        Edit("grad /= dp", "grad /= dist.get_world_size(group)", LARGE),
        Edit("grad /= dp", "grad /= dp if group is None else dp // ep", LARGE),
        Edit("grad /= dp", "grad /= dp if group is None else dp * ep", SMALL),
        Edit("grad /= dp", "pass", SUMMED),
        Edit("grad /= dp", "grad /= ep", SUMMED),
        Edit(SAME, "[other for other in range(dp) if other // ep == rank // ep]", OTHERS),
        Edit("(experts, same)", "(experts, None)", OTHERS),
        Edit("(dense, None)", "(dense, same)", DENSE_SMALL_GROUP),
        Edit("((dense, None), (experts, same))", "((dense, None),)", NOT_SUMMED),
        Edit("grad /= dp", "grad = grad / dp", SUMMED),
        Edit("dist.all_reduce(grad, group=group)", CLONED, IN_PLACE),
        Edit(
            "dist.all_reduce(grad, group=group)",
            "dist.all_reduce(grad, group=group)\ndist.all_reduce(grad.clone(), group=group)",
            BUDGET,
        ),
        Edit(
            "dist.all_reduce(grad, group=group)",
            "if not grad.any():\n    continue\ndist.all_reduce(grad, group=group)",
            EACH,
        ),
        Edit("(experts, same)", "(experts[: len(dense)], same)", ALL_OF_THEM),
        SEEDS,
    ),
)
