"""Exercise 2 of 13_scaling_study, with its planted mistakes: a run compared with one rank."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from course_lib.checks.exercise import CheckFailed, Exercise, Mistake
from course_lib.core.presets import find_model
from course_lib.scaling_study.aggregate import Experiment
from course_lib.scaling_study.study_run import StudyRun

Alone = Sequence[Experiment]
Rule = Callable[..., float]


@dataclass(frozen=True)
class Wrong:
    """A planted mistake: the wrong value for the number `key`, and its meaning."""

    name: str
    key: str
    rule: Rule
    says: str

    def planted(self, right: Callable[..., Mapping[str, float]]) -> Mistake:
        """Return the right answer with this one number wrong."""

        def answer(*case: Any) -> dict[str, float]:
            return {**right(*case), self.key: self.rule(*case)}

        return Mistake(self.name, answer, self.says[:40])


def expect_numbers(
    got: Sequence[Any],
    cases: Mapping[str, tuple[Any, ...]],
    right: Callable[..., Mapping[str, float]],
    wrongs: Sequence[Wrong],
) -> None:
    """Demand that every case has all numbers, under their names."""
    wanted = [right(*case) for case in cases.values()]
    for key in wanted[0]:
        for name, found, numbers in zip(cases, got, wanted, strict=True):
            value = _number(name, key, found, numbers)
            if not near(value, numbers[key]):
                says = _why(key, [one.get(key) for one in got], list(cases.values()), wrongs)
                raise CheckFailed(
                    f"{name}, {key}: need {numbers[key]:g}; got {value:g}. {says}".rstrip()
                )


def _number(name: str, key: str, found: Any, wanted: Mapping[str, float]) -> float:
    if found is None:
        raise CheckFailed(f"{name}: got None. Does your function return its result?")
    if not isinstance(found, Mapping) or key not in found:
        raise CheckFailed(f"{name}: need a dictionary with {', '.join(wanted)}; got {found!r}.")
    value = found[key]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise CheckFailed(f"{name}, {key}: need a number; got {value!r}.")
    return float(value)


def _why(
    key: str, values: Sequence[Any], cases: Sequence[tuple[Any, ...]], wrongs: Sequence[Wrong]
) -> str:
    """Return the sentence of the first mistake that fits every case; None where none does."""
    for wrong in wrongs:
        told = zip(values, cases, strict=True)
        if wrong.key == key and all(near(value, wrong.rule(*case)) for value, case in told):
            return wrong.says
    return ""


def near(value: Any, wanted: float, rel: float = 1e-6) -> bool:
    """Return whether they are equal but for rounding."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isclose(value, wanted, rel_tol=rel, abs_tol=1e-12)


def beside_one(experiment: Experiment, alone: Alone) -> dict[str, float]:
    """Compare a run with the run of one rank: the right answer."""
    one = _same_work(experiment, alone)
    factor = experiment.tokens_per_s / one.tokens_per_s
    return {
        "overhead_percent": (experiment.step_s / one.step_s - 1) * 100,
        "throughput_factor": factor,
        "efficiency_percent": factor / experiment.run.ranks * 100,
    }


def _same_work(experiment: Experiment, alone: Alone) -> Experiment:
    return next(one for one in alone if one.run.work == experiment.run.work)


# --- planted mistakes, which are also what the check compares a wrong answer with


def _overhead(e: Experiment, alone: Alone) -> float:
    return beside_one(e, alone)["overhead_percent"]


def _factor(e: Experiment, alone: Alone) -> float:
    return beside_one(e, alone)["throughput_factor"]


def _at(place: int) -> Any:
    """Return the comparison with the run at this index of the list, whatever its batch."""
    return lambda experiment, alone: beside_one(
        experiment, [replace(alone[place], run=experiment.run)]
    )


def _alike(*places: int) -> Any:
    """Return the comparison with the first run that is alike in some places of `run.work` only."""

    def answer(experiment: Experiment, alone: Alone) -> dict[str, float]:
        work = [experiment.run.work[place] for place in places]
        found = next(i for i, e in enumerate(alone) if [e.run.work[at] for at in places] == work)
        return beside_one(experiment, [replace(alone[found], run=experiment.run)])

    return answer


PLACES = {  # spec, global_batch, seq, dtype, micro-batches, warm-up
    "the same model": (0,),
    "the same batch": (1, 2, 3, 4, 5),
    "not cut alike": (0, 1, 2, 3, 5),
    "another length": (0, 1, 3, 4, 5),
    "another dtype": (0, 1, 2, 4, 5),
    "another warm-up": (0, 1, 2, 3, 4),
}
OTHER = "that run of one rank did other work: take the one whose run.work is the same."
WRONG = (
    Wrong("a share", "overhead_percent", lambda e, a: _overhead(e, a) / 100,
          "That is a share: in per cent it is 100 times as much."),
    Wrong("upside down", "overhead_percent", lambda e, a: 100 / (1 + _overhead(e, a) / 100) - 100,
          "Upside down: a run that takes longer than one rank has an overhead above 0."),
    Wrong("without the - 1", "overhead_percent", lambda e, a: 100 + _overhead(e, a),
          "An overhead is what comes on top: as long as one rank is 0 %, so subtract 1."),
    Wrong("whole runs", "overhead_percent",
          lambda e, a: (e.time_s / _same_work(e, a).time_s - 1) * 100,
          "The runs have different numbers of steps: compare the time of a step."),
    Wrong("ideal subtracted", "overhead_percent",
          lambda e, a: (e.step_s / (_same_work(e, a).step_s / e.run.ranks) - 1) * 100,
          "That compares with an ideal split, which is what efficiency is for: T_N / T_1 - 1."),
    Wrong("factor upside down", "throughput_factor", lambda e, a: 1 / _factor(e, a),
          "Upside down: a factor above 1 says that splitting made it faster."),
    Wrong("tokens, not tokens a second", "throughput_factor",
          lambda e, a: e.num_tokens / _same_work(e, a).num_tokens,
          "Those are tokens: throughput is tokens a second."),
    Wrong("factor divided", "throughput_factor", lambda e, a: _factor(e, a) / e.run.ranks,
          "Already divided by the ranks: the factor is of all ranks together."),
    Wrong("not divided by N", "efficiency_percent", lambda e, a: _factor(e, a) * 100,
          "Not divided by the ranks: N ranks that are N times as fast are 100 % efficient."),
    Wrong("efficiency as a share", "efficiency_percent", lambda e, a: _factor(e, a) / e.run.ranks,
          "That is a share, from 0 to 1: in per cent it is 100 times as much."),
    Wrong("divided twice", "efficiency_percent",
          lambda e, a: _factor(e, a) / e.run.ranks**2 * 100,
          "Divided by the ranks twice: tokens_per_s is of all ranks together already."),
    Wrong("divided by the copies", "efficiency_percent",
          lambda e, a: _factor(e, a) / e.run.parallelism.dp * 100,
          "Divided by the copies of the model: the ranks of TP and PP count, too."),
    Wrong("100 minus the overhead", "efficiency_percent", lambda e, a: 100 - _overhead(e, a),
          "That is not what is lost: efficiency is the factor over the ranks, times 100."),
)  # fmt: skip


# --- the check


def _experiment(run: StudyRun, num_steps: int, step_s: float) -> Experiment:
    return Experiment(
        run=run,
        num_steps=num_steps,
        time_s=num_steps * step_s,
        num_tokens=num_steps * run.tokens_a_step,
        held={},
        machine={},
    )


_TINY = StudyRun(spec=find_model("tiny"), global_batch=16, seq=64, steps=12)
_SMALL = replace(_TINY, spec=find_model("small"))
_OTHER_WORK = (
    _experiment(replace(_TINY, global_batch=32), 9, 3.5),
    _experiment(replace(_TINY, seq=32), 9, 1.5),
    _experiment(replace(_TINY, dtype="bfloat16"), 9, 1.75),
    _experiment(replace(_TINY, warmup=3), 9, 2.25),
)
ALONE = (
    *_OTHER_WORK,
    _experiment(_TINY, 9, 2.0),
    _experiment(replace(_TINY, num_micro_batches=4), 12, 2.5),
    _experiment(_SMALL, 6, 8.0),
    *_OTHER_WORK,
)
CASES: dict[str, tuple[Experiment, Alone]] = {
    "DP on 2 ranks": (_experiment(replace(_TINY, strategy="ddp", ranks=2), 6, 1.25), ALONE),
    "TP on 4 ranks, slower than one": (_experiment(replace(_TINY, ranks=4, tp=4), 9, 3.0), ALONE),
    "ZeRO on 4 ranks, in 4 micro-batches": (
        _experiment(replace(_TINY, strategy="zero1", ranks=4, num_micro_batches=4), 3, 1.0),
        ALONE,
    ),
    "DP 2 x TP 2": (_experiment(replace(_TINY, strategy="ddp", ranks=4, tp=2), 5, 0.75), ALONE),
    "PP on 2 ranks": (_experiment(replace(_SMALL, ranks=2, pp=2, num_micro_batches=4), 4, 5.0),
                      ALONE),
}  # fmt: skip


def check_beside(answer: Any) -> str:
    """Check runs faster and slower than one rank, with several runs of one rank to choose from."""
    got = [answer(*case) for case in CASES.values()]
    for (name, case), one in zip(CASES.items(), got, strict=True):
        others = (_at(place)(*case) for place in range(len(ALONE)))
        if not _same(one, beside_one(*case)) and any(_same(one, other) for other in others):
            raise CheckFailed(f"{name}: {OTHER}")
    expect_numbers(got, CASES, beside_one, WRONG)
    return "Overhead, factor and efficiency, each beside the run with the same batch."


def _same(got: Any, wanted: dict[str, float]) -> bool:
    return isinstance(got, dict) and all(
        isinstance(got.get(key), int | float) and abs(got[key] - value) <= 1e-6 * abs(value)
        for key, value in wanted.items()
    )


BESIDE = Exercise(
    key="scaling_study-2",
    title="a run beside one rank",
    check=check_beside,
    reference=beside_one,
    mistakes=(
        Mistake("the first run of one rank", _at(0), OTHER[:40]),
        Mistake("the last run of one rank", _at(-1), OTHER[:40]),
        *(Mistake(name, _alike(*places), OTHER[:40]) for name, places in PLACES.items()),
        *(wrong.planted(beside_one) for wrong in WRONG),
    ),
)
