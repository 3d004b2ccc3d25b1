"""Exercise 6 of 08_pipeline: the order of interleaved 1F1B."""

from collections.abc import Callable
from functools import partial
from typing import Any

from course_lib.checks.accumulation.effects import EffectCase, Effects
from course_lib.checks.edits import Edit
from course_lib.checks.exercise import Cause, Exercise
from course_lib.checks.pipeline.parts import STAGE, demand_own_stages, read_schedule
from course_lib.pipeline.actions import Schedule, ScheduleError, as_text
from course_lib.pipeline.schedule_rules import check_schedule
from course_lib.pipeline.simulation import simulate

SIZES = ((4, 8, 2), (2, 6, 3), (3, 3, 2), (4, 4, 2), (1, 3, 2), (4, 12, 3), (6, 12, 2), (9, 18, 2))
UNEVEN = ((4, 6, 2), (2, 3, 2), (3, 2, 2))
KINDS = ("forward", "backward")
REFUSED = "micro-batches that are no multiple of the ranks"
NO_LIST, RULES, BUBBLE = "what it returns", "schedule", "bubble of a rank"
IN_FLIGHT, AGAIN = "chunks in flight, rank by rank", "a second call"

REFUSE = Cause("A round needs p micro-batches: raise a ValueError where m is no multiple of p.")
ONE_SHORT = Cause(
    "One forward too few before the first backward: the warm-up is too short, or the steady phase "
    "does not begin with a forward."
)
KEPT = Cause(
    "A call may not depend on the calls before it, nor return their lists: build new iterators "
    "and new lists each time."
)


def _cases() -> list[EffectCase]:
    sizes = [(each, _observe) for each in SIZES] + [(each, _refuse) for each in UNEVEN]
    return [(f"p = {p}, m = {m}, v = {v}", partial(see, p=p, m=m, v=v)) for (p, m, v), see in sizes]


def _refuse(answer: Callable[..., Any], p: int, m: int, v: int) -> dict[str, str]:
    try:
        result = answer(p, m, v)
    except ValueError:
        return {REFUSED: "a ValueError"}
    schedule = read_schedule(result or [], KINDS)
    micro_batches = {action.micro_batch for actions in schedule for action in actions}
    return {REFUSED: f"a schedule of {len(micro_batches)} micro-batches"}


def _observe(answer: Callable[..., Any], p: int, m: int, v: int) -> dict[str, str]:
    """Return what is known about the schedule; what follows from broken rules is left out."""
    result = answer(p, m, v)
    if result is None:
        return {NO_LIST: "None"}
    schedule = read_schedule(result, KINDS)
    demand_own_stages(schedule)
    seen = {NO_LIST: "lists of actions", RULES: _broken_rule(schedule, p, m, v)}
    if seen[RULES] == "valid":
        played = simulate(schedule)
        seen[BUBBLE] = f"{max(played.idle_s):g} F"
        seen[IN_FLIGHT] = " ".join(map(str, played.peak_in_flight()))
        for rank, actions in enumerate(schedule):
            labels = enumerate((action.label for action in actions), 1)
            seen |= {f"rank {rank}, action {number}": label for number, label in labels}
    for actions in result:
        if isinstance(actions, list):
            actions.clear()  # they are the caller's now
    again = as_text(read_schedule(answer(p, m, v), KINDS))
    seen[AGAIN] = "the same" if again == as_text(schedule) else "another schedule"
    return seen


def _broken_rule(schedule: Schedule, p: int, m: int, v: int) -> str:
    if len(schedule) != p:
        return f"{len(schedule)} lists for {p} ranks"
    chunks = {action.model_chunk for actions in schedule for action in actions}
    if chunks != set(range(v)):
        return f"model chunks {sorted(chunks)}, not 0 to {v - 1}"
    try:
        check_schedule(schedule, num_micro_batches=m)
    except ScheduleError as error:
        return str(error)
    return "valid"


WARMUP = "min((v - 1) * p + 2 * (p - 1 - rank), m * v)"
COOLDOWN = 'kinds += ["backward"] * warmup'
ROUNDS = "rounds = [range(first, first + p) for first in range(0, m, p)]"
REVERSED = "(i, v - 1 - chunk)"
EACH = "for each in rounds for chunk in range(v) for i in each"
IF, RAISE = "if m % p:", 'raise ValueError(f"{m} micro-batches are no multiple of {p} ranks")'


def _warmup(length: str, sentence: str) -> Edit:
    """Return the right answer with a warm-up of another length."""
    return Edit(WARMUP, length, Cause(sentence))


INTERLEAVED = Exercise(
    key="pipeline-6",
    title="the order of interleaved 1F1B",
    library=("course_lib.pipeline.schedules:interleaved",),
    check=Effects(
        cases=_cases,
        looks={REFUSED: REFUSE, AGAIN: KEPT},
        look=Cause(
            "Rank 0 of p = 2, m = 4, v = 2 runs F0 F1 F0.1 F1.1 (F0.1: micro-batch 0, chunk 1), "
            "then F2 B0.1 F3 B1.1 F2.1 B0 F3.1 B1 and so on."
        ),
        success="Rounds, chunks and warm-up of 1 to 9 ranks; the bubble is divided by v.",
    ),
    wrong=(
        Edit(WARMUP, "min((v - 1) * p + 2 * (p - 1 - rank) - 1, m * v)", ONE_SHORT),
        _warmup(
            "min((v - 1) * p + 2 * (p - 1 - rank) + 1, m * v)",
            "The warm-up is one forward too long: the steady phase begins with a forward, too.",
        ),
        _warmup(
            "min((v - 2) * p + 2 * (p - 1 - rank), m * v)",
            "The warm-up is a round of p forwards too short: a micro-batch has to reach the last "
            "chunk before the first backward.",
        ),
        _warmup(
            "min(v * p + 2 * (p - 1 - rank), m * v)",
            "The warm-up is a round of p forwards too long: only v - 1 chunks come before the last "
            "one.",
        ),
        _warmup(
            "min((v - 1) * p + p - 1 - rank, m * v)",
            "From rank to rank, your warm-up gets shorter by one forward: need 2 for each later "
            "rank.",
        ),
        _warmup(
            "min(p - 1 - rank, m * v)",
            "That is 1F1B's warm-up: need (v - 1)p forwards, plus 2 for each later rank.",
        ),
        _warmup(
            "min((v - 1) * p + 2 * rank, m * v)",
            "The warm-up is the other way round: rank 0 runs ahead the most.",
        ),
        _warmup(
            "(v - 1) * p + 2 * (p - 1 - rank)",
            "A rank has m * v forwards; with few micro-batches that is less than a whole warm-up.",
        ),
        Edit(
            ROUNDS,
            "rounds = [range(m)]",
            Cause(
                "All micro-batches pass a chunk before any passes the next: run them in rounds of "
                "p, each of them through all chunks."
            ),
        ),
        Edit(
            EACH,
            "for each in rounds for i in each for chunk in range(v)",
            Cause(
                "One micro-batch passes all chunks before the next one: a rank then waits for the "
                "micro-batch to come round. Let the p of a round pass a chunk first."
            ),
        ),
        Edit(
            REVERSED,
            "(i, chunk)",
            Cause("Backward begins with the last chunk: reverse the order of the chunks."),
        ),
        Edit(COOLDOWN, "pass", Cause("The backwards of the warm-up's forwards are missing.")),
        Edit(RAISE, "pass", REFUSE),
        Edit(
            IF,
            "if m < p:",
            Cause("Raise the ValueError also where m > p, if m is no multiple of p."),
        ),
        Edit("Action(kind, rank,", "Action(kind, 0,", STAGE),
        Edit(
            "backwards = [(i, v - 1 - chunk) for i, chunk in forwards]",
            "forwards = [(chunk, i) for i, chunk in forwards]\n"
            "backwards = [(v - 1 - chunk, i) for chunk, i in forwards]",
            Cause("The micro-batch comes before the chunk: Action(kind, rank, i, chunk)."),
        ),
    ),
)
