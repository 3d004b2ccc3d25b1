"""What tests of pages share: the commands in them, and a terminal to type them into."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent


def commands(text: str) -> list[str]:
    """The commands of all ```sh blocks, without their comments, each on one line."""
    blocks = re.findall(r"^```sh\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    lines = re.sub(r"\\\n\s*", "", "".join(blocks)).splitlines()
    return [line.partition(" #")[0].strip() for line in lines if line.strip()]


def settings(**extra: str) -> dict[str, str]:
    """The variables of a terminal where the environment is activated."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
    return kept | {"PATH": path, "VENV": sys.prefix, "COLUMNS": "200"} | extra


def run(command: str, folder: Path, code: int = 0, typed: str = "", **extra: str) -> str:
    """Run a line of shell; returns what it prints, and fails if its exit code is another one."""
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=settings(**extra),
        input=typed,
        capture_output=True,
        text=True,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


@contextmanager
def started(command: str, folder: Path, **extra: str) -> Iterator[subprocess.Popen[str]]:
    """A line of shell that runs on; it and all it started are gone afterwards."""
    process = subprocess.Popen(
        ["bash", "-c", command],
        cwd=folder,
        env=settings(**extra),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
        process.communicate(timeout=20)
