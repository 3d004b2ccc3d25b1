"""The report as one self-contained HTML file: tables, pictures, notes."""

import html
from collections.abc import Iterable, Iterator
from pathlib import Path

from course_lib.core.files import write_result
from course_lib.display.show import picture
from course_lib.scaling_study.pictures import BY_SET, OF_ALL, _Picture
from course_lib.scaling_study.report import HEADERS, cells_of, notes
from course_lib.scaling_study.results import Result, Results, in_order

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 80rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; font-size: 12px; display: block; overflow-x: auto; }
th, td { padding: .2rem .6rem; text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
tr + tr { border-top: 1px solid #e4e4e4; }
p.note { color: #595959; }
figure { margin: 1.5rem 0; }
"""


def write_page(results: Results, path: str | Path, title: str = "Scaling study") -> Path:
    """Write the report; return its path. Raises: CourseError where it cannot be written"""
    write_result(Path(path), "\n".join(_lines(results, title)))
    return Path(path)


def _lines(results: Results, title: str) -> Iterator[str]:
    yield '<!doctype html><html lang="en"><head><meta charset="utf-8">'
    yield f"<title>{html.escape(title)}</title><style>{STYLE}</style></head><body>"
    yield f"<h1>{html.escape(title)}</h1>"
    yield from (f'<p class="note">{html.escape(note)}</p>' for note in notes(results))
    for name, found in results.sets().items():
        yield f"<h2>{html.escape(name)}</h2>"
        yield from _table(in_order(found))
        yield from _figures(filter(None, (draw(found, name) for draw in BY_SET)))
    yield from _figures(filter(None, (draw(results) for draw in OF_ALL)))
    yield "</body></html>"


def _table(results: Iterable[Result]) -> Iterator[str]:
    yield f"<table><tr>{''.join(f'<th>{header}</th>' for header in HEADERS)}</tr>"
    for result in results:
        cells = (f"<td>{html.escape(cell)}</td>" for cell in cells_of(result))
        yield f"<tr>{''.join(cells)}</tr>"
    yield "</table>"


def _figures(drawn: Iterable[_Picture]) -> Iterator[str]:
    for figure, alt in drawn:
        data, _ = picture(figure, alt)
        yield f"<figure>{data['text/html']}</figure>"
