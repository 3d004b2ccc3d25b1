"""Build the course as a static site in build/site: lessons, docs, API, published tables, search.

Sphinx with MyST-NB, because it renders stored outputs without running anything and works without
a network (jupyter-book 2 fetches its theme, and 1.x pins an old Sphinx); Furo, because it needs no
web fonts and has dark and narrow layouts. The sources keep the repository's layout in a temporary
folder, so that links in README.md and docs/ work as they are.
"""

import argparse
import importlib.metadata
import os
import re
import shutil
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote

import site_api
import site_lessons
import site_live
import site_map
import site_repository
import site_tables
from progress import run_showing

ROOT = Path(__file__).resolve().parent.parent
THEME = ROOT / "tools" / "site_theme"
NEEDED = ("sphinx", "myst_nb", "furo", "sphinx-mathjax-offline")
LINK = re.compile(r"(?:\]\(|^\[[^\]]+\]: )<?([^)\s>#]+)", re.MULTILINE)
SECRET = "**For instructors only.**"  # what a page of docs/ says that has answers
WITHHELD = "---\norphan: true\n---\n{}\n\nThis page is in the instructors' site only.\n"
MENDED = {
    '<p class="caption" role="heading">': '<p class="caption" role="heading" aria-level="2">',
    '<aside class="sidebar-drawer">': '<aside class="sidebar-drawer" aria-label="The site">',
    '<aside class="toc-drawer': '<aside aria-label="This page" class="toc-drawer',
    '<th class="head"><p></p></th>': "<td></td>",  # the corner of a table is no header
    "<th></th>": "<td></td>",
}
# what the README says of the lessons, and what their website says instead
MAKES = ", and `make site` makes a website of them, in which the\nexplorers compute in the page"
SOLVED = "`notebooks/solved` has\nthe lessons with all their pictures"
BEGIN = "these pages are\nthe lessons with all their pictures. "
BEGIN += "[Begin with lesson 00](notebooks/00_ranks.ipynb)"
# the README's picture and its two commands; the front page has the commands first
FIRST = re.compile(r"(?P<picture>^!\[[^\]]+\]\([^)]+\))\n\n(?P<commands>```sh.*?```)", re.M | re.S)
WAYS = """<nav class="lesson-links" aria-label="Where to begin">
<a href="notebooks/00_ranks.html">I want to learn</a>
<a href="play/index.html">Let me play first</a>
<a href="docs/teaching.html">I teach</a>
<a href="docs/cluster_operator.html">I run a cluster</a>
</nav>
"""
GUIDES = {
    "On a cluster": ["cluster_student", "cluster_operator", "checkpoints", "engines", "planner"],
    "For instructors": ["teaching", "instructor", "grading_ta", "exam", "ai_policy", "authoring"],
}


class SiteError(Exception):
    """An obstacle to building the site, as one sentence."""


def check_tools() -> None:
    """Say at once which package is missing."""
    missing = [name for name in NEEDED if not find_spec(name)]
    if missing:
        raise SiteError(
            f"The site needs {' and '.join(missing)}. Try `make environment`, or "
            "`pip install -e '.[site]'`."
        )


def lessons_named(names: list[str]) -> list[str]:
    """The stems of the lessons whose numbers or names are given; all of them if none is."""
    stems = sorted(path.stem for path in (ROOT / "notebooks/solved").glob("[0-9]*.ipynb"))
    unknown = [name for name in names if not any(stem.startswith(name) for stem in stems)]
    if unknown:
        raise SiteError(f"No lesson is called {unknown[0]}. Expected a number up to {stems[-1]}.")
    return [stem for stem in stems if not names or any(map(stem.startswith, names))]


def empty_folder(out: Path) -> None:
    """Delete an earlier site, and nothing else: a page of an old build must not stay in a new."""
    if out.is_dir() and any(out.iterdir()):
        if not (out / "objects.inv").exists():
            raise SiteError(
                f"{out} has files and is not a site; nothing was deleted. Name another folder: "
                "--out build/site"
            )
        shutil.rmtree(out)


# -- the sources -------------------------------------------------------------------------------


def write_sources(source: Path, stems: list[str], audience: str, slides: Path) -> None:
    """Write all that Sphinx reads: pages in `source`, files to be copied in `source/extra`."""
    extra = source / "extra"
    (source / "static").mkdir(parents=True)
    for name in ("conf.py", "scorer.js"):
        shutil.copy(THEME / name, source)
    for name in ("course.css", "course.js", "favicon.svg"):
        shutil.copy(THEME / name, source / "static")
    shutil.copy(mathjax(), source / "static" / "mathjax.js")
    named = site_repository.repository(ROOT)
    write_docs(source / "docs", audience, named)
    packages = site_api.write_pages(ROOT, source / "api", stems)
    decks_of = {stem: copy_slides(stem, slides, extra / "slides") for stem in stems}
    (source / "slides.md").write_text(slides_page(decks_of), encoding="utf-8")
    parts = site_live.write_live(ROOT, source, stems)
    for stem, decks in decks_of.items():
        others = [*site_lessons.slide_links(decks), *site_repository.run_links(stem, named)]
        live = {n: site_live.html_of(n, "../") for n, one in parts.items() if one.lesson == stem}
        others += [(f"Play: {site_live.title_of(name)}", f"../play/{name}.html") for name in live]
        site_lessons.write_lesson(ROOT, stem, audience, source, others, packages, live)
    for stem in set(lessons_named([])) - set(stems):
        site_lessons.write_placeholder(stem, source)
    site_tables.write_pages(ROOT / "course_lib/cost/published", source)
    (source / "index.md").write_text(front_page(source), encoding="utf-8")
    for page in [source / "index.md", *source.glob("docs/*.md")]:
        follow_links(page, source)


def mathjax() -> Path:
    """The one file of MathJax, with its fonts inside, that a package of the environment brings."""
    files = importlib.metadata.files("sphinx-mathjax-offline") or []
    return Path(next(file for file in files if file.name == "tex-svg-full.js").locate())


def copy_slides(stem: str, built: Path, folder: Path) -> list[str]:
    """Copy the slide deck of a lesson if `make slides` has built it; return its files."""
    files = [f"{stem}.{kind}" for kind in site_lessons.DECK]
    decks = [file for file in files if (built / file).exists()]
    for deck in decks:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(built / deck, folder)
    if decks and (built / stem).is_dir():
        shutil.copytree(built / stem, folder / stem, dirs_exist_ok=True)
    return decks


def slides_page(decks_of: dict[str, list[str]]) -> str:
    """The page that lists the decks."""
    lines = ["# Slides", ""]
    if not any(decks_of.values()):
        lines.append("The slides are not part of this build. `make slides site` makes them first.")
    for stem, decks in decks_of.items():
        links = [
            f'<a href="{address.removeprefix("../")}">{name}</a>'
            for name, address in site_lessons.slide_links(decks)
        ]
        lines += [f"- [{stem}](notebooks/{stem}.ipynb): {'; '.join(links)}"] if links else []
    return "\n".join([*lines, ""])


def write_docs(folder: Path, audience: str, named: str | None) -> None:
    """Copy docs/; learners get a page without answers in the place of one that has them."""
    shutil.copytree(ROOT / "docs", folder)
    for page in folder.glob("*.md"):
        text = site_repository.name_repository(page.read_text(encoding="utf-8"), named)
        if SECRET in text and audience == "learners":
            text = WITHHELD.format(text.partition("\n")[0])
        page.write_text(text, encoding="utf-8")
    name_terms(folder / "glossary.md")


def name_terms(glossary: Path) -> None:
    """Give each term of the glossary an anchor: `#term-all-reduce`."""

    def named(found: re.Match[str]) -> str:
        anchor = re.sub(r"\W+", "-", found[1].lower()).strip("-")
        return f'- <span id="term-{anchor}"></span>**{found[1]}**'

    text = glossary.read_text(encoding="utf-8")
    text = re.sub(r"^- \*\*([^*]+)\*\*", named, text, flags=re.MULTILINE)
    glossary.write_text(text, encoding="utf-8")


def front_page(source: Path) -> str:
    """README.md, and the table of contents that stands at the side of every page."""
    orphan = WITHHELD.partition("{}")[0]
    docs = {page.stem: page.read_text(encoding="utf-8") for page in source.glob("docs/*.md")}
    shown = {name for name, text in docs.items() if not text.startswith(orphan)} - {"glossary"}
    guides = {title: [name for name in names if name in shown] for title, names in GUIDES.items()}
    guides["More"] = sorted(shown.difference(*GUIDES.values()))
    contents = {
        "Lessons": [f"notebooks/{stem}" for stem in lessons_named([])],
        "Play": ["play/index"],
        "Reference": ["docs/glossary", "slides", "api/index", "published/index"],
        **{title: [f"docs/{name}" for name in names] for title, names in guides.items() if names},
    }
    trees = [
        "\n".join(["```{toctree}", f":caption: {title}", ":hidden:", "", *pages, "```"])
        for title, pages in contents.items()
    ]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    readme = readme.replace("](notebooks/solved/", "](notebooks/")  # a page has both versions
    readme = readme.replace(MAKES, "").replace(SOLVED, BEGIN)
    readme = site_map.with_map(readme, lessons_named([]))
    first = [r"\g<commands>", WAYS, site_live.first_question(ROOT).replace("\\", r"\\"), ""]
    readme = FIRST.sub("\n\n".join(first) + r"\n\n\g<picture>", readme, count=1)
    return "\n\n".join([readme, *trees, ""])


def follow_links(page: Path, source: Path) -> None:
    """Copy each file of the course that a page links to and that is no page of the site.

    A link to a folder becomes its text, but for the slides, which have a page.
    """
    here = page.relative_to(source).parent
    text = page.read_text(encoding="utf-8")
    for link in set(LINK.findall(text)):
        name = Path(os.path.normpath(here / unquote(link)))
        if "://" in link or link.startswith("mailto:"):
            continue
        is_page = any((source / name).with_suffix(kind).exists() for kind in (".md", ".ipynb"))
        if name == Path("slides"):
            text = text.replace(f"]({link})", f"]({link}.md)")
        elif (ROOT / name).is_dir():
            text = re.sub(rf"\[([^\]]+)\]\({re.escape(link)}\)", r"\1", text)
        elif not is_page and (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, source / name)
            if name.suffix == ".md":  # a page that only links lead to
                text_of = (ROOT / name).read_text(encoding="utf-8")
                (source / name).write_text(f"---\norphan: true\n---\n\n{text_of}", encoding="utf-8")
    page.write_text(text, encoding="utf-8")


# -- the build ---------------------------------------------------------------------------------


def run_sphinx(source: Path, out: Path, audience: str, stems: list[str], jobs: str) -> None:
    """Build the pages; a warning is a failure, since it is a page that does not look right."""
    settings = [f"-Dhtml_title=Distributed training, taken apart ({audience})"]
    if audience == "learners":
        settings = []
    command = [sys.executable, "-m", "sphinx", "-b", "html", "-W", "--keep-going", "--no-color"]
    command += ["-q", "-j", jobs, "-d", str(source / "doctrees"), *settings, str(source), str(out)]
    code, lines = run_showing(command, f"{len(stems)} lessons and the other pages (about 1 min)")
    if code:
        said = [line.replace(f"{source}/", "") for line in lines if line.strip()]
        raise SiteError("Sphinx could not build the site:\n" + "\n".join(said[-20:]))


def mend(page: Path, out: Path, named: str | None) -> None:
    """Add to a finished page what the theme leaves out: for screen readers, and a share card."""
    text = page.read_text(encoding="utf-8")
    card = site_repository.share_card(text, page, out, named)
    text = text.replace("</title>", f"</title>\n{card}", 1)
    for old, new in MENDED.items():
        text = text.replace(old, new)
    page.write_text(text, encoding="utf-8")


def build(options: argparse.Namespace) -> None:
    """Build the site in a folder."""
    check_tools()
    stems = lessons_named(options.lessons)
    empty_folder(options.out)
    with tempfile.TemporaryDirectory(prefix="course-site-") as folder:
        source = Path(folder) / "source"
        write_sources(source, stems, options.audience, options.slides)
        run_sphinx(source, options.out, options.audience, stems, options.jobs)
    shutil.rmtree(options.out / "_sources", ignore_errors=True)
    named = site_repository.repository(ROOT)
    for page in options.out.rglob("*.html"):
        if page.parent.name != "slides":
            mend(page, options.out, named)
    size = sum(path.stat().st_size for path in options.out.rglob("*") if path.is_file())
    pages = len(list(options.out.rglob("*.html")))
    print(f"{options.out}/index.html: {pages} pages, {size / 1e6:.0f} MB, for {options.audience}")


def main() -> None:
    """Build the site of all lessons, or of those that are named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("lessons", nargs="*", help="lessons by their numbers (all)")
    parser.add_argument(
        "--for",
        dest="audience",
        choices=("learners", "instructors"),
        default="learners",
        help="instructors get the solutions, folded; learners get none (learners)",
    )
    parser.add_argument("--out", type=Path, default=Path("build/site"), help="(build/site)")
    parser.add_argument(
        "--slides", type=Path, default=Path("build/slides"), help="decks to link (build/slides)"
    )
    parser.add_argument("--jobs", default="auto", help="processes (one for each core)")
    try:
        build(parser.parse_args())
    except (SiteError, site_lessons.LessonError) as error:
        sys.exit(f"\n{error}\n")


if __name__ == "__main__":
    main()
