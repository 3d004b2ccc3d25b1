"""Exercise 2 of 08_pipeline: when each action of a schedule ends."""

from collections.abc import Mapping
from typing import Any

from course_lib.checks.cases import Case, Cases
from course_lib.checks.edits import Edit
from course_lib.checks.exercise import Cause, Exercise, failed
from course_lib.pipeline.actions import Schedule
from course_lib.pipeline.schedules import gpipe, naive, one_f_one_b

Seconds = Mapping[str, float]

DICTIONARY = Cause("Return a dictionary: the actions of the schedule, and when each ends.")
SCHEDULE = Cause("The schedule is the caller's: work on a copy of its lists.")
ENDLESS = Cause(
    "Your loop never ends. An action whose input is there must run and leave its list; the input "
    "is the same action of the stage source_of, and is in `ends` once it has run."
)
EVERY_ACTION = Cause(
    "The first stage's forward and the last stage's backward wait for no message (source_of says "
    "None)."
)
ONE_CLOCK = Cause("In yours, only one rank works at a time: each rank needs its own clock.")


def _cases() -> list[Case]:
    plain, uneven = {"forward": 1.0, "backward": 2.0}, {"forward": 2.0, "backward": 1.5}
    schedules: list[tuple[str, Schedule, Seconds, float]] = [
        ("1F1B, p = 2, m = 2", one_f_one_b(2, 2), plain, 0.5),
        ("1F1B, p = 3, m = 4", one_f_one_b(3, 4), plain, 0.25),
        ("GPipe, p = 4, m = 3", gpipe(4, 3), uneven, 0.0),
        ("GPipe, backwards from the newest on, p = 3, m = 4", _newest_first(3, 4), uneven, 0.75),
        ("naive, p = 3, m = 2", naive(3, 2), uneven, 1.0),
        ("1F1B, p = 4, m = 8", one_f_one_b(4, 8), plain, 3.0),
        ("1F1B, p = 1, m = 3", one_f_one_b(1, 3), plain, 1.0),
        ("1F1B, p = 6, m = 2", one_f_one_b(6, 2), uneven, 0.5),
        ("1F1B, p = 2, m = 3", one_f_one_b(2, 3), {"forward": 3.1e-4, "backward": 6.7e-4}, 2.3e-5),
    ]
    return [
        (
            f"{what}, forward {seconds['forward']:g} s, backward {seconds['backward']:g} s, "
            f"messages {message_s:g} s",
            (schedule, dict(seconds), message_s),
        )
        for what, schedule, seconds, message_s in schedules
    ]


def _newest_first(p: int, m: int) -> Schedule:
    return [actions[:m] + actions[m:][::-1] for actions in gpipe(p, m)]


def _by_action(ends: Any, schedule: Schedule, *_costs: Any) -> dict[str, Any]:
    """Return the seconds of each action of the schedule: `{"B0 on rank 1": 5.5}`."""
    if not isinstance(ends, dict):
        raise failed(f"got {str(ends)[:60]}", DICTIONARY)
    if not any(action in ends for actions in schedule for action in actions):
        raise failed(f"got the keys {[*ends][:2]}", DICTIONARY)
    return {
        f"{action.label} on rank {action.stage}": ends[action]
        for actions in schedule
        for action in actions
        if action in ends
    }


LATER = "max(free_s[rank], input_s)"
TAKES = "seconds[actions[0].kind]"
STARTS = f"free_s[rank] = {LATER} + {TAKES}"
ENDS = "ends[actions.pop(0)] = free_s[rank]"
ARRIVES = "ends[sent] + message_s"
SOURCE = "source_of(actions[0], p)"
RETURNS = "return ends"

TIMES = Exercise(
    key="pipeline-2",
    title="when each action ends",
    check=Cases(
        cases=_cases,
        show=_by_action,
        unit=" s",
        unchanged=SCHEDULE,
        endless=ENDLESS,
        look="Draw it for p = 2: when is the rank free, and when is the input there?",
        success="Every action ends when it has to: nine cases, 1 to 6 ranks.",
    ),
    wrong=(
        Edit(
            ARRIVES,
            "ends[sent]",
            Cause(
                "Your messages take no time: an input arrives message_s after its action has ended."
            ),
        ),
        Edit(
            LATER,
            "input_s",
            Cause(
                "Two actions of one rank overlap: a rank runs one at a time, so its own clock "
                "counts, too."
            ),
        ),
        Edit(
            LATER,
            "free_s[rank]",
            Cause(
                "No action waits for its input: take the later of two times, when the rank is free "
                "and when the input arrives."
            ),
        ),
        Edit(
            LATER,
            "free_s[rank] + input_s",
            Cause("The two clocks are added: a rank waits for the later of them."),
        ),
        Edit(
            RETURNS,
            "return {action: end_s - seconds[action.kind] for action, end_s in ends.items()}",
            Cause("These are the times when the actions start: add their duration."),
        ),
        Edit(
            ENDS,
            "action = actions.pop(0)\n"
            "ends[action] = free_s[rank]\n"
            "free_s[rank] += message_s * (target_of(action, p) is not None)",
            Cause("The sender is idle during its message: sends do not block, so it continues."),
        ),
        Edit(
            LATER,
            f"{LATER} + message_s * (source is not None)",
            Cause(
                "A message travels while its receiver computes: add message_s to the sender's "
                "end, and only then take the later clock."
            ),
            also=((ARRIVES, "ends[sent]"),),
        ),
        Edit(
            LATER,
            f"{LATER} + message_s",
            EVERY_ACTION,
            also=((ARRIVES, "ends[sent]"),),
        ),
        Edit(
            "if source is None else",
            "if not source else",
            Cause("Stage 0 is a stage, too, but `if source` is False for it: ask `is None`."),
        ),
        Edit(
            STARTS,
            f"end_s = {LATER} + {TAKES}\nfree_s[rank] += {TAKES}",
            Cause(
                "The rank's clock counts only computation: after a wait it is free when the action "
                "ends."
            ),
            also=((ENDS, "ends[actions.pop(0)] = end_s"),),
        ),
        Edit(
            "while actions:",
            "if actions:",
            Cause(
                "Actions run before their input is computed: leave them until it is in `ends`, and "
                "continue with the next rank."
            ),
            also=(("sent not in ends", "False"), (ARRIVES, "ends.get(sent, 0.0) + message_s")),
        ),
        Edit(
            SOURCE,
            f'{SOURCE} if actions[0].kind == "forward" else None',
            Cause("Your backwards do not wait: each needs the gradient of the next stage."),
        ),
        *(
            Edit(
                TAKES,
                f'seconds["{kind}"]',
                Cause("Your actions all take equally long: use seconds[action.kind]."),
            )
            for kind in ("forward", "backward")
        ),
        Edit(STARTS, f"free_s[:] = [max(free_s[rank], input_s) + {TAKES}] * p", ONE_CLOCK),
        Edit("[list(actions) for actions in schedule]", "schedule", SCHEDULE),
        Edit("sent not in ends", "actions[0] not in ends", ENDLESS),
    ),
)
