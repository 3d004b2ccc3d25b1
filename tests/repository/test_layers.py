"""The house holds together: imports only go down, files and functions stay short."""

import ast
import functools
import shutil
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LAYERS = (  # a package imports only from what stands before it
    *("core", "cost", "models", "ranks", "frameworks", "collectives", "display"),
    *("memory", "speed", "accumulation", "recompute", "data_parallel", "ddp", "tensor_parallel"),
    *("pipeline", "zero", "fsdp", "context_parallel", "mesh", "expert_parallel", "checkpoint"),
    *("debugging", "hub"),
    *(
        "train",
        "clinic",
        "jobs",
        "cluster_ranks",
        "planner",
        "scaling_study",
        "checks",
        "workbooks",
    ),
    "cli",
)
WINGS = {
    "course_lib": LAYERS,
    "course_tools": (*LAYERS, "authoring", "grading", "platforms", "commands"),
}
WITH_CORE = ("config", "families", "fields", "parts", "usual")  # of hub: how a spec is read
NO_TORCH = (  # formulas and simulations, by path or by the name of the file
    *(f"hub/{name}" for name in WITH_CORE),
    *("core/", "cost/", "cost.py", "live.py", "collectives/messages.py"),
    *("pipeline/actions.py", "pipeline/schedules.py", "pipeline/schedule_rules.py"),
    "pipeline/live_by_hand.py",
    *("pipeline/simulation.py", "pipeline/balance.py", "pipeline/token_pipeline.py"),
    *("mesh/mesh.py", "planner/plan.py", "planner/cluster.py", "planner/prediction.py"),
    *("planner/predicting.py", "planner/stages.py", "planner/sharding.py"),
    *("planner/launches.py", "planner/emit.py"),
    *("planner/compute.py", "planner/communication.py", "planner/pipeline_step.py"),
    *("planner/memory.py", "planner/constants.py", "planner/published_runs.py"),
    *("planner/scores.py", "planner/searching.py", "planner/table.py"),
    "planner/notes.py",
)
DRAWS = ("pictures.py", "explorer.py", "html_report.py")
BESIDE = ("beside_frameworks.py", "lab.py")
LONGEST_FILE = 400


def sources(root: Path) -> list[Path]:
    return sorted(path for wing in WINGS for path in (root / wing).rglob("*.py"))


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


def problem_of(name: str, path: Path) -> str | None:
    """Why a file may not import this, or None. The path begins with its wing."""
    wing, here, file = path.parts[0], path.parts[1], path.name
    place, parts = path.relative_to(wing).as_posix(), name.split(".")
    if parts[0] in {"notebooks", "tests", "tools", "slides"}:
        return f"imports {parts[0]}"
    if parts[0] not in WINGS:
        pure = any(place.startswith(word) or file == word for word in NO_TORCH)
        return f"is pure Python, and imports {parts[0]}" if pure and is_foreign(parts[0]) else None
    if len(parts) == 1 or here == file:  # course_lib/__init__.py
        return None if len(parts) == 1 else f"imports {parts[1]}, and stands above every package"
    there, layers = parts[1], WINGS[wing]
    here = "core" if here == "hub" and path.stem in WITH_CORE else here
    there = "core" if there == "hub" and parts[2] in WITH_CORE else there
    if file == "__main__.py":  # a command: it may use all packages, and none uses it
        return None
    if there not in layers or layers.index(there) > layers.index(here):
        return f"imports {there}, which does not stand before {here}"
    if there == "display" != here and file not in DRAWS and here not in ("authoring", "cli"):
        return f"imports {there}: only {', '.join(DRAWS)} draw"
    if there == "frameworks" != here and file not in BESIDE and here != "train":
        return f"imports {there}: only train and {', '.join(BESIDE)} do"
    return None


def is_foreign(package: str) -> bool:
    return package not in sys.stdlib_module_names


def broken_imports(root: Path) -> list[str]:
    """Every import that does not go down, as `file:line problem`."""
    return [
        f"{path.relative_to(root)}:{line} {problem}"
        for path in sources(root)
        for line, name in imported(path, root)
        if (problem := problem_of(name, path.relative_to(root)))
    ]


def unknown_packages(root: Path) -> list[str]:
    """Folders without a place in the list of layers."""
    places = (path.relative_to(root).parts for path in sources(root))
    unknown = {(wing, name) for wing, name, *_ in places if "." not in name}
    return sorted(f"{name}/__init__.py" for wing, name in unknown if name not in WINGS[wing])


def functions(root: Path) -> Iterator[tuple[str, int]]:
    """Name and length in lines of every function; parameters of a command are its options."""
    for path in sources(root):
        for node in nodes_of(path.read_text()):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                is_command = any(".command(" in ast.unparse(one) for one in node.decorator_list)
                first = node.body[0].lineno if is_command else node.lineno
                yield f"{path.relative_to(root)}: {node.name}", node.end_lineno - first + 1


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
        if len(path.read_text().splitlines()) > LONGEST_FILE
    ]


def long_functions(root: Path) -> list[str]:
    return [name for name, length in functions(root) if length > 50]


def without_docstring(root: Path) -> list[str]:
    return [
        str(path.relative_to(root))
        for path in sources(root)
        if not ast.get_docstring(nodes_of(path.read_text())[0])
    ]


LAWS = [
    broken_imports,
    unknown_packages,
    bare_asserts,
    long_files,
    long_functions,
    without_docstring,
]


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
    (broken_imports, "fsdp/more/cost.py", '"""."""\nimport torch\n'),
    (broken_imports, "pipeline/schedules.py", '"""."""\nimport torch\n'),
    (broken_imports, "ranks/planted.py", '"""."""\nfrom course_lib import collectives\n'),
    (broken_imports, "ranks/planted.py", '"""."""\nimport course_lib.display.timeline\n'),
    (broken_imports, "ddp/planted.py", '"""."""\nfrom course_lib.display import show\n'),
    (broken_imports, "ddp/planted.py", '"""."""\nfrom course_lib.frameworks import missing\n'),
    (broken_imports, "ddp/planted.py", '"""."""\nfrom course_lib.zero import ZeRO1\n'),
    (broken_imports, "display/planted.py", '"""."""\nfrom ..checks import check\n'),
    (broken_imports, "checks/planted.py", '"""."""\nfrom course_lib.cli import main\n'),
    (broken_imports, "workbooks/planted.py", '"""."""\nfrom notebooks.source import x\n'),
    (broken_imports, "cli/planted.py", '"""."""\nfrom course_tools.grading import task\n'),
    (broken_imports, "planted.py", '"""."""\nfrom course_lib.core import Link\n'),
    (unknown_packages, "planted/__init__.py", '"""."""\n'),
    (bare_asserts, "core/planted.py", '"""."""\nassert True\n'),
    (long_files, "core/planted.py", '"""."""\n' + "x = 1\n" * LONGEST_FILE),
    (long_functions, "core/planted.py", '"""."""\ndef long():\n' + "    x = 1\n" * 50),
    (long_functions, "core/planted.py", '"""."""\n@a.command()\ndef b():\n' + "    x = 1\n" * 51),
    (without_docstring, "core/planted.py", "x = 1\n"),
]


@pytest.mark.parametrize(("law", "place", "text"), PLANTED)
def test_a_planted_breach_is_found(law, place, text, tmp_path):
    shutil.copytree(
        ROOT / "course_lib", tmp_path / "course_lib", ignore=shutil.ignore_patterns("__pycache__")
    )
    planted = tmp_path / "course_lib" / place
    planted.parent.mkdir(exist_ok=True, parents=True)
    before = law(tmp_path)
    planted.write_text(text)
    (found,) = set(law(tmp_path)) - set(before)
    assert place in found


def test_what_goes_down_is_let_through(tmp_path):
    good = tmp_path / "course_lib" / "collectives" / "planted.py"
    good.parent.mkdir(parents=True)
    good.write_text("import torch\nfrom course_lib.ranks import record\nfrom .ring import x\n")
    assert broken_imports(tmp_path) == []
