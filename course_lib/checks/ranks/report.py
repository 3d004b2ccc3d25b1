"""Exercise 5 of 00_ranks: a collective out of `if rank == 0`."""

from collections.abc import Callable
from math import inf, nan
from numbers import Real
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.checks.edits import Edit, Own
from course_lib.checks.exercise import Cause, Exercise
from course_lib.checks.judge import ByExample
from course_lib.checks.on_ranks import copied
from course_lib.checks.properties import DIGITS, NOT_WAITED
from course_lib.checks.watch import UNWAITED, Watch

ZERO, A_NAN, AN_INF = "all losses are 0", "the last loss is nan", "the last loss is inf"
LAST = {A_NAN: nan, AN_INF: inf}
LOSSES = {  # those of float32 have exact sums
    "step 1": torch.tensor(1.0),
    "step 2": torch.tensor(2.123456789012345, dtype=torch.float64),
    "step 3": torch.tensor(1.234567e-9, dtype=torch.float64),
    ZERO: torch.tensor(0.0),
    A_NAN: torch.tensor(1.0),
    AN_INF: torch.tensor(1.0),
}
TIMES, TOTAL = "calls of log", "total"

SOME_RANKS = Cause("A collective stands where only some ranks come: all of them have to call it.")
OTHER_CALL = Cause(
    "A collective is one call that all ranks make: take it out of the branch, so that no rank "
    "needs another call in its place."
)
ONLY_RANK_0 = Cause("Only rank 0 logs; the others take part in the sum and stay silent.")
LOG_ONCE = Cause("Rank 0 calls log, in every step, and once; the others do not.")
SILENT = Cause("Rank 0 is the one that logs; it said nothing.")
RETURNS_NOTHING = Cause("all_reduce and reduce return nothing: they change the tensor itself.")
BEFORE_THE_SUM = Cause("That is rank 0's own loss: sum over the ranks, and log what is there then.")
A_TEXT = Cause("log takes the number itself, not a text: what prints it decides how it looks.")
ONE_NUMBER = Cause("log takes one number, the sum: a tensor of one number, or what its item() is.")
ROUNDED = Cause("That is rounded: log the sum with all its digits.")
HIDDEN = Cause(
    "Where a rank's loss is nan or inf, so is the sum: log it as it is. Whoever leaves it out "
    "hides what the report is for."
)
ALSO_ZERO = Cause("A sum of 0 is a sum: log it like any other. `if total` is false for 0.")
FOUR_RANKS = Cause("Those are the first 4 ranks: add up the losses of all, however many they are.")
SUMMED_TWICE = Cause("Summed twice: a second all_reduce adds up the sums. One is enough.")
THE_MEAN = Cause("That is the mean; the sum of the losses is asked for.")
LOOK = Cause("Rank 0 calls log once, with the sum, which is a number with all its digits.")


def _observe(rank: int, answer: Callable[..., Any]) -> dict[str, Any]:
    """Report several losses; what is logged is copied at once."""
    watch, is_last = Watch(), rank == dist.get_world_size() - 1
    for label, one in LOSSES.items():
        totals = list[Any]()
        loss = one * (LAST[label] if label in LAST and is_last else 10.0**rank)
        with watch.step(label) as step:
            answer(rank, loss, lambda total, to=totals: to.append(copied(total)))
        step.show(**{TIMES: len(totals), TOTAL: _as_number(totals[0]) if totals else None})
    return watch.seen


def _as_number(total: Any) -> Any:
    """Return what was logged as a number of float64, or as it is where it is no single number."""
    is_number = isinstance(total, Real) or (isinstance(total, Tensor) and total.numel() == 1)
    return torch.tensor(float(total), dtype=torch.float64) if is_number else total


def _first_four(rank: int, loss: Tensor, log: Callable[[float], Any]) -> None:
    losses = [torch.zeros_like(loss) for _ in range(dist.get_world_size())]
    dist.all_gather(losses, loss)
    if rank == 0:
        log(sum(one.item() for one in losses[:4]))


CALL, IF_0, NUMBER = "dist.all_reduce(loss)", "if rank == 0:", "loss.item()"
BRANCH, LOGS = f"{CALL}\n    {IF_0}\n", f"log({NUMBER})"

REPORT = Exercise(
    key="ranks-5",
    title="one report of what all ranks have",
    check=ByExample(
        observe_on_rank=_observe,
        worlds=(3, 2, 5, 1),
        facets=(UNWAITED, TIMES, TOTAL),
        rtol=2e-15,  # 5 numbers, added up in any order
        looks=(
            *(("hang", SOME_RANKS), ("mismatch", OTHER_CALL), (UNWAITED, NOT_WAITED)),
            *((TIMES, LOG_ONCE), (TOTAL, LOOK)),
        ),
        success="Rank 0 logs the sum of 1, 2, 3 and 5 ranks, once, and no rank is left waiting.",
    ),
    wrong=(
        Edit(BRANCH, f"{IF_0}\n        {CALL}\n", SOME_RANKS),
        Edit(
            BRANCH, f"if rank > 0:\n        dist.barrier()\n    else:\n        {CALL}\n", OTHER_CALL
        ),
        Edit(IF_0, "if True:", ONLY_RANK_0),
        Edit(CALL, "pass", BEFORE_THE_SUM),
        Edit(CALL, "dist.all_reduce(loss, async_op=True)", NOT_WAITED),
        Edit(CALL, f"{CALL}\n{CALL}", SUMMED_TWICE),
        Edit(IF_0, "if rank == dist.get_world_size() - 1:", SILENT),
        Edit(LOGS, f"{LOGS}\n{LOGS}", LOG_ONCE),
        Edit(NUMBER, f"{NUMBER} / dist.get_world_size()", THE_MEAN),
        Edit(NUMBER, f"round({NUMBER}, 2)", ROUNDED),
        Edit(NUMBER, f"int({NUMBER})", ROUNDED),
        Edit(NUMBER, f"float(f'{{{NUMBER}:.6f}}')", ROUNDED),
        Edit(IF_0, "if rank == 0 and loss:", ALSO_ZERO),
        Edit(CALL, f"loss = loss.float()\n{CALL}", DIGITS),
        Edit(NUMBER, f"str({NUMBER})", A_TEXT),
        Edit(NUMBER, f"[{NUMBER}]", ONE_NUMBER),
        Edit(CALL, f"loss = loss.nan_to_num()\n{CALL}", HIDDEN),
        Edit(IF_0, "if rank == 0 and loss == loss:", HIDDEN),
        Edit(CALL, f"total = {CALL}", RETURNS_NOTHING, also=((NUMBER, "total"),)),
        Own(_first_four, FOUR_RANKS),
    ),
)
