"""Build every deck slides/NN_idea.md to build/slides: HTML, PDF, and a handout to be printed.

A deck's pictures are drawn, never stored: slides/NN_idea.py has a function `pictures()` that gives
{name: matplotlib figure}, and the deck shows them as ![what is seen](NN_idea/name.png).

A process on each core draws while Marp writes the HTML of all decks, in one run, and one chromium
prints what is ready.
"""

import argparse
import importlib.util
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from matplotlib.figure import Figure
from playwright.sync_api import Page, sync_playwright
from progress import run_showing

SLIDES = Path(__file__).resolve().parent.parent / "slides"
MARP = SLIDES / "node_modules" / ".bin" / "marp"
FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-background-networking")
FRAMES = """() => new Promise(done => {  // Marp takes a few to fit long lines of code
  let left = 5;
  const frame = () => left-- ? requestAnimationFrame(frame) : done();
  frame();
})"""
TOO_FULL = """() => [...document.querySelectorAll("section")]
  .filter(slide => slide.scrollHeight > slide.clientHeight + 1)
  .map(slide => slide.querySelector("h1, h2")?.innerText ?? slide.innerText.slice(0, 60))"""
FOOTER = """<p style="font: 8px sans-serif; margin: 0 10mm; width: 100%; text-align: right">
<span class="title"></span>, page <span class="pageNumber"></span></p>"""
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


def flatten(figure: Figure) -> None:
    """Make a tall picture of curves flatter, like a slide, which then shows it with larger letters.

    Boxes with labels, as of a timeline, are laid out for the size that they have.
    """
    width, height = figure.get_size_inches()
    curves = [[len(line.get_xdata()) > 2 for line in axes.lines] for axes in figure.axes]
    if all(map(any, curves)):
        figure.set_size_inches(width, max(0.82 * height, min(height, 0.45 * width)))


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
            if isinstance(figure, Figure):
                flatten(figure)
            figure.savefig(target / f"{name}.png", dpi=150)
    for alt, path in re.findall(r"!\[([^\]]*)\]\(([^)\s]+)", deck.read_text()):
        if not re.sub(r"\b(bg|fit|left|right|contain|[wh]:\S+)(\s|$)", "", alt).strip():
            raise SlidesError(f"{deck.name}: need alt text for the picture {path}")
        if not (folder / path).exists():
            raise SlidesError(f"{deck.name} shows {path}, but {source.name} does not draw it")


def build(decks: list[Path], folder: Path) -> None:
    """Build the decks in a folder, beside their pictures."""
    browser = find_browser()
    install_marp()
    folder.mkdir(parents=True, exist_ok=True)
    for deck in decks:
        shutil.copy(deck, folder)
    fresh = multiprocessing.get_context("spawn")  # a fork would keep the browser's pipes open
    artists = ProcessPoolExecutor(min(len(decks), os.cpu_count() or 1), fresh)
    drawings = [artists.submit(draw_pictures, deck, folder) for deck in decks]
    try:
        write_pages(decks, folder)
        with sync_playwright() as playwright:
            chromium = playwright.chromium.launch(executable_path=browser, args=FLAGS)
            page = chromium.new_page()  # one for all decks: a new one takes longer than to print
            for deck, drawing in zip(decks, drawings, strict=True):
                drawing.result()
                print_deck(page, folder / deck.stem)
            chromium.close()
    finally:
        artists.shutdown(cancel_futures=True)
    for deck in decks:
        (folder / deck.name).unlink()


def write_pages(decks: list[Path], folder: Path) -> None:
    """Run the slide builder, which writes HTML; its own words are shown only if it fails."""
    command = [str(MARP), "--no-stdin", "--config-file", str(SLIDES / "package.json"), "--"]
    command += [deck.name for deck in decks]
    done = subprocess.run(
        command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    if done.returncode:
        raise SlidesError(f"The slide builder failed:\n{done.stderr.strip()}")


def print_deck(page: Page, deck: Path) -> None:
    """Print a deck, and then its handout, from its HTML; a slide that is cut off is an error."""
    page.emulate_media(media="print")  # lays out all slides, not only the first
    page.goto(deck.with_suffix(".html").resolve().as_uri())
    page.evaluate(FRAMES)
    if cut := page.evaluate(TOO_FULL):
        raise SlidesError(
            f"{deck.name}: the text has to fit on its slide, and this one is too full: {cut[0]!r}. "
            "Shorten it, or put <!-- _class: small --> above its title."
        )
    printed = {"prefer_css_page_size": True, "print_background": True, "tagged": True}
    page.pdf(path=deck.with_suffix(".pdf"), outline=True, **printed)
    page.add_style_tag(path=SLIDES / "handout.css")
    footer = {"display_header_footer": True, "header_template": "<p></p>"}
    handout = deck.with_suffix(".handout.pdf")
    page.pdf(path=handout, footer_template=FOOTER, **footer, **printed)
    print(f"{deck}.html, .pdf and .handout.pdf", flush=True)


def main() -> None:
    """Build all decks, or those that are named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("decks", nargs="*", type=Path, help="decks (all of slides/)")
    parser.add_argument("--out", type=Path, default=Path("build/slides"))
    options = parser.parse_args()
    os.environ.setdefault("MPLBACKEND", "agg")
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # each core has a process of its own
    try:
        build(options.decks or sorted(SLIDES.glob("[0-9]*.md")), options.out)
    except SlidesError as error:
        sys.exit(f"\n{error}\n")


if __name__ == "__main__":
    main()
