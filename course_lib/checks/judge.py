"""Judge an answer on ranks by example: the right answer shows what is needed, mistakes name causes.

    ByExample(observe_on_rank=train, facets=(CHANGED, ORDER, "gradients"), success="...")

`observe_on_rank` returns the facets of each step (course_lib.checks.watch). They are compared with
those of the right answer in the same run. A planted mistake whose first difference is the same
names the cause: so a mistake needs no predicate. What the right answer and the mistakes show lies
in a file beside the checks (course_lib.checks.right_answer); where there is none, they run.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

from course_lib.checks.exercise import Cause, CheckFailed, Exercise, NotDone, failed
from course_lib.checks.expect import difference
from course_lib.checks.on_ranks import (
    DTYPE,
    OF_DTYPES,
    TWO_DTYPES,
    WORLDS,
    Run,
    Trouble,
    run_on,
    told,
)
from course_lib.checks.parts import EDGES, TRAFFIC, part_of, whole_parts
from course_lib.checks.properties import (
    CALLERS,
    DIGITS,
    EVERY_HANDLE,
    EVERY_RANK,
    NAN,
    SAME_CALLS,
)
from course_lib.checks.watch import CHANGED, UNWAITED
from course_lib.core import CourseError
from course_lib.ranks import Ranks

ROUNDING = {  # relative
    torch.float64: 1e-12,
    torch.float32: 1e-6,
    torch.float16: 2e-3,
    torch.bfloat16: 0.02,  # 8 bits: each rounding is off by at most 0.4 %
}
MOST_SHOWN = 12  # of a list
ADDRESS = re.compile(r" at 0x[0-9a-f]+")
LOOKS = {"hang": EVERY_RANK, "mismatch": SAME_CALLS, CHANGED: CALLERS, UNWAITED: EVERY_HANDLE}
SAYS = (  # whatever the exercise is: what the words of a difference or an error tell
    ("^need dtype", DTYPE),
    (OF_DTYPES, TWO_DTYPES),
    ("right but for the last digits", DIGITS),
    (r"need [^;]*\b(inf|nan)\b[^;]*; got (?!.*\b(inf|nan)\b)", NAN),
)
OF_ALL = ("hang", "mismatch")  # trouble that many mistakes make: one cause each, in `looks`


@dataclass(frozen=True)
class Difference:
    """The first difference from the right answer: in which run, step and facet, and what ranks had.

    `rank` is the first that differs, `words` say how.
    """

    run: int
    step: str
    facet: str
    by_rank: Sequence[Any]
    rank: int = 0
    words: str = ""


@dataclass(frozen=True, kw_only=True)
class ByExample:
    """A check of an answer on ranks that compares it with the right answer, and with mistakes.

    `observe_on_rank(rank, answer, **options)` returns the facets by step and name; `runs(p)` gives
    the options of the runs on a world of p ranks.
    `facets` are compared in this order, floating-point numbers within `rtol` (default: rounding).
    Those in `equal` are pairs of a group and a value, which has to be the same in all of the group.
    `looks` has what to say where no planted mistake does the same, by facet, and by kind of
    trouble (`hang`, `mismatch`, `raised`), beyond LOOKS: it has to be true of any such answer.
    """

    observe_on_rank: Callable[..., Mapping[str, Any]]
    facets: Sequence[str]
    success: str
    worlds: Sequence[int] = WORLDS
    runs: Callable[[int], Sequence[Mapping[str, Any]]] = lambda _world_size: ({},)
    rtol: float | None = None
    equal: Sequence[str] = ()
    looks: Sequence[tuple[str, Cause]] = ()

    def observe(self, answer: Any) -> Iterator[Run]:
        """Run the answer on each world in turn; yield what the ranks observed, run by run."""
        for world_size in self.worlds:
            with Ranks(world_size, cluster="laptop") as ranks:
                for options in self.runs(world_size):
                    yield self.run_on(ranks, answer, options)

    def run_on(self, ranks: Ranks, answer: Any, options: Mapping[str, Any]) -> Run:
        """Run the answer once on these ranks; return what they observed, or their trouble."""
        return run_on(ranks, self.observe_on_rank, answer, options)

    def judge(self, observed: Iterable[Run], exercise: Exercise) -> str:
        """Compare each run with the right answer's; return the line of success."""
        right = exercise.right_values()
        for run, (seen, need) in enumerate(zip(observed, right, strict=False)):
            if found := self._compare(run, seen, need):
                raise self._failed(seen, found, exercise)
        return self.success

    def first_difference(self, answer: Any, exercise: Exercise) -> list[Any]:
        """Return the first difference of a wrong answer from the right one as plain data."""
        runs = zip(self.observe(answer), exercise.right_values(), strict=False)
        differences = (self._compare(run, *pair) for run, pair in enumerate(runs))
        found = next(filter(None, differences), None)
        return [found.run, found.step, found.facet, found.by_rank] if found else []

    def shares(self, observed: Sequence[Run], right: Sequence[Run]) -> dict[str, float]:
        """Return 1.0 for each part that holds, else 0.0 (course_lib.checks.parts).

        `edges` is all that is expected on other worlds than the first one.
        """
        found, shows_work = list[tuple[str, bool]](), False
        for number, need in enumerate(right):
            seen = observed[number] if number < len(observed) else Run(0, {})
            is_whole = _shape(seen) == _shape(need)
            differ = (
                {one.facet for one in self._differences(number, seen, need)} if is_whole else ()
            )
            is_edge = need.world_size != right[0].world_size
            for facet in self.facets:
                part = EDGES if is_edge else part_of(facet)
                found.append((part, is_whole and facet not in differ))
                if part == TRAFFIC:
                    shows_work |= any(isinstance(v, list) and v for v in _everywhere(need, facet))
        return whole_parts(found, shows_work=shows_work)

    def _compare(self, number: int, seen: Run, need: Run) -> Difference | None:
        if need.trouble:
            raise CourseError(f"the check's own right answer fails: {need.trouble.text}")
        if seen.trouble:
            return _of_trouble(number, seen.trouble)
        return next(self._differences(number, seen, need), None)

    def _differences(self, number: int, seen: Run, need: Run) -> Iterator[Difference]:
        for step in need.by_rank[0]:
            for facet in self.facets:
                gots, needs = (self._values(one, step, facet) for one in (seen, need))
                words = list(map(self._unlike, gots, needs))
                if any(words):
                    rank = next(rank for rank, each in enumerate(words) if each)
                    yield Difference(number, step, facet, gots, rank, words[rank])

    def _values(self, run: Run, step: str, facet: str) -> list[Any]:
        """Return the values of a facet by rank; of those in `equal`, whether they are."""
        found = [rank[step].get(facet) for rank in run.by_rank]
        if facet not in self.equal or None in found:
            return found
        first = {str(group): value for group, value in reversed(found)}
        return [
            f"{'' if first[str(g)] == value else 'not '}those of rank {g[0]}" for g, value in found
        ]

    def _unlike(self, got: Any, need: Any) -> str:
        return unlike(got, need, self.rtol)

    def _alike(self, found: Difference, other: Difference) -> bool:
        """Return whether two answers differ from the right one in the same way."""
        places = ((each.run, each.step, each.facet) for each in (found, other))
        return len({*places}) == 1 and not any(map(self._unlike, found.by_rank, other.by_rank))

    def _failed(self, seen: Run, found: Difference, exercise: Exercise) -> CheckFailed | NotDone:
        p = seen.world_size
        if trouble := seen.trouble:
            for name, text in trouble.failures.values():
                if name == "NotImplementedError":
                    return NotDone(text)
            return told(trouble, p, self._cause(found, exercise))
        where = f"rank {found.rank} of {p}, {found.step}"
        what = f"{where}: {found.facet}: {found.words}"
        return failed(what, self._cause(found, exercise), p=p, rank=found.rank)

    def _cause(self, found: Difference, exercise: Exercise) -> Cause | None:
        looks = LOOKS | dict(self.looks)
        if found.facet in OF_ALL:
            return looks[found.facet]
        firsts = ((c, Difference(*one)) for c, one in exercise.wrong_values() if one)
        cause = next((c for c, other in firsts if self._alike(found, other)), None)
        told = found.words or (str(found.by_rank) if found.facet == "raised" else "")
        says = (one for pattern, one in SAYS if re.search(pattern, told))
        return cause or next(says, looks.get(found.facet))


def _shape(run: Run) -> tuple[int, list[list[str]]]:
    """Return which ranks and steps a run shows; none where it had trouble."""
    return run.world_size, [list(rank) for rank in run.by_rank]


def _everywhere(run: Run, facet: str) -> list[Any]:
    """Return the values of a facet, of all ranks and steps."""
    return [step.get(facet) for rank in run.by_rank for step in rank.values()]


def _of_trouble(number: int, trouble: Trouble) -> Difference:
    texts = [ADDRESS.sub("", f"{name}: {text}") for name, text in trouble.failures.values()]
    return Difference(number, trouble.step, trouble.kind, texts)


def unlike(got: Any, need: Any, rtol: float | None = None) -> str:
    """Return how a value differs from the right one, in words; an empty text if it does not."""
    if isinstance(got, list) and isinstance(need, list) and _has_tensors(need):
        got, need = dict(enumerate(got)), dict(enumerate(need))
    if isinstance(got, dict) and isinstance(need, dict):
        pairs = ((name, unlike(got.get(name), need.get(name), rtol)) for name in need | got)
        return next((f"{name}: {words}" for name, words in pairs if words), "")
    if isinstance(got, list) and isinstance(need, list):
        return "" if got == need else _in_order(got, need)
    if rtol is None:
        rtol = ROUNDING.get(need.dtype, 0.0) if isinstance(need, Tensor) else 0.0
    return difference(got, need, rtol)[1]


def _has_tensors(values: Sequence[Any]) -> bool:
    return any(isinstance(one, Tensor) for one in values)


def _in_order(got: list[Any], need: list[Any]) -> str:
    """Return where two lists of words part."""
    if not need or not got:
        return f"need {_listed(need)}; got {_listed(got)}"
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(got, need, strict=False)))
    wanted, seen = ((each[same:] or ["nothing more"])[0] for each in (need, got))
    after = f"after {need[same - 1]}, " if same else "first, "
    return f"{after}need {wanted}; got {seen} (all of it: {_listed(got)})"


def _listed(words: list[Any]) -> str:
    more = [f"and {len(words) - MOST_SHOWN} more"] if len(words) > MOST_SHOWN else []
    return ", ".join([*map(str, words[:MOST_SHOWN]), *more]) or "nothing"
