"""How outputs look in JupyterLab: whole words, verdicts of checks, progress that goes away."""

from collections.abc import Callable

import pytest
from playwright.sync_api import Locator, expect

from .notebook import Notebook

CELLS = (
    """
from course_lib.checks import check
from course_lib.ranks import progress

def global_rank(node, local_rank, ranks_per_node):
    return node * ranks_per_node + local_rank
""",
    'print(" ".join("synchronous"[:n] for n in range(5, 12) for _ in range(10)))',
    'check("ranks-1", global_rank)',
    'def global_rank(*args): raise NotImplementedError("exercise ranks-1: count")',
    'check("ranks-1", global_rank)',
)
MEASURE = "progress.EVERY_S = 0\nfor _ in progress.in_turns('a', 2): input()"
BOXES_OF_WORDS = r"""pre => {
    const text = pre.firstChild, range = document.createRange();
    return [...text.data.matchAll(/\S+/g)].map(word => {
        range.setStart(text, word.index);
        range.setEnd(text, word.index + word[0].length);
        return range.getClientRects().length;
    });
}"""


@pytest.fixture(scope="module")
def notebook(new_lesson: Callable[..., Notebook]) -> Notebook:
    notebook = new_lesson("outputs.ipynb", CELLS)
    notebook.run_all()
    return notebook


def output(notebook: Notebook, cell: int) -> Locator:
    return notebook.cells().nth(cell).locator(".jp-OutputArea-output.jp-RenderedText")


def look(part: Locator, name: str, pseudo: str = "") -> str:
    return part.evaluate(
        "(part, [name, pseudo]) => getComputedStyle(part, pseudo || null)[name]", [name, pseudo]
    )


def test_lines_break_between_words(notebook: Notebook) -> None:
    text = output(notebook, 1).locator("pre")
    assert text.evaluate(BOXES_OF_WORDS) == [1] * 70
    assert text.bounding_box()["height"] > 50  # several lines


def test_right_is_green_and_not_done_is_no_error(notebook: Notebook) -> None:
    right, open_ = output(notebook, 2), output(notebook, 4)
    expect(right).to_contain_text("ranks-1: right. ")
    expect(open_).to_contain_text("ranks-1 is not done yet: count")
    assert "\u2713" in look(right.locator("pre"), "content", "::before")
    assert look(right, "borderLeftColor") == "rgb(0, 158, 115)"
    assert look(open_, "backgroundColor") == "rgba(0, 0, 0, 0)"
    assert look(open_, "borderLeftColor") == "rgb(118, 118, 118)"
    notebook.screenshot("verdicts")


def test_progress_is_seen_while_it_measures_and_not_afterwards(notebook: Notebook) -> None:
    cell = notebook.write_cell(MEASURE)
    for turn in (1, 2):
        expect(cell.locator(".jp-OutputArea-output").first).to_have_text(
            f"measuring: 1 of 1, turn {turn} of 2"
        )
        cell.locator("input.jp-Stdin-input").last.fill(str(turn))
        notebook.page.keyboard.press("Enter")
    expect(cell.locator(".jp-OutputArea-output", has_text="measuring")).to_have_count(0)
    notebook.screenshot("progress_gone")
