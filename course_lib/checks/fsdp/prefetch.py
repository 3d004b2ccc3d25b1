"""Exercise 3 of 10_fsdp: the asynchronous prefetch, judged by the order of its moves.

Overlap is an order, not a duration: the next unit's gather is launched before this unit computes,
and waited for after that. `_Walk` follows the moves of a step and says which one breaks a rule.
"""

from itertools import takewhile

import torch
from torch import Tensor

from course_lib.checks.edits import Edit
from course_lib.checks.exercise import Cause, Exercise
from course_lib.checks.expectations import Bytes, Numbers
from course_lib.checks.fsdp.prefetch_moves import PrefetchMove, shard_value, steps_of
from course_lib.checks.on_ranks import At, OnRanks
from course_lib.checks.zero.parts import BESIDE, OF_THE_CLASS

OTHER_CALL = Cause("One all_gather of a whole unit is the only call that is needed.")
TWICE = Cause("It is there, or on its way: remember what was launched, and launch it once.")
ALLOCATE = Cause("A unit has no memory until unit.allocate(): gather into what that returns.")
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
MORE_MEMORY = Cause(
    "More is alive than the units: a second buffer, a copy, or the memory of a unit after its "
    "free(). Gather unit.shard into what unit.allocate() returns, and keep only handles."
)
EVERY_RANK = Cause("Not every rank makes the same calls: all of them prefetch, in one order.")


COMPUTES = ("forward", "backward")


class _Walk:
    """The state of a step while its moves are followed: which units are there, and since when."""

    def __init__(self, moves: list[PrefetchMove], num_units: int, reshard: bool) -> None:
        self.moves, self.num_units, self.reshard = moves, num_units, reshard
        self.there, self.launched, self.waited = set[int](), set[int](), set[int]()
        self.early: int | None = None  # waited for before it was needed
        self.owed: int | None = None  # has to be freed before anything else computes

    def fault(self) -> tuple[str, Cause] | None:
        """Return what the first wrong move is, and its cause; None where all are right."""
        for index, (kind, unit) in enumerate(self.moves):
            computes = kind in COMPUTES
            step = self._compute if computes else getattr(self, f"_{kind}")
            if cause := step(index, unit):
                verb = kind if computes else f"{kind} of"
                return f"{verb} unit {unit} of {self.num_units}" if unit >= 0 else "a call", cause
        if self.owed is not None:
            return f"unit {self.owed} is there after the step", NOT_FREED
        return None if not self.there else (f"units {sorted(self.there)} are left", AHEAD)

    def _needed(self, index: int) -> PrefetchMove:
        """Return what computes next."""
        later = (move for move in self.moves[index:] if move[0] in COMPUTES)
        return next(later, ("", -1))

    def _allocate(self, index: int, unit: int) -> Cause | None:
        if unit in self.there:
            return TWICE
        self.there.add(unit)
        if not self.reshard or len(self.there) <= 2:
            return None
        before_next = takewhile(lambda move: move[0] not in COMPUTES, self.moves[index:])
        late = self.owed is None or ("free", self.owed) in before_next
        return AHEAD if late else NOT_FREED

    def _launch(self, index: int, unit: int) -> Cause | None:
        needed = self._needed(index)[1]
        if unit not in self.there or unit in self.launched:
            return OTHER_CALL if unit < 0 else TWICE if unit in self.launched else ALLOCATE
        self.launched.add(unit)
        return None if needed in self.launched or needed < 0 else OWN_FIRST

    def _wait(self, index: int, unit: int) -> Cause | None:
        if unit not in self.waited and unit != self._needed(index)[1]:
            self.early = unit
        self.waited.add(unit)
        return None

    def _compute(self, index: int, unit: int) -> Cause | None:
        kind = self.moves[index][0]
        following = unit + 1 if kind == "forward" else unit - 1
        exists = 0 <= following < self.num_units
        if self.owed is not None:
            return NOT_FREED
        if unit not in self.launched:
            return NOT_GATHERED
        if unit not in self.waited:
            return NOT_WAITED
        if self.early is not None:
            return WAITS_AT_ONCE
        if exists and following not in self.launched:
            return DIRECTION if kind == "backward" and self._looks_back() else NO_PREFETCH
        kept = set() if self.reshard else set(range(unit))
        if self.there - kept - {unit, following}:
            return AHEAD if exists else BEYOND
        self.owed = unit if self.reshard or kind == "backward" else None
        return None

    def _looks_back(self) -> bool:
        """Return whether backward launches units that it has been through."""
        launches = (i for i, (kind, _) in enumerate(self.moves) if kind == "launch")
        needed = ((self._needed(i), self.moves[i][1]) for i in launches)
        return any(kind == "backward" and unit > now for (kind, now), unit in needed)

    def _free(self, index: int, unit: int) -> Cause | None:
        if not self.reshard and self.moves[index - 1][0] == "forward":
            return KEPT
        self.owed = None if unit == self.owed else self.owed
        for known in (self.there, self.launched, self.waited):
            known.discard(unit)
        return None


def _in_order(at: At) -> None:
    """Demand that every move is in its place."""
    walk = _Walk(at.seen.moves, at.options["num_units"], at.options["reshard"])
    if found := walk.fault():
        at.fail(found[0], OF_THE_CLASS if at.options.get("beside") else found[1])


def _wholes(at: At, step: int) -> list[Tensor]:
    """Return the numbers of every unit, in the order in which forward and backward use them."""
    units = range(at.options["num_units"])
    return [
        torch.cat(
            [torch.full((2 + u,), shard_value(u, step, rank)) for rank in range(at.world_size)]
        )
        for u in (*units, *reversed(units))
    ]


def _runs(_p: int) -> list[dict[str, object]]:
    sizes = [(4, True), (4, False), (2, True), (1, True), (1, False)]
    plain: list[dict[str, object]] = [{"num_units": n, "reshard": frees} for n, frees in sizes]
    return [*plain, {"num_units": 3, "reshard": True, "beside": True}]


LAUNCHES = "dist.all_gather_single(whole, unit.shard, async_op=True)"
MISSING = "if 0 <= one < len(self.units) and one not in self.works:"
BOTH = "for one in (number, following):"
WAITS = "self.works[number].wait()"
BACK = "self.use(number, number - 1)"
FORWARD = "self.use(number, number + 1)"
FORGETS = "del self.works[number]"
FREES = "if self.reshard:\n            self.free(number)"

PREFETCH = Exercise(
    key="fsdp-3",
    title="the asynchronous prefetch",
    check=OnRanks(
        observe_on_rank=steps_of,
        worlds=(3, 2, 1),
        runs=_runs,
        trouble=(
            ("raised", BESIDE, OF_THE_CLASS),
            ("raised", "IndexError", BEYOND),
            ("raised", "'wait'", WAITS_AT_ONCE),
            ("raised", "KeyError", NOT_GATHERED),
            *((kind, "", EVERY_RANK) for kind in ("mismatch", "hang")),
        ),
        expect=(
            _in_order,
            Numbers(
                "used",
                lambda at: _wholes(at, at.number),
                what="the unit",
                causes=((STALE, lambda at: _wholes(at, 0)),),
                look=STALE,
            ),
            Bytes("more_bytes", lambda _at: 0, MORE_MEMORY, what="beside the units it keeps"),
        ),
        success="One unit ahead, waited for when it is used; if forward frees, two at most.",
    ),
    wrong=(
        Edit(BOTH, "for one in (number,):", NO_PREFETCH),
        Edit(FORWARD, "self.use(number, number)", NO_PREFETCH),
        Edit(BACK, "self.use(number, number)", NO_PREFETCH),
        Edit(
            FREES,
            f"{FREES}\n        self.launch(number + 1)\n\n    def launch(self, one):\n"
            "        if one < len(self.units) and one not in self.works:\n"
            "            unit, whole = self.units[one], self.units[one].allocate()\n"
            f"            self.works[one] = {LAUNCHES}",
            NO_PREFETCH,
            also=((BOTH, "for one in (number,):"),),
        ),
        Edit(WAITS, "for work in self.works.values():\n    work.wait()", WAITS_AT_ONCE),
        Edit(", async_op=True", "", WAITS_AT_ONCE, also=((WAITS, "pass"),)),
        Edit(", async_op=True", "", WAITS_AT_ONCE),
        Edit(WAITS, "pass", NOT_WAITED),
        Edit(WAITS, "list(self.works.values())[-1].wait()", NOT_WAITED),
        Edit(BACK, FORWARD, DIRECTION),
        Edit(BOTH, "for one in (number, following, 2 * following - number):", AHEAD),
        Edit(BOTH, "for one in (number, *range(len(self.units))):", AHEAD),
        Edit(
            FORWARD,
            f"{FORWARD}\nif self.reshard and number:\n    self.free(number - 1)",
            AHEAD,
            also=(("if self.reshard:\n", "if self.reshard and number == len(self.units) - 1:\n"),),
        ),
        Edit(BOTH, "for one in (following, number):", OWN_FIRST),
        Edit("one not in self.works:", "True:", TWICE),
        Edit("0 <= one < len(self.units) and one", "one", BEYOND),
        Edit("0 <= one < len(self.units)", "one < len(self.units)", BEYOND),
        Edit("if self.reshard:", "if False:", NOT_FREED),
        Edit("if self.reshard:", "if number < len(self.units) - 1:", NOT_FREED),
        Edit("if self.reshard:", "if True:", KEPT),
        Edit("self.units[number].free()", "pass", NOT_FREED),
        Edit(FORGETS, "pass", NOT_GATHERED),
        Edit(
            "self.units[one].allocate()",
            "torch.empty(dist.get_world_size() * len(self.units[one].shard))",
            ALLOCATE,
        ),
        Edit(LAUNCHES, f"{LAUNCHES}\ndist.barrier()", OTHER_CALL),
        Edit(BOTH, "for one in (number, following)[: 2 - dist.get_rank() % 2]:", NO_PREFETCH),
        Edit(BOTH, "for one in (number, following)[:: 1 - dist.get_rank() % 2 * 2]:", EVERY_RANK),
        Edit(
            "unit.shard, async",
            "self.first.setdefault(one, unit.shard.clone()), async",
            STALE,
            also=(("self.works = {}", "self.works, self.first = {}, {}"),),
        ),
        Edit(
            LAUNCHES,
            f"(self.buffer.setdefault(one, whole.clone()), {LAUNCHES})[1]",
            MORE_MEMORY,
            also=(("self.works = {}", "self.works, self.buffer = {}, {}"),),
        ),
        Edit(
            LAUNCHES,
            f"(self.kept.update({{one: whole}}), {LAUNCHES})[1]",
            MORE_MEMORY,
            also=(("self.works = {}", "self.works, self.kept = {}, {}"),),
        ),
        Edit("self.works = {}", "Prefetch.works = {}", OF_THE_CLASS),
    ),
)
