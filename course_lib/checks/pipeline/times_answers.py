"""The right answer to exercise 2 of 08_pipeline, and wrong ones that its check must name."""

from collections.abc import Callable, Mapping
from typing import Any

from course_lib.pipeline.actions import Action, Schedule, source_of, target_of

Seconds = Mapping[str, float]
Ends = dict[Action, float]
# when an action ends: from when the rank is free, when its input is there (0 without one), seconds
Rule = Callable[[float, float, float], float]


def finish_times(schedule: Schedule, seconds: Seconds, message_s: float) -> Ends:
    """Start an action when its rank is free and its input has arrived: the right answer."""
    return _play(schedule, seconds, message_s)


def _play(
    schedule: Schedule,
    seconds: Seconds,
    message_s: float,
    rule: Rule = lambda free_s, input_s, took_s: max(free_s, input_s) + took_s,
    busy: Callable[[float, float, Action], float] = lambda free_s, end_s, action: end_s,
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
                free_s[rank] = busy(free_s[rank], ends[action], action)
    return ends


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
    """Keep the sender busy while its message travels."""

    def busy(_free_s: float, end_s: float, action: Action) -> float:
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


def _wire_in_the_end(schedule: Schedule, seconds: Seconds, message_s: float) -> Ends:
    """End when the message has arrived, not when the computation is done."""
    right, p = finish_times(schedule, seconds, message_s), len(schedule)
    return {
        action: end_s + message_s * (target_of(action, p) is not None)
        for action, end_s in right.items()
    }


def _waiting_forgotten(schedule: Schedule, seconds: Seconds, message_s: float) -> Ends:
    """Count only the work in a rank's clock, not the time for which it was idle."""

    def busy(free_s: float, _end_s: float, action: Action) -> float:
        return free_s + seconds[action.kind]

    return _play(schedule, seconds, message_s, busy=busy)


def _not_there_yet(schedule: Schedule, seconds: Seconds, message_s: float) -> Ends:
    """Run one action of each rank in turn; an input that is not ready counts as ready at 0 s."""
    ends: Ends = {}
    free_s, left = [0.0] * len(schedule), [list(actions) for actions in schedule]
    while any(left):
        for rank, actions in enumerate(left):
            action = actions.pop(0)
            source, input_s = source_of(action, len(schedule)), 0.0
            if source is not None:
                input_s = ends.get(action._replace(stage=source), 0.0) + message_s
            ends[action] = free_s[rank] = max(free_s[rank], input_s) + seconds[action.kind]
    return ends


def _backward_needs_nothing(schedule: Schedule, seconds: Seconds, message_s: float) -> Ends:
    """Let only forwards wait for an input."""
    ends: Ends = {}
    free_s = [0.0] * len(schedule)
    for rank, actions in enumerate(schedule):
        for action in actions:
            waits = action.kind == "forward" and rank > 0
            input_s = ends[action._replace(stage=rank - 1)] + message_s if waits else 0.0
            ends[action] = free_s[rank] = max(free_s[rank], input_s) + seconds[action.kind]
    return ends


def _one_length(schedule: Schedule, seconds: Seconds, message_s: float) -> Ends:
    return _play(schedule, dict.fromkeys(seconds, seconds["forward"]), message_s)


def _in_one_row(schedule: Schedule, seconds: Seconds, message_s: float) -> Ends:
    """Run everything in sequence: no two ranks work at the same time."""
    order = sorted(finish_times(schedule, seconds, message_s).items(), key=lambda item: item[1])
    now_s, ends = 0.0, {}
    for action, _ in order:
        now_s += seconds[action.kind]
        ends[action] = now_s
    return ends


def empties_the_schedule(schedule: Schedule, seconds: Seconds, message_s: float) -> Ends:
    right = finish_times(schedule, seconds, message_s)
    for actions in schedule:
        actions.clear()
    return right


def never_ends(schedule: Schedule, _seconds: Seconds, _message_s: float) -> Ends:
    """Wait for the action itself, in place of the same one of the stage before."""
    ends: Ends = {}
    left = [list(actions) for actions in schedule]
    while any(left):
        for actions in left:
            if actions and actions[0] in ends:
                actions.pop(0)
    return ends


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
        "the wire in the end",
        _wire_in_the_end,
        "In it an action ends when its message has arrived: add message_s where the input is "
        "taken.",
    ),
    (
        "waiting forgotten",
        _waiting_forgotten,
        "The rank's clock counts work only: after a wait, too, it is free when the action ends.",
    ),
    (
        "not there yet",
        _not_there_yet,
        "Actions run before their input is made: leave them until it is in ends, and go on with "
        "the next rank.",
    ),
    (
        "backwards need nothing",
        _backward_needs_nothing,
        "Only forwards wait in it: a backward waits for the gradient from the stage behind.",
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
