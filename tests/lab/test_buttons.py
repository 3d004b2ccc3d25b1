"""Check and Hand in, the course's buttons in the toolbar of a notebook."""

import json
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import nbformat
import pytest
from playwright.sync_api import Browser, Locator, expect

from .notebook import Notebook
from .server import BUTTONS, Lab, environment, started

ROOT = Path(__file__).resolve().parents[2]
SMALL, OTHER = "small.ipynb", "other.ipynb"
ODD = 'my notes/it\'s $(touch ran) "mine" -- `touch ran`.ipynb'
ANSWER = "def global_rank(n, l, p): return n * p + l"
COMMAND_TIMEOUT_MS = 120_000


def course_in(folder: Path) -> Path:
    """A course with a small notebook: one exercise of the first lesson, and not its other four.

    What a terminal of JupyterLab shows stands in the page, too, as for a screen reader.
    """
    shutil.copytree(ROOT / "notebooks", folder / "notebooks")
    notebook = nbformat.read(folder / "notebooks" / "00_ranks.ipynb", 4)
    notebook.cells = [cell for cell in notebook.cells if cell.id == "exercise-ranks-1"]
    for name in (SMALL, OTHER, ODD):
        path = folder / "notebooks" / name
        path.parent.mkdir(exist_ok=True)
        nbformat.write(notebook, path)
    settings = folder / "settings" / "@jupyterlab" / "terminal-extension"
    settings.mkdir(parents=True)
    readable = json.dumps({"screenReaderMode": True})
    (settings / "plugin.jupyterlab-settings").write_text(readable)
    return folder


@pytest.fixture(scope="module")
def lab(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """JupyterLab on a course of its own, as other tests look at their folder."""
    with started(course_in(tmp_path_factory.mktemp("buttons"))) as lab:
        yield lab


@pytest.fixture(autouse=True)
def no_terminal(request: pytest.FixtureRequest) -> Iterator[None]:
    """End the terminals of a test: a new window would show again what they said."""
    yield
    if "lab" in request.fixturenames:
        lab = request.getfixturevalue("lab")
        for terminal in lab.api("terminals"):
            lab.api(f"terminals/{terminal['name']}", "DELETE")


def button(notebook: Notebook, name: str) -> Locator:
    """A button, found by what a screen reader says."""
    toolbar = notebook.page.locator(".jp-NotebookPanel-toolbar:visible")
    return toolbar.get_by_role("button", name=name, exact=True)


def said(notebook: Notebook) -> Locator:
    """What a terminal shows."""
    return notebook.page.locator(".jp-Terminal .xterm-accessibility-tree")


def answer(notebook: Notebook) -> None:
    """Write the answer into the first cell, and save nothing."""
    notebook.cells().first.locator(".cm-content").click()
    notebook.page.keyboard.press("Control+A")
    notebook.page.keyboard.insert_text(ANSWER)


def sources(text: str) -> list[str]:
    """The cells of a saved notebook."""
    return [cell.source for cell in nbformat.reads(text, 4).cells]


def packed(folder: Path, stem: str) -> str:
    """What is in the one zip of a notebook that is to be handed in."""
    (path,) = (path for path in folder.iterdir() if path.suffix == ".zip")
    assert path.name.startswith(f"{stem}-")
    with zipfile.ZipFile(path) as file:
        return file.read(f"{stem}.ipynb").decode()


def test_check_saves_the_notebook_and_shows_the_verdicts_below_it(
    lab: Lab, open_notebook: Callable[[str], Notebook]
) -> None:
    notebook = open_notebook(SMALL)
    for hint in ("check its exercises (course check)", "make the file to hand in (course pack)"):
        expect(notebook.page.get_by_title(hint)).to_be_visible()
    notebook.screenshot("buttons")
    answer(notebook)
    button(notebook, "Check").dblclick()  # counts as one
    # it scrolls out of sight when the verdicts are there
    expect(said(notebook)).to_contain_text(f"course check {SMALL}", timeout=COMMAND_TIMEOUT_MS)
    expect(said(notebook)).to_contain_text("1 of 5 exercises", timeout=COMMAND_TIMEOUT_MS)
    expect(said(notebook)).to_contain_text(re.compile(r"ranks-1\s+right"))
    expect(notebook.cells().first).to_be_visible()
    notebook.page.keyboard.type("echo $((20 + 22)) comes after\n")
    expect(said(notebook)).to_contain_text("42 comes after", timeout=COMMAND_TIMEOUT_MS)
    assert said(notebook).inner_text().count("of 5 exercises") == 1
    assert [terminal["name"] for terminal in lab.api("terminals")] == ["course"]
    notebook.screenshot("check")
    notebook.page.locator(f".jp-DirListing-item[title*='{OTHER}']").dblclick()
    notebook.page.wait_for_timeout(2000)
    toolbar = notebook.page.locator(".jp-NotebookPanel-toolbar:visible")
    terminal = notebook.page.locator(".jp-Terminal").bounding_box()
    assert toolbar.count() == 1  # in place of the first notebook, not beside it
    assert toolbar.bounding_box()["y"] < 200 < terminal["y"]
    notebook.screenshot("check_then_open")


def test_hand_in_packs_what_is_on_the_screen_wherever_the_terminal_has_been(
    lab: Lab, open_notebook: Callable[[str], Notebook]
) -> None:
    notebook = open_notebook(OTHER)
    button(notebook, "Check").click()
    expect(said(notebook)).to_contain_text("of 5 exercises", timeout=COMMAND_TIMEOUT_MS)
    notebook.page.keyboard.type(f"cd {lab.notebooks.parent}\ntouch half-typed")
    expect(said(notebook)).to_contain_text("touch half-typed")
    answer(notebook)
    button(notebook, "Hand in").click()
    expect(said(notebook)).to_contain_text("is what you hand in", timeout=COMMAND_TIMEOUT_MS)
    notebook.screenshot("hand_in")
    assert sources(packed(lab.notebooks, "other")) == [ANSWER]
    assert not list(lab.notebooks.parent.rglob("half-typed*"))
    assert [terminal["name"] for terminal in lab.api("terminals")] == ["course"]


def test_the_name_of_a_notebook_is_never_run(
    lab: Lab, open_notebook: Callable[[str], Notebook]
) -> None:
    notebook = open_notebook(ODD)
    notebook.page.keyboard.press("Control+Shift+C")
    notebook.page.locator(".lm-CommandPalette-input:visible").fill("hand in")
    notebook.page.locator(".lm-CommandPalette-item[data-command='course:pack']").click()
    expect(said(notebook)).to_contain_text("is what you hand in", timeout=COMMAND_TIMEOUT_MS)
    packed(notebook.file.parent, notebook.file.stem)
    button(notebook, "Check").click()
    expect(said(notebook)).to_contain_text("0 of 5 exercises", timeout=COMMAND_TIMEOUT_MS)
    assert not list(lab.notebooks.rglob("ran"))


def test_without_terminals_a_dialog_tells_the_commands(
    browser: Browser, tmp_path: Path, screenshots: Path
) -> None:
    with started(course_in(tmp_path), "--ServerApp.terminals_enabled=False") as lab:
        context = browser.new_context()
        notebook = Notebook(context.new_page(), lab, SMALL, screenshots)
        answer(notebook)
        button(notebook, "Check").click()
        dialog = notebook.page.get_by_role("dialog")
        expect(dialog).to_contain_text("This JupyterLab has no terminals")
        lines = [f"cd {lab.notebooks}", f"course check {SMALL}", f"course pack {SMALL}"]
        assert dialog.locator("pre").inner_text().splitlines() == lines
        assert sources(notebook.file.read_text()) == [ANSWER]
        notebook.screenshot("no_terminals")
        context.close()
    assert notebook.errors == []


def test_jupyterlab_lists_the_buttons_as_enabled(tmp_path: Path) -> None:
    extensions = tmp_path / "data" / "labextensions"
    extensions.mkdir(parents=True)
    (extensions / "distributed-training-course").symlink_to(BUTTONS)
    done = subprocess.run(
        [sys.executable, "-m", "jupyter", "labextension", "list"],
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        check=True,
    )
    (line,) = [
        line
        for line in (done.stdout + done.stderr).splitlines()
        if "distributed-training-course" in line
    ]
    assert "enabled" in line
    assert "OK" in line
