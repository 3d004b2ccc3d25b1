"""What a changed file can break: the tests that import it, directly or through others.

Read from the source, nothing is imported. A name that a package offers counts as the file that
defines it. A fixture of tests/conftest.py counts where a test names it; a module or a file counts,
too, where a text names it: `-m course_lib.train`, "pyproject.toml". `READ_BY` has what tests find
by other ways, and a change that reaches no test at all reaches every test.
"""

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

FOLDERS = (
    *("course_lib", "course_tools", "tests", "tools"),
    *("slides", "docs", "cluster", "notebooks/source"),
)
CONFTEST = "tests/conftest.py"
EVERYTHING = {CONFTEST, "tests/selection.py", "pyproject.toml", "requirements.lock"}
ALWAYS = "tests/repository/"  # reads all files
READ_BY = {  # folders whose files are found by their place, and the folders of tests that do
    "tools/": ("tests/setup/", "tests/site/"),
    "slides/": ("tests/setup/", "tests/site/"),
    "docs/": ("tests/site/",),
    "cluster/": ("tests/cluster/", "tests/cluster_exercises/"),
    "tests/jobs/": ("tests/cluster/",),
    "course_lib/planner/profiles/": ("tests/planner/",),
    "course_lib/cost/published/": ("tests/cost/", "tests/memory/", "tests/planner/"),
    "course_lib/workbooks/lab_extension/": ("tests/lab/",),
}


def changed_files(root: Path, base: str) -> set[str]:
    """Return what differs from a commit, and what git does not know; "1": from the main branch."""

    def git(*words: str) -> list[str]:
        done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True)
        return done.stdout.splitlines() if done.returncode == 0 else []

    bases = [base] if base != "1" else ["origin/main", "main", "HEAD"]
    since = next((found[0] for one in bases if (found := git("merge-base", one, "HEAD"))), None)
    if since is None:
        raise ValueError(f"CHANGED: need 1 or a commit; got {base}. Try CHANGED=HEAD~1")
    moved = git("diff", "--name-only", "--no-renames", since)
    return {*moved, *git("ls-files", "-o", "--exclude-standard")}


class Reached:
    """The files that a set of changed files reaches."""

    def __init__(self, root: Path, changed: set[str]) -> None:
        self.root, self.changed = root, changed
        paths = [path for folder in FOLDERS for path in sorted((root / folder).rglob("*.py"))]
        self.texts = {path.relative_to(root).as_posix(): path.read_text() for path in paths}
        self.texts |= {name: "" for name in changed if name[-3:] == ".py" if name not in self.texts}
        self.offered = {name: dict(self._offers(name)) for name in self.texts if is_package(name)}
        self.files = self._closure()

    def by_test(self, path: Path) -> bool:
        """Whether a test file is reached."""
        name = path.relative_to(self.root).as_posix()
        return bool(self.changed) and (name.startswith(ALWAYS) or name in self.files)

    def by_name(self, name: str) -> bool:
        """Whether a module, or a file, is reached."""
        return not self.files.isdisjoint([name] if "/" in name else self._files_of(name))

    def _closure(self) -> set[str]:
        """Return the changed files, and all that depend on them or name them."""
        if self.changed & EVERYTHING:
            return {*self.texts, *self.changed}
        users: dict[str, set[str]] = {}
        tests = {name for name in self.texts if re.match(r"tests/.*/test_\w+\.py", name)}
        fixtures = self._fixtures()
        for name, text in self.texts.items():
            for used in self._depends_on(name, text, fixtures):
                users.setdefault(used, set()).add(name)
        reached = set()
        for one in self.changed:
            found, todo = {one}, {one, *self._named_or_read(one, tests)}
            while todo:
                found |= todo
                todo = {user for name in todo for user in users.get(name, ())} - found
            reached |= found if found & tests or is_text(one) else tests
        return reached

    def _named_or_read(self, changed: str, tests: set[str]) -> set[str]:
        """Return the files that name a changed file, and the tests that find it by its place."""
        file = changed.rpartition("/")[2]
        is_one = [name.rpartition("/")[2] for name in self.texts].count(file) <= 1  # no __init__.py
        named = re.compile(rf"(?<![\w.]){re.escape(file)}(?!\w)")
        found = {one for one, text in self.texts.items() if is_one and named.search(text)}
        folders = [read for place, read in READ_BY.items() if changed.startswith(place)]
        return found | {one for one in tests if one.startswith(tuple(sum(folders, ())))}

    def _depends_on(self, name: str, text: str, fixtures: dict[str, set[str]]) -> set[str]:
        found = {file for module in modules_in(text, name) for file in self._files_of(module)}
        if name.startswith("tests/"):
            above = [f"{parent}/conftest.py" for parent in Path(name).parents if parent.name]
            found |= set(above) & set(self.texts)
            asked = {node.arg for node in ast.walk(ast.parse(text)) if isinstance(node, ast.arg)}
            found |= {file for one in asked & set(fixtures) for file in fixtures[one]}
        return found - {name, CONFTEST}

    def _files_of(self, module: str) -> set[str]:
        """Return the file of a module, or of a name in a module or a package."""
        parts = module.split(".")
        for end in range(len(parts), 0, -1):
            folder = "/".join(parts[:end])
            for file in (f"{folder}.py", f"{folder}/__init__.py"):
                if file in self.texts:
                    place = self.offered.get(file, {}).get(parts[end]) if parts[end:] else None
                    # a package's own file only says where its names are: a change of it is a sign
                    own = {file} if file in self.changed or not place else set()
                    return own | (self._files_of(place) if place else set())
        return set()

    def _offers(self, package: str) -> Iterator[tuple[str, str]]:
        """Yield the names that a package takes from its files, and where each is defined."""
        for node in ast.walk(ast.parse(self.texts[package])):
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                for alias in node.names:
                    yield alias.asname or alias.name, f"{node.module}.{alias.name}"

    def _fixtures(self) -> dict[str, set[str]]:
        """Return the files that each fixture of conftest.py depends on."""
        top = ast.parse(self.texts[CONFTEST]).body
        kinds = ast.FunctionDef | ast.ClassDef
        defined = {node.name: ast.unparse(node) for node in top if isinstance(node, kinds)}
        imports = {
            alias.asname or alias.name: f"{node.module}.{alias.name}"
            for node in top
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }

        found = {one: set(self._files_of(place)) for one, place in imports.items()}
        for name in defined:
            seen, todo, modules = {name}, {name}, set()
            while todo:
                source = defined[todo.pop()]
                words = set(re.findall(r"\w+", source))
                modules.update(
                    modules_in(source, CONFTEST), (imports[w] for w in words & set(imports))
                )
                todo |= words & set(defined) - seen
                seen |= todo
            found[name] = {file for module in modules for file in self._files_of(module)}
        return found


def is_text(name: str) -> bool:
    """Whether a file has no test of its own: marks name it, or tests/repository reads it."""
    return name.endswith((".md", ".yml", ".png")) or name.startswith(("notebooks/", ".git", ".ci/"))


def is_package(name: str) -> bool:
    return name.endswith("/__init__.py")


def modules_in(text: str, name: str) -> Iterator[str]:
    """Yield every module, and every name of one, that a file imports or names in a text."""
    package = name.split("/")[:-1]
    python = re.sub(r"^\s*[%!].*$", "", text, flags=re.M)
    for node in ast.walk(ast.parse(python)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *filter(None, [node.module])])
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from re.findall(r"\b(?:course_lib|tests|tools)(?:\.\w+)+", node.value)
