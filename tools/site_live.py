"""Live parts of the site: the course's formulas in the page, run by Python in WebAssembly.

Everything that a page needs lies in the site's folder `live`: Pyodide from its npm package, the
modules that need nothing but Python as one archive, and what each part shows before it is touched.
"""

import base64
import hashlib
import html
import importlib
import json
import shutil
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import asdict
from pathlib import Path

from course_lib.core.live import Live
from course_lib.display.colours import KIND, RANK, SERIES

PYODIDE = "pyodide@314.0.7"
SHA512 = "0YvXxEhfEdpLfb/XkM2BFAeMROq0iMUX2bzzH9pOttyMcWkwq+HbE5uyuGD82LN7y2q+SNvi/6V5JEsOlD2R1A=="
FILES = ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "python_stdlib.zip")
FILES += ("pyodide-lock.json",)
WORDS = {
    "params": "parameters",
    "grads": "gradients",
    "optim_state": "the optimizer's state",
    "activations": "activations",
}
DATA = (".csv", ".json", ".gz")
LOADED = "import sys, {}; print(*(m.__file__ for n, m in sys.modules.items() if 'course_lib' in n))"
PAGE = "# {title}\n\n{part}\n\nFrom [lesson {lesson}](../notebooks/{lesson}.ipynb). {told}\n"
TOLD = (
    "Nothing leaves this page: the formulas of the course run in it, in Python, of which the first "
    "touch loads 14 MB from this site. "
    "The address keeps what you choose, so that you can share it."
)


def all_parts(root: Path) -> dict[str, tuple[Live, list[str]]]:
    """Every live part of the lessons by name, with its module and its name there."""
    found = {}
    for path in sorted(root.glob("course_lib/*/live*.py")):
        module = ".".join(path.relative_to(root).with_suffix("").parts)
        for name, value in vars(importlib.import_module(module)).items():
            if isinstance(value, Live):
                found[value.name] = (value, [module, name])
    return dict(sorted(found.items(), key=lambda one: one[1][0].lesson))


def first_question(root: Path) -> str:
    """The first live part of the front page: where the bytes go, after a guess."""
    part = all_parts(root)["calculator"][0]
    values = part.start()
    (bars,) = part.compute(**values).panels
    held = bars.rows["peak"]
    most = max(held, key=held.get)
    quiz = {
        "question": f"{values['model']} trains in {values['recipe']} on one "
        f"{values['gpu'].upper()}, on one sequence of {values['seq']} tokens: what is largest?",
        "answers": [WORDS[kind] for kind in held],
        "right": WORDS[most],
        "says": f"{held[most]:.0f} of {sum(held.values()):.0f} GiB. Now move the sliders.",
    }
    return html_of("calculator", "", quiz)


def html_of(name: str, above: str, quiz: dict[str, object] | None = None) -> str:
    """The place of a part in a page; `above` leads from the page to the site's folder."""
    asked = f' data-quiz="{html.escape(json.dumps(quiz))}"' if quiz else ""
    scripts = "".join(
        f'<script defer src="{above}live/{one}.js"></script>' for one in ("parts", "live")
    )
    fallback = "<p>This part needs JavaScript.</p>"
    return f'<section class="live" data-live="{name}"{asked}>{fallback}</section>{scripts}'


def write_live(root: Path, source: Path, stems: list[str]) -> dict[str, Live]:
    """Write the folder `live`, and a page for each part of these lessons; return those parts."""
    found, folder = all_parts(root), source / "extra" / "live"
    folder.mkdir(parents=True)
    lacks = fetch_pyodide(root / "build", folder / "pyodide")
    write_archive(root, folder / "course.zip")
    for script in ("live.js", "live_worker.js"):
        shutil.copy(root / "tools/site_theme" / script, folder)
    told = {
        name: {
            "question": part.question,
            "where": where,
            "options": part.options(),
            "hidden": part.hidden,
            "drawing": json.loads(part.answer({})),
        }
        for name, (part, where) in found.items()
    }
    inks = {kind: asdict(ink) for kind, ink in KIND.items()}
    data = {"parts": told, "inks": inks, "series": SERIES, "ranks": RANK, "lacks": lacks}
    script = f"window.COURSE_LIVE = {json.dumps(data)};\n"
    (folder / "parts.js").write_text(script, encoding="utf-8")
    shown = {name: part for name, (part, _) in found.items() if part.lesson in stems}
    write_pages(source / "play", shown)
    return shown


def write_pages(folder: Path, parts: dict[str, Live]) -> None:
    """Write a page for each part, and one that lists them."""
    folder.mkdir()
    rows = [
        f"- [{title_of(name)}]({name}.md) (lesson {part.lesson}): {part.question}"
        for name, part in parts.items()
    ]
    tree = "\n".join(["```{toctree}", ":hidden:", "", *parts, "```"])
    lines = ["# Play", "", TOLD, "", *rows, "", tree, ""]
    (folder / "index.md").write_text("\n".join(lines), encoding="utf-8")
    for name, part in parts.items():
        page = PAGE.format(
            title=title_of(name), part=html_of(name, "../"), lesson=part.lesson, told=TOLD
        )
        (folder / f"{name}.md").write_text(page, encoding="utf-8")


def title_of(name: str) -> str:
    """The title of a part's page."""
    return name.replace("_", " ").replace(" explorer", "").replace("explore ", "").capitalize()


def write_archive(root: Path, file: Path) -> None:
    """Write the modules that the parts import, and the data beside them, in one archive."""
    modules = sorted({where[0] for _, where in all_parts(root).values()})
    command = [sys.executable, "-S", "-c", LOADED.format(", ".join(modules))]  # -S: no packages
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    sources = {Path(name) for name in done.stdout.split()}
    folders = {path.parent for path in sources}
    data = {path for one in folders for path in one.rglob("*") if path.suffix in DATA}
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(sources | data):
            one = zipfile.ZipInfo(path.relative_to(root).as_posix())  # of no date: the same bytes
            archive.writestr(one, path.read_bytes(), zipfile.ZIP_DEFLATED)


def fetch_pyodide(cache: Path, folder: Path) -> str:
    """Put Pyodide's files in a folder; return why the pages of this build cannot compute, or ""."""
    package = cache / f"{PYODIDE.replace('@', '-')}.tgz"
    if not package.exists():
        if not shutil.which("npm"):
            return "This build of the site has no Python: it was built without npm."
        cache.mkdir(exist_ok=True)
        command = ["npm", "pack", PYODIDE, "--silent", "--pack-destination", str(cache)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            return "This build of the site has no Python: its npm package could not be fetched."
    digest = base64.b64encode(hashlib.sha512(package.read_bytes()).digest()).decode()
    if digest != SHA512:
        package.unlink()
        return f"This build of the site has no Python: {PYODIDE} is not the package that was tried."
    folder.mkdir()
    with tarfile.open(package) as archive:
        for name in FILES:
            content = archive.extractfile(f"package/{name}")
            if content is not None:
                (folder / name).write_bytes(content.read())
    return ""
