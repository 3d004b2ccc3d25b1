"""A Firefox of the system, driven by its own protocol, Marionette: no driver, no other package.

Source:  https://firefox-source-docs.mozilla.org/testing/marionette/Protocol.html
"""

import json
import shutil
import socket
import subprocess
import time
from base64 import b64decode
from pathlib import Path
from typing import Any

FIREFOX = shutil.which("firefox-esr") or shutil.which("firefox")
START_S = 120
PROMISED = """const [source, arg, done] = arguments;
Promise.resolve(eval(`(${source})`)(arg))
  .then((got) => done({ got }), (bad) => done({ bad: `${bad}` }));
"""


class Firefox:
    """One window of its own profile; `goto` and `evaluate` are those of Playwright's page."""

    def __init__(self, profile: Path, width: int = 1100, height: int = 900) -> None:
        profile.mkdir()
        prefs = {"marionette.port": 0, "ui.prefersReducedMotion": 1}
        lines = [f'user_pref("{name}", {value});' for name, value in prefs.items()]
        (profile / "user.js").write_text("\n".join(lines))
        command = [str(FIREFOX), "--headless", "--marionette", "--no-remote", "--profile"]
        self.process = subprocess.Popen(
            [*command, str(profile)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        told, until = profile / "MarionetteActivePort", time.monotonic() + START_S
        while not told.exists() or not told.read_text().strip():
            assert self.process.poll() is None, "Firefox has ended"
            assert time.monotonic() < until, f"no Firefox after {START_S} s"
            time.sleep(0.05)
        with socket.create_connection(("127.0.0.1", int(told.read_text()))) as connection:
            self.stream = connection.makefile("rwb")  # which keeps it open
        self._read()  # its greeting
        self.ask("NewSession")
        self.ask("SetTimeouts", script=600_000, pageLoad=120_000)
        self.ask("SetWindowRect", width=width, height=height)

    def ask(self, command: str, **parameters: Any) -> Any:
        """Send a command of WebDriver, and return its result."""
        message = json.dumps([0, 1, f"WebDriver:{command}", parameters]).encode()
        self.stream.write(b"%d:%b" % (len(message), message))
        self.stream.flush()
        _, _, problem, result = self._read()
        assert problem is None, problem
        return result.get("value", result)

    def _read(self) -> Any:
        length = b""
        while not length.endswith(b":"):
            length += self.stream.read(1)
        return json.loads(self.stream.read(int(length[:-1])))

    def goto(self, address: str) -> None:
        """Open a page."""
        self.ask("Navigate", url=address)

    def evaluate(self, function: str, arg: Any = None) -> Any:
        """Call a JavaScript function in the page; wait for what it promises."""
        args = [function, arg]
        answer = self.ask("ExecuteAsyncScript", script=PROMISED, args=args, sandbox=None)
        assert "bad" not in answer, answer["bad"]
        return answer.get("got")

    def screenshot(self, path: Path) -> None:
        """Write the whole page as a picture."""
        path.write_bytes(b64decode(self.ask("TakeScreenshot", full=True)))

    def close(self) -> None:
        """End this Firefox."""
        self.stream.close()
        self.process.terminate()
        self.process.wait(START_S)
