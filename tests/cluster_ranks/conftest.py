"""What these tests share: ranks on two hosts that are this machine, behind a command like ssh."""

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from course_lib.ranks import Ranks

SHIM = '#!/bin/sh\nshift\nexec sh -c "$*"\n'  # ssh HOST WORDS, here
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def shim(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("ssh") / "ssh"
    path.write_text(SHIM)
    path.chmod(0o755)
    return str(path)


@pytest.fixture(scope="session")
def servers() -> Callable[[], set[int]]:
    """The processes of node servers, their ranks among them: but those of others' tests."""

    def find() -> set[int]:
        found = set()
        for process in psutil.process_iter(["cmdline", "environ", "status"]):
            words = " ".join(process.info["cmdline"] or ())
            mark = (process.info["environ"] or {}).get("COURSE_TEST_MARK")
            if "node_server" in words and mark == str(os.getpid()):
                found |= {process.pid} if process.info["status"] != "zombie" else set()
        return found

    return find


@pytest.fixture(scope="module")
def two_hosts(shim: str) -> Iterator[Ranks]:
    """Four ranks on two hosts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COURSE_SSH", shim)
        patch.setenv("COURSE_TEST_MARK", str(os.getpid()))
        with Ranks(4, cluster="ssh", hosts=["localhost", "localhost"]) as ranks:
            yield ranks


@pytest.fixture
def kernel(
    shim: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], list[str]]:
    """The command of a program that has ranks, says so, and waits to be killed."""

    def command(made: str) -> list[str]:
        program = tmp_path / "kernel.py"
        program.write_text(
            "import time\nfrom course_lib.ranks import Ranks\n"
            f"ranks = Ranks(4, {made})\n"
            "ranks.run(lambda rank: None)\nprint('ready', flush=True)\n"
            "ranks.run(lambda rank: time.sleep(1000))\n"
        )
        monkeypatch.setenv("PYTHONPATH", str(ROOT))
        return [sys.executable, str(program)]

    return command
