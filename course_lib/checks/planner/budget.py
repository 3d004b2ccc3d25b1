"""Exercise 4 of 12_planner: the cheapest plan that trains so many tokens in so many days."""

from random import Random
from typing import Any

from course_lib.checks.cases import Case, Cases
from course_lib.checks.edits import Edit
from course_lib.checks.exercise import Cause, Exercise, failed

ONE_GPU = Cause("The plans' rates are per GPU: all GPUs of a plan work together.")
FASTEST = Cause("That is the fastest plan: need the cheapest that is fast enough.")
FEWEST = Cause("That is the plan with the fewest GPUs: its hours count, too.")
DEADLINE = Cause("A plan that takes longer than the days is out, however cheap.")
HOURS = Cause("A day has 24 hours.")
NOT_FIT = Cause("A plan that does not fit cannot run: skip it.")
WALL = Cause("The price is per GPU and hour: each GPU costs.")
WHOLE_TIME = Cause("You pay until the last token, not until the deadline.")
SECONDS = Cause("An hour has 3,600 seconds.")
ON_TIME = Cause("A plan that ends exactly on time is on time.")
NOTHING = Cause("Where no plan is left, there is no answer: None.")
COUNTED = Cause("Number the plans as they were given, from 0, those that do not fit included.")
PARTS = Cause("Days have parts: compare hours with hours, and do not round.")
UNCHANGED = Cause("The plans belong to the caller: leave them in their order.")
PAIR = Cause("Need a pair: the plan's number and its dollars; or None.")

# GPUs, tokens per second and GPU, whether it fits
Rows = list[tuple[int, float, bool]]


def _case(text: str, plans: Rows, num_tokens: float, days: float, price: float) -> Case:
    words = f"{text}: {num_tokens:g} tokens in {days:g} days at {price:g} dollars"
    return words, (list(plans), num_tokens, days, price)


def _cases() -> list[Case]:
    plans: Rows = [(8, 4000.0, False), (256, 3000.0, True), (64, 3400.0, True)]
    plans += [(32, 3600.0, True), (16, 2000.0, True), (128, 3500.0, False)]
    two: Rows = [(10, 1000.0, True), (20, 700.0, True)]
    return [
        _case("much time", plans, 2e11, 400, 2.5),
        _case("a month", plans, 2e11, 30, 2.5),
        _case("two weeks", plans, 2e11, 14, 2.5),
        _case("a week", plans, 2e11, 7, 2.5),
        _case("too little time", plans, 2e11, 1, 2.5),
        _case("small and dear", plans, 1e10, 3, 98.0),
        _case("exactly on time", [(10, 1000.0, True), (20, 900.0, True)], 8.64e8, 1, 1.0),
        _case("the last one", [(4, 9.0, False), (4, 8.0, True), (4, 10.0, True)], 1e6, 30, 2.0),
        _case("late by half an hour", two, 8.82e8, 1, 1.0),
        _case("14.4 days", two, 14.4 * 8.64e8, 14, 1.0),
        _case("14.9 days", two, 14.9 * 8.64e8, 14, 1.0),
        _case("a day and a half", two, 1.4 * 8.64e8, 1.5, 1.0),
        _case("one fits", [(8, 100.0, False), (8, 100.0, True)], 1e7, 30, 1.0),
        _case("none fits", [(8, 4000.0, False)], 1e9, 100, 2.0),
        _case("no plans", [], 1e9, 100, 2.0),
    ]


def _drawn(random: Random) -> list[Case]:
    found = []
    for number in range(3):
        plans = [
            (random.choice((8, 16, 32, 64, 128)), random.randint(900, 5000) + 0.5, bool(row % 3))
            for row in range(8)
        ]
        found.append(_case(f"drawn {number}", plans, 1e11, random.randint(5, 60), 3.0))
    return found


def _shown(result: Any, *_: Any) -> Any:
    """Return the number and the dollars as a list."""
    try:
        number, dollars = result
        return [int(number), float(dollars)]
    except (TypeError, ValueError):
        raise failed(f"got {result!r}"[:200], PAIR) from None


LEFT, COST = "fits and hours <= 24 * days", "gpus * hours * price"
THREE = (("cost, number = min(found)", "_, number, cost = min(found)"),)
HOUR = "num_tokens / (gpus * tokens_per_s) / 3600"

BUDGET = Exercise(
    key="planner-4",
    title="a budget",
    check=Cases(
        cases=_cases,
        drawn=_drawn,
        show=_shown,
        unchanged=UNCHANGED,
        look="For each plan: hours, GPU-hours, dollars. Which ones are left?",
        success="The cheapest plan on time in fifteen cases.",
    ),
    wrong=(
        Edit(HOUR, "num_tokens / tokens_per_s / 3600", ONE_GPU),
        Edit(f"({COST}, number)", f"(hours, number, {COST})", FASTEST, also=THREE),
        Edit(f"({COST}, number)", f"(gpus, number, {COST})", FEWEST, also=THREE),
        Edit(LEFT, "fits", DEADLINE),
        Edit(LEFT, "fits and hours <= days", HOURS),
        Edit(LEFT, "hours <= 24 * days", NOT_FIT),
        Edit(COST, "hours * price", WALL),
        Edit(COST, "gpus * 24 * days * price", WHOLE_TIME),
        Edit(HOUR, HOUR.replace("3600", "60"), SECONDS),
        Edit(LEFT, "fits and hours < 24 * days", ON_TIME),
        Edit("return None", "return 0, 0.0", NOTHING),
        Edit(LEFT, "fits and hours // 24 <= days", PARTS),
        Edit("found = []", "plans.sort()\nfound = []", UNCHANGED),
        Edit("enumerate(plans)", "enumerate(plan for plan in plans if plan[2])", COUNTED),
    ),
)
