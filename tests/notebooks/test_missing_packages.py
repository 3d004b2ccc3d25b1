"""Beside other packages the course installs what is missing, and replaces nothing."""

import subprocess
import sys

import pytest

from course_lib.workbooks import missing_packages as packages

NEEDED = [
    *("torch==2.13.0", "numpy<3,>=2.1", "ipykernel<8,>=7", "cloudpickle>=3.1", "jupyterlab<5"),
    *('deepspeed==0.19.8; sys_platform == "linux"', 'ruff>=0.14; extra == "dev"', "nb_val>=0.11"),
]


def test_only_what_is_not_there_and_is_needed_is_missing():
    assert packages.missing(NEEDED, {"numpy": "1.26"}) == ["cloudpickle>=3.1", "nb_val>=0.11"]
    assert packages.missing(NEEDED, {"cloudpickle": "2", "nb-val": "0", "numpy": "1"}) == []


def test_torch_and_ipykernel_are_never_asked_for():
    assert not {"torch==2.13.0", "ipykernel<8,>=7"} & set(packages.missing(NEEDED, {}))


@pytest.fixture
def pip(monkeypatch):
    """Notes what pip is asked for, with the text of its constraints, and answers with `codes`."""
    asked, codes = [], [0]

    def run(command, **_):
        words = command[command.index("install") + 1 :]
        if "--constraint" in words:
            with open(words[words.index("--constraint") + 1]) as file:
                words = [*words, file.read()]
        asked.append(words)
        return subprocess.CompletedProcess(command, codes.pop(0), "", "no such version")

    monkeypatch.setattr(subprocess, "run", run)
    return asked, codes


def test_all_that_is_there_is_pinned(pip):
    asked, _ = pip
    have = {"torch": "2.9.0+cu126", "ipykernel": "6.17.1", packages.COURSE: "0.1.0"}
    assert packages.install(["nbval>=0.11"], have) == 0
    (words,) = asked
    assert words[-1] == "ipykernel==6.17.1\ntorch==2.9.0+cu126\n"
    assert "nbval>=0.11" in words
    assert "--upgrade" not in words


def test_what_does_not_go_with_them_is_installed_alone_and_a_failure_is_told(pip, capsys):
    asked, codes = pip
    codes[:] = [1, 0]
    assert packages.install(["nbval>=0.11"], {"torch": "2.9.0"}) == 0
    assert "--no-deps" in asked[1]
    assert capsys.readouterr().out == ""
    codes[:] = [1, 1]
    assert packages.install(["nbval>=0.11"], {"torch": "2.9.0"}) == 1
    assert "no such version" in capsys.readouterr().out


def test_where_nothing_is_missing_nothing_is_installed():
    command = [sys.executable, "-m", "course_lib.workbooks.missing_packages"]
    said = subprocess.check_output(command, text=True)
    assert said.startswith("The course is installed; torch ")
    assert "stayed" in said
    assert len(said.splitlines()) == 1
