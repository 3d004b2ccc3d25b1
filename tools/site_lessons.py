"""Turn a stored lesson into a page of the site; nothing is executed, outputs are as saved.

Learners get the stubs of the exercises; instructors get the solutions too, folded. Pictures become
files beside the page, with the alternative text that the lesson gave them.
"""

import base64
import copy
import html
import json
import re
import struct
from pathlib import Path
from typing import Any

from site_api import package_of

Cell = dict[str, Any]
DRAWN = re.compile(r'width="(\d+)"([^>]*)src="data:image/(png|svg\+xml);base64,([^"]+)"')
MARKER = re.compile(r"^[ \t]*### (?:BEGIN|END) SOLUTION.*\n?", re.MULTILINE)

DECK = {"html": "Slides", "pdf": "Slides as PDF", "handout.pdf": "Handout, four slides a page"}
NOTE = (
    '<p class="lesson-note">The outputs, and the predictions that they compare with, are those of '
    "one saved run.</p>"
)


LIVE = (
    '\n\n<p class="lesson-note">Move the sliders here: this page computes the picture as the '
    "notebook does.</p>"
)
SLIDERS = (
    '\n\n<p class="lesson-note">The sliders are in the notebook; this page shows the picture as it '
    "was in one run.</p>"
)


class LessonError(Exception):
    """A lesson that cannot be made a page, as one sentence."""


def write_lesson(
    root: Path,
    stem: str,
    audience: str,
    source: Path,
    others: list[tuple[str, str]],
    packages: list[str],
    live: dict[str, str],
) -> None:
    """Write the page of a lesson, its pictures and the files that it links to.

    `others` are links, as names and addresses, besides those to its notebook and its package;
    `live` is what stands in the page for a call, by the name of the function that shows sliders.
    """
    student = root / "notebooks" / f"{stem}.ipynb"
    solved = root / "notebooks/solved" / f"{stem}.ipynb"
    notebook, stubs = (json.loads(path.read_text(encoding="utf-8")) for path in (solved, student))
    if len(notebook["cells"]) != len(stubs["cells"]):
        raise LessonError(f"{stem} and its solved version differ in cells. Try `make notebooks`.")
    pairs = zip(notebook["cells"], stubs["cells"], strict=True)
    cells = [new for pair in pairs for new in page_cells(*pair, audience)]
    put_live_parts(cells, live)
    pictures = source / "extra" / "pictures" / stem
    for cell in cells:
        for output in cell.get("outputs", []):
            take_pictures_out(output, pictures)
    files = [student] if audience == "learners" else [student, solved]
    links = [*notebook_links(files), *others, *package_links(stem, packages)]
    write_links(cells[0], links)
    notebook["cells"] = cells
    page = source / "notebooks" / student.name
    page.parent.mkdir(exist_ok=True)
    page.write_text(json.dumps(notebook), encoding="utf-8")
    for file in files:
        target = source / "extra" / "files" / file.relative_to(root / "notebooks")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(file.read_bytes())


def write_placeholder(stem: str, source: Path) -> None:
    """Write a page in the place of a lesson that is left out, so that links lead somewhere."""
    text = f"# {stem.replace('_', ' ')}\n\nThis lesson was left out of this build."
    cell = {"cell_type": "markdown", "id": "left-out", "metadata": {}, "source": text}
    page = {"cells": [cell], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
    (source / "notebooks" / f"{stem}.ipynb").write_text(json.dumps(page), encoding="utf-8")


def put_live_parts(cells: list[Cell], live: dict[str, str]) -> None:
    """Put live parts in the place of the pictures of cells that show sliders, and say so near."""
    for number, cell in enumerate(cells):
        calls = [name for name in live if f"{name}(" in text_of(cell["source"])]
        if cell["cell_type"] != "code" or not calls:
            continue
        shown = {"output_type": "display_data", "metadata": {}}
        shown["data"] = {"text/html": live[calls[0]]}
        cell["outputs"] = [one for one in cell["outputs"] if "data" not in one] + [shown]
        for near in cells[max(number - 1, 0) : number + 2]:
            near["source"] = text_of(near["source"]).replace(SLIDERS, LIVE)


def page_cells(solved: Cell, stub: Cell, audience: str) -> list[Cell]:
    """The cells of the page for one cell of a lesson: the learner's, or also its solution."""
    tags = solved["metadata"].get("tags", [])
    if "exercise" in tags and audience == "instructors":
        answer = copy.deepcopy(solved)
        answer["source"] = MARKER.sub("", text_of(solved["source"]))
        answer["id"] = f"solution-{solved['id']}"
        said = f"Solution of {solved['metadata'].get('exercise', 'the exercise')}"
        folded = {"code_prompt_show": said, "code_prompt_hide": said}
        answer["metadata"] = {"tags": ["solution", "hide-input"], "mystnb": folded}
        return [stub | {"outputs": []}, answer]
    if "exercise" in tags:
        return [stub | {"outputs": solved["outputs"]}]
    if "check" in tags and "exercise" in solved["metadata"] and audience == "learners":
        return [solved | {"outputs": [*map(of_a_right_answer, solved["outputs"])]}]
    if solved["cell_type"] == "markdown":
        parts = text_of(solved["source"]).split("\n\n")
        told = [part + SLIDERS * ("slider" in part) for part in parts]
        return [solved | {"source": "\n\n".join(told)}]
    if "predict" in tags and audience == "learners":
        return [stub | {"outputs": [one for one in solved["outputs"] if not is_commit(one)]}]
    return [solved]


def of_a_right_answer(output: Cell) -> Cell:
    """The output of a check, below a page's empty exercise: it is that of a right answer."""
    return output | {"text": f"A right answer gets: {text_of(output['text'])}"}


def is_commit(output: Cell) -> bool:
    """Whether an output only repeats the guess that the stored lesson committed to."""
    return text_of(output.get("data", {}).get("text/plain", "")).startswith("Committed: ")


def text_of(source: str | list[str]) -> str:
    """The text of a field of a notebook, which may be stored as lines."""
    return source if isinstance(source, str) else "".join(source)


# -- pictures ----------------------------------------------------------------------------------


def take_pictures_out(output: Cell, folder: Path) -> None:
    """Move the picture of an output into a file; its <img> keeps the alternative text."""
    data = output.get("data", {})
    page = text_of(data.get("text/html", ""))
    if not DRAWN.search(page):
        return
    data["text/html"] = DRAWN.sub(lambda found: stored(found, folder), page)
    for kind in ("image/png", "image/svg+xml"):
        data.pop(kind, None)


def stored(found: re.Match[str], folder: Path) -> str:
    """Store one picture; return the attributes that show it, in a place of the right height."""
    width, others, kind, content = found.groups()
    picture = base64.b64decode(content)
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{len(list(folder.iterdir())) + 1:02}.{kind.partition('+')[0]}"
    file.write_bytes(picture)
    if kind == "png":
        pixels = struct.unpack(">II", picture[16:24])  # width and height, in the header
        others = f' height="{int(width) * pixels[1] // pixels[0]}"{others}'
    return f'width="{width}"{others}src="../pictures/{folder.name}/{file.name}" loading="lazy"'


# -- the line of links under the title ---------------------------------------------------------


def notebook_links(files: list[Path]) -> list[tuple[str, str]]:
    """Links that download the notebooks."""
    kinds = ["Notebook", "Notebook with solutions"]
    folders = ["", "solved/"]
    return [
        (kind, f"../files/{folder}{file.name}")
        for kind, folder, file in zip(kinds, folders, files, strict=False)
    ]


def slide_links(decks: list[str]) -> list[tuple[str, str]]:
    """Links to a deck, as far as it has been built."""
    return [(DECK[deck.partition(".")[2]], f"../slides/{deck}") for deck in decks]


def package_links(stem: str, packages: list[str]) -> list[tuple[str, str]]:
    """The link to the page of the lesson's package."""
    package = package_of(stem)
    return [(f"course_lib.{package}", f"../api/{package}.html")] if package in packages else []


def write_links(first: Cell, links: list[tuple[str, str]]) -> None:
    """Write the links below the title, which the first cell begins with."""
    title, _, rest = text_of(first["source"]).partition("\n")
    shown = [
        f'<a href="{address}"{" download" if "/files/" in address else ""}>{html.escape(name)}</a>'
        for name, address in links
    ]
    line = f'<nav class="lesson-links" aria-label="Files of this lesson">{" ".join(shown)}</nav>'
    first["source"] = f"{title}\n\n{line}\n{NOTE}\n{rest}"
