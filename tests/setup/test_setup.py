"""`make` builds the environment once, and says in one sentence what keeps it from doing so."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def finished(environment, root: Path, venv: Path, torch: str = "") -> None:
    """Make a folder look as after a finished build."""
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "python").symlink_to(sys.executable)
    environment.write_stamp(venv, environment.fingerprint(root, venv), torch)


def add_a_line(path: Path) -> None:
    """Change a file a little."""
    path.write_text(path.read_text() + "# more\n")


@pytest.fixture
def steps(environment, project, monkeypatch):
    """Run `build` with the steps noted instead of done; returns the notes."""
    notes: list[str] = []
    monkeypatch.setattr(environment, "stands", lambda venv, python: (venv / "bin").exists())
    monkeypatch.setattr(environment, "choose_build", lambda asked, remembered: asked or remembered)
    for name in ("create", "update"):
        note = partial(notes.append, name)
        monkeypatch.setattr(environment, name, lambda *given, note=note: note())
    return notes


# ---- when it is built ------------------------------------------------------------------------


def test_a_missing_environment_is_made(environment, project, steps):
    venv = project / ".venv"
    venv.mkdir()
    environment.build(project, venv)
    assert steps == ["create"]
    assert environment.stamp_of(venv) == environment.fingerprint(project, venv)


def test_a_ready_environment_is_left_alone(environment, project, steps):
    finished(environment, project, project / ".venv")
    os.utime(project / "pyproject.toml")  # a newer date with the same content changes nothing
    environment.build(project, project / ".venv")
    assert steps == []


def test_another_content_of_pyproject_updates(environment, project, steps):
    finished(environment, project, project / ".venv")
    add_a_line(project / "pyproject.toml")
    environment.build(project, project / ".venv")
    assert steps == ["update"]


def test_a_half_built_environment_is_made_anew(environment, project, steps):
    finished(environment, project, project / ".venv")
    (project / ".venv" / environment.STAMP).write_text(environment.BUILDING)
    environment.build(project, project / ".venv")
    assert steps == ["create"]


def test_a_broken_environment_is_made_anew(environment, project, steps):
    finished(environment, project, project / ".venv")
    shutil.rmtree(project / ".venv" / "bin")
    environment.build(project, project / ".venv")
    assert steps == ["create"]


def test_a_moved_course_is_made_anew(environment, project, steps, tmp_path):
    finished(environment, project, project / ".venv")
    moved = project.rename(tmp_path / "elsewhere")
    environment.build(moved, moved / ".venv")
    assert steps == ["create"]


def test_an_environment_stands_only_with_its_packages_and_the_python_asked_for(
    environment, tmp_path, fake_python
):
    here = Path(sys.prefix)
    assert environment.stands(here, "")
    assert environment.stands(here, sys.executable)
    assert not environment.stands(here, fake_python("echo 3.99.0"))
    empty = tmp_path / "empty"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", empty], check=True)
    assert not environment.stands(empty, "")
    assert not environment.stands(tmp_path / "none", "")


def test_half_built_folders_are_emptied_and_others_never_touched(environment, tmp_path):
    ours, other = tmp_path / "ours", tmp_path / "other"
    for folder in (ours, other):
        (folder / "lib").mkdir(parents=True)
        (folder / "file").write_text("mine")
    (ours / environment.STAMP).write_text(environment.BUILDING)
    environment.clear(tmp_path, ours)
    assert [path.name for path in ours.iterdir()] == [environment.STAMP]
    with pytest.raises(environment.Problem, match="was not made by make"):
        environment.clear(tmp_path, other)
    assert (other / "file").read_text() == "mine"


def test_the_environment_of_another_course_is_not_touched(environment, tmp_path):
    theirs, mine, venv = tmp_path / "theirs", tmp_path / "mine", tmp_path / "venv"
    for folder in (theirs, mine, venv):
        folder.mkdir()
        (folder / "pyproject.toml").write_text("")
    (venv / environment.STAMP).write_text(environment.fingerprint(theirs, venv))
    with pytest.raises(environment.Problem, match=r"belongs to the course in .*theirs"):
        environment.clear(mine, venv)
    shutil.rmtree(theirs)  # moved away, or deleted
    environment.clear(mine, venv)
    assert environment.stamp_of(venv) == environment.BUILDING


# ---- the buttons of JupyterLab ---------------------------------------------------------------


def test_the_buttons_are_linked_under_their_name_and_follow_the_course(environment, tmp_path):
    venv, mine = tmp_path / "venv", ROOT / "course_lib" / "workbooks" / "lab_extension"
    for root in (tmp_path / "moved away", ROOT, ROOT):
        environment.link_buttons(root, venv)
    (link,) = (venv / "share" / "jupyter" / "labextensions").iterdir()
    assert link.resolve() == mine
    package = json.loads((link / "package.json").read_text())
    assert package["name"] == link.name
    assert (link / package["jupyterlab"]["_build"]["load"]).is_file()


def test_an_environment_without_links_has_no_buttons_and_no_failure(environment, tmp_path):
    (tmp_path / "share").touch()  # no folder can be made
    environment.link_buttons(ROOT, tmp_path)


# ---- which build of PyTorch it has -----------------------------------------------------------


def test_the_build_of_pytorch_is_remembered_and_another_one_makes_all_anew(
    environment, project, steps
):
    venv = project / ".venv"
    finished(environment, project, venv, "cpu")
    for asked in ("", "cpu", "gpu", "", "gpu"):
        environment.build(project, venv, asked=asked)
    assert steps == ["create"]
    assert environment.read_stamp(venv) == (environment.fingerprint(project, venv), "gpu")


def test_an_update_keeps_the_build_of_pytorch(environment, project, steps):
    venv = project / ".venv"
    finished(environment, project, venv, "cpu")
    add_a_line(project / "pyproject.toml")
    environment.build(project, venv)
    assert steps == ["update"]
    assert environment.read_stamp(venv)[1] == "cpu"


def test_an_environment_from_before_the_question_is_asked_once_and_made_anew(
    environment, project, steps, monkeypatch
):
    venv = project / ".venv"
    finished(environment, project, venv)
    environment.build(project, venv)
    assert steps == []  # ready is ready: no question
    add_a_line(project / "pyproject.toml")
    monkeypatch.setattr(environment, "choose_build", lambda asked, remembered: remembered or "cpu")
    environment.build(project, venv)
    environment.build(project, venv)
    assert steps == ["create"]


def test_what_stops_the_build_is_said_before_anything_is_asked(environment, project, monkeypatch):
    monkeypatch.setattr(environment, "choose_build", lambda *given: pytest.fail("asked"))
    venv = project / ".venv"
    with pytest.raises(environment.Problem, match="Expected TORCH=cpu or TORCH=gpu; got mps"):
        environment.build(project, venv, asked="mps")
    with pytest.raises(environment.Problem, match=r"3\.11 or newer"):
        environment.build(project, venv, "/no/such/python")
    venv.mkdir()
    (venv / "mine").touch()
    with pytest.raises(environment.Problem, match="was not made by make"):
        environment.build(project, venv)


# ---- what a failed update leaves -------------------------------------------------------------


@pytest.mark.parametrize(("line", "kept"), [("Collecting", True), ("Installing", False)])
def test_a_failed_update_keeps_the_old_packages_only_if_none_was_touched(
    environment, project, monkeypatch, line, kept
):
    venv = project / ".venv"
    finished(environment, project, venv, "gpu")
    before = environment.stamp_of(venv)

    def install(root, venv, title, lines):
        lines.append(line + " collected packages: torch")
        raise environment.Problem("no network")

    monkeypatch.setattr(environment, "install", install)
    with pytest.raises(environment.Problem):
        environment.update(project, venv, "cpu")
    assert environment.read_stamp(venv) == (
        (before, "gpu") if kept else (environment.BUILDING, "cpu")
    )


# ---- Ctrl-C ----------------------------------------------------------------------------------


def test_ctrl_c_leaves_nothing_that_counts_as_ready(project, environment, offline):
    with socket.create_server(("127.0.0.1", 0)) as silent_registry:
        url = f"http://127.0.0.1:{silent_registry.getsockname()[1]}/simple"
        process = subprocess.Popen(
            ["make", "lab", f"PYTHON={sys.executable}"],
            cwd=project,
            env=offline | {"PIP_INDEX_URL": url},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        connection, _ = silent_registry.accept()  # pip waits for an answer now
        start_s = time.monotonic()
        os.killpg(process.pid, signal.SIGINT)
        said, _ = process.communicate(timeout=20)
        connection.close()
    assert time.monotonic() - start_s < 5
    assert process.returncode != 0
    assert "Stopped. Nothing half-built will be used" in said
    assert environment.stamp_of(project / ".venv") == environment.BUILDING


# ---- the second time -------------------------------------------------------------------------


def test_the_second_make_starts_within_three_seconds(environment):
    here = Path(sys.prefix)
    if environment.stamp_of(here) != environment.fingerprint(ROOT, here):
        pytest.skip("these tests do not run in an environment that make built")
    start_s = time.monotonic()
    done = subprocess.run(
        ["make", "environment", f"VENV={here}"], cwd=ROOT, capture_output=True, text=True
    )
    assert time.monotonic() - start_s < 3
    assert (done.returncode, done.stdout) == (0, "")


def test_help_lists_every_target():
    targets = [
        "help",
        "environment",
        "lab",
        "test",
        "test-all",
        "test-nightly",
        "test-cluster",
        "faults",
        "gpu",
        "cluster",
        "check",
        "format",
        "notebooks",
        "pictures",
    ]
    targets += ["slides", "site", "bench", "clean"]
    said = subprocess.check_output(["make"], cwd=ROOT, text=True).splitlines()
    targets.insert(-1, "release")
    targets.insert(2, "lock")
    assert [line.split()[1] for line in said] == targets
