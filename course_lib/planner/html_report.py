"""The best plans of a search as one self-contained HTML file: a table, and pictures of their bills.

`course plan --html FILE`. Notebook 12_planner.
"""

import html
from collections.abc import Iterator, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from course_lib.core.files import write_result
from course_lib.core.units import format_seconds
from course_lib.display.show import picture
from course_lib.planner.notes import table_notes
from course_lib.planner.pictures import bill_and_memory, bills, time_against_memory
from course_lib.planner.prediction import HEADERS, PredictedStep
from course_lib.planner.searching import SearchResult

DRAWN = 3  # plans that have a picture of their own
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; font-size: 13px; display: block; overflow-x: auto; }
th, td { padding: .2rem .6rem; text-align: left; white-space: nowrap; }
tr + tr { border-top: 1px solid #e4e4e4; }
figure { margin: 1.5rem 0; }
"""


def write_page(
    found: SearchResult, best: Sequence[PredictedStep], path: Path, explained: int = 0
) -> None:
    """Write the page of the best plans of a search.

    explained   number of a plan that has a picture besides the first ones; 0: none

    Raises: CourseError where it cannot be written
    """
    write_result(path, "\n".join(_lines(found, best, explained)))


def _lines(found: SearchResult, best: Sequence[PredictedStep], explained: int) -> Iterator[str]:
    first = best[0]
    cluster, plan = first.cluster, first.plan
    title = f"{first.model.name} on {cluster.num_gpus} {cluster.device.name} ({cluster.name})"
    yield '<!doctype html><html lang="en"><head><meta charset="utf-8">'
    yield f"<title>{html.escape(title)}</title><style>{STYLE}</style></head><body>"
    yield f"<h1>{html.escape(title)}</h1>"
    yield (
        f"<p>{len(found.steps):,} of {found.num_plans:,} plans fit; {plan.global_batch} sequences "
        f"of {plan.seq} tokens in a step. All numbers are predictions.</p>"
    )
    yield f"<table><tr>{''.join(f'<th>{header}</th>' for header in ('', *HEADERS))}</tr>"
    for number, step in enumerate(best, 1):
        cells = (f"<td>{html.escape(cell)}</td>" for cell in (str(number), *step.cells))
        yield f"<tr>{''.join(cells)}</tr>"
    yield "</table>"
    yield from (f"<p>{html.escape(note)}</p>" for note in table_notes(best, found.steps))
    named = {f"plan {number}": step for number, step in enumerate(best, 1)}
    times = f"{format_seconds(first.step_s)} to {format_seconds(best[-1].step_s)}"
    yield "<h2>Where the time goes</h2>"
    yield _figure(*bills(named, f"Steps of the best plans take {times}: what they lose differs"))
    yield "<h2>Time against memory</h2>"
    yield _figure(*time_against_memory(found, {"plan 1": first}))
    drawn = sorted({*range(1, min(DRAWN, len(best)) + 1), explained} - {0})
    for number in drawn:
        step = best[number - 1]
        yield f"<h2>Plan {number}: {html.escape(str(step.plan))}</h2>"
        yield _figure(*bill_and_memory(step))
    yield "</body></html>"


def _figure(figure: Figure, alt: str) -> str:
    data, _ = picture(figure, alt)
    return f"<figure>{data['text/html']}</figure>"
