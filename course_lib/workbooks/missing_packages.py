"""Install what the course lacks beside packages that have to stay, as on Colab.

`python -m course_lib.workbooks.missing_packages`: nothing that is installed is replaced, torch and
ipykernel least of all: the kernel that runs has them loaded. Standard library only.
"""

import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import distributions, requires
from pathlib import Path

COURSE = "distributed-training-course"
STAY = ("torch", "ipykernel")
NOT_NEEDED = ("jupyterlab", "jupytext", "deepspeed", "accelerate", "transformers")
NOT_THERE = (
    "What does not work here: the buttons Check and Hand in (type !course check 00), DeepSpeed and "
    "Accelerate, Slurm; 2 cores mean that ranks take turns; what you write is gone with the "
    "machine unless you save a copy."
)


def installed() -> dict[str, str]:
    """Return the version of every installed package, by its name in lower case."""
    found: dict[str, str] = {}
    for one in distributions():  # in the order of sys.path: the first is the one that is imported
        if one.metadata["Name"]:
            found.setdefault(plain(one.metadata["Name"]), one.version)
    return found


def plain(name: str) -> str:
    """Return a package's name as registries compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def missing(needed: Sequence[str], have: Mapping[str, str]) -> list[str]:
    """Return which requirements name a package that is not there, and that the lessons need here.

    `needed` are lines as a wheel lists them: `numpy<3,>=2.1`, `ruff>=0.14; extra == "dev"`.
    """
    found = []
    for line in needed:
        requirement, _, marker = line.partition(";")
        name = plain(re.split(r"[\s<>=!~\[(]", requirement.strip(), maxsplit=1)[0])
        if "extra" not in marker and name not in (*STAY, *NOT_NEEDED, *have):
            found.append(requirement.strip())
    return found


def install(packages: Sequence[str], have: Mapping[str, str]) -> int:
    """Let pip install these, with all that is there kept as it is; return pip's exit code."""
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder, "kept.txt")
        lines = [f"{name}=={version}\n" for name, version in sorted(have.items())]
        kept.write_text("".join(line for line in lines if not line.startswith(COURSE)))
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        ways = ["--constraint", str(kept)], ["--no-deps"]  # the second mostly works, too
        for way in ways:
            done = subprocess.run([*pip, *way, *packages], capture_output=True, text=True)
            if done.returncode == 0:  # what pip says of versions that stay is known
                return 0
        print(done.stdout, done.stderr, sep="\n")
        return done.returncode


def main() -> int:
    """Install what is missing; say what stayed, and what does not work here."""
    have = installed()
    packages = missing(requires(COURSE) or (), have)
    code = install(packages, have) if packages else 0
    after = installed()
    stayed = [f"{name} {after[name]}" for name in STAY if name in after]
    if code == 0:
        print(f"The course is installed; {' and '.join(stayed) or 'nothing'} stayed. {NOT_THERE}")
    return code


if __name__ == "__main__":
    sys.exit(main())
