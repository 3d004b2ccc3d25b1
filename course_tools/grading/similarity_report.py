"""The report on answers that are alike: one table, and each pair side by side."""

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from course_lib.core.files import write_result
from course_lib.core.html_page import block, html_page, line, table
from course_lib.core.plain_text import printable
from course_tools.grading.feedback import SIMILARITY
from course_tools.grading.gradebook import csv_text
from course_tools.grading.similarity import SimilarPair

TABLE = "similarity.csv"
MOST_SHOWN = 200  # pairs on the page; the table has all
MOST_LINES = 400  # of one text on the page
MOST_IN_LINE = 500  # characters
CAUTION = (
    "Likeness proves nothing. The share says how much of the shorter answer's structure stands in "
    "the other one, too, without names, comments and formatting, without what the exercise hands "
    "out, and without what many of the class wrote. Two people can find the same answer, learn it "
    "from the same page, or have worked together as the course allows. Read both, and ask both, "
    "before you conclude anything."
)
MARKS = {
    "": "structure",
    "short": "short: equal to the letter",
    "common": "common structure: equal to the letter",
}


def write_similarity(folder: Path, pairs: Sequence[SimilarPair]) -> None:
    """Write `similarity.csv` and `similarity.html`.

    Raises: CourseError where they cannot be written
    """
    rows: list[list[str | float]] = [
        ["exercise", "student", "other", "other is", "share", "likeness", "others"]
    ]
    for pair in pairs:
        kind = "source" if pair.source else "student"
        share = round(pair.share, 3)
        rows.append([pair.key, pair.left, pair.right, kind, share, MARKS[pair.mark], pair.others])
    write_result(folder / TABLE, csv_text(rows))
    write_result(folder / SIMILARITY, html_page("Similar answers", _page(pairs), wide=True))


def _page(pairs: Sequence[SimilarPair]) -> Iterator[str]:
    yield "<h1>Similar answers</h1>"
    yield f'<p class="box">{CAUTION}</p>'
    if not pairs:
        yield "<p>No two answers are alike.</p>"
        return
    rows = [
        (
            f'<a href="#p{number}">{number}</a>',
            line(pair.key),
            f"<bdi>{line(pair.left)}</bdi>",
            f"<bdi>{line(pair.right)}</bdi>{' (source)' if pair.source else ''}",
            f"{pair.share:.0%}",
            MARKS[pair.mark],
            str(pair.others),
        )
        for number, pair in enumerate(pairs[:MOST_SHOWN], start=1)
    ]
    headers = (
        "Pair",
        "Exercise",
        "Student",
        "Other",
        "Share",
        "Likeness",
        "Others with this",
    )
    yield table(_caption(pairs), headers, rows, numbers=(4, 6))
    for number, pair in enumerate(pairs[:MOST_SHOWN], start=1):
        yield from _side_by_side(number, pair)


def _caption(pairs: Sequence[SimilarPair]) -> str:
    what = "1 pair" if len(pairs) == 1 else f"{len(pairs)} pairs"
    shown = f"; the first {MOST_SHOWN} are shown, all are in {TABLE}"
    return f"{what}, the most alike first{shown if len(pairs) > MOST_SHOWN else ''}"


def _side_by_side(number: int, pair: SimilarPair) -> Iterator[str]:
    yield f'<section class="box" id="p{number}">'
    yield f"<h2>{number}. {line(pair.key)}: {pair.share:.0%}</h2>"
    yield '<div class="sides">'
    sides = (
        (pair.left, pair.left_code, pair.left_lines, ""),
        (pair.right, pair.right_code, pair.right_lines, " (source)" if pair.source else ""),
    )
    for who, code, alike, kind in sides:
        yield f"<div><h3><bdi>{line(who)}</bdi>{kind}</h3>{_code(code, alike)}</div>"
    yield "</div></section>"


def _code(code: str, alike: Collection[int]) -> str:
    """Return the code; lines that hold what is shared are marked."""
    lines = printable(code).rstrip().split("\n")
    shown = "".join(
        f"<mark>{block(text[:MOST_IN_LINE])}</mark>"
        if number in alike
        else f"<span>{block(text[:MOST_IN_LINE])}</span>"
        for number, text in enumerate(lines[:MOST_LINES], start=1)
    )
    more = "<span>(cut)</span>" if len(lines) > MOST_LINES else ""
    return f'<pre tabindex="0">{shown}{more}</pre>'
