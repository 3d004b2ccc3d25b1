"""environment.yml says the same as pyproject.toml, in words that conda can read."""

import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from rattler import MatchSpec

ROOT = Path(__file__).resolve().parents[2]
CONDA_NAMES = {"torch": "pytorch"}
OWN_KEYS = {"name", "channels", "dependencies"}


def wanted() -> dict[str, set[str]]:
    """What pyproject.toml lists: conda's name -> its bounds."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    found = {"python": {project["requires-python"]}, "pip": set()}
    for requirement in map(Requirement, lines):
        name = canonicalize_name(requirement.name)
        found[CONDA_NAMES.get(name, name)] = conditions(requirement)
    return found


def conditions(requirement: Requirement) -> set[str]:
    """Bounds of the version and, where it is for some systems only, which ones."""
    marker = {str(requirement.marker)} if requirement.marker else set()
    return {str(bound) for bound in requirement.specifier} | marker


def read(text: str) -> dict[str, set[str]]:
    """What an environment.yml lists; raises for any line that conda or pip would not take."""
    content = yaml.safe_load(text)
    if set(content) != OWN_KEYS:
        raise ValueError(f"need the keys {sorted(OWN_KEYS)}; got {sorted(content)}")
    found: dict[str, set[str]] = {}
    for line in content["dependencies"]:
        if isinstance(line, dict):
            found |= read_pip(line["pip"])
            continue
        MatchSpec(line, strict=True)
        name, _, version = line.partition(" ")
        found[name] = set(filter(None, version.split(",")))
    return found


def read_pip(lines: list[str]) -> dict[str, set[str]]:
    """The part that pip installs, without the course itself."""
    requirements = [Requirement(line) for line in lines if line != "--editable ."]
    return {one.name: conditions(one) for one in requirements}


def test_environment_yml_lists_what_pyproject_lists():
    assert read((ROOT / "environment.yml").read_text()) == wanted()


def test_environment_yml_installs_the_course_itself():
    pip_part = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"][-1]
    assert "--editable ." in pip_part["pip"]


def test_torch_is_one_exact_version():
    assert wanted()["pytorch"] == {"==2.13.0"}


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("jupyterlab >=4.6,<5", "jupyterlab =>4.6"),
        ("numpy >=2.1,<3", "numpy >=2.1,,<3"),
        ("playwright>=1.55", "playwright=>1.55"),
        ("channels:", "chanels:"),
    ],
)
def test_a_line_that_conda_would_not_take_is_rejected(right, wrong):
    text = (ROOT / "environment.yml").read_text()
    assert right in text
    with pytest.raises(Exception, match=r"=>|,,|chanels|invalid|[Ee]xpected"):
        read(text.replace(right, wrong))


def test_a_forgotten_or_changed_package_is_seen():
    text = (ROOT / "environment.yml").read_text()
    assert read(text.replace("  - rich >=14\n", "")) != wanted()
    assert read(text.replace("ruff >=0.14", "ruff >=0.15")) != wanted()
    assert read(
        text.replace("deepspeed==0.19.8; sys_platform == 'linux'", "deepspeed==0.19.8")
    ) != (wanted())
