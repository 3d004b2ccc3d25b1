"""The best plans of a search as one self-contained HTML file: a table, and pictures of their bills.

`course plan --html FILE`. Notebook 12_planner.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

from course_lib.core.files import write_result
from course_lib.core.html_page import html_page, line, table
from course_lib.core.units import format_seconds
from course_lib.display.show import figure_html
from course_lib.planner.notes import table_notes
from course_lib.planner.pictures import bill_and_memory, bills, time_against_memory
from course_lib.planner.prediction import HEADERS, PredictedStep
from course_lib.planner.searching import SearchResult

DRAWN = 3  # plans that have a picture of their own


def write_page(
    found: SearchResult, best: Sequence[PredictedStep], path: Path, explained: int = 0
) -> None:
    """Write the page of the best plans of a search.

    explained   number of a plan that has a picture besides the first ones; 0: none

    Raises: CourseError where it cannot be written
    """
    model, cluster = best[0].model, best[0].cluster
    title = f"{model.name} on {cluster.num_gpus} {cluster.device.name} ({cluster.name})"
    write_result(path, html_page(title, _body(title, found, best, explained), wide=True))


def _body(
    title: str, found: SearchResult, best: Sequence[PredictedStep], explained: int
) -> Iterator[str]:
    first, plan = best[0], best[0].plan
    yield f"<h1>{line(title)}</h1>"
    yield (
        f"<p>{len(found.steps):,} of {found.num_plans:,} plans fit; {plan.global_batch} sequences "
        f"of {plan.seq} tokens in a step. All numbers are predictions.</p>"
    )
    rows = ([str(number), *map(line, step.cells)] for number, step in enumerate(best, 1))
    yield table(f"{len(best)} plans, the fastest first", ("", *HEADERS), rows)
    yield from (f"<p>{line(note)}</p>" for note in table_notes(best, found.steps))
    named = {f"plan {number}": step for number, step in enumerate(best, 1)}
    times = f"{format_seconds(first.step_s)} to {format_seconds(best[-1].step_s)}"
    yield "<h2>Where the time goes</h2>"
    yield figure_html(
        *bills(named, f"Steps of the best plans take {times}: what they lose differs")
    )
    yield "<h2>Time against memory</h2>"
    yield figure_html(*time_against_memory(found, {"plan 1": first}))
    for number in sorted({*range(1, min(DRAWN, len(best)) + 1), explained} - {0}):
        step = best[number - 1]
        yield f"<h2>Plan {number}: {line(str(step.plan))}</h2>"
        yield figure_html(*bill_and_memory(step))
