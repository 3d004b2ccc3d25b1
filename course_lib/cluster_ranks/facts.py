"""What has to be the same on the notebook's machine and on a node: Python, PyTorch, the course."""

import hashlib
import platform
import socket
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from course_lib.core.errors import MachineError

PACKAGES = ("torch", "cloudpickle", "numpy")
SHARED = ("core", "ranks", "cluster_ranks")  # packages whose values travel


def own_facts() -> dict[str, str]:
    """Return the versions of this machine, and its name; nothing large is imported for them."""
    python = ".".join(platform.python_version_tuple()[:2])
    return {
        "node": socket.gethostname(),
        "Python": python,
        **{name: _version(name) for name in PACKAGES},
        "course": _course_version(),
    }


def check_facts(nodes: Iterable[dict[str, str]]) -> None:
    """Compare the nodes' versions with this machine's.

    Raises: MachineError with what differs on which node
    """
    ours = own_facts()
    for theirs in nodes:
        differ = [name for name in ours if name != "node" and theirs.get(name) != ours[name]]
        if differ:
            need = ", ".join(f"{name} {ours[name]}" for name in differ)
            got = ", ".join(f"{name} {theirs.get(name, 'none')}" for name in differ)
            raise MachineError(
                f"Ranks, node {theirs.get('node')}: need {need}, as in this notebook; got {got}. "
                "Try the same environment on both: modules and environment in the profile, or one "
                "shared folder."
            )


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def _course_version() -> str:
    made, top = hashlib.sha256(), Path(__file__).parents[1]
    for package in SHARED:
        for path in sorted((top / package).rglob("*.py")):
            made.update(path.read_bytes())
    return made.hexdigest()[:12]
