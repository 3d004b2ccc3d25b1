"""Lines of Python stay within budgets.toml: raising a budget is a line that a reviewer sees."""

import tomllib
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUDGETS: dict[str, int] = tomllib.loads((ROOT / "tests/repository/budgets.toml").read_text())
SPLIT = ("course_lib", "course_tools", "tests")  # a budget a package; one for any other folder


def lines_by_package(root: Path) -> Counter[str]:
    """Lines of each package; generated and installed files have none."""
    found: Counter[str] = Counter()
    for path in root.rglob("*.py"):
        folder, *inside = path.relative_to(root).parts
        if folder[0] in "._" or folder == "build" or "node_modules" in inside:
            continue
        name = f"{folder}/{inside[0]}" if folder in SPLIT and len(inside) > 1 else folder
        found[name if inside else "setup.py"] += path.read_text().count("\n")
    return found


def over_budget(found: Counter[str], budgets: dict[str, int]) -> list[str]:
    """What is over its budget, or has none."""
    return [
        f"{name}: {lines} lines; its budget is {budgets.get(name, 0)}. Try to take out as many as "
        "you put in, or raise it in tests/repository/budgets.toml and say why"
        for name, lines in sorted(found.items())
        if lines > budgets.get(name, 0)
    ]


def test_every_package_is_within_its_budget():
    assert not over_budget(lines_by_package(ROOT), BUDGETS)


def test_budgets_have_packages():
    assert not BUDGETS.keys() - lines_by_package(ROOT).keys()


def test_a_package_that_grows_or_is_new_is_found(tmp_path):
    for name, lines in {"course_lib/ddp/ddp.py": 11, "tools/new.py": 1, "setup.py": 1}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("\n" * lines)
    found = over_budget(lines_by_package(tmp_path), {"course_lib/ddp": 10, "setup.py": 1})
    assert [one.partition(":")[0] for one in found] == ["course_lib/ddp", "tools"]
