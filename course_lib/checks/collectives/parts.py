"""Tools for the checks of 04_collectives, and for their planted wrong answers."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.checks.exercise import CheckFailed
from course_lib.checks.expect import told
from course_lib.ranks import RankError, Ranks

WORLD_SIZES = (4, 3, 2, 1)  # on few ranks, wrong answers look alike
SENDS = ("send", "recv")
SENDS_FIRST = (
    "All of you send first, and every receiver is busy sending: a circle. Start both with isend "
    "and irecv, then wait for both."
)
DROPPED = "isend and irecv give a handle: keep it, and wait() for it before you return."
ARROWS = "Follow the arrows: who waits for whom?"
# float64 keeps 16 digits; dividing before or after the sum may round the last ones differently
ROUNDING = 1e-12
SHOWN = 1e-5  # numbers closer than this may print alike


def run_answer(
    ranks: Ranks, fn: Callable[..., Any], *args: Any, raised: str | Callable[[RankError], str] = ""
) -> list[Any]:
    """Run `ranks.run(fn, *args)`; errors become CheckFailed or NotDone, a hang with its cause.

    `raised` is what to say when an answer raised an error, or its calls did not fit.
    """
    try:
        return ranks.run(fn, *args)
    except RankError as error:
        says = _why_stuck(error, ranks.world_size) if error.kind == "hang" else ""
        if error.kind in ("raised", "mismatch"):
            says = raised(error) if callable(raised) else raised
        raise told(error, ranks.world_size, says) from None


def _why_stuck(error: RankError, p: int) -> str:
    """Return what a hang proves: only a blocking send proves that all ranks send first."""
    if error.report.dropped:
        return DROPPED
    kinds = {wait.kind for wait in error.waits}
    if len(error.waits) < p or len(kinds) > 1:
        return ARROWS
    if kinds == {"recv"}:
        return f"{ARROWS} All of you wait to receive: does your source send to you?"
    if all("dist.send(" in wait.where for wait in error.waits):
        return SENDS_FIRST
    return (
        f"{ARROWS} All of you wait for a send to end: is a receive started before that, and from "
        "the rank that sends to you?"
    )


def rounded(got: Any, wanted: Tensor, where: str) -> Any:
    """Return `wanted` itself where `got` differs by rounding only; smaller than what prints."""
    alike = isinstance(got, Tensor) and (got.shape, got.dtype) == (wanted.shape, wanted.dtype)
    if not alike or not torch.allclose(got, wanted, rtol=SHOWN, atol=0):
        return got
    if torch.allclose(got, wanted, rtol=ROUNDING, atol=0):
        return wanted
    off = (got - wanted).abs().max().item()
    raise CheckFailed(f"{where}: off by {off:.1g}. Digits were lost: keep the dtype of x.")


def shared_cause(got: Sequence[Any], causes: Sequence[Sequence[tuple[Any, str]]]) -> str:
    """Return the first sentence whose wrong answer is what every rank got; None if none is.

    `causes[rank]` are pairs of a wrong answer (a tensor or a predicate) and its sentence.
    """
    for row in zip(*causes, strict=True):
        if all(_fits(wrong, one) for (wrong, _), one in zip(row, got, strict=True)):
            return row[0][1]
    return ""


def _fits(wrong: Any, got: Any) -> bool:
    if not isinstance(got, Tensor):
        return False
    if callable(wrong):
        return bool(wrong(got))
    alike = (got.shape, got.dtype) == (wrong.shape, wrong.dtype)
    return alike and torch.allclose(got, wrong, rtol=ROUNDING, atol=0)


def brings(rank: int, n: int) -> Tensor:
    """Return a rank's contribution: 1, 2, 3 ... times 10**rank, whose sums and means are exact."""
    return torch.arange(1, n + 1, dtype=torch.float64) * 10**rank


def total(p: int, n: int) -> Tensor:
    """Return the sum of the contributions of p ranks."""
    return brings(0, n) * sum(10**rank for rank in range(p))


def me() -> tuple[int, int]:
    """Return this rank, and the number of ranks."""
    return dist.get_rank(), dist.get_world_size()


def swap(out: Tensor, to: int, incoming: Tensor, source: int) -> None:
    """Send and receive at once, then wait for both."""
    for work in (dist.isend(out, to), dist.irecv(incoming, source)):
        if work is not None:
            work.wait()


def everyones(x: Tensor) -> list[Tensor]:
    """Return the x of all ranks, each sent to every rank by its owner: far too much traffic."""
    rank, p = me()
    came = [x.clone() for _ in range(p)]
    for step in range(1, p):
        swap(x, (rank + step) % p, came[(rank - step) % p], (rank - step) % p)
    return came
