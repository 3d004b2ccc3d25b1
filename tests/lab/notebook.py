"""A notebook in the browser, and what a learner does with it."""

import re
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import nbformat
from nbformat import NotebookNode
from playwright.sync_api import ConsoleMessage, Locator, Page, Request

from .server import Lab

OPEN_TIMEOUT_MS, TIMEOUT_MS = 240_000, 120_000
IDLE_S = 1.5  # longer than the pause between two cells
OVERLAP_PX = 80  # what a screenshot shows again of the one above it
_STATUS = ".jp-Notebook-ExecutionIndicator"
_PROMPTS = "[...document.querySelectorAll('.jp-CodeCell .jp-InputPrompt')].map(p => p.textContent)"
_FURTHER = """(window, overlap) => {
    const end = [...window.querySelectorAll(".jp-Cell")].at(-1).getBoundingClientRect().bottom;
    const below = end - window.getBoundingClientRect().bottom;
    return window.scrollTop + Math.max(0, Math.min(below + 20, window.clientHeight - overlap));
}"""
_CUT_OFF = """outputs => outputs.flatMap(output => [output, ...output.querySelectorAll('*')])
    .filter(part => part.scrollWidth > part.clientWidth + 1)
    .filter(part => part.clientWidth > 1)  // not what is for a screen reader alone
    .filter(part => !['visible', 'clip'].includes(getComputedStyle(part).overflowX))
    .map(part => part.innerText.slice(0, 80) || part.outerHTML.slice(0, 80))"""


class Notebook:
    """One notebook, opened in a page; `errors` and `outside` are what should not have happened."""

    def __init__(self, page: Page, lab: Lab, name: str, screenshots: Path) -> None:
        self.page, self.file = page, lab.notebooks / name
        self.errors: list[str] = []
        self.outside: list[str] = []
        self._lab, self._screenshots = lab, screenshots
        page.on("console", self._hear)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("request", self._see)
        page.set_default_timeout(TIMEOUT_MS)
        page.goto(lab.page(name), timeout=OPEN_TIMEOUT_MS)
        self._wait_for_kernel()

    # -- what a learner does ----------------------------------------------------------------

    def run_all(self, timeout_s: float = 60.0) -> float:
        """Choose Run All Cells; return the seconds until no cell waits or runs any more."""
        begin, before = time.monotonic(), self.page.evaluate(_PROMPTS)
        self.page.locator(".lm-MenuBar-item", has_text=re.compile("^Run$")).click()
        self.page.locator(".lm-Menu-item", has_text=re.compile("^Run All Cells$")).click()
        self.page.wait_for_function(f"before => {_PROMPTS}.join() != before.join()", arg=before)
        self.wait_until_done(timeout_s)
        return time.monotonic() - begin

    def write_cell(self, text: str) -> Locator:
        """Write a cell below all others and run it."""
        number = self.cells().count()
        self.page.locator(".jp-Notebook-footer").click()
        cell = self.cells().nth(number)
        cell.wait_for()
        self.page.keyboard.press("Enter")
        cell.locator(".cm-editor.cm-focused").wait_for()
        self.page.keyboard.insert_text(text)
        self.page.keyboard.press("Control+Enter")
        return cell

    def stop(self) -> None:
        """Press the stop button."""
        self.page.locator("[data-command='notebook:interrupt-kernel']").first.click()

    def save(self) -> NotebookNode:
        """Save the notebook; return what is in the file."""
        with self.page.expect_response(lambda answer: answer.request.method == "PUT"):
            self.page.locator(".jp-NotebookPanel-toolbar [data-jp-item-name='save']").click()
        return nbformat.read(self.file, 4)

    # -- what a learner sees ----------------------------------------------------------------

    def cells(self) -> Locator:
        """All cells."""
        return self.page.locator(".jp-Notebook .jp-Cell")

    def prompts(self) -> list[str]:
        """`1` for a cell that ran first, `*` for one that runs or waits, nothing for the others."""
        return [prompt.strip("[]: ") for prompt in self.page.evaluate(_PROMPTS)]

    def wait_until_done(self, timeout_s: float = 20.0) -> None:
        """Wait until every cell has run, or the kernel has been idle for a while.

        Prompts are not enough: once a cell has raised, waiting cells look like idle ones.
        """
        deadline = time.monotonic() + timeout_s
        idle_since = time.monotonic()
        while not all(prompt.isdigit() for prompt in self.prompts()):
            now = time.monotonic()
            idle_since = idle_since if self._seems_idle() else now
            if now - idle_since > IDLE_S:
                return
            if now > deadline:
                raise TimeoutError(f"{self.file.name}: still {self.prompts()} at {timeout_s} s")
            self.page.wait_for_timeout(100)

    def cut_off(self) -> list[str]:
        """The beginnings of outputs in this window that are wider than their place.

        JupyterLab lays out what can be seen, and nothing else.
        """
        return self.page.locator(".jp-OutputArea-output").evaluate_all(_CUT_OFF)

    def screenshot(self, name: str) -> None:
        """Keep what the window shows."""
        self.page.screenshot(path=self._screenshots / f"{name}.png")

    def windows(self) -> Iterator[int]:
        """Scroll from the top to the last cell; yield 1, 2, ... at each window."""
        window = self.page.locator(".jp-WindowedPanel-outer").first
        at, further, number = -1.0, 0.0, 0
        while further >= at + 1:
            at, number = further, number + 1
            window.evaluate("(window, at) => window.scrollTo(0, at)", at)
            self.page.wait_for_timeout(100)
            yield number
            further = window.evaluate(_FURTHER, OVERLAP_PX)

    # -- what is watched meanwhile ----------------------------------------------------------

    def _wait_for_kernel(self) -> None:
        """Wait until this notebook has a kernel, and both sides know that it is idle."""
        deadline = time.monotonic() + OPEN_TIMEOUT_MS / 1000
        while not any(self._idle(session) for session in self._lab.api("sessions")):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.file.name}: its kernel did not start")
            self.page.wait_for_timeout(100)
        self.page.wait_for_selector(f"{_STATUS}[data-status='idle']")

    def _seems_idle(self) -> bool:
        shown = self.page.locator(_STATUS).first.get_attribute("data-status")
        return shown == "idle" and "*" not in self.prompts()

    def _idle(self, session: dict) -> bool:
        kernel = session["kernel"]
        mine = session["path"] == str(self.file.relative_to(self._lab.notebooks))
        return mine and kernel["connections"] > 0 and kernel["execution_state"] == "idle"

    def _hear(self, message: ConsoleMessage) -> None:
        """Keep an error; not that another window's widget is unknown here: they share a kernel."""
        if message.type == "error" and not message.text.startswith("Comm not found for comm id"):
            self.errors.append(f"{message.text} ({message.location.get('url', '')})")

    def _see(self, request: Request) -> None:
        address = urlsplit(request.url)
        if address.scheme not in ("data", "blob") and address.hostname != "127.0.0.1":
            self.outside.append(request.url)
