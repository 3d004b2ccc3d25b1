"""The site, built once for each audience."""

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import cached_property
from html.parser import HTMLParser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
REPOSITORY = "somebody/their-course"


class PageReader(HTMLParser):
    """What a page has: anchors, links, what it loads, pictures, and its text."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.pictures: list[dict[str, str | None]] = []
        self.words: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        got = dict(attrs)
        self.ids |= {got[name] for name in ("id", "name") if got.get(name)}
        if tag == "a" and got.get("href"):
            self.links.append(got["href"])
        elif tag == "link" and "stylesheet" in (got.get("rel") or ""):
            self.loads.append(got["href"])
        elif tag == "img":
            self.pictures.append(got)
        self.loads += [got[name] for name in ("src", "srcset", "poster", "data") if got.get(name)]

    def handle_data(self, data: str) -> None:
        self.words.append(data)


@dataclass(frozen=True)
class Site:
    """A built site: for whom, its folder, what the builder said, and how long it took."""

    audience: str
    folder: Path
    said: str
    seconds: float

    @cached_property
    def pages(self) -> dict[str, PageReader]:
        """Every page by its path below the folder."""
        found = {}
        for path in sorted(self.folder.rglob("*.html")):
            name = str(path.relative_to(self.folder))
            if not name.startswith("slides/"):  # made by another builder
                found[name] = PageReader()
                found[name].feed(path.read_text(encoding="utf-8"))
        return found

    @cached_property
    def text(self) -> str:
        """The text of all pages, without its white space."""
        return "".join("".join("".join(page.words).split()) for page in self.pages.values())


def run_builder(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run tools/build_site.py as make does, for a course that somebody has on GitHub."""
    command = [sys.executable, str(ROOT / "tools/build_site.py"), *map(str, arguments)]
    env = os.environ | {"GITHUB_REPOSITORY": REPOSITORY}
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=env)


def built(folder: Path, audience: str) -> Site:
    """Build the whole site for an audience."""
    begin = time.monotonic()
    done = run_builder("--for", audience, "--out", folder, "--jobs", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    return Site(audience, folder, done.stdout, time.monotonic() - begin)


@pytest.fixture(scope="session")
def learners(tmp_path_factory: pytest.TempPathFactory) -> Site:
    """The site for learners."""
    return built(tmp_path_factory.mktemp("site") / "learners", "learners")


@pytest.fixture(scope="session")
def instructors(tmp_path_factory: pytest.TempPathFactory) -> Site:
    """The site for instructors."""
    return built(tmp_path_factory.mktemp("site") / "instructors", "instructors")
