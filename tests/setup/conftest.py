"""What the tests of the setup share."""

import os
import shutil
import subprocess
import sys
import zipfile
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
    for name in ("pyproject.toml", "requirements.lock"):
        shutil.copy(ROOT / name, root)
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


BACKEND = """
import zipfile
def build_editable(folder, config_settings=None, metadata_directory=None):
    name, info = "small-1-py3-none-any.whl", "small-1.dist-info/"
    about = ["Metadata-Version: 2.1", "Name: small", "Version: 1", "Provides-Extra: dev"]
    with zipfile.ZipFile(folder + "/" + name, "w") as wheel:
        wheel.writestr(info + "METADATA", "\\n".join([*about, "Requires-Dist: NEEDS", ""]))
        wheel.writestr(info + "WHEEL", "Wheel-Version: 1.0\\nTag: py3-none-any\\n")
        wheel.writestr(info + "RECORD", "")
    return name
"""
PROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
[project]
name = "small"
version = "1"
dependencies = [
  "NEEDS",
]
[project.optional-dependencies]
dev = []
"""


class Registry:
    """A registry on disk, one more with builds of PyTorch for the CPU, and a project to install."""

    def __init__(self, environment, folder: Path) -> None:
        self.environment, self.folder, self.root = environment, folder, folder / "small"
        self.root.mkdir()
        self.needs("torch==2.13.0")

    def needs(self, requirement: str) -> None:
        """Let the project need one package."""
        for name, text in (("backend.py", BACKEND), ("pyproject.toml", PROJECT)):
            (self.root / name).write_text(text.replace("NEEDS", requirement))

    def wheel(self, name: str, version: str, *needs: str, of: str = "usual") -> None:
        """Put an empty package into a registry."""
        folder, info = self.folder / of / name, f"{name}-{version}.dist-info"
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"{name}-{version}-py3-none-any.whl"
        lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
        lines += [f"Requires-Dist: {need}" for need in needs]
        with zipfile.ZipFile(file, "w") as parts:
            parts.writestr(f"{info}/METADATA", "\n".join(lines) + "\n")
            parts.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
            parts.writestr(f"{info}/RECORD", "")
        (folder / "index.html").write_text(
            "".join(f'<a href="{one.name}">{one.name}</a>' for one in folder.glob("*.whl"))
        )

    def build(self, torch: str = "") -> dict[str, str]:
        """Make the project's environment; return its packages and their versions."""
        venv = self.folder / "venv"
        self.environment.create(self.root, venv, sys.executable, torch)
        listed = [str(venv / "bin" / "python"), "-m", "pip", "list", "--format=freeze"]
        said = subprocess.check_output(listed, text=True)
        return dict(line.split("==") for line in said.split())


@pytest.fixture
def registry(environment, tmp_path, monkeypatch) -> Registry:
    """A registry of its own, which pip's settings name; uv keeps nothing of it."""
    import packages
    import torch_build

    monkeypatch.setattr(packages, "FIRST_IMPORTS", ())  # the packages are empty
    monkeypatch.setattr(torch_build, "CPU_INDEX", (tmp_path / "cpu").as_uri())
    for name in [name for name in os.environ if name.startswith(("PIP_", "UV_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", (tmp_path / "usual").as_uri())
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "cache"))
    return Registry(environment, tmp_path)


@pytest.fixture(params=["uv", "pip"])
def uv_or_pip(request, monkeypatch) -> str:
    """The one of the two that installs."""
    import packages

    own = shutil.which("uv", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if request.param == "uv" and not own:
        pytest.skip("no uv here: make environment gets one where the registry has it")
    monkeypatch.setattr(packages.shutil, "which", lambda name: own if request.param == "uv" else "")
    return request.param
