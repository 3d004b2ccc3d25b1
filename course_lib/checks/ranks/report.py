"""Exercise ranks-5 of notebook 00_ranks: a collective out of `if rank == 0`."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from course_lib.checks.exercise import CheckFailed, Exercise, Mistake
from course_lib.checks.expect import Cause, expect_equal, run
from course_lib.checks.ranks.mean import WORLD_SIZES, calls_of
from course_lib.ranks import Ranks

Tensor = torch.Tensor


def report_loss(rank: int, loss: Tensor, log: Callable[[float], None]) -> None:
    """Call log(total) once, on rank 0, with the sum of the losses of all ranks."""
    dist.all_reduce(loss)
    if rank == 0:
        log(loss.item())


def _report(rank: int, answer: Callable[..., None]) -> list[float]:
    lines: list[float] = []

    def log(total: Any) -> None:
        if total is None:
            raise CheckFailed(
                "log got None: all_reduce and reduce return nothing, they change the tensor itself."
            )
        lines.append(float(total))  # at this moment: a later sum must not change it

    answer(rank, torch.tensor(10.0**rank), log)
    return lines


def check_report_loss(answer: Callable[..., None]) -> str:
    """Check that rank 0 logs once, the sum that it has then, and the others are silent."""
    on = {
        "hang": "A collective stands where only some ranks come: all of them have to call it.",
        "mismatch": "A collective is one call that all ranks make: take it out of the branch, so "
        "that no rank needs another call in its place.",
    }
    for p in WORLD_SIZES:
        with Ranks(p) as ranks:
            logged = run(ranks, _report, answer, on=on)
            events = ranks.events
        total = sum(10.0**rank for rank in range(p))
        for rank, lines in enumerate(logged):
            expect_equal(
                lines,
                [total] if rank == 0 else [],
                where=f"what rank {rank} of {p} logged",
                causes=_report_causes(rank, calls=bool(calls_of(events, rank))),
                look="Rank 0 calls log once, with the sum.",
            )
    return "Rank 0 logs the sum of 1 to 4 ranks, once, and no rank is left waiting."


def _report_causes(rank: int, *, calls: bool) -> list[Cause]:
    if rank > 0:
        return [(bool, "Only rank 0 logs; the others take part in the sum and stay silent.")]
    own = "That is rank 0's own loss: "
    own += "log what is there after the sum." if calls else "nothing came from the others."
    return [
        (lambda lines: len(lines) > 1, "Log once."),
        ([], "Rank 0 is the one that logs; it said nothing."),
        ([1.0], own),
    ]


def _collective_inside_if(rank: int, loss: Tensor, log: Callable[[float], None]) -> None:
    if rank == 0:
        dist.all_reduce(loss)
        log(loss.item())


def _early_return(rank: int, loss: Tensor, log: Callable[[float], None]) -> None:
    if rank != 0:
        return
    dist.reduce(loss, dst=0)
    log(loss.item())


def _barrier_for_the_others(rank: int, loss: Tensor, log: Callable[[float], None]) -> None:
    if rank == 0:
        dist.all_reduce(loss)
        log(loss.item())
    else:
        dist.barrier()


def _everybody_logs(rank: int, loss: Tensor, log: Callable[[float], None]) -> None:
    dist.all_reduce(loss)
    log(loss.item())


def _own_loss(rank: int, loss: Tensor, log: Callable[[float], None]) -> None:
    if rank == 0:
        log(loss.item())


def _logged_before_the_sum(rank: int, loss: Tensor, log: Callable[[Any], None]) -> None:
    if rank == 0:
        log(loss)
    dist.all_reduce(loss)


def _last_rank_logs(rank: int, loss: Tensor, log: Callable[[float], None]) -> None:
    dist.all_reduce(loss)
    if rank == dist.get_world_size() - 1:
        log(loss.item())


REPORT = Exercise(
    key="ranks-5",
    title="one report of what all ranks have",
    check=check_report_loss,
    reference=report_loss,
    mistakes=(
        Mistake("a collective inside if rank == 0", _collective_inside_if, "only some ranks come"),
        Mistake("an early return", _early_return, "only some ranks come"),
        Mistake("a barrier for the others", _barrier_for_the_others, "take it out of the branch"),
        Mistake("everybody logs", _everybody_logs, "Only rank 0 logs"),
        Mistake("its own loss", _own_loss, "nothing came from the others"),
        Mistake("logged before the sum", _logged_before_the_sum, "log what is there after the sum"),
        Mistake("the last rank logs", _last_rank_logs, "Rank 0 is the one that logs"),
    ),
)
