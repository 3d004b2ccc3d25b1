"""Every case trains with a loss like that of right runs, and is found by its first difference."""

import pytest

from course_lib.clinic.cases import CASES, function_at
from course_lib.clinic.ward import examine, run_case, run_right

FIRST = {  # step, phase, parameter and ranks that differ first; words of the type of its gradient
    "unequal micro-batches": (0, "gradient", "embedding.weight", (0, 1), "another one"),
    "one loader for all": (0, "gradient", "embedding.weight", (0, 1), "another one"),
    "every rank shuffles": (0, "gradient", "embedding.weight", (1,), "another one"),
    "a bias too many": (1, "gradient", "embedding.weight", (0, 1), "another one"),
    "norms apart": (0, "gradient", "positions.weight", (0, 1), "partial over tp, and nobody"),
    "norm of norms": (0, "parameter", "embedding.weight", (0, 1), ""),
    "two ends of a pipeline": (0, "gradient", "embedding.weight", (0, 1), "partial over pp"),
    "the first and the last": (0, "gradient", "embedding.weight", (0, 1), "each rank's own data"),
    "sharded too soon": (0, "gradient", "embedding.weight", (0, 1, 2, 3), "partial over pp"),
    "pages from one": (0, "gradient", "embedding.weight", (0, 1), "another one"),
    "the experts' share": (0, "gradient", "blocks.0.mlp.experts.0.up.weight", (0,), "2 times"),
    "its own ruler": (0, "parameter", "embedding.weight", (0, 1), ""),
    "two masks": (0, "gradient", "embedding.weight", (0, 1), "another one"),
    "a resume": (25, "parameter", "embedding.weight", (0, 1), ""),
    "a fast clock": (1, "parameter", "embedding.weight", (0, 1), ""),
}
IN_CI = ("norms apart", "the experts' share", "a resume")
each_case = pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in IN_CI else pytest.mark.nightly) for name in CASES],
)


def distance(a, b):
    return sum(abs(x - y) for x, y in zip(a, b, strict=True)) / len(a)


@each_case
def test_the_loss_is_within_the_spread_of_right_runs(name):
    case = CASES[name]
    right, faulty = run_right(case), run_case(case)
    others = [distance(right, run_right(case, seed=seed)) for seed in (1, 2, 3)]
    assert len(right) == 50
    assert 0 < distance(right, faulty) < min(others)


@each_case
def test_the_first_difference_is_told(name):
    step, phase, parameter, ranks, words = FIRST[name]
    report = examine(CASES[name])
    assert report.first.key[:3] == (step, phase, parameter)
    assert report.first.ranks == ranks
    assert words in str(report.first.kind or "")


@each_case
def test_the_function_that_was_there_ends_the_difference(name):
    report = examine(CASES[name], function_at(CASES[name].place))
    assert report.first is None, str(report)
