"""The house holds together: imports only go down, files and functions stay short."""

import ast
import functools
import shutil
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
OUTER_ROOMS = {"training", "display", "checks", "authoring", "cluster", "study"}
ROOMS = {"core", "cost", "models", "ranks", "frameworks"} | OUTER_ROOMS
COMMANDS = {"cli", "train"}
ROOMS_BELOW = {
    "core": set(),
    "cost": {"core"},
    "models": {"core"},
    "ranks": {"cost", "core"},
    "frameworks": {"ranks", "core"},
    "lessons": {"frameworks", "models", "ranks", "cost", "core"},
    "training": {"lessons", "frameworks", "models", "ranks", "cost", "core"},
    "train": {"training", "core"},
    "display": {"lessons", "models", "ranks", "cost", "core"},
    "checks": {"study", "cluster", "lessons", "models", "ranks", "cost", "core"},
    "authoring": {"checks", "display", "lessons", "models", "ranks", "cost", "core"},
    "cluster": {"ranks", "cost", "core"},
    "study": {"cluster", "training", "display", "lessons", "ranks", "cost", "core"},
    "cli": ROOMS | {"lessons"},
}
# a lesson imports another only where the idea truly stands on the other one
LESSONS_BELOW = {
    "buckets": {"point_to_point"},
    "calculator": {"memory"},
    "collectives": {"ring", "tree", "point_to_point"},
    "compression": {"buckets", "ddp", "point_to_point"},
    "data_parallel": {"thread_parallel"},
    "ddp": {"buckets", "point_to_point"},
    "estimators": {"memory", "saved"},
    "flat_rows": {"flat_shards", "offload", "point_to_point"},
    "fsdp": {"fsdp_row", "fsdp_state", "fsdp_units", "point_to_point"},
    "fsdp_beside": {"data_parallel", "fsdp"},
    "fsdp_lab": {"fsdp", "fsdp_row", "overlap_lab"},
    "fsdp_row": {"flat_shards", "point_to_point"},
    "fsdp_state": {"flat_shards", "fsdp_row"},
    "fsdp_units": {"fsdp_row", "point_to_point"},
    "local_sgd": {"data_parallel"},
    "mailbox": {"point_to_point"},
    "gradient_rounds": {"flat_rows", "point_to_point"},
    "module_rows": {"buckets", "flat_rows", "offload", "point_to_point"},
    "overlap_lab": {"buckets", "ddp"},
    "parallel_linear": {"parallel_regions", "point_to_point"},
    "parallel_regions": {"point_to_point"},
    "parallel_tensors": {"parallel_linear", "parallel_regions"},
    "parameter_server": {"data_parallel"},
    "pipeline": {"mailbox", "point_to_point", "stage_run", "stages"},
    "pipeline_lab": {"overlap_lab", "pipeline", "stage_run"},
    "recompute": {"mixed_precision"},
    "ring": {"point_to_point"},
    "sharded_optimizer": {
        "buckets",
        "flat_rows",
        "offload",
        "point_to_point",
        "sharded_state",
    },
    "sharded_state": {"flat_rows", "flat_shards", "sharded_optimizer"},
    "stage_run": {"backward_halves", "mailbox", "point_to_point", "stages"},
    "stages": {"point_to_point"},
    "tensor_parallel": {
        "parallel_linear",
        "parallel_regions",
        "parallel_tensors",
        "point_to_point",
        "vocab_parallel",
    },
    "tree": {"point_to_point"},
    "vocab_parallel": {"parallel_linear", "parallel_regions", "point_to_point"},
    "zero": {
        "buckets",
        "flat_rows",
        "gradient_rounds",
        "module_rows",
        "offload",
        "point_to_point",
        "sharded_optimizer",
        "zero_state",
    },
    "zero_lab": {"flat_rows", "sharded_optimizer", "zero"},
    "zero_state": {"zero"},
}
FOUNDATION = "collectives"
PURE_PYTHON = {"core", "cost"}


def sources(root: Path) -> list[Path]:
    return sorted((root / "course_lib").rglob("*.py"))


def room(path: Path, root: Path) -> str:
    """The room a file lies in; a flat file is a lesson, except the command lines."""
    parts = path.relative_to(root / "course_lib").parts
    return room_of_module(parts[0].removesuffix(".py") if parts != ("__init__.py",) else "core")


def room_of_module(name: str) -> str:
    return name if name in ROOMS | COMMANDS else "lessons"


@functools.cache
def nodes_of(text: str) -> tuple[ast.AST, ...]:
    """All nodes of a file: most files are the same in every tree that is looked at."""
    return tuple(ast.walk(ast.parse(text)))


def imported(path: Path, root: Path) -> Iterator[tuple[int, str]]:
    """Line and full name of everything a file imports, also inside functions."""
    package = path.relative_to(root).with_suffix("").parts[:-1]
    for node in nodes_of(path.read_text()):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join([*above, *filter(None, [node.module])])
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def problem_of(name: str, here: str, lesson: str) -> str | None:
    """Why an import may not stand in this room, or None."""
    parts = name.split(".")
    if parts[0] in {"notebooks", "tests", "tools", "slides"}:
        return f"imports {parts[0]}"
    if parts[0] != "course_lib":
        outside = here in PURE_PYTHON and parts[0] not in sys.stdlib_module_names
        return f"is pure Python, and imports {parts[0]}" if outside else None
    there = room_of_module(parts[1]) if len(parts) > 1 else "core"
    if here == there == "lessons":
        allowed = LESSONS_BELOW.get(lesson, set()) | {FOUNDATION, lesson}
        return None if parts[1] in allowed else f"imports the lesson {parts[1]}"
    return None if there == here or there in ROOMS_BELOW[here] else f"imports {there}, not below it"


def broken_imports(root: Path) -> list[str]:
    """Every import that does not go down, as `file:line room problem`."""
    found = []
    for path in sources(root):
        here = room(path, root)
        for line, name in imported(path, root):
            if problem := problem_of(name, here, path.stem):
                found.append(f"{path.relative_to(root)}:{line} {here} {problem}")
    return found


def functions(root: Path) -> Iterator[tuple[str, int]]:
    """Name and length in lines of every function."""
    for path in sources(root):
        for node in nodes_of(path.read_text()):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{path.relative_to(root)}: {node.name}", node.end_lineno - node.lineno + 1


def bare_asserts(root: Path) -> list[str]:
    return [
        f"{path.relative_to(root)}:{node.lineno}"
        for path in sources(root)
        for node in nodes_of(path.read_text())
        if isinstance(node, ast.Assert)
    ]


def long_files(root: Path) -> list[str]:
    return [
        str(path.relative_to(root))
        for path in sources(root)
        if len(path.read_text().splitlines()) > 250
    ]


def long_functions(root: Path) -> list[str]:
    return [name for name, length in functions(root) if length > 50]


def without_docstring(root: Path) -> list[str]:
    return [
        str(path.relative_to(root))
        for path in sources(root)
        if not ast.get_docstring(nodes_of(path.read_text())[0])
    ]


LAWS = [broken_imports, bare_asserts, long_files, long_functions, without_docstring]


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_the_course_keeps_the_law(law):
    assert len(sources(ROOT)) > 10
    assert law(ROOT) == []


def test_functions_are_short():
    lengths = sorted(length for _, length in functions(ROOT))
    assert statistics.median(lengths) <= 10
    assert lengths[int(0.9 * len(lengths))] <= 30


PLANTED = [
    (broken_imports, "core/planted.py", '"""."""\nimport torch\n'),
    (broken_imports, "core/planted.py", '"""."""\nfrom course_lib.cost import network\n'),
    (broken_imports, "cost/planted.py", '"""."""\nfrom ..ranks import Ranks\n'),
    (broken_imports, "cost/planted.py", '"""."""\ndef late():\n    import numpy\n'),
    (broken_imports, "ranks/planted.py", '"""."""\nfrom course_lib import collectives\n'),
    (broken_imports, "ranks/planted.py", '"""."""\nimport course_lib.display.timeline\n'),
    (broken_imports, "planted.py", '"""."""\nfrom course_lib.display import show\n'),
    (broken_imports, "planted.py", '"""."""\nfrom course_lib.ddp import step\n'),
    (broken_imports, "display/planted.py", '"""."""\nfrom ..checks import check\n'),
    (broken_imports, "checks/planted.py", '"""."""\nfrom course_lib.cli import main\n'),
    (broken_imports, "authoring/planted.py", '"""."""\nfrom notebooks.source import x\n'),
    (bare_asserts, "core/planted.py", '"""."""\nassert True\n'),
    (long_files, "core/planted.py", '"""."""\n' + "x = 1\n" * 250),
    (long_functions, "core/planted.py", '"""."""\ndef long():\n' + "    x = 1\n" * 50),
    (without_docstring, "core/planted.py", "x = 1\n"),
]


@pytest.mark.parametrize(("law", "place", "text"), PLANTED)
def test_a_planted_breach_is_found(law, place, text, tmp_path):
    shutil.copytree(
        ROOT / "course_lib", tmp_path / "course_lib", ignore=shutil.ignore_patterns("__pycache__")
    )
    planted = tmp_path / "course_lib" / place
    planted.parent.mkdir(exist_ok=True)
    before = law(tmp_path)
    planted.write_text(text)
    (found,) = set(law(tmp_path)) - set(before)
    assert place in found


def test_what_goes_down_is_let_through(tmp_path):
    good = tmp_path / "course_lib" / "collectives.py"
    good.parent.mkdir()
    good.write_text("import torch\nfrom course_lib.ranks import record\nfrom .core import Event\n")
    assert broken_imports(tmp_path) == []
