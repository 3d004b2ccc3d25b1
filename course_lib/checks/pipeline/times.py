"""Exercise 2 of 08_pipeline: the end of each action; mistakes in `times_answers.py`."""

import contextlib
import math
import signal
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from course_lib.checks.exercise import CheckFailed, Exercise, Mistake
from course_lib.checks.pipeline.times_answers import (
    WRONG,
    Answer,
    Ends,
    Seconds,
    empties_the_schedule,
    finish_times,
    never_ends,
)
from course_lib.core.links import Link
from course_lib.pipeline import schedules
from course_lib.pipeline.actions import Schedule
from course_lib.pipeline.simulation import PipelineTimes, simulate

ENDLESS_CPU_S = 2.0  # right answers need some ms


def _cases() -> list[tuple[str, Schedule, Seconds, float]]:
    plain, uneven = {"forward": 1.0, "backward": 2.0}, {"forward": 2.0, "backward": 1.5}
    return [
        ("1F1B, p = 2, m = 2", schedules.one_f_one_b(2, 2), plain, 0.5),
        ("1F1B, p = 3, m = 4", schedules.one_f_one_b(3, 4), plain, 0.25),
        ("GPipe, p = 4, m = 3", schedules.gpipe(4, 3), uneven, 0.0),
        ("naive, p = 3, m = 2", schedules.naive(3, 2), uneven, 1.0),
        ("1F1B, p = 4, m = 8", schedules.one_f_one_b(4, 8), plain, 3.0),
        ("1F1B, p = 1, m = 3", schedules.one_f_one_b(1, 3), plain, 1.0),
        ("1F1B, p = 4, m = 2", schedules.one_f_one_b(4, 2), uneven, 0.5),
    ]


def check_times(answer: Answer) -> str:
    """Check schedules of 1 to 4 ranks, fast and slow links, m < p: every action's end."""
    cases = _cases()
    made = []
    for what, schedule, seconds, message_s in cases:
        given = [list(actions) for actions in schedule]
        with _no_endless_loop(what):
            made.append(answer(given, dict(seconds), message_s))
        if given != schedule:
            raise CheckFailed(f"{what}: the schedule has changed: work on a copy of its lists.")
    for (what, schedule, seconds, message_s), got in zip(cases, made, strict=True):
        _expect(what, schedule, (seconds, message_s), got, made)
    return "Every action of seven schedules ends when it does in the course's simulator."


@contextlib.contextmanager
def _no_endless_loop(what: str) -> Iterator[None]:
    """Stop an answer that never ends, after ENDLESS_CPU_S of the process's CPU time."""
    if threading.current_thread() is not threading.main_thread():  # only there a signal can raise
        yield
        return

    def stop(*_: Any) -> None:
        raise CheckFailed(
            f"{what}: your loop never ends. Whatever has its input must run and leave its list; "
            "the input is the same action of the stage source_of, in ends once it has run."
        )

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, ENDLESS_CPU_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def _expect(
    what: str, schedule: Schedule, costs: tuple[Seconds, float], got: Any, made: Sequence[Any]
) -> None:
    seconds, message_s = costs
    half_s = seconds["backward"] / 2
    played = simulate(
        schedule,
        PipelineTimes(
            forward_s=seconds["forward"],
            backward_input_s=half_s,
            backward_weight_s=half_s,
            link=Link(latency_s=message_s, bytes_per_s=math.inf),
        ),
    )
    if not isinstance(got, dict):
        raise CheckFailed(f"{what}: need a dictionary, action: seconds; got {str(got)[:60]}.")
    for rank, actions in enumerate(schedule):
        for action, end_s in zip(actions, played.ends_s[rank], strict=True):
            is_now = got.get(action)
            if not isinstance(is_now, int | float) or abs(is_now - end_s) > 1e-9:
                shown = f"{is_now:g} s" if isinstance(is_now, int | float) else is_now
                raise CheckFailed(
                    f"{what}, forward {seconds['forward']:g} s, backward {seconds['backward']:g} "
                    f"s, messages {message_s:g} s: {action.label} on rank {rank} ends after "
                    f"{end_s:g} s; got {shown}. {_why(made)}"
                )


def _why(made: Sequence[Any]) -> str:
    """Return the cause that fits every case."""
    for _, wrong, says in WRONG:
        if all(_same(got, wrong(*case[1:])) for got, case in zip(made, _cases(), strict=True)):
            return says
    return "Draw it for p = 2: when is the rank free, and when is the input there?"


def _same(got: Any, wrong: Ends) -> bool:
    return (
        isinstance(got, dict)
        and got.keys() == wrong.keys()
        and all(abs(got[action] - wrong[action]) < 1e-9 for action in wrong)
    )


TIMES = Exercise(
    key="pipeline-2",
    title="when each action ends",
    check=check_times,
    reference=finish_times,
    mistakes=(
        *(Mistake(name, wrong, says[:45]) for name, wrong, says in WRONG),
        Mistake("empties the schedule", empties_the_schedule, "work on a copy of its lists"),
        Mistake("never ends", never_ends, "your loop never ends"),
    ),
)
