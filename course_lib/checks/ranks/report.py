"""Exercise 5 of 00_ranks: a collective out of `if rank == 0`."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from math import inf, nan
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.checks.ddp.parts import watched_handles
from course_lib.checks.edits import Edit, Own
from course_lib.checks.exercise import Cause, Exercise
from course_lib.checks.expectations import DIGITS_LOST, Demand, Numbers
from course_lib.checks.on_ranks import At, OnRanks, calls_of, copied
from course_lib.core import Event
from course_lib.ranks import record

ZERO, A_NAN, AN_INF = "all losses are 0", "the last loss is nan", "the last loss is inf"
LAST = {A_NAN: nan, AN_INF: inf}
LOSSES = {
    "step 1": torch.tensor(1.0),
    "step 2": torch.tensor(2.123456789012345, dtype=torch.float64),
    "step 3": torch.tensor(0.0001234567),
    ZERO: torch.tensor(0.0),
    A_NAN: torch.tensor(1.0),
    AN_INF: torch.tensor(1.0),
}

KINDS = "all_reduce", "reduce", "all_gather", "gather"

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


@dataclass
class Logged:
    """Values that one rank logged, copied at once; its calls, and those left open."""

    totals: list[Any]
    calls: list[Event]
    never_waited: int


def _report(rank: int, answer: Callable[..., Any]) -> dict[str, Logged]:
    logged = {}
    for label in LOSSES:
        totals, loss = list[Any](), _loss(label, rank, dist.get_world_size())
        with ExitStack() as stack:
            log = stack.enter_context(record())
            open_ones = [stack.enter_context(watched_handles(kind)) for kind in KINDS]
            answer(rank, loss, lambda total, to=totals: to.append(copied(total)))
        logged[label] = Logged(totals, calls_of(log.events), sum(map(len, open_ones)))
    return logged


def _loss(label: str, rank: int, p: int) -> Tensor:
    """Return the loss of a rank."""
    return LOSSES[label] * (LAST[label] if label in LAST and rank == p - 1 else 10.0**rank)


def _as_number(at: At) -> Any:
    """Return what was logged, in float64 where it is one number."""
    total = at.seen.totals[0]
    return torch.tensor(float(total), dtype=torch.float64) if _is_number(total) else total


def _is_number(total: Any) -> bool:
    try:
        return not isinstance(total, str) and bool(float(total) or True)
    except (TypeError, ValueError, RuntimeError):
        return False


def _times(factor: Callable[[At], float]) -> Callable[[At], Tensor]:
    return lambda at: LOSSES[at.label].double() * factor(at)


def _sum(at: At) -> float:
    return sum(10.0**rank for rank in range(at.world_size)) + LAST.get(at.label, 0.0)


def _rounding(at: At) -> float:
    """Return what rounding amounts to where 5 numbers are added up in any order."""
    return 5 * torch.finfo(LOSSES[at.label].dtype).eps


def _rounded(at: At, got: Tensor, _item: None) -> bool:
    need, number = TOTAL.right(at).item(), got.item()
    shorter = (float(f"{need:.{digits}g}") for digits in range(1, 10))
    return number in (int(need), *(round(need, digits) for digits in range(9)), *shorter)


def _logged(holds: Callable[[At, int], bool], cause: Cause) -> Demand:
    """Demand something of (a rank, how many times it logged)."""
    return Demand(
        lambda at: holds(at, len(at.seen.totals)),
        lambda at: (
            f"called log {len(at.seen.totals)} time{'s' * (len(at.seen.totals) != 1)}; "
            f"need {int(at.rank == 0)}"
        ),
        cause,
    )


def _on_rank_0(at: At) -> None:
    """Demand the sum on rank 0, which is the one that logs."""
    if at.rank > 0:
        return
    total = at.seen.totals[0]
    if total is not None and not _is_number(total):
        shown = repr(total) if len(repr(total)) < 60 else f"a {type(total).__name__}"
        at.fail(f"logs {shown}; need one number", A_TEXT if isinstance(total, str) else ONE_NUMBER)
    TOTAL(at)


TOTAL = Numbers(
    _as_number,
    _times(_sum),
    rtol=_rounding,
    predicates=(
        (lambda _at, got, _item: got is None, RETURNS_NOTHING),
        (lambda at, _got, _item: not at.seen.calls, NOTHING_CAME),
        (lambda at, _got, _item: at.label in LAST, HIDDEN),
        (_rounded, ROUNDED),
    ),
    causes=(
        (BEFORE_THE_SUM, _times(lambda _at: 1.0)),
        (SUMMED_TWICE, _times(lambda at: _sum(at) * at.world_size)),
        (THE_MEAN, _times(lambda at: _sum(at) / at.world_size)),
        (FOUR_RANKS, _times(lambda _at: 1111.0)),
    ),
    look=Cause("Rank 0 calls log once, with the sum."),
)


def _first_four(rank: int, loss: Tensor, log: Callable[[float], Any]) -> None:
    losses = [torch.zeros_like(loss) for _ in range(dist.get_world_size())]
    dist.all_gather(losses, loss)
    if rank == 0:
        log(sum(one.item() for one in losses[:4]))


CALL, IF_0 = "dist.all_reduce(loss)", "if rank == 0:"

REPORT = Exercise(
    key="ranks-5",
    title="one report of what all ranks have",
    check=OnRanks(
        observe_on_rank=_report,
        worlds=(3, 2, 5, 1),
        trouble=(
            ("hang", "", SOME_RANKS),
            ("mismatch", "", OTHER_CALL),
            ("raised", "NaN to integer", ROUNDED),
        ),
        expect=(
            Demand(lambda at: not at.seen.never_waited, "goes on before its call ends", NOT_WAITED),
            _logged(lambda at, times: at.rank == 0 or not times, ONLY_RANK_0),
            _logged(lambda at, times: times > 0 or at.rank > 0 or at.label not in LAST, HIDDEN),
            _logged(lambda at, times: times > 0 or at.rank > 0 or at.label != ZERO, ALSO_ZERO),
            _logged(lambda at, times: times > 0 or at.rank > 0, SILENT),
            _logged(lambda at, times: times == 1 or at.rank > 0, LOG_ONCE),
            _on_rank_0,
        ),
        success="Rank 0 logs the sum of 1, 2, 3 and 5 ranks, once, and no rank is left waiting.",
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
        Edit("loss.item()", "round(loss.item(), 2)", ROUNDED),
        Edit("loss.item()", "int(loss.item())", ROUNDED),
        Edit("loss.item()", "float(f'{loss.item():.6f}')", ROUNDED),
        Edit("loss.item()", "float(f'{loss.item():.7g}')", ROUNDED),
        Edit("loss.item()", "loss.item() if loss.isfinite() else float('nan')", HIDDEN),
        Edit(IF_0, "if rank == 0 and loss:", ALSO_ZERO),
        Edit(CALL, f"loss = loss.float()\n{CALL}", DIGITS_LOST),
        Own(_first_four, FOUR_RANKS),
        Edit("loss.item()", "str(loss.item())", A_TEXT),
        Edit("loss.item()", "[loss.item()]", ONE_NUMBER),
        Edit(CALL, f"loss = loss.nan_to_num()\n{CALL}", HIDDEN),
        Edit(IF_0, "if rank == 0 and loss == loss:", HIDDEN),
        Edit(CALL, f"if loss == loss:\n    {CALL}", SOME_RANKS),
        Edit(CALL, "dist.reduce(loss, 0, async_op=True)", NOT_WAITED),
        Edit(
            CALL, "total = dist.all_reduce(loss)", RETURNS_NOTHING, also=(("loss.item()", "total"),)
        ),
    ),
)
