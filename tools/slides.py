"""Build every deck slides/NN_idea.md to build/slides as HTML and PDF, with its pictures.

A deck's pictures are drawn, never stored: slides/NN_idea.py has a function `pictures()` that gives
{name: matplotlib figure}, and the deck shows them as ![what is seen](NN_idea/name.png).
"""

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from progress import run_showing

SLIDES = Path(__file__).resolve().parent.parent / "slides"
MARP = SLIDES / "node_modules" / ".bin" / "marp"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")


class SlidesError(Exception):
    """What keeps the slides from being built, as one sentence."""


def find_browser() -> str:
    """The chromium that prints the PDFs."""
    found = next(
        filter(None, map(shutil.which, [os.environ.get("CHROME_PATH", ""), *BROWSERS])), ""
    )
    if not found:
        raise SlidesError(
            "The slides need chromium. Install it (Debian and Ubuntu: apt install chromium) or "
            "name one: make slides CHROME_PATH=/path/to/chrome"
        )
    return found


def install_marp() -> None:
    """Install the slide builder that slides/package-lock.json names, if it is not there yet."""
    lock, installed = SLIDES / "package-lock.json", SLIDES / "node_modules/.package-lock.json"
    if installed.exists() and installed.stat().st_mtime >= lock.stat().st_mtime:
        return
    if not (shutil.which("node") and shutil.which("npm")):
        raise SlidesError("The slides need Node.js 18 or newer with npm: https://nodejs.org")
    os.environ["PUPPETEER_SKIP_DOWNLOAD"] = "1"  # the browser is chromium, not one of its own
    command = ["npm", "ci", "--no-fund", "--no-audit"]
    code, lines = run_showing(command, "installing the slide builder (about 15 s)", str(SLIDES))
    if code:
        raise SlidesError(f"npm could not install the slide builder: {(lines or ['?'])[-1]}")
    installed.touch()


def draw_pictures(deck: Path, folder: Path) -> None:
    """Draw what the deck's Python file offers, and see that the deck finds all it shows."""
    source = deck.with_suffix(".py")
    if source.exists():
        spec = importlib.util.spec_from_file_location(f"slides_{deck.stem}", source)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        target = folder / deck.stem
        target.mkdir(parents=True, exist_ok=True)
        for name, figure in module.pictures().items():
            figure.savefig(target / f"{name}.png", dpi=150)
    for alt, path in re.findall(r"!\[([^\]]*)\]\(([^)\s]+)", deck.read_text()):
        if not re.sub(r"\b(bg|fit|left|right|contain|[wh]:\S+)(\s|$)", "", alt).strip():
            raise SlidesError(f"{deck.name}: need alt text for the picture {path}")
        if not (folder / path).exists():
            raise SlidesError(f"{deck.name} shows {path}, but {source.name} does not draw it")


def build(decks: list[Path], folder: Path) -> None:
    """Build the decks as HTML and PDF in a folder, beside their pictures."""
    os.environ.setdefault("MPLBACKEND", "agg")
    browser = find_browser()
    install_marp()
    folder.mkdir(parents=True, exist_ok=True)
    for deck in decks:
        print(f"{deck.name}: pictures", flush=True)
        draw_pictures(deck, folder)
        shutil.copy(deck, folder)
    for kind in ([], ["--pdf", "--allow-local-files", "--browser-path", browser]):
        marp(folder, [*kind, "--", *(deck.name for deck in decks)])
    for deck in decks:
        (folder / deck.name).unlink()
        print(f"{folder / deck.stem}.html and .pdf", flush=True)


def marp(folder: Path, arguments: list[str]) -> None:
    """Run the slide builder; its own words are shown only if it fails."""
    command = [str(MARP), "--no-stdin", "--theme-set", str(SLIDES / "theme.css"), *arguments]
    done = subprocess.run(
        command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    if done.returncode:
        raise SlidesError(f"The slide builder failed:\n{done.stderr.strip()}")


def main() -> None:
    """Build all decks, or those that are named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("decks", nargs="*", type=Path, help="decks (all of slides/)")
    parser.add_argument("--out", type=Path, default=Path("build/slides"))
    options = parser.parse_args()
    try:
        build(options.decks or sorted(SLIDES.glob("[0-9]*.md")), options.out)
    except SlidesError as error:
        sys.exit(f"\n{error}\n")


if __name__ == "__main__":
    main()
