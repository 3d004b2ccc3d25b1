"""Every case trains with a loss like that of right runs, and is found by its first difference."""

from pathlib import Path

import pytest

from course_lib.clinic.cases import CASES, function_at
from course_lib.clinic.ward import examine, run_case, run_right

PAGE = Path(__file__).parents[2] / "docs" / "debugging.md"
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


def row_of(name):
    """Return the row of docs/debugging.md: what the instruments say, and the place of the fault."""
    case = CASES[name]
    report = examine(case, steps=6 if "save_every" in case.settings else 3)
    first, _, _ = str(report.first).rpartition(" (")
    before = report.where.partition(":")[0] or "gradients are equal"
    kind = str(report.first.kind or "").partition(f"{report.first.key[2]} ")[2].partition(":")[0]
    place = case.place.rpartition(":")[2].removesuffix(".__call__")
    return f"| {name} | step {report.first.key[0]}: {first} | {before} | {kind} | `{place}` |"


@each_case
def test_the_page_tells_what_the_instruments_say(name):
    assert row_of(name) in PAGE.read_text().splitlines()


@each_case
def test_the_function_that_was_there_ends_the_difference(name):
    report = examine(CASES[name], function_at(CASES[name].place))
    assert report.first is None, str(report)
