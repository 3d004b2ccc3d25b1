"""Copy the course without what answers its exercises: what a graded submission may import.

In the copy, the library's own objects for the judged exercises raise; the checks keep what observes
an answer, and lose what judges it: right numbers, planted mistakes, causes. `notebooks/`, with the
solutions, is not copied.
"""

import ast
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

from course_lib.checks.right_answer import SEEN, bound_names
from course_lib.core import CourseError
from course_lib.core.course_files import BROUGHT
from course_lib.core.files import write_whole
from course_lib.workbooks.lessons import Lesson

COURSE = Path(__file__).parents[2]
PACKAGES = ("course_lib", "course_tools")
Modules = dict[str, ast.Module]
Arguments = Mapping[str, Mapping[str, ast.expr | None]]
NOTHING = ast.Tuple([], ast.Load())
# the arguments that only judge, by the class that takes them, and what replaces them
JUDGING: Arguments = {
    "Exercise": {"wrong": NOTHING, "reference": None, "mistakes": NOTHING},
    "ByExample": {"looks": NOTHING},
    "Cases": {"symptoms": NOTHING},
}
ANSWERS = {"Exercise": JUDGING["Exercise"]}  # of these, what a student's copy has not
RAISES = "this is the library's own; it is not there while your answer to its exercise is graded"


def copy_bare(to: Path, library: Iterable[str] = (), own: Lesson | None = None) -> None:
    """Copy the course's packages to a folder.

    library  objects of it that raise in the copy: `course_lib.collectives.ring:ring_all_gather`
    own      an assignment, whose checks come to `to/checks`, and its hidden cases to `to/hidden.py`
    """
    ignored = shutil.ignore_patterns("__pycache__", "cli", "commands", "build", BROUGHT.name, SEEN)
    for package in PACKAGES:
        shutil.copytree(COURSE / package, to / package, ignore=ignored)
    modules = {
        ".".join(path.relative_to(to).with_suffix("").parts): path
        for path in sorted(to.glob("course_lib/checks/*/*.py"))
    }
    if own and (own.folder / "checks").is_dir():
        shutil.copytree(own.folder / "checks", to / "checks", ignore=ignored)
        modules |= {module_of(own.name, path): path for path in to.glob("checks/*.py")}
    if own and (own.folder / "hidden.py").is_file():
        modules["hidden"] = Path(shutil.copy(own.folder / "hidden.py", to))
    trees = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in modules.items()}
    bare_checks(trees)
    for name, path in modules.items():
        write_whole(path, ast.unparse(ast.fix_missing_locations(trees[name])) + "\n")
    for place in library:
        module, _, name = place.partition(":")
        path = to.joinpath(*module.split(".")).with_suffix(".py")
        write_whole(path, without(path.read_text(encoding="utf-8"), name))


def without(text: str, name: str) -> str:
    """Return a module's text in which a function, or every method of a class, raises."""
    tree = ast.parse(text)
    for node in tree.body:
        if getattr(node, "name", "") == name:
            inside = node.body if isinstance(node, ast.ClassDef) else [node]
            for each in inside:
                if isinstance(each, ast.FunctionDef):
                    each.body = ast.parse(f"raise RuntimeError({f'{name}: {RAISES}.'!r})").body
    return ast.unparse(tree) + "\n"


def library_text(place: str) -> str:
    """Return the text of an object of the library: `course_lib.ddp.buckets:make_buckets`.

    Raises: CourseError where there is none
    """
    module, _, name = place.partition(":")
    path = COURSE.joinpath(*module.split(".")).with_suffix(".py")
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    for node in ast.parse(text).body:
        if getattr(node, "name", "") == name:
            return ast.get_source_segment(text, node) or ""
    raise CourseError(f"the library: need {place}; there is no such object.")


def module_of(assignment: str, path: Path) -> str:
    """Return the name of a module of an assignment's own checks."""
    name = f"course_lib.checks.{assignment}"
    return name if path.stem == "__init__" else f"{name}.{path.stem}"


def bare_checks(trees: Modules, arguments: Arguments = JUDGING) -> None:
    """Take these arguments out of modules of checks, and then what nothing uses any more."""
    for tree in trees.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                judging = arguments.get(node.func.id, {})
                for argument in node.keywords:
                    if argument.arg and argument.arg in judging:
                        argument.value = judging[argument.arg] or ast.Constant(None)
    dropped = True
    while dropped:
        asked = _imported(trees)
        dropped = (
            sum(_drop_unused(tree, asked.get(name, set())) for name, tree in trees.items()) > 0
        )


def _imported(trees: Modules) -> dict[str, set[str]]:
    """Return by module the names that other modules import from it."""
    asked: dict[str, set[str]] = {}
    for node in (node for tree in trees.values() for node in ast.walk(tree)):
        if isinstance(node, ast.ImportFrom):
            asked.setdefault(str(node.module), set()).update(alias.name for alias in node.names)
    return asked


def _drop_unused(tree: ast.Module, asked: set[str]) -> bool:
    """Drop the definitions and imports of a module that nothing reads; return whether any was."""
    used = {"EXERCISES", "HIDDEN", *asked}
    for statement in tree.body:
        reads = {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
        used |= reads.difference(bound_names(statement))
    kept, count = list[ast.stmt](), len(used)
    for statement in tree.body:
        if isinstance(statement, ast.Import | ast.ImportFrom):
            names = [a for a in statement.names if (a.asname or a.name.partition(".")[0]) in used]
            count += len(statement.names) - len(names)
            statement.names = names
            kept += [statement] if names else []
        elif not bound_names(statement) or not used.isdisjoint(bound_names(statement)):
            kept.append(statement)
    count += len(tree.body) - len(kept)
    tree.body = kept
    return count > len(used)
