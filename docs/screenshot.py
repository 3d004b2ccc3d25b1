"""Take the README's screenshot: an exercise, its check and its picture, in JupyterLab.

python -m docs.screenshot [FOLDER]
"""

import io
import shutil
import sys
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

from tests.browser import FLAGS
from tests.lab.notebook import Notebook
from tests.lab.server import started

HERE = Path(__file__).resolve().parent
SOLVED = HERE.parent / "notebooks/solved/08_pipeline.ipynb"
FIRST_LINE = 'check("pipeline-1", one_f_one_b)'  # the cell at the top of the picture
VIEWPORT = {"width": 1180, "height": 1110}
COLOURS = 128  # enough for text and flat pictures, at a quarter of the size


def main(out: Path = HERE) -> None:
    """Open the solved lesson as it is stored, go to the cell, and keep what a learner sees."""
    with tempfile.TemporaryDirectory() as name, sync_playwright() as playwright:
        folder = Path(name)
        (folder / "notebooks").mkdir()
        shutil.copy(SOLVED, folder / "notebooks")
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=[*FLAGS]
        )
        with started(folder) as lab:
            page = browser.new_page(viewport=VIEWPORT)
            notebook = Notebook(page, lab, SOLVED.name, folder)
            cell = notebook.cells().filter(has_text=FIRST_LINE).last
            cell.scroll_into_view_if_needed()
            cell.evaluate("cell => cell.scrollIntoView({block: 'start'})")
            page.wait_for_timeout(2000)  # the pictures below it are drawn
            taken = Image.open(io.BytesIO(page.screenshot()))
        browser.close()
    taken.convert("RGB").quantize(COLOURS).save(out / "lesson.png", optimize=True)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:2]))
