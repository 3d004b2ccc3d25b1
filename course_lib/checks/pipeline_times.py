"""Exercise 2 of 08_pipeline, with its planted mistakes: when each action ends."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from course_lib.checks.exercise import CheckFailed, Exercise, Mistake
from course_lib.core.links import Link
from course_lib.cost import schedules
from course_lib.cost.actions import Action, Schedule, source_of
from course_lib.cost.schedule_simulation import simulate
from course_lib.cost.schedule_times import PipelineTimes

Seconds = Mapping[str, float]
Ends = dict[Action, float]
# when an action ends: from when the rank is free, when its input is there (0 without one), seconds
Rule = Callable[[float, float, float], float]


def finish_times(schedule: Schedule, seconds: Seconds, message_s: float) -> Ends:
    """The right answer: an action starts when its rank is free and its input is there."""
    return _play(schedule, seconds, message_s)


def _play(
    schedule: Schedule,
    seconds: Seconds,
    message_s: float,
    rule: Rule = lambda free_s, input_s, took_s: max(free_s, input_s) + took_s,
    busy: Callable[[float, Action], float] = lambda end_s, action: end_s,
) -> Ends:
    ends: Ends = {}
    free_s = [0.0] * len(schedule)
    left = [list(actions) for actions in schedule]
    while any(left):
        for rank, actions in enumerate(left):
            while actions:
                source = source_of(actions[0], len(schedule))
                sent = None if source is None else actions[0]._replace(stage=source)
                if sent is not None and sent not in ends:
                    break
                action = actions.pop(0)
                input_s = 0.0 if sent is None else ends[sent] + message_s
                ends[action] = rule(free_s[rank], input_s, seconds[action.kind])
                free_s[rank] = busy(ends[action], action)
    return ends


# --- planted mistakes, which are also what the check compares a wrong answer with


def _no_wire(schedule: Schedule, seconds: Seconds, message_s: float) -> Ends:
    return _play(schedule, seconds, 0.0)


def _rank_never_busy(schedule: Schedule, seconds: Seconds, message_s: float) -> Ends:
    return _play(schedule, seconds, message_s, lambda free_s, input_s, took_s: input_s + took_s)


def _never_waits(schedule: Schedule, seconds: Seconds, message_s: float) -> Ends:
    return _play(schedule, seconds, message_s, lambda free_s, input_s, took_s: free_s + took_s)


def _added(schedule: Schedule, seconds: Seconds, message_s: float) -> Ends:
    return _play(schedule, seconds, message_s, lambda *clocks: sum(clocks))


def _starts(schedule: Schedule, seconds: Seconds, message_s: float) -> Ends:
    right = finish_times(schedule, seconds, message_s)
    return {action: end_s - seconds[action.kind] for action, end_s in right.items()}


def _sender_waits(schedule: Schedule, seconds: Seconds, message_s: float) -> Ends:
    """What leaves keeps its rank busy while it travels."""

    def busy(end_s: float, action: Action) -> float:
        last = len(schedule) - 1
        leaves = action.stage < last if action.kind == "forward" else action.stage > 0
        return end_s + message_s * leaves

    return _play(schedule, seconds, message_s, busy=busy)


def _wire_after_wait(schedule: Schedule, seconds: Seconds, message_s: float) -> Ends:
    def rule(free_s: float, input_s: float, took_s: float) -> float:
        return max(free_s, input_s - message_s) + message_s * (input_s > 0) + took_s

    return _play(schedule, seconds, message_s, rule)


def _wire_everywhere(schedule: Schedule, seconds: Seconds, message_s: float) -> Ends:
    def rule(free_s: float, input_s: float, took_s: float) -> float:
        return max(free_s, input_s or message_s) + took_s

    return _play(schedule, seconds, message_s, rule)


def _one_length(schedule: Schedule, seconds: Seconds, message_s: float) -> Ends:
    return _play(schedule, dict.fromkeys(seconds, seconds["forward"]), message_s)


def _in_one_row(schedule: Schedule, seconds: Seconds, message_s: float) -> Ends:
    """Everything in a row: no two ranks work at the same time."""
    order = sorted(finish_times(schedule, seconds, message_s).items(), key=lambda item: item[1])
    now_s, ends = 0.0, {}
    for action, _ in order:
        now_s += seconds[action.kind]
        ends[action] = now_s
    return ends


def _empties_the_schedule(schedule: Schedule, seconds: Seconds, message_s: float) -> Ends:
    right = finish_times(schedule, seconds, message_s)
    for actions in schedule:
        actions.clear()
    return right


Answer = Callable[[Schedule, Seconds, float], Any]
WRONG: tuple[tuple[str, Answer, str], ...] = (
    ("no wire", _no_wire, "The wire takes no time in it: the input comes message_s after its end."),
    (
        "a rank is never busy",
        _rank_never_busy,
        "Two actions of one rank overlap: it does one at a time, so its own clock counts, too.",
    ),
    (
        "never waits",
        _never_waits,
        "Nobody waits for an input: take the later of the two clocks, the rank's and the input's.",
    ),
    ("both clocks added", _added, "The two clocks are added: a rank waits for the later of them."),
    ("starts, not ends", _starts, "These are the moments when the actions start: add their time."),
    (
        "the sender waits",
        _sender_waits,
        "The sender stands still while its message travels: sends do not block, it goes on.",
    ),
    (
        "the message waits",
        _wire_after_wait,
        "A message travels while its receiver computes: add message_s to the sender's end, and "
        "only then take the later clock.",
    ),
    (
        "a wire at the ends",
        _wire_everywhere,
        "The first stage's forward and the last stage's backward wait for no message "
        "(source_of says None).",
    ),
    (
        "one length for all",
        _one_length,
        "All actions are equally long in it: seconds[action.kind].",
    ),
    (
        "one after the other",
        _in_one_row,
        "Only one rank works at a time in it: each rank has a clock of its own.",
    ),
)


# --- the check


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
    """Schedules of 1 to 4 ranks, fast and slow wires, m < p: every action's end."""
    cases = _cases()
    made = []
    for what, schedule, seconds, message_s in cases:
        given = [list(actions) for actions in schedule]
        made.append(answer(given, dict(seconds), message_s))
        if given != schedule:
            raise CheckFailed(f"{what}: the schedule has changed: work on a copy of its lists.")
    for (what, schedule, seconds, message_s), got in zip(cases, made, strict=True):
        _expect(what, schedule, (seconds, message_s), got, made)
    return "Every action of seven schedules ends when it does in the course's simulator."


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
    """The cause that fits every case."""
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
        Mistake("empties the schedule", _empties_the_schedule, "work on a copy of its lists"),
    ),
)
