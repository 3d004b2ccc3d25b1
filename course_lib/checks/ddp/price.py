"""Exercise 3 of 06_ddp: the time of a step with overlap."""

from collections.abc import Sequence
from random import Random

from course_lib.checks.cases import Case, Cases
from course_lib.checks.edits import Edit
from course_lib.checks.exercise import Cause, Exercise
from course_lib.checks.properties import COUNTS

Times = Sequence[float]
STEPS: tuple[tuple[float, Times, Times], ...] = (
    (2.0, (3.0, 1.0, 2.0), (1.0, 4.0, 1.0)),
    (1.0, (4.0, 4.0), (1.0, 1.0)),
    (1.0, (1.0, 1.0, 1.0), (3.0, 3.0, 3.0)),
    (0.5, (2.0,), (1.5,)),
    (1.0, (1.0, 5.0, 1.0, 1.0), (2.0, 1.0, 4.0, 0.5)),
    (3.0, (2.0, 2.0), (0.0, 0.0)),
    (0.0, (1.0, 2.0, 2.0), (5.0, 0.5, 0.5)),
    (0.003, (0.0062, 0.0012), (0.0013, 0.0004)),
)


def _cases(steps: Sequence[tuple[float, Times, Times]] = STEPS) -> list[Case]:
    return [
        (
            f"forward {forward_s:g} s, backward {_listed(backward_s)} s, all-reduces "
            f"{_listed(all_reduce_s)} s",
            (forward_s, [*backward_s], [*all_reduce_s]),
        )
        for forward_s, backward_s, all_reduce_s in steps
    ]


def _drawn(random: Random) -> list[Case]:
    def some_s(count: int) -> list[float]:
        return [random.randint(1, 60) / 10 for _ in range(count)]

    return _cases([(random.randint(1, 30) / 10, some_s(n), some_s(n)) for n in (2, 3, 5)])


def _listed(times: Times) -> str:
    return ", ".join(f"{time_s:g}" for time_s in times)


WIRE = "max(ready_s, done_s) + wire_s"

PRICE = Exercise(
    key="ddp-3",
    title="the time of a step with overlap",
    check=Cases(
        cases=_cases,
        drawn=_drawn,
        unit=" s",
        look="Go through it with two clocks: when is a bucket ready, when is the link free?",
        success="Right for fast links, for slow ones, and in between.",
    ),
    wrong=(
        Edit(
            "return done_s",
            "return forward_s + sum(backward_s) + sum(all_reduce_s)",
            Cause("That is without any overlap: while a bucket is reduced, backward goes on."),
        ),
        Edit(
            "return done_s",
            "return forward_s + max(sum(backward_s), sum(all_reduce_s))",
            Cause(
                "The link is idle before the first bucket is ready, so not everything is hidden."
            ),
        ),
        Edit(
            "return done_s",
            "return ready_s",
            Cause("The last bucket is ready when backward ends: nothing can hide its all-reduce."),
        ),
        Edit(
            "return done_s",
            "return ready_s + wire_s",
            Cause(
                "Only the last all-reduce is exposed if the link keeps up; if not, they queue up."
            ),
        ),
        Edit(
            "return done_s",
            "return forward_s + backward_s[0] + sum(all_reduce_s)",
            Cause("Right for a slow link only: a fast one waits until the next bucket is ready."),
        ),
        Edit(
            "return done_s",
            "return forward_s + sum(map(max, backward_s, all_reduce_s))",
            Cause(
                "Backward never waits for the link; only the link waits: max() is for its clock."
            ),
        ),
        Edit(
            WIRE,
            "max(done_s, ready_s + wire_s)",
            Cause(
                "There is one link: a bucket also waits until the one before it has been reduced."
            ),
        ),
        Edit(
            "ready_s += compute_s",
            "ready_s, before_s = ready_s + compute_s, ready_s",
            Cause(
                "A bucket is sent before its own backward is done: take the later of the two "
                "clocks, and add the time of the all-reduce to that."
            ),
            also=(
                (WIRE, "max(before_s, done_s) + wire_s"),
                ("return done_s", "return max(ready_s, done_s)"),
            ),
        ),
        Edit(
            "ready_s += compute_s",
            "ready_s = forward_s + compute_s",
            Cause("Each backward starts when the one before ends: keep ready_s, and add to it."),
        ),
        Edit(
            "ready_s = done_s = forward_s",
            "ready_s = done_s = 0.0",
            Cause("Forward is missing: nothing is ready before it ends."),
        ),
        *COUNTS,
    ),
)
