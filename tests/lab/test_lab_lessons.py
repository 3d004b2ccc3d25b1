"""The first lesson in JupyterLab, from the first cell to the last; or all lessons."""

import os
from collections.abc import Callable

import pytest
from nbformat import NotebookNode
from playwright.sync_api import expect

from course_lib.workbooks.lessons import find_folder, tags_of

from .notebook import Notebook

# nbval runs every lesson (tests/notebooks/test_notebooks.py); JupyterLab the first one (for sliders
# see test_lab_widgets.py), and all of them for whoever wants screenshots
LESSONS = ["00_ranks.ipynb"]
if "COURSE_SCREENSHOTS" in os.environ:
    paths = [*find_folder().glob("*.ipynb"), *find_folder().glob("solved/*.ipynb")]
    LESSONS = sorted(str(path.relative_to(find_folder())) for path in paths)
RUN_TIMEOUT_S = 300.0
PICTURES = """cells => cells.map(cell =>
    [...cell.querySelectorAll('.jp-OutputArea img, .jp-OutputArea svg[role=img]')]
        .map(picture => picture.getAttribute('alt') ?? picture.getAttribute('aria-label') ?? ''))"""


def errors(cell: NotebookNode) -> list[tuple[str, str]]:
    """The names and messages of what a cell raised."""
    raised = [output for output in cell.get("outputs", []) if output.output_type == "error"]
    return [(output.ename, output.evalue) for output in raised]


@pytest.mark.parametrize("name", LESSONS)
def test_a_lesson_runs_from_top_to_bottom(
    name: str, open_notebook: Callable[[str], Notebook]
) -> None:
    notebook = open_notebook(name)
    seconds = notebook.run_all(RUN_TIMEOUT_S)
    print(f"{name}: all cells in {seconds:.1f} s")
    saved = notebook.save()
    code = [cell for cell in saved.cells if cell.cell_type == "code"]
    assert notebook.prompts() == [str(number) for number in range(1, len(code) + 1)]
    for cell in code:
        ends_as_it_should(cell, solved=name.startswith("solved/"))
    every_picture_is_told(notebook)
    nothing_is_cut_off(notebook, name.removesuffix(".ipynb").replace("/", "_"))
    assert "\x1b[" not in notebook.page.locator(".jp-Notebook").text_content()
    every_slider_moves_its_picture(notebook)


def ends_as_it_should(cell: NotebookNode, *, solved: bool) -> None:
    """Only what is broken on purpose raises, and what a learner has not done yet says so."""
    raised, tags = errors(cell), tags_of(cell)
    if "check" in tags and "exercise" in cell.metadata and not solved:
        (ename, evalue), key = *raised, cell.metadata["exercise"]
        assert (ename, evalue.startswith(f"{key} is not done yet")) == ("NotDone", True), evalue
    else:
        assert bool(raised) == ("failure" in tags and "raises-exception" in tags), (cell.id, raised)


def every_picture_is_told(notebook: Notebook) -> None:
    """Each picture has its alt text, and no cell shows one twice."""
    by_cell = notebook.cells().evaluate_all(PICTURES)
    assert any(by_cell)
    for told in by_cell:
        assert "" not in told
        assert len(set(told)) == len(told)


def nothing_is_cut_off(notebook: Notebook, name: str) -> None:
    """No output is wider than its place; whoever wants screenshots gets each window."""
    for number in notebook.windows():
        assert notebook.cut_off() == []
        if "COURSE_SCREENSHOTS" in os.environ:
            notebook.screenshot(f"{name}_{number:02}")
    assert number > 3


def every_slider_moves_its_picture(notebook: Notebook) -> None:
    """By one key press, whichever sliders the lesson has."""
    handle = notebook.page.locator(".noUi-handle")
    for cell in notebook.cells().filter(has=handle).all():
        for slider in cell.locator(handle).all():
            before = cell.locator("img").get_attribute("src")
            slider.focus()
            notebook.page.keyboard.press("ArrowRight")
            expect(cell.locator("img")).not_to_have_attribute("src", before)
