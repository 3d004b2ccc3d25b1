"""The report as one self-contained HTML file: tables, pictures, notes."""

from collections.abc import Iterator
from pathlib import Path

from course_lib.core.files import write_result
from course_lib.core.html_page import html_page, line, table
from course_lib.display.show import figure_html
from course_lib.scaling_study.pictures import BY_SET, OF_ALL
from course_lib.scaling_study.report import HEADERS, cells_of, notes
from course_lib.scaling_study.results import Results, in_order


def write_page(results: Results, path: str | Path, title: str = "Scaling study") -> Path:
    """Write the report; return its path. Raises: CourseError where it cannot be written"""
    write_result(Path(path), html_page(title, _body(results, title), wide=True))
    return Path(path)


def _body(results: Results, title: str) -> Iterator[str]:
    yield f"<h1>{line(title)}</h1>"
    yield from (f'<p class="quiet">{line(note)}</p>' for note in notes(results))
    for name, found in results.sets().items():
        rows = (list(map(line, cells_of(result))) for result in in_order(found))
        yield f"<h2>{line(name)}</h2>"
        yield table(f"{len(found)} runs", HEADERS, rows, numbers=range(1, len(HEADERS)))
        yield from (figure_html(*one) for draw in BY_SET if (one := draw(found, name)))
    yield from (figure_html(*one) for draw in OF_ALL if (one := draw(results)))
