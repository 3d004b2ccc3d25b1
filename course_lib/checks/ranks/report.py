"""Exercise 5 of 00_ranks: a collective out of `if rank == 0`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from course_lib.checks.ddp.parts import watched_handles
from course_lib.checks.edits import Edit
from course_lib.checks.exercise import Cause, Exercise
from course_lib.checks.expectations import Demand, Numbers
from course_lib.checks.on_ranks import At, OnRanks, calls_of, copied
from course_lib.core import Event
from course_lib.ranks import record

LOSSES = {"step 1": torch.tensor(1.0), "step 2": torch.tensor(2.5).double()}

SOME_RANKS = Cause("A collective stands where only some ranks come: all of them have to call it.")
OTHER_CALL = Cause(
    "A collective is one call that all ranks make: take it out of the branch, so that no rank "
    "needs another call in its place."
)
ONLY_RANK_0 = Cause("Only rank 0 logs; the others take part in the sum and stay silent.")
LOG_ONCE = Cause("Log once.")
SILENT = Cause("Rank 0 is the one that logs; it said nothing.")
RETURNS_NOTHING = Cause("all_reduce and reduce return nothing: they change the tensor itself.")
NOTHING_CAME = Cause("That is rank 0's own loss: nothing came from the others.")
BEFORE_THE_SUM = Cause("That is rank 0's own loss: log what is there after the sum.")
NOT_WAITED = Cause(
    "async_op=True gives a handle: the sum is there when its wait() returns, not before."
)
SUMMED_TWICE = Cause("Summed twice: a second all_reduce adds up the sums. One is enough.")
THE_MEAN = Cause("That is the mean; the sum of the losses is asked for.")


@dataclass
class Logged:
    """Values that one rank logged, copied at once; its calls, and those left open."""

    totals: list[Any]
    calls: list[Event]
    never_waited: int


def _report(rank: int, answer: Callable[..., Any]) -> dict[str, Logged]:
    logged = {}
    for label, loss in LOSSES.items():
        totals = list[Any]()
        with record() as log, watched_handles() as open_ones:
            answer(rank, loss * 10.0**rank, lambda total, to=totals: to.append(copied(total)))
        logged[label] = Logged(totals, calls_of(log.events), len(open_ones))
    return logged


def _as_number(at: At) -> Any:
    """Return what was logged, in float64 where it is one number."""
    total = at.seen.totals[0]
    one = total.numel() == 1 if isinstance(total, Tensor) else isinstance(total, int | float)
    return torch.tensor(float(total)).double() if one else total


def _times(factor: Callable[[At], float]) -> Callable[[At], Tensor]:
    return lambda at: LOSSES[at.label].double() * factor(at)


def _sum(at: At) -> float:
    return sum(10.0**rank for rank in range(at.world_size))


def _logged(holds: Callable[[int, int], bool], cause: Cause) -> Demand:
    """Demand something of (the rank, how many times it logged)."""
    return Demand(
        lambda at: holds(at.rank, len(at.seen.totals)),
        lambda at: (
            f"called log {len(at.seen.totals)} time{'s' * (len(at.seen.totals) != 1)}; "
            f"need {int(at.rank == 0)}"
        ),
        cause,
    )


def _on_rank_0(at: At) -> None:
    """Demand the sum on rank 0, which is the one that logs."""
    if at.rank == 0:
        TOTAL(at)


TOTAL = Numbers(
    _as_number,
    _times(_sum),
    predicates=(
        (lambda _at, got, _item: got is None, RETURNS_NOTHING),
        (lambda at, _got, _item: not at.seen.calls, NOTHING_CAME),
    ),
    causes=(
        (BEFORE_THE_SUM, _times(lambda _at: 1.0)),
        (SUMMED_TWICE, _times(lambda at: _sum(at) * at.world_size)),
        (THE_MEAN, _times(lambda at: _sum(at) / at.world_size)),
    ),
    look=Cause("Rank 0 calls log once, with the sum."),
)

CALL, IF_0 = "dist.all_reduce(loss)", "if rank == 0:"

REPORT = Exercise(
    key="ranks-5",
    title="one report of what all ranks have",
    check=OnRanks(
        observe_on_rank=_report,
        trouble=(("hang", "", SOME_RANKS), ("mismatch", "", OTHER_CALL)),
        expect=(
            Demand(lambda at: not at.seen.never_waited, "goes on before its call ends", NOT_WAITED),
            _logged(lambda rank, times: rank == 0 or not times, ONLY_RANK_0),
            _logged(lambda rank, times: rank > 0 or times > 0, SILENT),
            _logged(lambda rank, times: rank > 0 or times == 1, LOG_ONCE),
            _on_rank_0,
        ),
        success="Rank 0 logs the sum of 1 to 4 ranks, once, and no rank is left waiting.",
    ),
    wrong=(
        Edit(f"{CALL}\n    {IF_0}\n", f"{IF_0}\n        {CALL}\n", SOME_RANKS),
        Edit(CALL, "if rank != 0:\n    return\ndist.reduce(loss, dst=0)", SOME_RANKS),
        Edit(
            f"{CALL}\n    {IF_0}\n",
            f"if rank > 0:\n        dist.barrier()\n    else:\n        {CALL}\n",
            OTHER_CALL,
        ),
        Edit(IF_0, "if True:", ONLY_RANK_0),
        Edit(CALL, "pass", NOTHING_CAME),
        Edit(CALL, "dist.all_reduce(loss, async_op=True)", NOT_WAITED),
        Edit(CALL, f"{CALL}\n{CALL}", SUMMED_TWICE),
        Edit(
            CALL,
            "if rank == 0:\n    log(loss)\ndist.all_reduce(loss)",
            BEFORE_THE_SUM,
            also=(("if rank == 0:\n        log(loss.item())", "pass"),),
        ),
        Edit(IF_0, "if rank == dist.get_world_size() - 1:", SILENT),
        Edit("log(loss.item())", "log(loss.item())\nlog(loss.item())", LOG_ONCE),
        Edit("loss.item()", "loss.item() / dist.get_world_size()", THE_MEAN),
        Edit(
            CALL, "total = dist.all_reduce(loss)", RETURNS_NOTHING, also=(("loss.item()", "total"),)
        ),
    ),
)
