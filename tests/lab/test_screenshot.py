"""The README's screenshot can be taken again."""

import subprocess
import sys

from PIL import Image

from docs.screenshot import VIEWPORT

from .conftest import ROOT


def test_the_tool_takes_a_picture_of_a_lesson(browser, tmp_path):
    subprocess.run([sys.executable, "-m", "docs.screenshot", tmp_path], cwd=ROOT, check=True)
    with Image.open(tmp_path / "lesson.png") as picture:
        assert picture.size == tuple(VIEWPORT.values())
        assert len(picture.getcolors()) > 50  # more than an empty page has
