"""The files around the course name only what is there; `make check` holds them to their schemas."""

import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

from tests.terminal import ROOT, commands

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
CHANGELOG = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
KINDS = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
LINUX_ONLY = re.compile(r"/proc/|sched_getaffinity\(|^def test.*\bslurm(_box)?\b", re.MULTILINE)


def targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def make_targets(command: str) -> list[str]:
    """The targets that a line of shell makes."""
    found = []
    for line in re.findall(r"^\s*make ([^#\n&|;]*)", command, re.MULTILINE):
        words = re.sub(r"\"[^\"]*\"", "", line).split()
        found += [word for word in words if re.fullmatch(r"[a-z-]+", word)]
    return found


def workflow(text: str) -> dict:
    """A workflow; YAML reads its key `on` as true."""
    read = yaml.safe_load(text)
    return {("on" if key is True else key): value for key, value in read.items()}


def steps_of(path: Path) -> list[dict]:
    return [step for job in workflow(path.read_text())["jobs"].values() for step in job["steps"]]


# ---- workflows -------------------------------------------------------------------------------


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_runs_what_is_there_and_ends(path):
    for job in workflow(path.read_text())["jobs"].values():
        assert job.get("timeout-minutes") or "pages" in job.get("permissions", {})
    for step in steps_of(path):
        assert set(make_targets(step.get("run", ""))) <= targets()
        for script in re.findall(r"^\.ci/\S+", step.get("run", ""), re.MULTILINE):
            assert os.access(ROOT / script, os.X_OK), script
        if "uses" in step:
            assert re.fullmatch(r"actions/[a-z-]+@v\d+", step["uses"])


def test_the_tests_run_on_both_systems_the_long_ones_nightly_the_notebooks_weekly_and_the_site():
    runs = {path.stem: [step.get("run") for step in steps_of(path)] for path in WORKFLOWS}
    assert {".ci/run", ".ci/run-macos", "make check"} <= set(runs["tests"])
    assert {".ci/run test-nightly", "make faults"} <= set(runs["nightly"])
    assert "make notebooks NOTEBOOKS_ARGS=--force" in runs["notebooks"]
    assert "make slides site" in runs["site"]
    weekly = workflow((ROOT / ".github/workflows/notebooks.yml").read_text())["on"]["schedule"]
    assert re.fullmatch(r"\d+ \d+ \* \* [0-6]", weekly[0]["cron"])


def test_what_macos_skips_is_there_and_all_that_needs_linux_is_skipped():
    text = (ROOT / ".ci" / "run-macos").read_text()
    skipped = re.findall(r"^(tests/\S+) +(?=\S)", text, re.MULTILINE)
    assert all((ROOT / name).exists() for name in skipped)
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        name = str(path.relative_to(ROOT))
        if path != Path(__file__) and LINUX_ONLY.search(path.read_text()):
            assert any(name.startswith(one) for one in skipped), name


def test_macos_hands_the_list_to_pytest(tmp_path):
    """`make` is a stand-in that prints what it is asked for."""
    (tmp_path / "make").write_text('#!/bin/sh\nfor word in "$@"; do echo "$word"; done\n')
    (tmp_path / "make").chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    said = subprocess.check_output([ROOT / ".ci/run-macos"], env={"PATH": path}, text=True)
    target, arguments = said.splitlines()
    assert target == "test-all"
    assert arguments.split()[0] == "TEST_ARGS=--ignore=tests/grading"
    assert all(word.startswith("--ignore=tests/") for word in arguments.split()[1:])


# ---- templates -------------------------------------------------------------------------------


def test_the_pull_request_template_names_targets_that_are_there():
    text = (ROOT / ".github" / "pull_request_template.md").read_text()
    named = re.findall(r"`make ([a-z-]+)`", text)
    assert named
    assert set(named) <= targets()
    assert "- [ ]" in text


# ---- how to cite it, what changed ------------------------------------------------------------


def test_the_citation_says_the_version_of_pyproject():
    read = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (read["version"], read["license"]) == (PROJECT["version"], PROJECT["license"])


def test_the_changelog_has_its_form_and_begins_with_what_is_not_released():
    titles = re.findall(r"^## (.*)", CHANGELOG, re.MULTILINE)
    assert titles[0] == "[Unreleased]"
    assert re.match(rf"\[{re.escape(PROJECT['version'])}\]", titles[1])
    assert all(re.fullmatch(r"\[\d+\.\d+\.\d+\]( - \d{4}-\d\d-\d\d)?", one) for one in titles[1:])
    assert set(re.findall(r"^### (.*)", CHANGELOG, re.MULTILINE)) <= KINDS


def test_the_version_is_a_semantic_one_and_stands_in_no_code():
    assert re.fullmatch(r"\d+\.\d+\.\d+", PROJECT["version"])
    for folder in ("course_lib", "course_tools", "tools"):
        for path in (ROOT / folder).rglob("*.py"):
            assert "__version__ =" not in path.read_text(encoding="utf-8"), path


# ---- CONTRIBUTING.md -------------------------------------------------------------------------


def test_contributing_names_commands_and_files_that_are_there():
    found = commands(CONTRIBUTING)
    assert len(found) > 8
    assert {name for line in found for name in make_targets(line)} <= targets()
    for line in [*found, *re.findall(r"`([^`\n]+)`", CONTRIBUTING)]:
        for name in re.findall(
            r"\b(?:tests|docs|tools|notebooks|course_(?:lib|tools))/[\w./]+", line
        ):
            if "NN" not in name and "IDEA" not in name and "idea" not in name:
                assert (ROOT / name).exists(), name


@pytest.mark.parametrize(
    "command",
    [line for line in commands(CONTRIBUTING) if line.startswith(("course", "python"))],
)
def test_a_command_of_contributing_is_one(command):
    """That their modules and options exist; the README's and the guide's are run whole."""
    words = command.split()
    if words[0] == "course":
        from course_lib.cli.commands import app

        assert words[1] in {
            one.name or one.callback.__name__.replace("_", "-") for one in app.registered_commands
        }
    elif words[1] == "-m":
        assert words[2] == "pytest" or (ROOT / words[2].replace(".", "/")).exists()
    else:
        assert (ROOT / words[1]).is_file()
