"""On Linux the learner chooses the build of PyTorch, once, and never against pip's own settings."""

import ast
import io
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from tests.terminal import ROOT

SETTINGS = ["INDEX_URL", "EXTRA_INDEX_URL", "FIND_LINKS", "NO_INDEX", "CONSTRAINT"]
AS_ON_LINUX = "import sys; sys.platform = 'linux'; import environment; environment.main()"


@pytest.fixture
def torch_build(environment, monkeypatch, tmp_path):
    """tools/torch_build.py on a plain Linux: no settings of pip, no driver, no terminal."""
    import pip_settings
    import torch_build

    monkeypatch.setattr(torch_build.sys, "platform", "linux")
    monkeypatch.setattr(pip_settings, "SYSTEM", tmp_path / "etc")
    monkeypatch.setattr(torch_build, "DRIVER", tmp_path / "driver")
    monkeypatch.setattr(torch_build.shutil, "which", lambda name: None)
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    for name in [name for name in os.environ if name.startswith(("PIP_", "XDG_CONFIG"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return torch_build


@pytest.fixture
def typed(torch_build, monkeypatch) -> Callable[[str], None]:
    """Let somebody at a terminal type these lines."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    def type_in(text: str) -> None:
        monkeypatch.setattr(sys, "stdin", Terminal(text))
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)

    return type_in


# ---- who decides -----------------------------------------------------------------------------


def test_without_a_terminal_the_driver_decides(torch_build, capsys):
    assert torch_build.choose_build("", "") == "cpu"
    assert "the CPU build of PyTorch, as no NVIDIA driver was found" in capsys.readouterr().out
    torch_build.DRIVER.mkdir()
    assert torch_build.choose_build("", "") == "gpu"
    assert "as an NVIDIA driver was found here; the other one: make lab TORCH=cpu" in (
        capsys.readouterr().out
    )


def test_nvidia_smi_is_a_driver(torch_build, monkeypatch):
    monkeypatch.setattr(torch_build.shutil, "which", lambda name: f"/usr/bin/{name}")
    assert torch_build.choose_build("", "") == "gpu"


@pytest.mark.parametrize(
    ("text", "driver", "build"),
    [
        ("\n", False, "cpu"),
        ("\n", True, "gpu"),
        ("gpu\n", False, "gpu"),
        (" CPU \n", True, "cpu"),
        ("yes\n\n", False, "cpu"),
        ("both\ngpu\n", False, "gpu"),
        ("", False, "cpu"),  # Ctrl-D
    ],
)
def test_the_answer_at_a_terminal_decides(torch_build, typed, capsys, text, driver, build):
    if driver:
        torch_build.DRIVER.mkdir()
    typed(text)
    assert torch_build.choose_build("", "") == build
    said = capsys.readouterr().out
    assert said.count("PyTorch comes in two builds") == 1
    assert "0.4 GB to download, 2 GB on disk" in said
    assert ("no driver for one was found" in said) != driver
    assert said.count("Please type cpu or gpu") == text.count("\n") - 1 or not text


def test_a_word_on_the_command_line_or_an_earlier_answer_is_enough(torch_build, typed, capsys):
    typed("")
    assert torch_build.choose_build("gpu", "cpu") == "gpu"
    assert torch_build.choose_build("cpu", "") == "cpu"
    assert torch_build.choose_build("", "gpu") == "gpu"
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("system", ["darwin", "win32"])
def test_other_systems_have_nothing_to_choose(torch_build, typed, monkeypatch, capsys, system):
    typed("")
    monkeypatch.setattr(torch_build.sys, "platform", system)
    assert torch_build.choose_build("", "") == ""
    assert capsys.readouterr().out == ""
    assert torch_build.choose_build("gpu", "") == ""
    said = capsys.readouterr().out
    assert said == "TORCH=gpu changes nothing here: this system has one build of PyTorch.\n"


# ---- what pip was told already ---------------------------------------------------------------


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_in_the_environment_wins(torch_build, typed, monkeypatch, capsys, name):
    typed("")
    monkeypatch.setenv(f"PIP_{name}", "/somewhere")
    assert torch_build.choose_build("", "cpu") == ""
    assert capsys.readouterr().out == ""
    assert torch_build.choose_build("cpu", "") == ""
    said = capsys.readouterr().out
    assert said == f"TORCH=cpu changes nothing here: your own setting of pip decides, PIP_{name}.\n"


@pytest.mark.parametrize("place", [
    "etc/pip.conf", "etc/xdg/pip/pip.conf", "home/.pip/pip.conf", "home/.config/pip/pip.conf",
])  # fmt: skip
@pytest.mark.parametrize("text", [
    "[global]\nindex-url = https://mirror/simple", "[install]\nfind_links = /wheels",
    "[global]\nextra-index-url =\n  file:///a\n  file:///b", "[install]\nconstraint = pins.txt",
])  # fmt: skip
def test_a_setting_in_a_file_of_pip_wins(torch_build, tmp_path, place, text):
    file = tmp_path / place
    file.parent.mkdir(parents=True)
    file.write_text(text)
    assert torch_build.own_setting().endswith(f" in {file}")


@pytest.mark.parametrize(
    "text", ["[global]\ntimeout = 60\ncert = /etc/ssl/x.crt", "[list]\nindex-url = x", "no section"]
)
def test_other_settings_leave_the_choice(torch_build, tmp_path, text):
    file = tmp_path / "etc" / "pip.conf"
    file.parent.mkdir()
    file.write_text(text)
    assert torch_build.own_setting() == ""


def test_pip_config_file_takes_the_place_of_the_users_files(torch_build, tmp_path, monkeypatch):
    files = {name: tmp_path / name / "pip" / "pip.conf" for name in ("user", "site", "named")}
    for name, file in files.items():
        file.parent.mkdir(parents=True)
        file.write_text(f"[global]\nfind-links = /{name}")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "user"))
    assert str(files["user"]) in torch_build.own_setting()
    monkeypatch.setenv("PIP_CONFIG_FILE", str(files["named"]))
    assert str(files["named"]) in torch_build.own_setting()
    files["site"].write_text("[global]\nindex-url = /site")
    monkeypatch.setenv("XDG_CONFIG_DIRS", str(tmp_path / "site"))
    assert str(files["site"]) in torch_build.own_setting()
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    assert torch_build.own_setting() == ""


# ---- what is installed then --------------------------------------------------------------------


def test_only_the_cpu_build_needs_a_step_of_its_own(torch_build, project):
    (step,) = torch_build.torch_step(project, "cpu")
    index = "https://download.pytorch.org/whl/cpu"
    assert step[1:] == (["--no-deps", "torch==2.13.0"], index)
    assert torch_build.torch_step(project, "gpu") == torch_build.torch_step(project, "") == []


@pytest.mark.parametrize(
    ("build", "torch", "others"),
    [("cpu", "2.13.0+cpu", {"pure"}), ("gpu", "2.13.0", {"pure", "nvidia"})],
)
def test_the_build_that_was_chosen_is_installed(registry, capsys, uv_or_pip, build, torch, others):
    registry.wheel("pure", "1")
    registry.wheel("nvidia", "1")
    registry.wheel("torch", "2.13.0", "pure", "nvidia")
    registry.wheel("torch", "2.13.0+cpu", "pure", of="cpu")
    registry.wheel("torch", "2.14.0+cpu", "pure", of="cpu")  # what is newer is not taken
    found = registry.build(build)
    assert found["torch"] == torch
    assert others == {"pure", "nvidia"} & set(found)
    titles = [line for line in capsys.readouterr().out.splitlines() if line.startswith("[")]
    assert [title[:5] for title in titles] == (
        ["[1/3]", "[2/3]", "[3/3]"] if build == "cpu" else ["[1/2]", "[2/2]"]
    )


# ---- at a real terminal ----------------------------------------------------------------------


def until(screen: int, wanted: str, once_more=lambda: None) -> str:
    """What a terminal shows up to some words, or to its end; in each silent second, once more."""
    said, give_up = "", time.monotonic() + 60
    while wanted not in said and time.monotonic() < give_up:
        if not select.select([screen], [], [], 1.0)[0]:
            once_more()
            continue
        try:
            said += os.read(screen, 4096).decode()
        except OSError:  # the other side has closed
            break
    return said


@pytest.fixture
def asked(project, offline, fake_python):
    """A build at a terminal, as on a plain Linux, that has just asked; its process and screen."""
    told = 'case "$2" in *print*) echo 3.12.3;; venv) echo "No module named venv"; exit 1;; esac'
    settings = {name: value for name, value in offline.items() if name != "PIP_INDEX_URL"}
    screen, terminal = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", AS_ON_LINUX, "--python", fake_python(told)],
        env=settings | {"PYTHONPATH": str(project / "tools")},
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
    )
    os.close(terminal)
    try:
        assert "press Enter for" in until(screen, "press Enter for")
        yield process, screen
    finally:
        process.kill()
        process.wait()
        os.close(screen)


def test_ctrl_c_at_the_question_leaves_nothing_behind(project, asked):
    process, screen = asked

    def press_ctrl_c():  # between its question and its reading, Python can miss one
        process.send_signal(signal.SIGINT)

    press_ctrl_c()
    assert "Stopped. Nothing half-built will be used" in until(screen, "go on.", press_ctrl_c)
    assert process.wait(30) == 130
    assert not (project / ".venv").exists()


def test_an_answer_is_remembered_when_the_build_fails_later(project, environment, asked):
    process, screen = asked
    os.write(screen, b"gpu\n")
    assert "came without its venv module" in until(screen, "python3-venv")
    assert process.wait(30) == 1
    assert environment.read_stamp(project / ".venv") == (environment.BUILDING, "gpu")


def test_the_setup_is_in_syntax_that_python_3_6_reads(torch_build):
    names = ["environment", "packages", "pip_settings", "progress", "symptoms", "torch_build"]
    assert {name for name in names if name in sys.modules} == set(names)  # all that it imports
    for name in names:
        ast.parse((ROOT / "tools" / f"{name}.py").read_text(), feature_version=(3, 6))
