"""Import the names of a package when they are first used.

A package that has formulas beside what needs PyTorch lists its names under `if TYPE_CHECKING:`,
where editors and type checkers read them. To import a module of it, such as its `cost.py`, then
loads that module alone: `course plan` waits for no PyTorch. No name may be that of a module.
"""

import ast
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def names_on_demand(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the `__getattr__` and `__dir__` of a package whose names are imported on demand."""
    module = sys.modules[package]
    imports = ast.walk(ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8")))
    places = {
        alias.name: node.module
        for node in imports
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }

    def find(name: str) -> Any:
        if name not in module.__all__:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(places[name]), name)
        setattr(module, name, value)
        return value

    return find, lambda: sorted({*vars(module), *module.__all__})
