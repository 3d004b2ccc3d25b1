"""The `check` of a graded notebook: it observes the answer, and judges nothing.

It writes what was seen into the folder COURSE_OUT, as plain data; course_tools.grading.judge reads
it in another process.
"""

import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from course_lib.checks.exercise import Check, CheckFailed, explained, find_exercise
from course_lib.checks.judge import ByExample
from course_lib.checks.right_answer import assignment_here
from course_lib.core import Event
from course_lib.ranks import Ranks
from course_lib.ranks.recorder import current_recorder
from course_lib.workbooks.assignment import hidden_exercises
from course_tools.grading.plain_data import HIDDEN, write_data

FOLDER = "COURSE_OUT"  # in the environment: where to write what was observed
CHANGED = "the record of your calls was changed; leave the recorder as it is."


def check(key: str, answer: Any, *, limit_s: float = 0) -> None:
    """Observe an answer, also in the hidden cases; write down what was seen.

    The time limit is that of a cell, which whoever grades has chosen.
    """
    del limit_s
    exercise, here, out = find_exercise(key), assignment_here(), Path(os.environ[FOLDER])
    hidden = hidden_exercises(here.folder).get(key) if here else None
    with explained(key, answer, 0):
        write_data(list(observe(exercise.check, answer)), out / f"{key}.pt")
        if hidden:
            write_data(list(observe(hidden.check, answer)), out / f"{HIDDEN}{key}.pt")


def wait_for_ranks() -> None:
    """Return when a first rank has run: what ranks import is then loaded, in nobody's time."""
    with Ranks(1, cluster="laptop") as ranks:
        ranks.run(abs)


def observe(check: Check, answer: Any) -> Iterator[Any]:
    """Observe an answer; on ranks, hold the events to what the recorder noted."""
    if isinstance(check, ByExample):
        check = replace(check, observe_on_rank=partial(with_all_events, check.observe_on_rank))
    return check.observe(answer)


def with_all_events(observe: Callable[..., Any], rank: int, answer: Any, **options: Any) -> Any:
    """Run on a rank what a check observes there.

    Raises: CheckFailed where the answer removed, added or no longer records events
    """
    recorder = current_recorder()
    if recorder is None:
        return observe(rank, answer, **options)
    first, add, noted = len(recorder.events), recorder.add, list[Event]()
    lock = threading.Lock()  # a thread of gloo may note an event, too

    def noting(*arguments: Any, **named: Any) -> None:
        with lock:
            before = len(recorder.events)
            add(*arguments, **named)
            noted.extend(recorder.events[before:])

    vars(recorder)["add"] = noting
    try:
        seen = observe(rank, answer, **options)
        with lock:
            found = recorder.events[first:]
        is_ours = current_recorder() is recorder and vars(recorder).get("add") is noting
        if not is_ours or list(map(id, found)) != list(map(id, noted)):
            raise CheckFailed(CHANGED)
        return seen
    finally:
        vars(recorder).pop("add", None)
