"""The stop button of JupyterLab, while ranks hang."""

import time
from collections.abc import Callable

import pytest
from playwright.sync_api import expect

from .notebook import Notebook

WITHIN_S = 2.0

HANG = """%%ranks
import time
if rank == 0:
    time.sleep(600)
else:
    dist.all_reduce(torch.ones(1))"""
FORGOTTEN = """%%ranks
if rank != 1:
    dist.all_reduce(torch.ones(1))"""
NEXT = "%%ranks\nx = torch.full((1,), 10.0**rank)\ndist.all_reduce(x)\nprint(int(x))"


@pytest.fixture(scope="module")
def notebook(new_lesson: Callable[..., Notebook]) -> Notebook:
    """A notebook with ranks that have begun to work."""
    notebook = new_lesson("hangs.ipynb", ["%load_ext course_lib.ranks", "ranks.run(abs)"])
    notebook.run_all()
    return notebook


def test_stop_ends_a_hang_with_a_report_and_the_next_cell_works(notebook: Notebook) -> None:
    for _ in range(3):  # the machine may be busy
        hangs = notebook.write_cell(HANG)
        notebook.page.wait_for_timeout(3000)
        assert notebook.prompts()[-1] == "*", "nothing but the button ends this cell"
        begin = time.monotonic()
        notebook.stop()
        expect(hangs).to_contain_text("RankError (stopped)")
        seconds = time.monotonic() - begin
        print(f"from the stop button to the report: {seconds:.2f} s")
        if seconds < WITHIN_S:
            break
    assert seconds < WITHIN_S
    for words in ("rank 0 was computing", "time.sleep(600)", "ranks 1, 2, 3 wait in all_reduce"):
        expect(hangs).to_contain_text(words)
    notebook.wait_until_done()
    expect(notebook.write_cell(NEXT)).to_contain_text("[3] 1111")
    notebook.screenshot("stop")


def test_a_hang_reports_itself_and_the_next_cell_works(notebook: Notebook) -> None:
    hangs = notebook.write_cell(FORGOTTEN)
    expect(hangs).to_contain_text("ranks 0, 2, 3 wait in all_reduce for rank 1")
    expect(hangs).to_contain_text("rank 1 had returned")
    notebook.wait_until_done()
    expect(notebook.write_cell(NEXT)).to_contain_text("[0] 1111")
    notebook.screenshot("hang")
