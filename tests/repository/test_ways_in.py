"""The files that start the course elsewhere name only what is there: containers, Binder, hubs."""

import ast
import fnmatch
import json
import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.repository.test_project_files import make_targets, targets
from tests.terminal import ROOT, commands

DOCKERFILE = re.sub(r"\\\n\s*", "", (ROOT / "Dockerfile").read_text())
IGNORED = (ROOT / ".dockerignore").read_text().split()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PAGES = {name: (ROOT / "docs" / f"{name}.md").read_text() for name in
         ("containers", "colab", "jupyterhub")}  # fmt: skip
KNOWN = {"FROM", "RUN", "USER", "WORKDIR", "ENV", "COPY", "EXPOSE", "CMD"}


def instructions(text: str = DOCKERFILE) -> list[tuple[str, str]]:
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [tuple(line.split(maxsplit=1)) for line in lines]


def problems(text: str) -> list[str]:
    """What a Dockerfile names that is not there, or leaves open."""
    found = [f"instruction {name}" for name, _ in instructions(text) if name not in KNOWN]
    for name, rest in instructions(text):
        if name == "RUN":
            found += [f"target {one}" for part in rest.split("&&")
                      for one in set(make_targets(part)) - targets()]  # fmt: skip
        if name == "COPY":
            files = [word for word in rest.split() if not word.startswith("--")][:-1]
            for file in files:
                ignored = any(fnmatch.fnmatch(file, pattern) for pattern in IGNORED)
                if ignored or not (ROOT / file).exists():
                    found.append(f"file {file}")
        if name == "CMD":
            words = json.loads(rest)
            found += [f"target {words[1]}"] if words[1] not in targets() else []
    if [rest for name, rest in instructions(text) if name == "USER"][-1:] in ([], ["root"]):
        found.append("runs as root")
    return found


# ---- the image -------------------------------------------------------------------------------


def test_the_dockerfile_names_targets_and_files_that_are_there():
    assert problems(DOCKERFILE) == []


@pytest.mark.parametrize(
    ("right", "wrong", "found"),
    [
        ("RUN make environment", "RUN make environ", "target environ"),
        ("COPY --chown=learner:learner tools", "COPY --chown=learner:learner tool", "file tool"),
        ('"lab"', '"labb"', "target labb"),
        ("USER learner", "USER root", "runs as root"),
        ("EXPOSE", "EXPOSES", "instruction EXPOSES"),
    ],
)
def test_a_mistake_in_the_dockerfile_is_seen(right, wrong, found):
    assert right in DOCKERFILE
    assert found in problems(DOCKERFILE.replace(right, wrong))


def test_the_image_has_a_python_that_the_course_takes_and_the_cpu_build():
    ((_, image), *_) = instructions()
    version = re.search(r"python:(\d+\.\d+)-slim", image)[1]
    assert Requirement(f"python{PROJECT['requires-python']}").specifier.contains(version)
    builds = [rest for name, rest in instructions() if "make environment" in rest]
    assert len(builds) == 2
    assert all("TORCH=cpu" in rest for rest in builds)


def test_what_a_build_leaves_here_does_not_go_into_the_image():
    assert {".venv", "build", "runs", "submissions", "grades"} <= set(IGNORED)
    tracked = subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines()
    for pattern in IGNORED:
        assert not fnmatch.filter(tracked, pattern), f"{pattern} leaves out what git tracks"


def test_the_dev_container_is_the_image_with_the_clone_in_its_place():
    read = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text())
    folder = ROOT / ".devcontainer"
    assert (folder / read["build"]["dockerfile"]).resolve() == ROOT / "Dockerfile"
    assert (folder / read["build"]["context"]).resolve() == ROOT
    users = [rest for name, rest in instructions() if name == "USER"]
    assert read["remoteUser"] == users[-1]
    places = [rest for name, rest in instructions() if name == "WORKDIR"]
    assert read["workspaceFolder"] == places[-1]
    assert f"target={places[-1]}," in read["workspaceMount"]
    assert set(make_targets(read["postCreateCommand"])) <= targets()
    ports = [int(rest) for name, rest in instructions() if name == "EXPOSE"]
    assert read["forwardPorts"] == ports
    (venv,) = [rest.partition("=")[2] for name, rest in instructions() if rest.startswith("VENV=")]
    settings = read["customizations"]["vscode"]["settings"]
    assert settings["python.defaultInterpreterPath"] == f"{venv}/bin/python"
    assert not venv.startswith(places[-1]), "the mounted clone would hide it"


# ---- Binder ----------------------------------------------------------------------------------


def test_binder_installs_the_torch_of_pyproject_and_the_rest_from_it(tmp_path):
    text = (ROOT / "binder" / "requirements.txt").read_text()
    (torch,) = [line for line in PROJECT["dependencies"] if line.startswith("torch")]
    assert torch in text.splitlines()
    script = (ROOT / "binder" / "postBuild").read_text()
    subprocess.run(["bash", "-n", ROOT / "binder" / "postBuild"], check=True)
    lists = re.search(r"<<'LIST'.*?\n(.*?)^LIST$", script, re.DOTALL | re.MULTILINE)[1]
    said = subprocess.check_output(["python3", "-c", lists], cwd=ROOT, text=True).splitlines()
    needed = [Requirement(line) for line in PROJECT["dependencies"]]
    assert [Requirement(line) for line in said] == [one for one in needed if not one.marker]
    for name in re.findall(r"\$PWD/([\w/]+)", script):
        assert (ROOT / name).is_dir(), name


def test_binder_has_the_python_of_the_image():
    (version,) = re.findall(r"python-(\d+\.\d+)", (ROOT / "binder" / "runtime.txt").read_text())
    assert f"python:{version}-slim" in DOCKERFILE


def test_each_lesson_has_its_memory_on_the_page():
    lessons = sorted(path.stem for path in (ROOT / "notebooks").glob("*.ipynb"))
    rows = re.findall(
        r"^\| (\d\d[a-z]?_\w+) \| ([\d,]+) MB \| (yes|no) \|", PAGES["containers"], re.M
    )
    assert [name for name, _, _ in rows] == lessons
    for name, mb, fits in rows:
        assert (int(mb.replace(",", "")) + 200 < 2048) == (fits == "yes"), name


# ---- the pages -------------------------------------------------------------------------------


def test_the_snippets_of_the_hub_are_python_that_sets_what_the_text_says():
    blocks = dict(re.findall(r"^```python (\w+)\n(.*?)^```", PAGES["jupyterhub"], re.S | re.M))
    assert set(blocks) == {"systemd", "docker", "cull"}
    for text in blocks.values():
        for statement in ast.parse(text).body:
            assert isinstance(statement, ast.Assign)
            assert ast.unparse(statement.targets[0]).startswith("c.")
    assert '"TasksMax": "1000"' in blocks["systemd"]
    assert '"pids_limit": 1000' in blocks["docker"]
    assert "cull_busy = False" in blocks["cull"]


def test_the_link_of_nbgitpuller_opens_a_lesson_that_is_there():
    from urllib.parse import parse_qs, urlsplit

    (link,) = re.findall(r"^https://HUB/\S+", PAGES["jupyterhub"], re.MULTILINE)
    asked = {name: one for name, (one,) in parse_qs(urlsplit(link).query).items()}
    repo = asked["repo"].rpartition("/")[2]
    tree, _, path = asked["urlpath"].partition(f"/{repo}/")
    assert tree == "lab/tree"
    assert (ROOT / path).is_file()
    assert repo == PROJECT["name"]


@pytest.mark.parametrize("page", PAGES)
def test_commands_of_a_page_name_what_is_there(page):
    lines = commands(PAGES[page])
    for line in lines:
        words = shlex.split(line)
        if words[0] == "make":
            assert words[3 if words[1] == "-C" else 1] in targets()
    text = PAGES[page]
    for module in re.findall(r"-m (course_lib[\w.]+)", text):
        assert Path(ROOT, *module.split(".")).with_suffix(".py").is_file()
    for name in re.findall(r"`((?:binder|notebooks|docs|\.devcontainer)/[\w./]*)`", text):
        assert (ROOT / name).exists(), name


def test_ports_volumes_and_the_image_are_the_same_in_the_commands_and_the_dockerfile():
    run = next(line for line in commands(PAGES["containers"]) if line.startswith("docker run"))
    (port,) = [rest for name, rest in instructions() if name == "EXPOSE"]
    (place,) = [rest for name, rest in instructions() if name == "WORKDIR"]
    assert f"127.0.0.1:{port}:{port}" in run
    assert f":{place}/notebooks" in run
    assert run.split()[-1] == commands(PAGES["containers"])[0].split()[3] == PROJECT["name"]
