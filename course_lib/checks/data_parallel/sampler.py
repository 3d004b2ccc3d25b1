"""Exercise 3 of 05_data_parallel: the items that a rank reads.

Many answers are right, so that no values are compared: the check deals out data sets on all ranks
of a world, and demands what has to hold for every order.
"""

import pickle
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import index
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist

from course_lib.checks.cases import NO_RESULT, Raised
from course_lib.checks.edits import Edit
from course_lib.checks.exercise import Cause, Exercise, NotDone, failed
from course_lib.checks.limits import little_memory
from course_lib.ranks import Ranks

WORLDS = ((12, 4), (10, 4), (7, 3), (13, 5), (9, 1), (3, 4), (1, 4), (2, 5), (100, 2))
EPOCHS = (0, 1, 2, 3, 10, 1000)
MANY = 100  # so many items are never in the order of the data by chance
MANY_EPOCHS = (*range(130), 1000)
LARGE, START = 70_000, 100  # more items than 16 bits can number; the first ones that a rank reads

NUMBERS = Cause("Return a list of whole numbers: list(...), or .tolist() of a tensor.")
NO_ITEM = Cause("Items are numbered from 0 to n - 1.")
SAME_ITEMS = Cause("p ranks then do the work of one: give each its own part.")
WAITS = Cause(
    "Ranks with more steps than others hang in their last all-reduce: fill up with items from the "
    "start of the order, again and again if they are few."
)
AS_MANY = Cause(
    "Each rank reads n / p items, rounded up, whatever p is: fill up, where p does not divide n, "
    "instead of dropping the tail. (n // p + 1 is one too many where p divides n.)"
)
OTHER_ORDERS = Cause(
    "Either the ranks do not share one order (no seed of a rank's own, as torch.initial_seed()), "
    "or the parts that you cut from it overlap."
)
ANEW = Cause(
    "Make a new list in every call, from its arguments alone, with a generator seeded by the "
    "epoch: whoever got a list may empty it, and a run that resumes has made no earlier calls."
)
OTHER_PROCESS = Cause(
    "Seed from the epoch alone: os.getpid(), time.time() and hash() of a text differ from process "
    "to process, and every rank is one."
)
NARROW = Cause(
    "Right for few items only: the numbers of the items need more digits than their dtype has "
    "(uint8 ends at 255, int16 at 32767, float16 has all whole numbers up to 2048)."
)
IN_WINDOWS = Cause(
    "Items are shuffled with their neighbors only, and data is often sorted: shuffle all of them "
    "at once."
)
OTHER_FILL = Cause(
    "Fill up by repeating the order from its beginning, then share it among the ranks, in turn or "
    "in blocks."
)
GLOBAL_STATE = Cause(
    "What is drawn after your call, such as dropout masks, would depend on it. Draw from a "
    "generator of your own: torch.Generator().manual_seed(...)."
)
NOT_SHUFFLED = Cause("Shuffle all items, in every epoch, also in epoch 0.")
SAME_EPOCH = Cause("The epoch has to change the seed, every time: that is what set_epoch is for.")
OWN_PART = Cause(
    "Only the order within a part, or its rank, is new: shuffle all items anew in each epoch, then "
    "share them among the ranks."
)

Fault = tuple[str, Cause | None]


@dataclass(frozen=True)
class Deal:
    """The items of each rank, those of a second call, and whether the global state was left alone.

    Items are a list of numbers; else `Raised`, or the name of what the answer returned. If
    `of_processes`, `by_rank` is what a process for each rank returned, and `again` is from here.
    """

    n: int
    p: int
    epoch: int
    by_rank: Sequence[Any]
    again: Sequence[Any]
    left_alone: bool
    of_processes: bool = False


class Dealing:
    """Check that a world's ranks deal out any number of items, in another order each epoch."""

    def observe(self, answer: Callable[..., Any]) -> Iterator[Deal]:
        """Call the answer for every rank of every world, in every epoch, twice."""
        for n, p in WORLDS:
            for epoch in MANY_EPOCHS if n == MANY else EPOCHS:
                yield _deal(answer, n, p, epoch)
        yield _deal(answer, LARGE, 2, 0)
        here = _deal(answer, MANY, 2, 1)
        with Ranks(2, cluster="laptop") as ranks:
            each = ranks.run(_on_a_rank, answer, MANY, 1)
        yield replace(here, by_rank=each, of_processes=True)

    def judge(self, observed: Iterable[Deal], exercise: Exercise) -> str:
        """Raise CheckFailed at the first rule that is broken."""
        del exercise  # there are many right orders
        for fault in _faults(list(observed)):
            raise failed(*fault)
        return "Each item read, as many on every rank, another order every epoch."


def _deal(answer: Callable[..., Any], n: int, p: int, epoch: int) -> Deal:
    """Call the answer for every rank, twice."""
    calls = [_call(answer, seed, n, seed % p, p, epoch) for seed in range(2 * p)]
    items = [found for found, _ in calls]
    return Deal(n, p, epoch, items[:p], items[p:], all(alone for _, alone in calls))


def _on_a_rank(rank: int, answer: Callable[..., Any], n: int, epoch: int) -> Any:
    """Call the answer in a process of its own, at another time on each rank."""
    now_s = time.time()
    with patch.object(time, "time", lambda: now_s + rank * 1e6):
        return _call(answer, 0, n, rank, dist.get_world_size(), epoch)[0]


def _call(answer: Callable[..., Any], seed: int, *arguments: int) -> tuple[Any, bool]:
    """Call the answer with a global random state of this seed; return whether it stays that."""
    saved = torch.get_rng_state(), random.getstate(), np.random.get_state()
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    before = _random_bytes()
    try:
        with little_memory():
            got = answer(*arguments)
            items, left_alone = _plain(got), before == _random_bytes()
        if isinstance(got, list):
            got.clear()  # it belongs to whoever asked for it
        return items, left_alone
    except (NotImplementedError, NotDone, MemoryError):
        raise
    except Exception as error:
        return Raised.of(error), True
    finally:
        torch.set_rng_state(saved[0])
        random.setstate(saved[1])
        np.random.set_state(saved[2])


def _random_bytes() -> bytes:
    return pickle.dumps((torch.get_rng_state().numpy(), random.getstate(), np.random.get_state()))


def _plain(got: Any) -> Any:
    """Return a list of whole numbers, or the name of what it is instead."""
    got = got.tolist() if isinstance(got, torch.Tensor | np.ndarray) else got
    if not isinstance(got, Sequence):
        return type(got).__name__
    try:
        is_tensor = any(isinstance(item, torch.Tensor) for item in got)
        return "a list of tensors" if is_tensor else [index(item) for item in got]
    except TypeError:
        return "a list of something else"


# --- the rules


def _faults(deals: Sequence[Deal]) -> Iterator[Fault]:
    """Yield what is wrong with the deals: in each of them, then in several together."""
    for deal in deals:
        for what, cause in _in_form(deal) or _in_deal(deal):
            yield _seen(deal, what), cause
    yield from _in_epochs([deal for deal in deals if deal.n == MANY and not deal.of_processes])
    for deal in deals:
        if deal.n == LARGE and not _mixes_halves(deal):
            what = f"the first {START} items that a rank reads are all from one half of the data"
            yield _seen(deal, what), IN_WINDOWS
        if deal.n != LARGE and not _fills_up(deal):
            yield _seen(deal, f"ranks read {list(deal.by_rank)}"), OTHER_FILL


def _seen(deal: Deal, what: str) -> str:
    """Format where something was seen: `10 items on 4 ranks, epoch 0: ...`."""
    words = ((deal.n, "item"), (deal.p, "rank"))
    items, ranks = (f"{count} {word}{'s' if count > 1 else ''}" for count, word in words)
    return f"{items} on {ranks}, epoch {deal.epoch}: {what}"


def _in_form(deal: Deal) -> list[Fault]:
    for items in deal.by_rank:
        if isinstance(items, Raised):
            where = f" ({items.line})" if items.line else ""
            return [(f"your code raised {items.name}: {items.text}{where}", None)]
        if isinstance(items, str):
            cause = NO_RESULT if items == "NoneType" else NUMBERS
            return [(f"need a list of items; got {items}", cause)]
    return []


def _in_deal(deal: Deal) -> list[Fault]:
    n, p, dealt = deal.n, deal.p, deal.by_rank
    times, each = Counter(item for items in dealt for item in items), -(-n // p)
    missing, lengths = [item for item in range(n) if item not in times], [*map(len, dealt)]
    strange = sorted(item for item in times if not 0 <= item < n)
    is_same = min(n, p) > 1 and any(dealt[0]) and len({(*sorted(x),) for x in dealt}) == 1
    need, never = f"need {each} items on each rank; got {lengths[0]}", "items are never read"
    other, again = deal.again != dealt, "a second call gives"
    rules: list[tuple[bool, str, Cause]] = [
        (deal.of_processes and other, "a process for each rank gives other items", OTHER_PROCESS),
        (n == LARGE and bool(missing or strange), f"{len(missing)} {never}", NARROW),
        (bool(strange), f"ranks read {strange[:9]}, which are not there", NO_ITEM),
        (is_same, "every rank reads the same items", SAME_ITEMS),
        (min(lengths) != max(lengths), f"ranks read {lengths} items", WAITS),
        (lengths[0] != each, need, AS_MANY),
        (bool(missing), f"{len(missing)} {never}, and others more than once", OTHER_ORDERS),
        (other, f"{again} {'other items' if any(deal.again) else 'an empty list'}", ANEW),
        (not deal.left_alone, "the global random state changes", GLOBAL_STATE),
    ]
    return [(what, cause) for broken, what, cause in rules if broken]


def _in_epochs(deals: Sequence[Deal]) -> Iterator[Fault]:
    """Yield the rules that the epochs of many items break together."""
    for deal in deals:
        if any(items == sorted(items) for items in deal.by_rank):
            yield _seen(deal, "a rank reads its items in the order of the data"), NOT_SHUFFLED
    epoch_of: dict[Any, int] = {}
    for deal in deals:
        order, parts = tuple(map(tuple, deal.by_rank)), frozenset(map(frozenset, deal.by_rank))
        for key, same, cause in ((order, "", SAME_EPOCH), (parts, " parts", OWN_PART)):
            if (earlier := epoch_of.setdefault(key, deal.epoch)) != deal.epoch:
                yield _seen(deal, f"the same{same} as in epoch {earlier}"), cause


def _mixes_halves(deal: Deal) -> bool:
    """Return whether the first items of each rank come from both halves of the data."""
    halves = [{item < deal.n // 2 for item in items[:START]} for items in deal.by_rank]
    return all(len(half) == 2 for half in halves)


def _fills_up(deal: Deal) -> bool:
    """Return whether the first items of the order are repeated, dealt out in turn or in blocks."""
    rounds = [item for turn in zip(*deal.by_rank, strict=True) for item in turn]
    blocks, n = [item for items in deal.by_rank for item in items], deal.n
    return any(len({*x[:n]}) == n and x[n:] == x[: len(x) - n] for x in (rounds, blocks))


SEED = "manual_seed(epoch)"
ORDER = f"torch.randperm(n, generator=random.{SEED}).tolist()"
MINE = "[order[i % n] for i in range(rank, each * p, p)]"
NEAR = ORDER.replace("(n,", "(min(32, n - at),")

SAMPLER = Exercise(
    key="data_parallel-3",
    title="sampler",
    check=Dealing(),
    wrong=(
        Edit(MINE, "[order[i % n] for i in range(each)]", SAME_ITEMS),
        Edit(SEED, "manual_seed(100 * rank + epoch)", OTHER_ORDERS),
        Edit(SEED, "manual_seed(0)", SAME_EPOCH),
        Edit(MINE, "order[rank::p]", WAITS),
        Edit(MINE, "order[rank : n // p * p : p]", AS_MANY),
        Edit("-(-n // p)", "n // p + 1", AS_MANY),
        Edit(ORDER, "list(range(n))", NOT_SHUFFLED),
        Edit(SEED, "manual_seed(0)", OWN_PART, also=(("[i % n]", "[(i + epoch) % n]"),)),
        Edit(MINE, "(order + order[-1:] * (-n % p))[rank::p]", OTHER_FILL),
        Edit(MINE, f"iter({MINE})", NUMBERS),
        Edit("[i % n]", "[i % n] + 1", NO_ITEM),
        Edit("random.manual_seed", "torch.manual_seed", GLOBAL_STATE),
        Edit(".tolist()", ".to(torch.int16).long().tolist()", NARROW),
        Edit(ORDER, f"[at + i for at in range(0, n, 32) for i in {NEAR}]", IN_WINDOWS),
        Edit(SEED, 'manual_seed(hash(f"epoch {epoch}") % 2**32)', OTHER_PROCESS),
        Edit(
            f"return {MINE}",
            f"return cache.setdefault((n, rank, p, epoch), {MINE})",
            ANEW,
            also=(("epoch):", "epoch, cache={}):"),),
        ),
    ),
)
