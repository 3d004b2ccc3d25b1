"""Exercise 3 of 10_fsdp: the asynchronous prefetch, judged by the order of its moves.

Overlap is an order, not a duration: the next unit's gather is launched before this unit computes,
and waited for after that. When a unit computes, the order tells what is on the way, and which units
have memory.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from course_lib.checks.edits import Edit
from course_lib.checks.exercise import Cause, Exercise
from course_lib.checks.judge import ByExample
from course_lib.checks.memory_watch import MemoryWatch
from course_lib.checks.properties import EVERY_RANK, HAS_STATE, SEEDS
from course_lib.checks.watch import ALWAYS, ORDER, WAIT, Step, Watch
from course_lib.ranks.process_group import TracedGroup

STEPS = 2

TWICE = Cause("It is there, or on its way: remember what was launched, and launch it once.")
OWN_FIRST = Cause("What is needed now leaves first: the link takes one message after another.")
NOT_GATHERED = Cause(
    "Launch each unit before it computes, and again after a free (backward, next step). Keep its "
    "handle in `works` until free(), not longer."
)
NOT_WAITED = Cause("A unit computes before its gather has completed: wait() for its own handle.")
WAITS_AT_ONCE = Cause(
    "No overlap: it waits for the next unit before this one computes. Launch with async_op=True, "
    "keep the handle, and wait just before that unit is used."
)
NO_PREFETCH = Cause(
    "No overlap: the next unit is launched after this one has computed. Launch it before, in "
    "forward and in backward."
)
DIRECTION = Cause("Backward runs from the last unit to the first: there the next one is i - 1.")
AHEAD = Cause("One unit ahead, not more: each that waits costs memory; at most two are whole.")
BEYOND = Cause("There are only units 0 to n - 1: none after the last one, and none before unit 0.")
NOT_FREED = Cause(
    "A unit is freed too late or never: free each after backward, and if reshard_after_forward "
    "also after forward."
)
KEPT = Cause("With reshard_after_forward=False a unit stays from its forward to its backward.")
STALE = Cause("Gather unit.shard, each time anew, into what unit.allocate() returns.")
MOVES = Cause(
    "When a unit computes, its own gather has completed, that of the next one is on the way, and "
    "no other unit has memory, unless forward keeps it."
)
MORE_MEMORY = Cause(
    "More is alive than the units: a second buffer, a copy, or the memory of a unit after its "
    "free(). Gather unit.shard into what unit.allocate() returns, and keep only handles."
)


class FetchedUnit:
    """The unit that the answer is given: a shard always, memory for the whole while allocated.

    Units have different sizes, so that the bytes of a call say whose it is.
    """

    def __init__(self, name: str, size: int, watch: Watch) -> None:
        self.name, self._watch, self.peers = name, watch, [self]
        self.shard, self.whole = torch.zeros(size), torch.empty(0)

    @property
    def call(self) -> str:
        """What a watched step calls its gather."""
        return f"all_gather of {dist.get_world_size() * self.shard.nbytes} bytes"

    def allocate(self) -> Tensor:
        """Return memory for the whole unit."""
        if self.has_memory:
            self._watch.mark(f"{self.name} is allocated again")
        self.whole = torch.full((dist.get_world_size() * len(self.shard),), torch.nan)
        count = sum(unit.has_memory for unit in self.peers)
        if count > 2:
            self._watch.mark(f"{count} units have memory at a time")
        return self.whole

    def free(self) -> None:
        """Give the memory back."""
        self.whole = torch.empty(0)

    @property
    def has_memory(self) -> bool:
        """Whether it is allocated."""
        return self.whole.numel() > 0


def train(
    rank: int, answer: Callable[..., Any], num_units: int, reshard: bool, beside: bool = False
) -> dict[str, Any]:
    """Take two steps with other numbers; another object may take one during each."""
    with MemoryWatch() as watch:
        units = [FetchedUnit(f"unit {n}", 8 + n, watch) for n in range(num_units)]
        others = [FetchedUnit(f"the other's unit {n}", 50 + n, watch) for n in range(num_units + 1)]
        for unit in units:
            unit.peers = units
        engine, other = answer(units, reshard), answer(others, reshard) if beside else None
        for number in range(STEPS):
            for n, unit in enumerate(units):
                unit.shard.fill_(1.0 + n + 10 * rank + 1000 * number)
            label = f"step {number + 1}, {num_units} unit{'s' if num_units > 1 else ''}"
            label += ", forward frees" if reshard else ", forward keeps"
            label += ", beside another object" if beside else ""
            _step(watch, label, engine, units, other, others)
        kept = watch.left_bytes([unit.shard for unit in (*units, *others)])
        watch.seen["at the end"] = {"bytes kept": kept}
    return watch.seen


def _step(
    watch: Watch,
    label: str,
    engine: Any,
    units: list[FetchedUnit],
    other: Any,
    others: list[FetchedUnit],
) -> None:
    """Watch a step, in which the other object, if there is one, takes a step, too."""
    used, shards = list[Tensor](), [unit.shard for unit in units]
    with watch.step(label, units=units, shards=shards) as step, _marking(watch, [*units, *others]):

        def compute(kind: str, number: int) -> None:
            watch.mark(f"{kind} of {units[number].name} ({_state(step, units)})")
            used.append(units[number].whole.clone())
            if other and (kind, number) == ("forward", 0):
                _pass(other, len(others), lambda *_: None)

        _pass(engine, len(units), compute)
        watch.mark(f"the step ends ({_state(step, units)})")
    order = [_named(line, [*units, *others]) for line in step.shown[ORDER]]
    step.show(used=used, **{ORDER: [line for line in order if not line.endswith(WAIT)]})


def _pass(engine: Any, num_units: int, compute: Callable[[str, int], None]) -> None:
    for number in range(num_units):
        engine.before_forward(number)
        compute("forward", number)
        engine.after_forward(number)
    for number in reversed(range(num_units)):
        engine.before_backward(number)
        compute("backward", number)
        engine.after_backward(number)


def _state(step: Step, units: list[FetchedUnit]) -> str:
    """Return the numbers of the units that have memory, and of those that are on the way."""
    memory = [str(n) for n, unit in enumerate(units) if unit.has_memory]
    on_the_way = [str(n) for n, unit in enumerate(units) if unit.call in step.unwaited]
    return f"memory: {', '.join(memory) or 'none'}; on the way: {', '.join(on_the_way) or 'none'}"


def _named(line: str, units: list[FetchedUnit]) -> str:
    """Say of which unit a gather is."""
    for unit in units:
        line = line.replace(unit.call, f"gather of {unit.name}")
    return line


@contextmanager
def _marking(watch: Watch, units: list[FetchedUnit]) -> Iterator[None]:
    """Mark a call that fills other memory than that of a unit."""
    start = TracedGroup.collective

    def marking(group: TracedGroup, method: str, args: tuple[Any, ...], kwargs: Any) -> Any:
        memory = [unit.whole.untyped_storage().data_ptr() for unit in units if unit.has_memory]
        filled = [one for one in tree_leaves(args[:1]) if isinstance(one, Tensor)]
        if any(one.untyped_storage().data_ptr() not in memory for one in filled):
            watch.mark("into memory that is no unit's:")
        return start(group, method, args, kwargs)

    with patch.object(TracedGroup, "collective", marking):
        yield


def _runs(_p: int) -> list[dict[str, Any]]:
    sizes = [(4, True), (4, False), (2, True), (1, True), (1, False)]
    plain: list[dict[str, Any]] = [{"num_units": n, "reshard": frees} for n, frees in sizes]
    return [*plain, {"num_units": 3, "reshard": True, "beside": True}]


LAUNCHES = "dist.all_gather_single(whole, unit.shard, async_op=True)"
BOTH = "for one in (number, following):"
WAITS = "self.works[number].wait()"
BACK = "self.use(number, number - 1)"
FORWARD = "self.use(number, number + 1)"
IN_INIT = "self.works = {}"

PREFETCH = Exercise(
    key="fsdp-3",
    title="the asynchronous prefetch",
    check=ByExample(
        observe_on_rank=train,
        worlds=(3, 2, 1),
        runs=_runs,
        facets=(ORDER, "used", *ALWAYS, "bytes kept"),
        looks=(
            ("mismatch", EVERY_RANK),
            (ORDER, MOVES),
            ("used", STALE),
            ("bytes kept", MORE_MEMORY),
        ),
        success="One unit ahead, waited for when it is used; if forward frees, two at most.",
    ),
    wrong=(
        Edit(BOTH, "for one in (number,):", NO_PREFETCH),
        Edit(FORWARD, "self.use(number, number)", NO_PREFETCH),
        Edit(BACK, "self.use(number, number)", NO_PREFETCH),
        Edit(WAITS, "for work in self.works.values():\n    work.wait()", WAITS_AT_ONCE),
        Edit(", async_op=True", "", WAITS_AT_ONCE, also=((WAITS, "pass"),)),
        Edit(", async_op=True", "", WAITS_AT_ONCE),
        Edit(WAITS, "pass", NOT_WAITED),
        Edit(BACK, FORWARD, DIRECTION),
        Edit(BOTH, "for one in (number, *range(len(self.units))):", AHEAD),
        Edit(BOTH, "for one in (following, number):", OWN_FIRST),
        Edit("one not in self.works:", "True:", TWICE),
        Edit("0 <= one < len(self.units) and one", "one", BEYOND),
        Edit("0 <= one < len(self.units)", "one < len(self.units)", BEYOND),
        Edit("if self.reshard:", "if False:", NOT_FREED),
        Edit("if self.reshard:", "if number < len(self.units) - 1:", NOT_FREED),
        Edit("if self.reshard:", "if True:", KEPT),
        Edit("self.units[number].free()", "pass", NOT_FREED),
        Edit("del self.works[number]", "pass", NOT_GATHERED),
        Edit(
            "unit.shard, async",
            "self.first.setdefault(one, unit.shard.clone()), async",
            STALE,
            also=((IN_INIT, "self.works, self.first = {}, {}"),),
        ),
        Edit(
            LAUNCHES,
            f"(self.kept.update({{one: whole}}), {LAUNCHES})[1]",
            MORE_MEMORY,
            also=((IN_INIT, "self.works, self.kept = {}, {}"),),
        ),
        *(*HAS_STATE, SEEDS),
    ),
)
