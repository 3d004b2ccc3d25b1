"""A deck becomes HTML that needs no network, a PDF and a handout, with pictures drawn for it."""

import contextlib
import re
import shutil
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

DECK = """---
marp: true
theme: course
math: mathjax
lang: en
---

# A ring moves $2(p-1)/p$ of the data

---

# The line rises

![The line rises from 0 to 3](99_toy/line.png)
"""
PICTURES = """
from matplotlib.figure import Figure

def pictures():
    figure = Figure()
    figure.subplots().plot([0, 1, 2, 3])
    return {"line": figure}
"""


ROOT = Path(__file__).resolve().parents[2]
DECKS = sorted((ROOT / "slides").glob("[0-9]*.md"))


@pytest.fixture
def slides(monkeypatch):
    """tools/slides.py as a module."""
    monkeypatch.syspath_prepend(ROOT / "tools")
    import slides

    return slides


@pytest.fixture
def deck(tmp_path) -> Path:
    (tmp_path / "99_toy.py").write_text(PICTURES)
    path = tmp_path / "99_toy.md"
    path.write_text(DECK)
    return path


def pdf_objects(path: Path) -> bytes:
    """The objects of a PDF, as they are and unpacked."""
    unpacked = [path.read_bytes()]
    streams = re.findall(rb"stream\r?\n(.*?)endstream", unpacked[0], re.DOTALL)
    for stream in streams:
        with contextlib.suppress(zlib.error):
            unpacked.append(zlib.decompressobj().decompress(stream))
    return b"\n".join(unpacked)


def build(slides, deck: Path, out: Path) -> subprocess.CompletedProcess[str]:
    """Run tools/slides.py on one deck; skip the test where a tool or the registry is missing."""
    for tool in ("node", "npm", "chromium"):
        if not shutil.which(tool):
            pytest.skip(f"{tool} is missing, which only the slides need")
    command = [sys.executable, slides.__file__, str(deck), "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True)
    if "npm could not install" in done.stderr:
        pytest.skip("the slide builder could not be installed from the npm registry")
    return done


def test_a_deck_becomes_html_and_pdf(slides, deck, tmp_path):
    out = tmp_path / "out"
    done = build(slides, deck, out)
    assert done.returncode == 0, done.stderr
    html = (out / "99_toy.html").read_text()
    assert '<html lang="en"' in html
    assert 'alt="The line rises from 0 to 3"' in html
    assert re.findall(r"<(?:script|link|img)[^>]+(?:src|href)=\"https?:", html) == []
    assert (out / "99_toy/line.png").read_bytes().startswith(b"\x89PNG")
    objects = pdf_objects(out / "99_toy.pdf")
    assert len(re.findall(rb"/Type\s*/Page\b", objects)) == 2
    assert len(re.findall(rb"/S\s*/Figure", objects)) >= 1
    handout = pdf_objects(out / "99_toy.handout.pdf")
    assert len(re.findall(rb"/Type\s*/Page\b", handout)) == 1  # both slides, of up to four


def test_a_deck_with_a_slide_that_is_cut_off_is_named(slides, deck, tmp_path):
    deck.write_text(DECK.replace("# A ring moves", "- one line\n" * 20 + "\n# A ring moves"))
    done = build(slides, deck, tmp_path / "out")
    assert done.returncode != 0
    assert "99_toy: the text has to fit on its slide, and this one is too full: 'A ring moves" in (
        done.stderr
    )
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("path", DECKS, ids=lambda path: path.stem)
def test_each_slide_has_notes_that_fit_the_lesson(path):
    _, _, *shown = re.split(r"^---\n", path.read_text(), flags=re.MULTILINE)
    notes = [re.search(r"^<!--\n(\d) min\. (.*?)-->", one, re.M | re.S) for one in shown]
    silent = [number for number, note in enumerate(notes, start=1) if not note]
    assert silent == [], "slides without notes that begin with minutes: <!--\\n2 min. Ask ..."
    assert 25 <= sum(int(note[1]) for note in notes) <= 60  # docs/teaching.md plans with that
    lesson = (ROOT / "notebooks/source" / f"{path.stem}.py").read_text()
    headings = "\n".join(re.findall(r"^# #+ (.*)", lesson, re.MULTILINE))
    said = " ".join(" ".join(note[2] for note in notes).split())
    wanted = re.findall(r'Show (?:the \w+ of )?"([^"]+)"', said)
    assert [section for section in wanted if section not in headings] == []


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        ("99_toy/line.png", "99_toy/other.png", "99_toy.py does not draw it"),
        ("The line rises from 0 to 3", "", "need alt text"),
        ("![The line rises from 0 to 3]", "![w:700 bg right]", "need alt text"),
    ],
)
def test_a_picture_that_is_missing_or_silent_is_named(slides, deck, tmp_path, before, after, says):
    slides.draw_pictures(deck, tmp_path / "out")
    deck.write_text(DECK.replace(before, after))
    with pytest.raises(slides.SlidesError, match=says):
        slides.draw_pictures(deck, tmp_path / "out")


def test_missing_chromium_or_node_is_one_sentence(slides, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CHROME_PATH", raising=False)
    with pytest.raises(slides.SlidesError, match=r"need chromium\. Install it"):
        slides.find_browser()
    monkeypatch.setattr(slides, "SLIDES", tmp_path)
    with pytest.raises(slides.SlidesError, match=r"need Node\.js"):
        slides.install_marp()
