"""Pages of course_lib made from its docstrings, read as text: nothing is imported.

A package has a page: what its `__init__.py` says, then its files in the order in which that names
them, each with its public classes and functions.
"""

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

HIDDEN = ("checks",)  # what judges an exercise would tell its answer
ROW = re.compile(r"^ *(\S(?:.*?\S)?) {2,}(\S.*)$")
FIELD = re.compile(r"^[A-Z]\w+:\s")
WORD = re.compile(r"(`[^`]+`)")
SPECIAL = re.compile(r"([\\*_<>\[\]$#|{}~])")
OTHER_WORDS = {"experts": "expert_parallel"}  # lessons whose package has another name
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def package_of(stem: str) -> str:
    """Return the package of a lesson, given the stem of its notebook."""
    word = stem.partition("_")[2]
    return OTHER_WORDS.get(word, word)


def write_pages(root: Path, folder: Path, stems: list[str]) -> list[str]:
    """Write a page for each package of course_lib, and the page that lists them; return names."""
    folder.mkdir()
    lessons = {package_of(stem): stem for stem in stems}
    library = root / "course_lib"
    described = docstring(library / "__init__.py")
    names = [path.name for path in sorted(library.iterdir()) if (path / "__init__.py").exists()]
    order = [name for name in re.findall(r"^ +(\w+) ", described, re.MULTILINE) if name in names]
    packages = [name for name in [*order, *names] if name not in HIDDEN]
    packages = list(dict.fromkeys(packages))
    for package in packages:
        page = Page(library / package, lessons)
        (folder / f"{package}.md").write_text(page.text(), encoding="utf-8")
    links = {package: f"{package}.md" for package in packages}
    tree = ["", "```{toctree}", ":hidden:", "", *packages, "```", ""]
    index = ["# course_lib", "", markdown(described, links, lessons), *tree]
    (folder / "index.md").write_text("\n".join(index), encoding="utf-8")
    return packages


class Page:
    """The page of one package, made of Markdown with Sphinx's directives for Python."""

    def __init__(self, package: Path, lessons: dict[str, str]) -> None:
        self.package, self.lessons = package, lessons
        described = docstring(package / "__init__.py")
        files = [path for path in package.rglob("*.py") if is_public(path.relative_to(package))]
        self.files = sorted(files, key=lambda path: (place(described, path), str(path)))

    def text(self) -> str:
        """The whole page."""
        name = self.package.name
        modules = [(path, text) for path in self.files if (text := self.module(path))]
        links = {}
        for path, _ in modules:
            title = str(path.relative_to(self.package))
            anchor = "#" + re.sub(r"[^\w-]", "", title.lower().replace(" ", "-"))
            links |= {title: anchor, title.removesuffix(".py"): anchor}
        lines = [f"# course_lib.{name}", ""]
        if name in self.lessons:
            stem = self.lessons[name]
            lines += [f"The package of lesson [{stem}](../notebooks/{stem}.ipynb).", ""]
        lines.append(markdown(docstring(self.package / "__init__.py"), links, self.lessons))
        return "\n".join([*lines, "", *(text for _, text in modules)])

    def module(self, path: Path) -> str:
        """The section of one file; empty if it has nothing that is public."""
        tree = ast.parse(path.read_text(encoding="utf-8"))
        said = ast.get_docstring(tree)
        if not said:
            return ""
        inside = path.relative_to(self.package.parent).with_suffix("")
        dotted = ".".join(["course_lib", *inside.parts])
        lines = [f"## {path.relative_to(self.package)}", ""]
        lines += ["```{py:module} " + dotted, "```", "", markdown(said, {}, self.lessons), ""]
        seen: set[str] = set()
        for node in definitions(tree.body, seen):
            lines += self.definition(node)
        return "\n".join(lines)

    def definition(self, node: Definition, owner: str = "") -> list[str]:
        """The directive of a class or a function, with its docstring and public methods."""
        body = [markdown(ast.get_docstring(node) or "", {}, self.lessons), ""]
        if isinstance(node, ast.ClassDef):
            kind, call = "py:class", node.name + fields(node)
            for method in definitions(node.body, set()):
                body += self.definition(method, node.name)
        else:
            names = {
                name for one in node.decorator_list for name in re.findall(r"\w+", ast.unparse(one))
            }
            kind = "py:method" if owner else "py:function"
            call = f"{node.name}({signature(node.args)})"
            if names & {"property", "cached_property"}:
                kind, call = "py:property", node.name
            elif node.returns:
                call += f" -> {ast.unparse(node.returns)}"
            if owner:
                call = re.sub(r"\((?:self|cls)(?:, (?:/, )?)?", "(", call, count=1)
        fence = "`" * (4 if owner else 5)
        return [f"{fence}{{{kind}}} {call}", *body, fence, ""]


def docstring(path: Path) -> str:
    """The docstring of a file."""
    return ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""


def is_public(path: Path) -> bool:
    """Whether a file of a package belongs to its page."""
    return not any(part.startswith("_") for part in path.parts)


def place(described: str, path: Path) -> int:
    """Return the position of a file in its package's docstring; the end if it is not named."""
    found = re.search(rf"(?:^|[ `]){path.stem}(?:\.py|\b)", described, re.MULTILINE)
    return found.start() if found else len(described)


def definitions(body: list[ast.stmt], seen: set[str]) -> Iterator[Definition]:
    """The public classes and functions that say what they are, each name once."""
    for node in body:
        if not isinstance(node, Definition) or node.name.startswith("_") or node.name in seen:
            continue
        if ast.get_docstring(node):
            seen.add(node.name)
            yield node


class Shorter(ast.NodeTransformer):
    """Leaves out of a signature what its reader does not need: typer's help, f-strings."""

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        """`Annotated[Path, ...]` is a `Path`."""
        if ast.unparse(node.value) == "Annotated" and isinstance(node.slice, ast.Tuple):
            return self.visit(node.slice.elts[0])
        return self.generic_visit(node)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        """An f-string as a default is `...`."""
        return ast.Constant(...)


def signature(arguments: ast.arguments) -> str:
    """The arguments of a function as they are shown."""
    return ast.unparse(Shorter().visit(arguments))


def fields(node: ast.ClassDef) -> str:
    """Return the signature of a class: from the fields of a dataclass, or from `__init__`."""
    for one in node.body:
        if isinstance(one, ast.FunctionDef) and one.name == "__init__":
            return re.sub(r"^\(self(?:, )?", "(", f"({signature(one.args)})")
    if not any("dataclass" in ast.unparse(one) for one in node.decorator_list):
        return ""
    made = [
        ast.unparse(Shorter().visit(one)) for one in node.body if isinstance(one, ast.AnnAssign)
    ]
    made = [re.sub(r" = (?:dataclasses\.|dc\.)?field\(.*", " = ...", one) for one in made]
    return (
        f"({', '.join(one for one in made if not one.startswith('_') and 'ClassVar' not in one)})"
    )


# -- docstrings as Markdown ----------------------------------------------------------------------


def markdown(text: str, links: dict[str, str], lessons: dict[str, str]) -> str:
    """A docstring as Markdown: paragraphs, tables of names, fields such as Cost and Raises."""
    blocks = re.split(r"\n\s*\n", inspect.cleandoc(text)) if text else []
    return "\n\n".join(block(lines.splitlines(), links, lessons) for lines in blocks)


def block(lines: list[str], links: dict[str, str], lessons: dict[str, str]) -> str:
    """One paragraph of a docstring."""
    rows = table_rows(lines)
    if rows:
        head = ["| name | what it is |", "|---|---|"]
        return "\n".join(
            head + [f"| {linked(name, links)} | {prose(said, lessons)} |" for name, said in rows]
        )
    if FIELD.match(lines[0]):
        joined = re.sub(r"\n +", " ", "\n".join(lines)).splitlines()
        named = [line.partition(":") for line in joined]
        return "\n".join(
            f"- **{name}:** {prose(said.strip(), lessons)}"
            if colon
            else f"  {prose(name, lessons)}"
            for name, colon, said in named
        )
    if all(line.startswith("  ") for line in lines):
        return "\n".join(["```text", *(inspect.cleandoc("\n".join(lines)).splitlines()), "```"])
    return "\n".join(prose(line.strip(), lessons) for line in lines)


def table_rows(lines: list[str]) -> list[tuple[str, str]]:
    """The rows of a table of names and what they are; none if the lines are something else."""
    rows: list[tuple[str, str]] = []
    for line in lines:
        found = ROW.match(line)
        indent = len(line) - len(line.lstrip())
        if found and indent <= 4:
            rows.append((found[1], found[2]))
        elif rows and indent > 4:
            rows[-1] = (rows[-1][0], f"{rows[-1][1]} {line.strip()}")
        else:
            return []
    return rows if all(len(name) < 30 and name[-1] != ":" for name, _ in rows) else []


def linked(names: str, links: dict[str, str]) -> str:
    """The first cell of a row: names of files or packages, linked where they have a place."""
    shown = [
        f"[`{name}`]({links[name]})" if name in links else f"`{name}`"
        for name in re.split(r",\s*", names.replace("`", ""))
    ]
    return ", ".join(shown)


def prose(text: str, lessons: dict[str, str]) -> str:
    """Text with what Markdown would take for a mark escaped, and lessons linked."""
    parts = WORD.split(text)
    parts[::2] = [SPECIAL.sub(r"\\\1", part) for part in parts[::2]]
    joined = "".join(parts)
    for stem in lessons.values():
        escaped = stem.replace("_", r"\_")
        joined = joined.replace(escaped, f"[{stem}](../notebooks/{stem}.ipynb)")
    return joined
