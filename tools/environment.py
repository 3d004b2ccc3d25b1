"""Build the course's environment in .venv when it is missing, broken or stale.

The Makefile calls this first. Whatever goes wrong is said in one sentence that ends in what to do.
Standard library only, and in old syntax, so that an old Python can say that it is too old.
"""

import argparse
import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

from packages import LOCK, OLDEST, Installer, has_touched, read_lock
from progress import run_showing
from symptoms import NEEDED_GB, Problem, explain
from torch_build import SIZES, check_answer, choose_build, torch_step

STAMP = "course-environment"  # a file in it: BUILDING, or the fingerprint of a finished build,
TORCH = "torch: "  # and after it a line that remembers which build of PyTorch was chosen
BUILDING = "not finished\n"
VERSION = "import sys; print('%d.%d.%d' % sys.version_info[:3])"
COMPLETE = (
    "import sys; from importlib.util import find_spec; "
    "sys.exit(not all(map(find_spec, ['torch', 'jupyterlab', 'pytest', 'course_lib'])))"
)
BUTTONS = "distributed-training-course"  # the name in the package.json of the buttons
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
    """Fingerprint of what the environment is built from and where; when it changes, it is stale."""
    files = [path for path in (root / "pyproject.toml", root / LOCK) if path.is_file()]
    content = hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()
    return f"{content}\n{root}\n{venv}\n"


def stamp_of(venv):
    """Return the last build's fingerprint if it was finished, and nothing if none began."""
    return read_stamp(venv)[0]


def read_stamp(venv):
    """The two parts of the stamp: how far the last build came, and its build of PyTorch."""
    stamp = venv / STAMP
    lines = stamp.read_text().splitlines(True) if stamp.is_file() else []
    torch = lines.pop()[len(TORCH) :].strip() if lines and lines[-1].startswith(TORCH) else ""
    return "".join(lines), torch


def write_stamp(venv, state, torch):
    """Note how far the build came, and which build of PyTorch it has ("": what pip took)."""
    (venv / STAMP).write_text(state + (f"{TORCH}{torch}\n" if torch else ""))


def stands(venv, wanted_python):
    """True if the environment's Python runs, is the one asked for, and finds the big packages."""
    python = venv / "bin" / "python"
    if wanted_python and python_version(wanted_python)[:2] != (python_version(python) or ())[:2]:
        return False
    try:
        return subprocess.call([str(python), "-c", COMPLETE]) == 0
    except OSError:
        return False


def build(root, venv, wanted_python="", asked=""):
    """Bring the environment up to date: nothing to do, an update on top, or all from scratch."""
    check_answer(asked)
    if wanted_python:
        choose_python(wanted_python)
    wanted = fingerprint(root, venv)
    if read_stamp(venv) == (wanted, asked or read_stamp(venv)[1]) and stands(venv, wanted_python):
        return
    read_lock(root)
    with one_builder_at_a_time():
        anew = not (same_place(venv, wanted) and stands(venv, wanted_python))
        if anew:  # what would stop it is said before anything is asked
            choose_python(wanted_python)
            check_folder(root, venv)
        remembered = read_stamp(venv)[1]
        torch = choose_build(asked, remembered)
        if anew or torch not in ("", remembered):
            create(root, venv, choose_python(wanted_python), torch)
        elif stamp_of(venv) != wanted:
            update(root, venv, torch)
        write_stamp(venv, wanted, torch)


def same_place(venv, wanted):
    """True if the last build was finished, here, by the course in this folder."""
    return stamp_of(venv).splitlines()[1:] == wanted.splitlines()[1:]


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


def create(root, venv, python, torch):
    """Make the environment anew, over an older or a half-built one of ours."""
    check_disk(venv, torch)
    clear(root, venv)
    write_stamp(venv, BUILDING, torch)
    version, num_steps = dotted(python_version(python)), 2 + len(torch_step(root, torch))
    title = f"[1/{num_steps}] making {venv.name} with Python {version} (about 5 s)"
    code, lines = run_showing([python, "-m", "venv", str(venv)], title)
    if code:
        raise Problem(explain(lines, version))
    install(root, venv, f"installing the packages ({SIZES[torch]})", [], num_before=1)


def check_folder(root, venv):
    """Stop at a folder that make did not make, or that another course uses."""
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


def clear(root, venv):
    """Empty the environment's folder; one that make did not make is never touched."""
    check_folder(root, venv)
    venv.mkdir(parents=True, exist_ok=True)
    (venv / STAMP).write_text(BUILDING)
    for path in venv.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(str(path))
        elif path.name != STAMP:
            path.unlink()


def update(root, venv, torch):
    """Bring the packages up to date; a failure before any changes leaves all as it was."""
    before, lines = read_stamp(venv), []
    write_stamp(venv, BUILDING, torch)
    try:
        install(root, venv, "updating the packages (some seconds)", lines)
    except BaseException:
        if not has_touched(lines):
            write_stamp(venv, *before)
        raise


def install(root, venv, title, lines, num_before=0):
    """Install the course and everything that pyproject.toml lists into the environment."""
    torch, version = read_stamp(venv)[1], dotted(python_version(venv / "bin" / "python"))
    installer = Installer(root, venv, torch, version, lines)
    installer.locked = read_lock(root)
    steps = [*torch_step(root, torch), (title, ["--editable", ".[dev]"], "")]
    for number, (what, arguments, index) in enumerate(steps, num_before + 1):
        title = f"[{number}/{num_before + len(steps)}] {what}"
        installer.install(title, arguments, index)
    installer.compile()
    settings = venv / "share" / "jupyter" / "lab" / "settings"
    settings.mkdir(parents=True, exist_ok=True)
    (settings / "overrides.json").write_text(CALM_LAB)  # no pop-ups, no look-ups outside


def link_buttons(root, venv):
    """Let the environment's JupyterLab find the course's buttons; without them it works as well.

    A link, because pip does not copy data files where it installs `--editable`.
    """
    source = root / "course_lib" / "workbooks" / "lab_extension"
    link = venv / "share" / "jupyter" / "labextensions" / BUTTONS
    if link.is_symlink() and os.readlink(str(link)) == str(source):
        return
    with contextlib.suppress(OSError):
        link.parent.mkdir(parents=True, exist_ok=True)
        if link.is_symlink():
            link.unlink()
        link.symlink_to(source)


def check_disk(venv, torch):
    """Stop before anything is written if the disk has no room."""
    folder = next(parent for parent in venv.parents if parent.exists())
    free_gb, needed_gb = shutil.disk_usage(str(folder)).free / 1e9, NEEDED_GB[torch]
    if free_gb < needed_gb:
        smaller = "take the CPU build (make lab TORCH=cpu), " if torch == "gpu" else ""
        raise Problem(
            f"The environment needs {needed_gb} GB of disk; {free_gb:.1f} GB are free in {folder}. "
            f"Free some, {smaller}or put it elsewhere: make lab VENV=/path/with/room"
        )


def main():
    """Run from the Makefile; exit with 0 only when the environment is ready."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--venv", default=".venv", help="where the environment lies")
    parser.add_argument("--python", default="", help="build with this Python")
    parser.add_argument("--torch", default="", help="cpu or gpu: the build of PyTorch")
    options = parser.parse_args()
    root = Path(__file__).resolve().parent.parent
    try:
        build(root, root / options.venv, options.python, options.torch)
        link_buttons(root, root / options.venv)
    except Problem as problem:
        sys.exit(f"\n{problem}\n")
    except OSError as problem:
        sys.exit(f"\n{explain([str(problem)], '')}\n")
    except KeyboardInterrupt:
        print("\nStopped. Nothing half-built will be used: run make again to go on.")
        sys.exit(130)


if __name__ == "__main__":
    main()
