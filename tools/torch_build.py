"""Choose the build of PyTorch: the one pip takes by itself on Linux brings the GPU libraries.

Nothing is asked where there is nothing to choose: on other systems, and where pip's own settings
already say which packages to take. Standard library only, and in old syntax.
"""

import configparser
import contextlib
import os
import re
import shutil
import sys
from pathlib import Path

from symptoms import Problem

CPU_INDEX = "https://download.pytorch.org/whl/cpu"  # pytorch.org, "Get started", compute: CPU
SETTINGS = ("index-url", "extra-index-url", "find-links", "no-index", "constraint")
SYSTEM = Path("/etc")
DRIVER = Path("/proc/driver/nvidia")
SIZES = dict.fromkeys(("", "cpu"), "2 GB, 1 to 3 minutes")
SIZES["gpu"] = "6 GB, 3 to 10 minutes"
QUESTION = """PyTorch comes in two builds. Which one should the course's environment have?
  cpu   0.4 GB to download, 2 GB on disk: all the course needs
  gpu   2.9 GB to download, 6 GB on disk: computes on an NVIDIA GPU too; {driver}
Type cpu or gpu, or press Enter for {usual}: """


def choose_build(asked, remembered):
    """Return "cpu" or "gpu", or "" where pip is to decide as it always does."""
    reason = pip_decides()
    if reason:
        if asked:
            print(f"TORCH={asked} changes nothing here: {reason}.", flush=True)
        return ""
    if asked or remembered:
        return asked or remembered
    usual, found = ("gpu", "an") if has_nvidia_driver() else ("cpu", "no")
    if sys.stdin.isatty() and sys.stdout.isatty():
        return ask(usual)
    other = "cpu" if usual == "gpu" else "gpu"
    print(
        f"Taking the {usual.upper()} build of PyTorch, as {found} NVIDIA driver was found here; "
        f"the other one: make lab TORCH={other}",
        flush=True,
    )
    return usual


def check_answer(asked):
    """Stop at a TORCH that is no build."""
    if asked not in ("", "cpu", "gpu"):
        raise Problem(f"Expected TORCH=cpu or TORCH=gpu; got {asked}. Try make lab TORCH=cpu")


def pip_decides():
    """Return why there is nothing to choose, in a few words; "" where there is a choice."""
    if not sys.platform.startswith("linux"):
        return "this system has one build of PyTorch"
    setting = own_setting()
    return setting and f"pip follows your own setting, {setting}"


def own_setting():
    """Return where the user told pip which packages to take; "" where nothing does."""
    for setting in SETTINGS:
        variable = "PIP_" + setting.upper().replace("-", "_")
        if os.environ.get(variable):
            return variable
    for path in config_files():
        found = configparser.RawConfigParser()
        with contextlib.suppress(configparser.Error, OSError, UnicodeError):  # pip will complain
            found.read(str(path))
        for section in ("global", "install"):
            options = found.options(section) if found.has_section(section) else []
            for option in options:
                if option.replace("_", "-") in SETTINGS:
                    return f"{option} in {path}"
    return ""


def config_files():
    """Return the configuration files that pip reads before it knows of our environment."""
    named = os.environ.get("PIP_CONFIG_FILE", "")
    if named == os.devnull:  # pip's way to say: none at all
        return []
    folders = os.environ.get("XDG_CONFIG_DIRS") or str(SYSTEM / "xdg")
    files = [Path(folder, "pip", "pip.conf") for folder in folders.split(os.pathsep)]
    files.append(SYSTEM / "pip.conf")
    if named and Path(named).exists():
        return [*files, Path(named)]
    home = Path(os.path.expanduser("~"))
    config = Path(os.environ.get("XDG_CONFIG_HOME") or str(home / ".config"))
    return [*files, home / ".pip" / "pip.conf", config / "pip" / "pip.conf"]


def has_nvidia_driver():
    """True if this computer has the driver that the GPU build needs."""
    return bool(shutil.which("nvidia-smi")) or DRIVER.exists()


def ask(usual):
    """Ask on the terminal until the answer is a build; Enter alone takes the usual one."""
    driver = "its driver is here" if usual == "gpu" else "no driver for one was found"
    print(QUESTION.format(driver=driver, usual=usual), end="", flush=True)
    while True:
        try:
            answer = input().strip().lower() or usual
        except EOFError:  # Ctrl-D
            print()
            return usual
        if answer in ("cpu", "gpu"):
            return answer
        print(f"Please type cpu or gpu, or press Enter for {usual}: ", end="", flush=True)


def torch_step(root, build):
    """Return, as a list, what pip installs before all else so that PyTorch is the CPU build.

    Its index is the only one in this step, so pip cannot find any other build. The next step
    finds PyTorch in place. The list is empty where pip's usual choice is the right one.
    """
    if build != "cpu":
        return []
    (torch,) = re.findall(r'"(torch==[^";]+)"', (root / "pyproject.toml").read_text())
    arguments = ["--no-deps", "--index-url", CPU_INDEX, torch]
    return [("installing PyTorch, the CPU build (0.7 GB)", arguments)]
