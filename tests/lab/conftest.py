"""JupyterLab and a browser without a window, for the tests of what a learner sees."""

import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook
from playwright.sync_api import Browser, expect

from .notebook import Notebook
from .server import Lab, started

expect.set_options(timeout=20_000)  # the machine may be busy
ROOT = Path(__file__).resolve().parents[2]
VIEWPORT = {"width": 1280, "height": 1400}


@pytest.fixture(scope="session")
def lab(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """JupyterLab on a copy of the notebooks."""
    folder = tmp_path_factory.mktemp("lab")
    shutil.copytree(ROOT / "notebooks", folder / "notebooks")
    with started(folder) as lab:
        yield lab


@pytest.fixture(scope="module")
def open_notebook(
    lab: Lab, browser: Browser, screenshots: Path
) -> Iterator[Callable[[str], Notebook]]:
    """Open a notebook in a fresh window; afterwards demand that the browser had no complaint."""
    opened: list[Notebook] = []

    def open_one(name: str) -> Notebook:
        context = browser.new_context(viewport=VIEWPORT, reduced_motion="no-preference")
        opened.append(Notebook(context.new_page(), lab, name, screenshots))
        return opened[-1]

    yield open_one
    for notebook in opened:
        notebook.page.context.close()
    lab.end_kernels()
    assert [error for notebook in opened for error in notebook.errors] == []
    assert [address for notebook in opened for address in notebook.outside] == []


@pytest.fixture(scope="module")
def new_lesson(
    lab: Lab, open_notebook: Callable[[str], Notebook]
) -> Callable[[str, Sequence[str]], Notebook]:
    """Make a notebook of these cells and open it."""

    def make(name: str, cells: Sequence[str]) -> Notebook:
        kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
        notebook = new_notebook(
            cells=[new_code_cell(cell.strip()) for cell in cells], metadata={"kernelspec": kernel}
        )
        nbformat.write(notebook, lab.notebooks / name)
        return open_notebook(name)

    return make
