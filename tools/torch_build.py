"""Choose the build of PyTorch: the one pip takes by itself on Linux brings the GPU libraries.

Nothing is asked where there is nothing to choose: on other systems, and where pip's own settings
already say which packages to take. Standard library only, and in old syntax.
"""

import re
import shutil
import sys
from pathlib import Path

from pip_settings import own_setting
from symptoms import Problem

CPU_INDEX = "https://download.pytorch.org/whl/cpu"  # pytorch.org, "Get started", compute: CPU
DRIVER = Path("/proc/driver/nvidia")
SIZES = dict.fromkeys(("", "cpu"), "2 GB, about a minute")
SIZES["gpu"] = "6 GB, 2 to 10 minutes"
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
    return setting and f"your own setting of pip decides, {setting}"


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
    """Return, as a list, what is installed before all else so that PyTorch is the CPU build.

    Its index is the only one in this step, so no other build can be found. The next step
    finds PyTorch in place. The list is empty where the usual choice is the right one.
    """
    if build != "cpu":
        return []
    (torch,) = re.findall(r'"(torch==[^";]+)"', (root / "pyproject.toml").read_text())
    return [("installing PyTorch, the CPU build (0.7 GB)", ["--no-deps", torch], CPU_INDEX)]
