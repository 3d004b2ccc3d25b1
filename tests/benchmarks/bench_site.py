"""Seconds from a click to the first live picture: `python -m tests.benchmarks.bench_site [folder]`.

It needs the built site (`make site`). Each turn opens a page in a new window, which has nothing in
its cache; the least disturbed turn counts. The weight is what that first touch loads.
"""

import sys
import time
from functools import partial
from http.server import ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread

from playwright.sync_api import Browser, sync_playwright

from tests.browser import FLAGS
from tests.firefox import FIREFOX, Firefox
from tests.site.test_live import PRESS, Server

TURNS = 5


def chromium_s(browser: Browser, address: str) -> float:
    """Return the seconds of one turn in Chromium."""
    page = browser.new_page()
    page.goto(address)
    begin = time.monotonic()
    page.evaluate(PRESS, ["rank 0", "F0"])
    seconds = time.monotonic() - begin
    page.close()
    return seconds


def firefox_s(address: str) -> float:
    """Return the seconds of one turn in a Firefox of its own."""
    with TemporaryDirectory() as folder:
        window = Firefox(Path(folder) / "profile")
        window.goto(address)
        begin = time.monotonic()
        window.evaluate(PRESS, ["rank 0", "F0"])
        seconds = time.monotonic() - begin
        window.close()
    return seconds


def main(folder: Path) -> None:
    """Print the times of both browsers, and the weight."""
    weight = sum(path.stat().st_size for path in (folder / "live").rglob("*") if path.is_file())
    print(f"{weight / 1e6:.1f} MB at the first touch")
    with (
        ThreadingHTTPServer(("127.0.0.1", 0), partial(Server, directory=folder)) as server,
        sync_playwright() as playwright,
    ):
        Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/play/schedule_by_hand.html"
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=[*FLAGS])
        turns = {"Chromium": [chromium_s(browser, address) for _ in range(TURNS)]}
        browser.close()
        if FIREFOX:
            turns["Firefox"] = [firefox_s(address) for _ in range(TURNS)]
        server.shutdown()
    for name, seconds in turns.items():
        print(f"{name}: {min(seconds):.2f} s least, {sorted(seconds)[TURNS // 2]:.2f} s median")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "build/site"))
