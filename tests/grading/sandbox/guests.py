"""Sandboxes as tests see them, started by a grader that is root or a plain user."""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

from course_tools.grading.bubblewrap import may_use_uids

ROOT = Path(__file__).resolve().parents[3]
NOBODY = 65534
AS_NOBODY = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]


@dataclass
class Guest:
    """What a grader that is root or a plain user runs, in bubblewrap or trusted without it."""

    folder: Path
    root: bool
    trusts: bool

    @property
    def python(self) -> str:
        """A Python that the guest can reach: another uid may not read the one of these tests."""
        return sys.executable if self.root or not may_use_uids() else "/usr/bin/python3"

    def start(self, *command: str, limits=None, env=None, read_only=None) -> subprocess.Popen:
        request = {
            "trusts": self.trusts,
            "folder": str(self.folder),
            "command": command,
            "limits": {"wall_s": 300, **(limits or {})},
            "env": {"OUT": "/out", **(env or {})},
            "read_only": read_only or {},
        }
        change = AS_NOBODY if may_use_uids() and not self.root else []
        return subprocess.Popen(
            [
                *change,
                self.python,
                "-B",
                str(ROOT / "tests/grading/sandbox/run_one.py"),
                json.dumps(request),
            ],
            env={**os.environ, "PYTHONPATH": str(ROOT), "A_SECRET": "token"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *command: str, **settings) -> SimpleNamespace:
        told, problem = self.start(*command, **settings).communicate()
        assert told, problem
        return SimpleNamespace(**json.loads(told))

    def act(self, code: str, *words: str, **settings) -> SimpleNamespace:
        """Run Python code in the sandbox, with these words as sys.argv[1:]."""
        return self.run(self.python, "-c", code, *words, **settings)


def leftovers() -> set[Path]:
    return set(Path(tempfile.gettempdir()).glob("sandbox-*"))


def running(mark: str) -> list[str]:
    """The processes of this machine with a word in their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if mark.encode() in words:
            found.append(path.parent.name)
    return found
