"""Compare what a picture says under nbval, not its pixels: a pytest plugin.

A figure's HTML contains its PNG, and another version of matplotlib or another processor draws some
pixel differently. The alt text, the text and everything around the image are still compared.
`notebooks/solved/conftest.py` loads this for `pytest --nbval notebooks/solved`.
"""

from collections.abc import Generator
from pathlib import Path

import pytest
from nbval.plugin import IPyNbFile

PIXELS = r"data:image/png;base64,[A-Za-z0-9+/=]*"


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(
    file_path: Path, parent: pytest.Collector
) -> Generator[None, list[pytest.Collector], list[pytest.Collector]]:
    """Replace the pixels in every output of a notebook before nbval compares it."""
    collected = yield
    for file in collected:
        if isinstance(file, IPyNbFile):
            file.sanitize_patterns[PIXELS] = "pixels"
    return collected
