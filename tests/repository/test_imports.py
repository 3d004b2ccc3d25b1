"""What notebooks, slides, job scripts and benchmarks import is there, before anyone runs them."""

import ast
import importlib
from pathlib import Path

import pytest

from course_lib.checks.lesson_source import read_source

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / "notebooks/source").glob("*.py"))
SCRIPTS = sorted(
    path
    for folder in ("slides", "cluster/exercises", "tests/benchmarks", "docs")
    for path in (ROOT / folder).glob("*.py")
)


def missing(code: str) -> list[str]:
    """Every `module.name` of the course that code imports and that does not exist."""
    wanted = [
        (node.module, alias.name)
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("course_lib")
        for alias in node.names
    ]
    return [f"{module}.{name}" for module, name in wanted if not is_there(module, name)]


def is_there(module: str, name: str) -> bool:
    try:
        if hasattr(importlib.import_module(module), name):
            return True
        importlib.import_module(f"{module}.{name}")
    except ImportError:
        return False
    return True


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_what_a_script_imports_is_there(path):
    assert missing(path.read_text()) == []


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_what_a_lesson_imports_is_there(path):
    code = [cell for cell in read_source(path) if cell.kind == "code"]
    lines = [line for cell in code for line in cell.text.splitlines()]
    assert missing("\n".join("" if line.startswith(("%", "!")) else line for line in lines)) == []


def test_what_is_not_there_is_found():
    code = "from course_lib.ddp import DDP, nothing\nfrom course_lib import zero_lab as lab\n"
    assert missing(code) == ["course_lib.ddp.nothing", "course_lib.zero_lab"]
