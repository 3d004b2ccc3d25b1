"""What the tests of the setup share."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ROOT / "tools"


@pytest.fixture(autouse=True)
def fresh_shell(monkeypatch):
    """Forget that `make test` may have started these tests: a make inside would talk more."""
    for name in list(os.environ):
        if name.startswith(("MAKE", "MFLAGS")):
            monkeypatch.delenv(name)


@pytest.fixture
def environment(monkeypatch):
    """tools/environment.py as a module."""
    monkeypatch.syspath_prepend(TOOLS)
    import environment

    return environment


@pytest.fixture
def project(tmp_path):
    """A small project with our Makefile."""
    root = tmp_path / "project"
    shutil.copytree(TOOLS, root / "tools", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "Makefile", root)
    shutil.copy(ROOT / "pyproject.toml", root)
    return root


@pytest.fixture
def offline(fresh_shell) -> dict[str, str]:
    """Environment variables with which pip finds no packages."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    registry = {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": "http://127.0.0.1:9/simple"}
    kept |= registry | {"PIP_NO_CACHE_DIR": "1", "NO_PROXY": "*"}
    return kept | {"PYTHON": "", "VENV": ".venv"}


@pytest.fixture
def fake_python(tmp_path) -> Callable[[str], str]:
    """Write a stand-in for a Python, as a shell script; returns its path."""

    def write(body: str) -> str:
        path = tmp_path / "python-stand-in"
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)
        return str(path)

    return write
