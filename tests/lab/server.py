"""JupyterLab as a learner starts it, on folders of its own: nobody's settings matter to it."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote
from urllib.request import ProxyHandler, Request, build_opener

import psutil

TOKEN = "lab-under-test"
BUTTONS = Path(__file__).resolve().parents[2] / "course_lib" / "workbooks" / "lab_extension"
START_TIMEOUT_S = 240.0
END_TIMEOUT_S = 60.0
_ANNOUNCEMENTS = "@jupyterlab/apputils-extension:announcements"


@dataclass(frozen=True, kw_only=True)
class Lab:
    """A running JupyterLab: where it answers, and the folder whose notebooks it opens."""

    url: str
    notebooks: Path
    process: psutil.Process

    def page(self, notebook: str) -> str:
        """The address that opens a notebook and no other tab."""
        return f"{self.url}lab/tree/{quote(notebook)}?reset&token={TOKEN}"

    def api(self, path: str, method: str = "GET") -> Any:
        """Ask the server itself."""
        request = Request(f"{self.url}api/{path}", method=method)
        request.add_header("Authorization", f"token {TOKEN}")
        with build_opener(ProxyHandler({})).open(request, timeout=30) as answer:
            return json.loads(answer.read() or "null")

    def end_kernels(self) -> None:
        """Shut all kernels down, at the same time, as each needs seconds."""
        with ThreadPoolExecutor() as threads:
            for kernel in self.api("kernels"):
                threads.submit(self.api, f"kernels/{kernel['id']}", "DELETE")


@contextmanager
def started(folder: Path, *options: str) -> Iterator[Lab]:
    """JupyterLab on `folder/notebooks`; afterwards nothing that it started is left."""
    log = folder / "lab.log"
    extensions = folder / "data" / "labextensions"
    extensions.mkdir(parents=True)
    (extensions / "distributed-training-course").symlink_to(BUTTONS)
    with log.open("w") as file:
        process = psutil.Popen(
            [*_command(folder), *options],
            cwd=folder / "notebooks",
            env=environment(folder),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    try:
        url = _url(folder / "runtime", process, log)
        yield Lab(url=url, notebooks=folder / "notebooks", process=process)
    finally:
        left = _end(process)
    assert not left, f"still there {END_TIMEOUT_S:.0f} s after JupyterLab was told to end: {left}"


def _command(folder: Path) -> list[str]:
    config = folder / "config" / "labconfig"
    config.mkdir(parents=True)
    no_news = {"disabledExtensions": {_ANNOUNCEMENTS: True}}  # they would ask jupyter.org
    (config / "page_config.json").write_text(json.dumps(no_news))
    return [
        *(sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root"),
        *("--ServerApp.ip=127.0.0.1", "--ServerApp.port=0", f"--IdentityProvider.token={TOKEN}"),
        *(f"--ServerApp.root_dir={folder / 'notebooks'}", "--LabApp.extension_manager=readonly"),
        *(f"--LabApp.user_settings_dir={folder / 'settings'}",),
        *(f"--LabApp.workspaces_dir={folder / 'workspaces'}",),
    ]


def environment(folder: Path) -> dict[str, str]:
    """Ours, without what would make Jupyter, pytest or the course behave in another way."""
    ours = ("JUPYTER", "PYTEST", "IPYTHON", "COURSE")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    places = {
        "JUPYTER_CONFIG_DIR": folder / "config",
        "JUPYTER_DATA_DIR": folder / "data",
        "JUPYTER_RUNTIME_DIR": folder / "runtime",
        "IPYTHONDIR": folder / "ipython",
    }
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    own = {"PATH": path, "SHELL": "/bin/bash"}  # sh has no line editor: a terminal shows less
    own["JUPYTER_PREFER_ENV_PATH"] = "0"  # this folder's extension, not the environment's
    return kept | {name: str(place) for name, place in places.items()} | own


def _url(runtime: Path, process: psutil.Popen, log: Path) -> str:
    """Where it answers: it picks a free port itself and writes it down."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        for file in runtime.glob("jpserver-*.json"):
            if text := file.read_text():
                return json.loads(text)["url"]
        time.sleep(0.1)
    raise RuntimeError(
        f"JupyterLab did not start within {START_TIMEOUT_S:.0f} s:\n{log.read_text()}"
    )


def _end(process: psutil.Popen) -> list[psutil.Process]:
    """End the server politely; what is left of it and of its kernels is killed and returned."""
    family = [process, *process.children(recursive=True)] if process.is_running() else []
    process.terminate()
    _, left = psutil.wait_procs(family, timeout=END_TIMEOUT_S)
    for member in left:
        member.kill()
    return left
