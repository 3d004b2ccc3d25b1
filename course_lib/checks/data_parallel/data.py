"""Exercises 3 and 4 of 05_data_parallel: the items that a rank reads, and its batch's weight.

The first is arithmetic; the weight is checked on ranks, where rank r's loss is a multiple of 10**r,
one of them without any items.
"""

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from course_lib.checks.data_parallel import data_answers as planted
from course_lib.checks.data_parallel.parts import expect_calls
from course_lib.checks.exercise import CheckFailed, Exercise, Mistake
from course_lib.checks.expect import run
from course_lib.data_parallel.naive_ddp import weighted_loss
from course_lib.data_parallel.sampler import RankSampler
from course_lib.ranks import Ranks

# --- data_parallel-3: the sampler

Indices = Callable[[int, int, int, int], list[int]]


def check_indices(answer: Indices) -> str:
    """Check any lengths: everything read, as often on every rank, in another order each epoch."""
    for n, p in ((12, 4), (10, 4), (7, 3), (9, 1), (3, 4), (1, 4)):
        for epoch in (0, 1):
            dealt = [_list_of(answer(n, rank, p, epoch)) for rank in range(p)]
            where = f"{n} item{'s' if n > 1 else ''} on {p} rank{'s' if p > 1 else ''}"
            _expect_dealt(dealt, n, f"{where}, epoch {epoch}")
            if [_list_of(answer(n, rank, p, epoch)) for rank in range(p)] != dealt:
                raise CheckFailed("The same call gives other items: draw from a seed, not by luck.")
    epochs = [_list_of(answer(100, 1, 2, epoch)) for epoch in range(3)]
    if epochs[0] == sorted(epochs[0]):
        raise CheckFailed("100 items on 2 ranks: they come in the order of the data. Shuffle.")
    if epochs[0] in epochs[1:]:
        raise CheckFailed(
            "100 items on 2 ranks: two epochs are the same. The epoch has to change the seed: "
            "that is what set_epoch is for."
        )
    if len({frozenset(items) for items in epochs}) == 1:
        raise CheckFailed(
            "100 items on 2 ranks: rank 1 reads the same half in every epoch. Shuffle all items, "
            "then deal them out, and not the other way round."
        )
    for n, p in ((10, 4), (7, 3), (13, 5)):
        _expect_filled([_list_of(answer(n, rank, p, 1)) for rank in range(p)], n)
    before = torch.get_rng_state(), random.getstate()
    answer(10, 1, 4, 2)
    if not (torch.equal(before[0], torch.get_rng_state()) and before[1] == random.getstate()):
        raise CheckFailed(
            "Your function changes the global random state, so dropout and weights drawn after it "
            "differ, and are alike where they should not be. Draw from a generator of your own: "
            "torch.Generator().manual_seed(...)."
        )
    return "Each item read, as many on every rank, another order every epoch."


def _expect_filled(dealt: Sequence[list[int]], n: int) -> None:
    """Demand that the first items of the order are repeated, dealt out in turn or in blocks."""
    rounds = [item for row in zip(*dealt, strict=True) for item in row]
    pieces = [item for items in dealt for item in items]
    if not any(len(set(x[:n])) == n and x[n:] == x[: len(x) - n] for x in (rounds, pieces)):
        raise CheckFailed(
            f"{n} items on {len(dealt)} ranks, {dealt}: others than the first items of the order "
            "are read twice. Fill up the common order, then deal it out."
        )


def _list_of(got: Any) -> list[int]:
    if isinstance(got, torch.Tensor):
        got = got.tolist()
    if isinstance(got, tuple):
        got = list(got)
    if not isinstance(got, list):
        raise CheckFailed(f"need a list of items; got {type(got).__name__}.")
    return [int(item) for item in got]


def _expect_dealt(dealt: Sequence[list[int]], n: int, where: str) -> None:
    p, times = len(dealt), Counter(item for items in dealt for item in items)
    each, lengths = -(-n // p), [len(items) for items in dealt]
    missing = sorted(set(range(n)) - set(times))
    twice = sum(times.values()) - len(times)
    if p > 1 and all(sorted(items) == sorted(dealt[0]) for items in dealt) and n > p:
        raise CheckFailed(
            f"{where}: every rank reads the same items. p ranks then do the work of one: give "
            "each its own part."
        )
    if min(lengths) != max(lengths):
        raise CheckFailed(
            f"{where}: ranks read {lengths} items. The ones with more steps wait for ever in "
            "their last all-reduce: fill up with items from the start of the order, "
            "again and again if they are few."
        )
    if lengths[0] != each:
        says = "The tail is dropped: fill up." if lengths[0] < each else "Only your own part."
        raise CheckFailed(f"{where}: need {each} items on each rank; got {lengths[0]}. {says}")
    if missing or twice > each * p - n:
        raise CheckFailed(
            f"{where}: {len(missing)} items are never read, and others twice. All ranks have to "
            "deal out the same order: shuffle from the same seed on each of them."
        )


def torchs_indices(n: int, rank: int, p: int, epoch: int) -> list[int]:
    """Return the course's own answer, and PyTorch's."""
    sampler = RankSampler(n, rank, p)
    sampler.set_epoch(epoch)
    return list(sampler)


SAMPLER = Exercise(
    key="data_parallel-3",
    title="sampler",
    check=check_indices,
    reference=torchs_indices,
    mistakes=(
        Mistake("same data", planted.same_on_every_rank, says="every rank reads the same items"),
        Mistake("own shuffle", planted.own_shuffle, says="from the same seed on each"),
        Mistake("set_epoch forgotten", planted.epoch_forgotten, says="what set_epoch is for"),
        Mistake("not filled up", planted.not_filled_up, says="wait for ever"),
        Mistake("tail dropped", planted.tail_dropped, says="The tail is dropped"),
        Mistake("never shuffled", planted.never_shuffled, says="in the order of the data"),
        Mistake("everything", planted.everything, says="every rank reads the same items"),
        Mistake("own part for ever", planted.own_part, says="the same half in every epoch"),
        Mistake("filled with its own", planted.own_fill, says="Fill up the common order"),
        Mistake("filled with the last", planted.last_fill, says="Fill up the common order"),
        Mistake("filled once", planted.filled_once, says="again and again if they are few"),
        Mistake("an iterator", planted.iterator, says="need a list of items"),
        Mistake("global seed", planted.global_seed, says="the global random state"),
        Mistake("by chance", planted.by_chance, says="items are never read"),
    ),
)

# --- data_parallel-4: the weight of an uneven batch

SIZES = ([3, 3, 3, 1], [2, 0, 4], [1, 5], [4])


def _weighted(
    rank: int, answer: Callable[..., Any], sizes: Sequence[int], diverged: bool = False
) -> tuple[float, float | None]:
    mean = torch.tensor(2.0 * 10**rank, dtype=torch.float64, requires_grad=True)
    loss = mean * 0 + math.nan if diverged or not sizes[rank] else mean * 1
    got = answer(loss, sizes[rank])
    if not isinstance(got, torch.Tensor):
        raise CheckFailed(f"need the scaled loss, a tensor; got {type(got).__name__}.")
    if got.requires_grad:
        got.backward()
    return got.item(), None if mean.grad is None else mean.grad.item()


def check_weighted(answer: Callable[..., Any]) -> str:
    """Check value and gradient of the weighted loss, one small all-reduce, also without items."""
    for sizes in SIZES:
        p = len(sizes)
        with Ranks(p) as ranks:
            hang = "A rank without items still has to count: all ranks call all_reduce."
            found = run(ranks, _weighted, answer, sizes, on={"hang": hang})
            events = ranks.events
        weights = [got / 2 / 10**rank for rank, (got, _) in enumerate(found)]
        _expect_weights(weights, [slope for _, slope in found], sizes)
        says = "One number is enough: the sum of all num_items."
        expect_calls(events, p, [8], "all_reduce", says)
    with Ranks(2) as ranks:
        if not all(math.isnan(got) for got, _ in run(ranks, _weighted, answer, [2, 3], True)):
            raise CheckFailed(
                "Losses of 2 and 3 items are nan, as of a model that has diverged, and you return "
                "a number: nobody would notice. Only a rank without items counts zero."
            )
    return "Each item counts the same in batches of any length, for 8 bytes."


def _expect_weights(
    weights: Sequence[float], slopes: Sequence[float | None], sizes: Sequence[int]
) -> None:
    p, total = len(sizes), sum(sizes)
    for rank, (weight, slope) in enumerate(zip(weights, slopes, strict=True)):
        need, where = sizes[rank] * p / total, f"rank {rank} of {p}, batches of {sizes} items"
        if math.isnan(weight):
            raise CheckFailed(
                f"{where}: got nan. The mean over no items is 0/0, and 0 * nan is nan: return a "
                "zero."
            )
        if not math.isclose(weight, need, rel_tol=1e-6):
            raise CheckFailed(
                f"{where}: need loss * {need:g}; got loss * {weight:g}. {_why(weights, sizes)}"
            )
        if slope is None:
            raise CheckFailed(
                f"{where}: there is no gradient. Keep the graph: no detach, no item()."
            )
        if sizes[rank] and not math.isclose(slope, need, rel_tol=1e-6):
            raise CheckFailed(f"{where}: the value is right, the gradient is not: scale the loss.")


def _why(weights: Sequence[float], sizes: Sequence[int]) -> str:
    """Return the cause that the weights of all ranks together show."""
    p, total = len(sizes), sum(sizes)
    first, most = max(1, sizes[0]), max(sizes)
    causes: list[tuple[Sequence[float], str]] = [
        (
            [min(1, mine) for mine in sizes],
            "Every rank counts the same: an item of a short batch weighs more.",
        ),
        (
            [mine / total for mine in sizes],
            "The mean over ranks divides by p once more: multiply by p.",
        ),
        (sizes, "Times its items: now divide by the items of all ranks."),
        (
            [mine / first for mine in sizes],
            "By the items of one batch, rank 0's or the longest: take the sum over all ranks.",
        ),
        (
            [mine / most for mine in sizes],
            "By the items of one batch, rank 0's or the longest: take the sum over all ranks.",
        ),
        (
            [p * min(1, mine) for mine in sizes],
            "Divided by this rank's own items: all_reduce brings the sum of all.",
        ),
        ([total / max(1, mine * p) for mine in sizes], "Upside down: b_r over the mean batch."),
        ([mine * 4 / total for mine in sizes], "Times 4: take the number of ranks."),
        ([mine * p // total for mine in sizes], "Rounded down: divide with /, not with //."),
        (
            [min(1, mine) / total for mine in sizes],
            "Divided by all items; times this rank's own ones is forgotten, and times p.",
        ),
    ]
    fits = (
        says
        for wrong, says in causes
        if all(math.isclose(a, b, rel_tol=1e-6) for a, b in zip(weights, wrong, strict=True))
    )
    return next(fits, "Scale this rank's own loss, by b_r * p / (the sum of all b_r).")


WEIGHT = Exercise(
    key="data_parallel-4",
    title="uneven batch",
    check=check_weighted,
    reference=lambda loss, num_items: weighted_loss(loss, num_items),
    mistakes=(
        Mistake("weighted equally", planted.equal_weights, says="Every rank counts the same"),
        Mistake("p forgotten", planted.part_of_all, says="multiply by p"),
        Mistake("total forgotten", planted.times_items, says="divide by the items of all ranks"),
        Mistake("mean of all", planted.sums_the_losses, says="Scale this rank's own loss"),
        Mistake("nan of no items", planted.nan_of_no_items, says="0/0"),
        Mistake("hides every nan", planted.hides_nan, says="nobody would notice"),
        Mistake("skips no items", planted.skips_no_items, says="all ranks call all_reduce"),
        Mistake("detached", planted.detached, says="there is no gradient"),
        Mistake("like the first", planted.items_of_the_first, says="rank 0's or the longest"),
        Mistake("like the longest", planted.like_the_longest, says="rank 0's or the longest"),
        Mistake("own total", planted.own_total, says="brings the sum of all"),
        Mistake("times 4", planted.times_4, says="take the number of ranks"),
        Mistake("rounded down", planted.rounded_down, says="not with //"),
        Mistake("upside down", planted.upside_down, says="Upside down"),
        Mistake("a plain zero", planted.plain_zero, says="a tensor; got float"),
        Mistake("gathers all", planted.gathers_all, says="the exercise is for all_reduce"),
    ),
)
