"""Build the course's environment in .venv when it is missing, broken or stale.

The Makefile calls this first. Whatever goes wrong is said in one sentence that ends in what to do.
Standard library only, and in old syntax, so that an old Python can say that it is too old.
"""

import argparse
import contextlib
import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

from progress import run_showing
from symptoms import NEEDED_GB, Problem, explain

OLDEST = (3, 11)
STAMP = "course-environment"  # a file in it: BUILDING, or the fingerprint of a finished build
BUILDING = "not finished"
VERSION = "import sys; print('%d.%d.%d' % sys.version_info[:3])"
COMPLETE = (
    "import sys; from importlib.util import find_spec; "
    "sys.exit(not all(map(find_spec, ['torch', 'jupyterlab', 'pytest', 'course_lib'])))"
)
CALM_LAB = """{
  "@jupyterlab/apputils-extension:notification": {"fetchNews": "false", "checkForUpdates": false},
  "@jupyter-widgets/jupyterlab-manager:plugin": {"saveState": true}
}
"""


def python_version(python):
    """Version of a Python as a tuple, or None if it cannot be run."""
    try:
        text = subprocess.check_output(
            [str(python), "-c", VERSION], stderr=subprocess.DEVNULL, timeout=30
        )
        return tuple(int(part) for part in text.decode().strip().split("."))
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def dotted(version):
    """(3, 11, 7) -> '3.11.7'."""
    return ".".join(str(part) for part in version or ("?",))


def choose_python(wanted):
    """The Python to build with: the one asked for, else the first that is new enough."""
    own = getattr(sys, "_base_executable", sys.executable)
    seen = []
    for candidate in [wanted] if wanted else [own, "python3.13", "python3.12", "python3.11"]:
        version = python_version(candidate)
        if version and version >= OLDEST:
            return shutil.which(candidate)
        if version or wanted:
            seen.append(
                f"{candidate} is {dotted(version) if version else 'not a Python that runs'}"
            )
    raise Problem(
        f"The course needs Python 3.11 or newer; here {', '.join(seen)}. Install a newer one from "
        "your system's packages or python.org, or name one: make lab PYTHON=/path/to/python3.12"
    )


def fingerprint(root, venv):
    """What the environment is built from and where; it is stale when this changes."""
    content = hashlib.sha256((root / "pyproject.toml").read_bytes()).hexdigest()
    return f"{content}\n{root}\n{venv}\n"


def stamp_of(venv):
    """What the last build left: a fingerprint if it was finished, and nothing if none began."""
    stamp = venv / STAMP
    return stamp.read_text() if stamp.is_file() else ""


def stands(venv, wanted_python):
    """True if the environment's Python runs, is the one asked for, and finds the big packages."""
    python = venv / "bin" / "python"
    if wanted_python and python_version(wanted_python)[:2] != (python_version(python) or ())[:2]:
        return False
    try:
        return subprocess.call([str(python), "-c", COMPLETE]) == 0
    except OSError:
        return False


def build(root, venv, wanted_python=""):
    """Bring the environment up to date: nothing to do, an update on top, or all from scratch."""
    if wanted_python:
        choose_python(wanted_python)
    wanted = fingerprint(root, venv)
    if stamp_of(venv) == wanted and stands(venv, wanted_python):
        return
    with one_builder_at_a_time():
        same_place = stamp_of(venv).splitlines()[1:] == wanted.splitlines()[1:]
        if not (same_place and stands(venv, wanted_python)):
            create(root, venv, choose_python(wanted_python))
        elif stamp_of(venv) != wanted:
            update(root, venv)
        (venv / STAMP).write_text(wanted)


@contextlib.contextmanager
def one_builder_at_a_time():
    """Two `make` at the same time would spoil each other's packages: the second one waits."""
    try:
        import fcntl
    except ImportError:  # no such lock on this system
        yield
        return
    with open(__file__) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            print("Another make is building the environment; waiting for it.", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def create(root, venv, python):
    """Make the environment anew, over an older or a half-built one of ours."""
    check_disk(venv)
    clear(root, venv)
    version = dotted(python_version(python))
    title = f"[1/2] making {venv.name} with Python {version} (about 5 s)"
    code, lines = run_showing([python, "-m", "venv", str(venv)], title)
    if code:
        raise Problem(explain(lines, version))
    install(root, venv, "[2/2] installing the packages (1.7 GB, 1 to 3 minutes)", [])


def clear(root, venv):
    """Empty the environment's folder; one that make did not make is never touched."""
    if venv.exists() and any(venv.iterdir()) and not stamp_of(venv):
        raise Problem(
            f"{venv} was not made by make, so make leaves it alone. Move it away, or put the "
            "course's environment elsewhere: make lab VENV=.venv-course"
        )
    owner, place = stamp_of(venv).splitlines()[1:] or ("", "")
    if place == str(venv) and owner != str(root) and Path(owner, "pyproject.toml").exists():
        raise Problem(
            f"{venv} belongs to the course in {owner}. Put this one's elsewhere: "
            "make lab VENV=.venv-course"
        )
    venv.mkdir(parents=True, exist_ok=True)
    (venv / STAMP).write_text(BUILDING)
    for path in venv.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(str(path))
        elif path.name != STAMP:
            path.unlink()


def update(root, venv):
    """Bring the packages up to date; a failure before pip changes any leaves all as it was."""
    before, lines = stamp_of(venv), []
    (venv / STAMP).write_text(BUILDING)
    try:
        install(root, venv, "[1/1] updating the packages (some seconds)", lines)
    except BaseException:
        if not any(line.startswith("Installing collected packages") for line in lines):
            (venv / STAMP).write_text(before)
        raise


def install(root, venv, title, lines):
    """Install the course and everything that pyproject.toml lists into the environment."""
    python = venv / "bin" / "python"
    command = [str(python), "-m", "pip", "install", "--no-input", "--progress-bar", "off"]
    command += ["--disable-pip-version-check", "--editable", ".[dev]"]
    code, lines = run_showing(command, title, str(root), lines)
    log = venv / "install.log"
    with contextlib.suppress(OSError):
        log.write_text("\n".join(lines))
    if code:
        raise Problem(explain(lines, dotted(python_version(python)), log))
    settings = venv / "share" / "jupyter" / "lab" / "settings"
    settings.mkdir(parents=True, exist_ok=True)
    (settings / "overrides.json").write_text(CALM_LAB)  # no pop-ups, no look-ups outside


def check_disk(venv):
    """Stop before anything is written if the disk has no room."""
    folder = next(parent for parent in venv.parents if parent.exists())
    free_gb = shutil.disk_usage(str(folder)).free / 1e9
    if free_gb < NEEDED_GB:
        raise Problem(
            f"The environment needs {NEEDED_GB} GB of disk; {free_gb:.1f} GB are free in {folder}. "
            "Free some, or put it elsewhere: make lab VENV=/path/with/room"
        )


def main():
    """Run from the Makefile; exit with 0 only when the environment is ready."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--venv", default=".venv", help="where the environment lies")
    parser.add_argument("--python", default="", help="build with this Python")
    options = parser.parse_args()
    root = Path(__file__).resolve().parent.parent
    try:
        build(root, root / options.venv, options.python)
    except Problem as problem:
        sys.exit(f"\n{problem}\n")
    except OSError as problem:
        sys.exit(f"\n{explain([str(problem)], '')}\n")
    except KeyboardInterrupt:
        print("\nStopped. Nothing half-built will be used: run make again to go on.")
        sys.exit(130)


if __name__ == "__main__":
    main()
