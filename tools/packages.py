"""Install packages into the environment: with uv, or with pip where uv cannot be had.

Run as a script, `make lock`, it writes the lock anew: the newest versions that fit.
Standard library only, and in old syntax.
"""

import contextlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from pip_settings import unknown_to_uv, uv_environment, uv_options
from progress import run_showing
from symptoms import UNTRUSTED, Problem, explain, symptom

OLDEST = (3, 11)  # Python that the course runs on, and the lock fits
LOCK = "requirements.lock"  # one version of every package but torch; `make lock` writes it
LOCKED = re.compile(r"[A-Za-z0-9][\w.-]*==[\w.+!-]+( ; .+)?")
OLDEST_UV, NEXT_UV, UV = (0, 9), (1,), "uv>=0.9,<1"  # the versions that are tested
MOST_TRIES = 5  # with versions of the lock left out, before it is left out as a whole
UNSOLVED = re.compile("No solution found|ResolutionImpossible|No matching distribution found")
# once uv has resolved, packages may change at any time: what is in its cache it just links
TOUCHED = ("Installing collected packages", "Resolved ", "Uninstalled ", "Installed ")
IMPORT_ALL = """
import importlib, sys
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except BaseException as error:
        sys.exit("cannot import %s (%s: %s)" % (name, type(error).__name__, error))
"""
SIDE_BY_SIDE = """
import subprocess, sys
lists = [names.split() for names in sys.argv[2:]]
running = [subprocess.Popen([sys.executable, "-c", sys.argv[1]] + names) for names in lists]
try:
    for one, names in zip(running, lists):
        if one.wait() not in (0, 1):
            print("cannot import %s (exit code %d)" % (" or ".join(names), one.wait()))
    sys.exit(any([one.wait() for one in running]))
finally:
    [one.kill() for one in running]
"""
FIRST_IMPORTS = (
    "torch.distributed.tensor torch._dynamo course_lib.train.trainer",
    "jupyterlab.labapp ipykernel.kernelapp ipywidgets nbval.plugin course_lib.display",
)


class Installer:
    """What installs into one environment; `lines` keeps all that was said."""

    def __init__(self, root, venv, torch, version, lines):
        self.root, self.venv, self.torch, self.version = root, venv, torch, version
        self.lines = lines
        self.python = str(venv / "bin" / "python")
        self.locked = []
        self.uv = self.find_uv()
        for sentence in unknown_to_uv() if self.uv else []:
            print(f"      {sentence}")

    def install(self, title, arguments, index=""):
        """Install by the lock; a version that the registry does not have gives way to another."""
        code, said = self.with_uv(title, arguments, index)
        for tries_left in reversed(range(MOST_TRIES)):
            others = [one for one in self.locked if code and is_unsolved(said, one)]
            if not others:
                break
            if tries_left:
                self.locked = [one for one in self.locked if one not in others]
                which = ", ".join(one.split(" ; ")[0] for one in others)
            else:
                self.locked, which = [], f"much of {LOCK}"
            title = f"      {which} cannot be had here: taking versions that can"
            code, said = self.with_uv(title, arguments, index)
        if code:
            log = self.venv / "install.log"
            raise Problem(explain(said, self.version, log, self.torch))

    def with_uv(self, title, arguments, index):
        """Install with uv, and with pip where uv fails for a reason of its own."""
        (self.venv / LOCK).write_text("\n".join(self.locked) + "\n")
        arguments = ["--constraint", str(self.venv / LOCK), *arguments]
        if self.uv:
            chosen = ["--default-index", index] if index else []
            command = [self.uv, "pip", "install", "--python", self.python, *uv_options()]
            code, said = self.run(command + chosen + arguments, title)
            if not code or (symptom(said) not in (None, UNTRUSTED) and not may_differ(said)):
                return code, said
            self.uv, title = "", f"      uv has failed ({said[-1].strip()}): pip tries it"
        return self.run(
            [*self.pip(), *(["--index-url", index] if index else []), *arguments], title
        )

    def pip(self):
        """Return the command of pip, which asks nothing and draws nothing."""
        quiet = ["--no-input", "--progress-bar", "off", "--disable-pip-version-check"]
        return [self.python, "-m", "pip", "install", *quiet]

    def run(self, command, title):
        """Run a command; return its exit code and its output, which install.log keeps too."""
        before = len(self.lines)
        code, _ = run_showing(command, title, str(self.root), self.lines, uv_environment())
        with contextlib.suppress(OSError):
            (self.venv / "install.log").write_text("\n".join(self.lines))
        return code, self.lines[before:] or ["no output"]

    def find_uv(self):
        """Return a uv that is new enough, of the PATH or from the registry; "" if there is none."""
        found = shutil.which("uv")
        if found and is_tested(found):
            return found
        own = str(self.venv / "bin" / "uv")
        if is_tested(own):
            return own
        code, said = self.run([*self.pip(), UV], "      getting uv, which installs the packages")
        del self.lines[:]  # that pip has installed uv changes none of the packages
        if not code and is_tested(own):
            return own
        if symptom(said) and not UNSOLVED.search(symptom(said)):
            raise Problem(explain(said, self.version, self.venv / "install.log", self.torch))
        print("      no uv for this system: pip installs the packages, which takes longer")
        return ""

    def compile(self):
        """Compile what is imported first: all packages would take as long as to install them."""
        command = [self.python, "-c", SIDE_BY_SIDE, IMPORT_ALL, *FIRST_IMPORTS]
        code, said = self.run(command, "      compiling what lessons use")
        if code:
            why = next((line for line in said if line.startswith("cannot import")), said[-1])
            raise Problem(
                f"The packages are installed, but Python {why}. Run make again, which builds the "
                f"environment anew; all that was said is in {self.venv / 'install.log'}"
            )


def uv_version(uv):
    """Return the version of a uv as a tuple; () if it does not run."""
    try:
        said = subprocess.check_output([uv, "--version"], stderr=subprocess.DEVNULL, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(int(part) for part in re.findall(rb"\d+", said)[:2])


def is_tested(uv):
    """True for a uv whose version the course is tested with."""
    return OLDEST_UV <= uv_version(uv) < NEXT_UV


def read_lock(root):
    """Return the lines of the lock; none where the course came without it."""
    path = root / LOCK
    lines = path.read_text().splitlines() if path.is_file() else []
    for number, line in enumerate(lines, 1):
        if not LOCKED.fullmatch(line) and not line.startswith("#"):
            raise Problem(
                f"{LOCK}, line {number}: expected name==version; got {line[:60]!r}. Try "
                f"git checkout {LOCK}, or make lock to write it anew"
            )
    return [line for line in lines if not line.startswith("#")]


def is_unsolved(said, locked):
    """True if packages could not be found together, and a locked one is named as a reason."""
    name = re.escape(locked.split(" ; ")[0])
    text = "\n".join(said)
    return bool(UNSOLVED.search(text) and re.search(rf"(?<![\w.-]){name}(?![\w.])", text))


def may_differ(said):
    """True if uv was refused for want of a name and a password that pip may have."""
    return bool(re.search("401|403|[Uu]nauthorized|[Ff]orbidden|credentials", "\n".join(said)))


def has_touched(lines):
    """True once a line says that packages of the environment may have changed."""
    return any(line.startswith(TOUCHED) for line in lines)


def write_lock(root, venv):
    """Lock the newest versions that pyproject.toml allows, for every system; not PyTorch's."""
    if not (venv / "bin" / "python").exists():
        raise Problem("make lock works in the course's environment. Try make environment first")
    uv = Installer(root, venv, "", "", []).uv
    if not uv:
        raise Problem("make lock needs uv, which is not available here. Try pip install uv")
    oldest, new = ".".join(map(str, OLDEST)), root / f"{LOCK}.new"
    found = ["--extra", "dev", "--universal", "--upgrade", "--no-emit-package", "torch"]
    quiet = ["--no-header", "--no-annotate", "--output-file", str(new)]
    command = [uv, "pip", "compile", "pyproject.toml", "--python-version", oldest, *found, *quiet]
    try:
        code, lines = run_showing(command, f"locking {LOCK}", str(root), None, uv_environment())
        if code:
            raise Problem(explain(lines, "any"))
        os.replace(str(new), str(root / LOCK))
    finally:
        with contextlib.suppress(OSError):
            new.unlink()


if __name__ == "__main__":
    try:
        top = Path(__file__).resolve().parent.parent
        write_lock(top, top / sys.argv[1])
    except Problem as problem:
        sys.exit(f"\n{problem}\n")
    except KeyboardInterrupt:
        print(f"\nStopped. {LOCK} is as it was.")
        sys.exit(130)
