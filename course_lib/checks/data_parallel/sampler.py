"""Exercise 3 of 05_data_parallel: the items that a rank reads.

Many answers are right, so that no values are compared: the check deals out data sets on all ranks
of a world, and demands what has to hold for every order.
"""

import pickle
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, combinations
from operator import index
from typing import Any

import numpy as np
import torch

from course_lib.checks.cases import NO_RESULT, Raised
from course_lib.checks.edits import Edit
from course_lib.checks.exercise import Cause, Exercise, NotDone, failed, own_line

WORLDS = ((12, 4), (10, 4), (7, 3), (13, 5), (9, 1), (3, 4), (1, 4), (2, 5), (100, 2))
EPOCHS = (0, 1, 2, 3, 10, 1000)
MANY = 100  # so many items are never in the order of the data by chance

NO_LIST = Cause("Return a list of whole numbers: list(...), or .tolist() of a tensor.")
NO_ITEM = Cause("Items are numbered from 0 to n - 1.")
SAME_ITEMS = Cause("p ranks then do the work of one: give each its own part.")
WAITS = Cause(
    "The ones with more steps wait for ever in their last all-reduce: fill up with items from the "
    "start of the order, again and again if they are few."
)
DROPPED = Cause("The tail is dropped: fill up. And deal out to p ranks, whatever p is.")
TOO_MANY = Cause(
    "Only your own part: n / p items, rounded up. (n // p + 1 is one too many where p divides n.)"
)
OTHER_ORDERS = Cause(
    "All ranks have to deal out the same order: shuffle from the same seed on each of them, and "
    "not from one that a rank has of its own, as torch.initial_seed()."
)
BY_LUCK = Cause(
    "Draw from the epoch's seed, not by luck, and not from what an earlier call has left: a run "
    "that goes on from a checkpoint has made no earlier calls."
)
OTHER_FILL = Cause(
    "Others than the first items of the order are read twice. Fill up the common order, then deal "
    "it out."
)
GLOBAL_STATE = Cause(
    "Dropout and weights drawn after it differ, and are alike where they should not be. Draw from "
    "a generator of your own: torch.Generator().manual_seed(...)."
)
NOT_SHUFFLED = Cause("Shuffle all items, in every epoch, also in epoch 0.")
SAME_EPOCH = Cause("The epoch has to change the seed, every time: that is what set_epoch is for.")
OWN_PART = Cause(
    "What meets in a rank's part stays together for ever. Shuffle all items, then deal them out, "
    "and not the other way round."
)

Fault = tuple[str, Cause | None]


@dataclass(frozen=True)
class Deal:
    """The items of each rank, those of a second call, and whether the global state was left alone.

    Items are a list of numbers; else `Raised`, or the name of what the answer returned.
    """

    n: int
    p: int
    epoch: int
    by_rank: Sequence[Any]
    again: Sequence[Any]
    left_alone: bool

    def seen(self, what: str) -> str:
        """Format where something was seen: `10 items on 4 ranks, epoch 0: ...`."""
        words = ((self.n, "item"), (self.p, "rank"))
        items, ranks = (f"{count} {word}{'s' if count > 1 else ''}" for count, word in words)
        return f"{items} on {ranks}, epoch {self.epoch}: {what}"


class Dealing:
    """Check that a world's ranks deal out any number of items, in another order each epoch."""

    def observe(self, answer: Callable[..., Any]) -> Iterator[Deal]:
        """Call the answer for every rank of every world, in every epoch, twice."""
        for n, p in WORLDS:
            for epoch in EPOCHS:
                calls = [_call(answer, seed, n, seed % p, p, epoch) for seed in range(2 * p)]
                items = [found for found, _ in calls]
                yield Deal(n, p, epoch, items[:p], items[p:], all(alone for _, alone in calls))

    def judge(self, observed: Iterable[Deal], exercise: Exercise) -> str:
        """Raise CheckFailed at the first rule that is broken."""
        del exercise  # there are many right orders
        deals = list(observed)
        many = [deal for deal in deals if deal.n == MANY]
        faults = chain(map(_in_deal, deals), map(_in_epochs, [many]), map(_in_fill, deals))
        if fault := next(filter(None, faults), None):
            raise failed(*fault)
        return "Each item read, as many on every rank, another order every epoch."


def _call(answer: Callable[..., Any], seed: int, *arguments: int) -> tuple[Any, bool]:
    """Call the answer with a global random state of this seed; return whether it stays that."""
    saved = torch.get_rng_state(), random.getstate(), np.random.get_state()
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    before = _random_bytes()
    try:
        return _plain(answer(*arguments)), before == _random_bytes()
    except (NotImplementedError, NotDone):
        raise
    except Exception as error:
        return Raised(type(error).__name__, str(error), own_line(error.__traceback__)), True
    finally:
        torch.set_rng_state(saved[0])
        random.setstate(saved[1])
        np.random.set_state(saved[2])


def _random_bytes() -> bytes:
    return pickle.dumps((torch.get_rng_state().numpy(), random.getstate(), np.random.get_state()))


def _plain(got: Any) -> Any:
    """Return a list of whole numbers, or the name of what it is instead."""
    got = got.tolist() if isinstance(got, torch.Tensor | np.ndarray) else got
    try:
        return [index(item) for item in got] if isinstance(got, Sequence) else type(got).__name__
    except TypeError:
        return "a list of something else"


def _in_deal(deal: Deal) -> Fault | None:
    """Return the first rule that one deal breaks."""
    n, p, dealt = deal.n, deal.p, deal.by_rank
    for items in dealt:
        if isinstance(items, Raised):
            where = f" ({items.line})" if items.line else ""
            return deal.seen(f"your code raised {items.name}: {items.text}{where}"), None
        if isinstance(items, str):
            cause = NO_RESULT if items == "NoneType" else NO_LIST
            return deal.seen(f"need a list of items; got {items}"), cause
    times, each = Counter(item for items in dealt for item in items), -(-n // p)
    missing, lengths = [item for item in range(n) if item not in times], [*map(len, dealt)]
    strange = sorted(item for item in times if not 0 <= item < n)
    twice = times.total() - len(times)
    rules: list[tuple[bool, str, Cause]] = [
        (bool(strange), f"ranks read {strange}, which are not there", NO_ITEM),
        (
            min(n, p) > 1 and any(dealt[0]) and len({(*sorted(items),) for items in dealt}) == 1,
            "every rank reads the same items",
            SAME_ITEMS,
        ),
        (min(lengths) != max(lengths), f"ranks read {lengths} items", WAITS),
        (lengths[0] < each, f"need {each} items on each rank; got {lengths[0]}", DROPPED),
        (lengths[0] > each, f"need {each} items on each rank; got {lengths[0]}", TOO_MANY),
        (
            bool(missing) or twice > each * p - n,
            f"{len(missing)} items are never read, and others twice",
            OTHER_ORDERS,
        ),
        (deal.again != dealt, "a second call gives other items", BY_LUCK),
        (not deal.left_alone, "the global random state changes", GLOBAL_STATE),
    ]
    return next(((deal.seen(what), cause) for broken, what, cause in rules if broken), None)


def _in_epochs(deals: Sequence[Deal]) -> Fault | None:
    """Return the first rule that the epochs of many items break together."""
    for deal in deals:
        if any(items == sorted(items) for items in deal.by_rank):
            return deal.seen("a rank reads its items in the order of the data"), NOT_SHUFFLED
    for one, other in combinations(deals, 2):
        if one.by_rank == other.by_rank:
            return other.seen(f"the same as in epoch {one.epoch}"), SAME_EPOCH
        if {*map(frozenset, one.by_rank)} == {*map(frozenset, other.by_rank)}:
            return other.seen(f"the same parts as in epoch {one.epoch}"), OWN_PART
    return None


def _in_fill(deal: Deal) -> Fault | None:
    """Demand that the first items of the order are repeated, dealt out in turn or in blocks."""
    rounds = [item for turn in zip(*deal.by_rank, strict=True) for item in turn]
    blocks = [item for items in deal.by_rank for item in items]
    n = deal.n
    if any(len({*x[:n]}) == n and x[n:] == x[: len(x) - n] for x in (rounds, blocks)):
        return None
    return deal.seen(f"ranks read {list(deal.by_rank)}"), OTHER_FILL


SEED = "manual_seed(epoch)"
ORDER = f"torch.randperm(n, generator=random.{SEED}).tolist()"
MINE = "[order[i % n] for i in range(rank, each * p, p)]"

SAMPLER = Exercise(
    key="data_parallel-3",
    title="sampler",
    check=Dealing(),
    wrong=(
        Edit(MINE, "[order[i % n] for i in range(each)]", SAME_ITEMS),
        Edit(MINE, "order[rank:] + order[:rank]", SAME_ITEMS),
        Edit(SEED, "manual_seed(100 * rank + epoch)", OTHER_ORDERS),
        Edit(SEED, "manual_seed(torch.initial_seed() + epoch)", OTHER_ORDERS),
        Edit(f", generator=random.{SEED}", "", OTHER_ORDERS),
        Edit(SEED, "manual_seed(0)", SAME_EPOCH),
        Edit(SEED, "manual_seed(epoch % 10)", SAME_EPOCH),
        Edit(MINE, "order[rank::p]", WAITS),
        Edit(MINE, "(order + order[: -n % p])[rank::p]", WAITS),
        Edit(MINE, "order[rank : n // p * p : p]", DROPPED),
        Edit("each * p, p", "each * 4, 4", DROPPED, also=(("n // p", "n // 4"),)),
        Edit("-(-n // p)", "n // p + 1", TOO_MANY),
        Edit(ORDER, "list(range(n))", NOT_SHUFFLED),
        Edit(ORDER, f"{ORDER} if epoch else list(range(n))", NOT_SHUFFLED),
        Edit(
            f"return {MINE}",
            f"mine = {MINE}\nreturn [mine[i] for i in {ORDER.replace('(n,', '(each,')}]",
            OWN_PART,
            also=((f"order = {ORDER}", "order = list(range(n))"),),
        ),
        Edit(SEED, "manual_seed(0)", OWN_PART, also=(("[i % n]", "[(i + epoch) % n]"),)),
        Edit(MINE, "(order[rank::p] * 2 or order[:1])[:each]", OTHER_FILL),
        Edit(MINE, "(order + order[-1:] * (-n % p))[rank::p]", OTHER_FILL),
        Edit(MINE, f"iter({MINE})", NO_LIST),
        Edit("[i % n]", "[i % n] + 1", NO_ITEM),
        Edit("random.manual_seed", "torch.manual_seed", GLOBAL_STATE),
        Edit(
            "epoch):",
            "epoch, calls=[]):",
            BY_LUCK,
            also=(
                ("order =", "calls.append((n, rank, p))\norder ="),
                ("seed(epoch)", "seed(calls.count((n, rank, p)))"),
            ),
        ),
    ),
)
