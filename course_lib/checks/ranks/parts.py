"""Tools for the checks of 00_ranks: several calls, whose results are kept to the last."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from course_lib.checks.exercise import Cause
from course_lib.checks.on_ranks import calls_of
from course_lib.checks.watch import Step, Watch
from course_lib.ranks import record

VALUE, AT_THE_END = "value", "at the end"
KEEPS = Cause(
    "Keep nothing from one call to the next, no numbers and no buffer: make a new tensor in each."
)


def call_in_turn(
    answer: Callable[..., Any],
    arguments: Mapping[str, Sequence[Any]],
    facets: Callable[..., Mapping[str, Any]],
) -> dict[str, Any]:
    """Watch `answer(x, ...)` once for each label, with its arguments; keep all that it returns.

    `facets(calls, result, x, ...)` are shown of each call; the results, also at the end.
    """
    watch, results = Watch(), dict[str, Any]()
    for label, given in arguments.items():
        with record() as log:
            with watch.step(label, x=given[0]) as step:
                results[label] = answer(*given)
            end_all(step)
        shown = facets(calls_of(log.events), results[label], *given)
        step.show(**{VALUE: results[label]}, **shown)
    with watch.step(AT_THE_END) as step:
        step.show(**{VALUE: results})
    return watch.seen


def end_all(step: Step) -> None:
    """Wait for calls whose handles were not kept: else a message may be lost, or may not be."""
    for call in [*step.calls.values()]:
        call.work.wait()
