"""Packages come by the lock, through uv, which is told what pip's settings say, or through pip."""

import os
import signal
import subprocess
import sys
import time
import tomllib

import pytest
from packaging.requirements import Requirement

from tests.setup.conftest import ROOT


@pytest.fixture
def packages(environment):
    """tools/packages.py as a module."""
    import packages

    return packages


@pytest.fixture
def installer(packages, tmp_path, monkeypatch):
    """An installer whose commands are noted, and say and return what the test wants."""
    monkeypatch.setattr(packages.Installer, "find_uv", lambda self: "uv")
    (tmp_path / "venv").mkdir()
    installer = packages.Installer(tmp_path, tmp_path / "venv", "cpu", "3.11.7", [])
    installer.answers, installer.ran = [], []

    def run(command, title):
        installer.ran.append((command[0], title))
        return installer.answers.pop(0)

    monkeypatch.setattr(installer, "run", run)
    return installer


# ---- the lock --------------------------------------------------------------------------------


def test_the_lock_has_one_version_that_pyproject_allows_of_all_that_is_installed(packages):
    locked = {}
    for line in packages.read_lock(ROOT):
        one = Requirement(line)
        locked.setdefault(one.name.lower().replace("_", "-"), []).append(one)
    assert "torch" not in locked  # pyproject.toml names its one version
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    for wanted in map(Requirement, lines):
        for one in locked.get(wanted.name, []):
            (version,) = one.specifier
            assert version.version in wanted.specifier, f"{wanted}: make lock"
        assert wanted.name in {*locked, "torch"}, f"{wanted} is not in the lock: make lock"


def test_the_lock_decides_between_versions(registry, uv_or_pip, capsys):
    registry.needs("pure>=1")
    for version in ("1.0", "1.1", "1.2"):
        registry.wheel("pure", version)
    (registry.root / "requirements.lock").write_text("pure==1.1\nnever-asked-for==3\n")
    assert registry.build()["pure"] == "1.1"
    said = capsys.readouterr().out
    assert ("no uv for this system: pip installs" in said) == (uv_or_pip == "pip")


def test_what_the_registry_lacks_of_the_lock_is_said_and_another_version_taken(
    registry, uv_or_pip, capsys
):
    registry.needs("top")
    registry.wheel("top", "1.0", "pure>=1", "other")
    for version in ("1.0", "1.2"):
        registry.wheel("pure", version)
        registry.wheel("other", version)
    (registry.root / "requirements.lock").write_text("other==1.0\npure==1.1 ; python_version>'3'\n")
    found = registry.build()
    assert (found["pure"], found["other"]) == ("1.2", "1.0")
    assert "pure==1.1 cannot be had here: taking versions that can" in capsys.readouterr().out


def test_a_version_that_no_range_allows_is_said(registry, uv_or_pip):
    registry.wheel("torch", "2.12.0")
    with pytest.raises(registry.environment.Problem, match=r"registry has no torch==2\.13\.0 for"):
        registry.build()


@pytest.mark.parametrize(
    "line", ["<<<<<<< HEAD", "pure>=1", "pure == 1", "pure", "pure==1 other==2", "pure==1 <<<<"]
)
def test_a_broken_lock_is_said_before_anything_is_written(environment, project, line):
    (project / "requirements.lock").write_text(f"# by make lock\npure==1\n{line}\n")
    with pytest.raises(environment.Problem) as found:
        environment.build(project, project / ".venv")
    assert str(found.value) == (
        f"requirements.lock, line 3: expected name==version; got {line!r}. Try git checkout "
        "requirements.lock, or make lock to write it anew"
    )
    assert not (project / ".venv").exists()


def test_another_lock_makes_the_environment_stale(environment, project):
    before = environment.fingerprint(project, project / ".venv")
    (project / "requirements.lock").write_text("pure==1\n")
    assert environment.fingerprint(project, project / ".venv") != before


UV = """
case $1 in --version) echo uv 0.9.0; exit;; esac
for word; do test "$before" = --python-version && version=$word; before=$word; done
echo "written==$version" > "$before"
"""


@pytest.fixture
def lock_with(project, offline, fake_python, tmp_path):
    """Start `make lock` in the project with a stand-in for uv; returns the process."""
    (project / ".venv" / "bin").mkdir(parents=True)
    (project / ".venv" / "bin" / "python").symlink_to(sys.executable)
    (project / "requirements.lock").write_text("before==1\n")

    def start(after: str) -> subprocess.Popen[str]:
        (tmp_path / "bin").mkdir()
        os.rename(fake_python(UV + after), tmp_path / "bin" / "uv")
        return subprocess.Popen(
            ["make", "lock"],
            cwd=project,
            env=offline | {"PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    return start


@pytest.mark.parametrize(("after", "lock"), [("", "written==3.11"), ("exit 1", "before==1")])
def test_a_lock_fits_the_oldest_python_and_is_written_whole_or_not(
    project, environment, lock_with, after, lock
):
    process = lock_with(after)
    process.communicate()
    assert (process.returncode == 0) == (after == "")
    assert [path.read_text() for path in project.glob("*.lock*")] == [lock + "\n"]
    assert environment.OLDEST == (3, 11)


def test_ctrl_c_leaves_the_lock_as_it_was(project, lock_with):
    process = lock_with("echo Resolved 3 packages; exec sleep 60")
    while not (project / "requirements.lock.new").exists():
        assert process.poll() is None
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)
    said, errors = process.communicate()
    assert process.returncode != 0
    assert "Stopped. requirements.lock is as it was." in said
    assert "Traceback" not in errors
    assert [path.read_text() for path in project.glob("*.lock*")] == ["before==1\n"]


# ---- what is imported first ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("import no_such_library", "ModuleNotFoundError: No module named 'no_such_library'"),
        ("raise OSError('libcuda.so is\\nnot here')", "OSError: libcuda.so is"),
        ("import sys; sys.exit(0)", "SystemExit: 0"),
        ("import os; os.abort()", "exit code -6"),
    ],
)
def test_an_import_that_fails_is_named(packages, tmp_path, monkeypatch, body, why):
    (tmp_path / "broken_torch.py").write_text(body + "\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(packages, "FIRST_IMPORTS", ("json", "broken_torch"))
    monkeypatch.setattr(packages.Installer, "find_uv", lambda self: "uv")
    installer = packages.Installer(tmp_path, tmp_path, "cpu", "3.11.7", [])
    installer.python = sys.executable
    with pytest.raises(packages.Problem) as found:
        installer.compile()
    assert f"Python cannot import broken_torch ({why}" in str(found.value)
    assert "\n" not in str(found.value)


# ---- uv, or pip ------------------------------------------------------------------------------

OFFLINE = "  cause: error sending request for url (https://registry/simple/pure/)"


@pytest.mark.parametrize(
    ("uv_says", "tools"),
    [
        ("error: invalid peer certificate: UnknownIssuer", ["uv", "pip"]),
        ("error: something new", ["uv", "pip"]),
        (
            "  cause: Because pure was not found in the package registry: 401 Unauthorized",
            ["uv", "pip"],
        ),
        (OFFLINE, ["uv"]),
        ("  cause: failed to write to file `x`: No space left on device (os error 28)", ["uv"]),
        ("  cause: Because there is no version of pure==1 and you require", ["uv"]),
    ],
)
def test_pip_tries_what_may_fail_for_uv_alone(installer, packages, uv_says, tools):
    installer.answers = [(1, ["error: No solution found", uv_says][-1 - uv_says.count("no v") :])]
    installer.answers.append((0, []))
    if tools == ["uv"]:
        with pytest.raises(packages.Problem):
            installer.install("title", ["pure"])
    else:
        installer.install("title", ["pure"])
        assert installer.ran[1][1] == f"      uv has failed ({uv_says.strip()}): pip tries it"
    names = [os.path.basename(command).replace("python", "pip") for command, _ in installer.ran]
    assert names == tools


def test_a_uv_on_the_path_that_is_not_tested_is_not_taken(
    packages, tmp_path, monkeypatch, fake_python
):
    monkeypatch.setattr(packages.Installer, "run", lambda self, command, title: (1, ["no uv"]))
    monkeypatch.setattr(packages.shutil, "which", lambda name: path)
    for version, taken in (("0.4.1", False), ("0.10.2", True), ("1.0.0", False)):
        path = fake_python(f"echo uv {version}")
        installer = packages.Installer(tmp_path, tmp_path, "cpu", "3.11.7", [])
        assert installer.uv == (path if taken else "")
    assert packages.uv_version("/no/such/uv") == ()


def test_an_unreachable_registry_is_said_at_the_first_step(registry, monkeypatch, capsys):
    import packages

    monkeypatch.setattr(packages.shutil, "which", lambda name: "")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    with pytest.raises(registry.environment.Problem, match="registry cannot be reached"):
        registry.build()
    assert "no uv for this system" not in capsys.readouterr().out


@pytest.mark.parametrize("name", ["constraint", "no-index", "pre", "no-binary"])
def test_a_setting_of_pip_holds_whoever_installs(registry, uv_or_pip, tmp_path, monkeypatch, name):
    registry.needs("pure>=1")
    for version in ("1.0", "1.2"):
        registry.wheel("pure", version)
    registry.wheel("pure", "1.0", of="wheels")
    (tmp_path / "mine.txt").write_text("pure<1.1\n")
    if name == "constraint":
        monkeypatch.setenv("PIP_CONSTRAINT", str(tmp_path / "mine.txt"))
    elif name == "no-index":
        monkeypatch.setenv("PIP_NO_INDEX", "1")
        monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels" / "pure"))
    elif name == "pre":
        registry.wheel("pure", "2.0rc1")
        monkeypatch.setenv("PIP_PRE", "1")
    else:  # there are wheels alone
        monkeypatch.setenv("PIP_NO_BINARY", "other,pure")
        with pytest.raises(registry.environment.Problem):
            registry.build()
        return
    assert registry.build()["pure"] == ("2.0rc1" if name == "pre" else "1.0")


def test_getting_uv_touches_no_package_and_asks_for_a_tested_version(
    packages, tmp_path, monkeypatch
):
    said, asked = ["Installing collected packages: uv"], []

    def run_showing(command, title, cwd, lines, env):
        asked.append(command[-1])
        lines.extend(said)
        return 1, lines

    monkeypatch.setattr(packages.shutil, "which", lambda name: "")
    monkeypatch.setattr(packages, "run_showing", run_showing)
    installer = packages.Installer(tmp_path, tmp_path, "cpu", "3.11.7", [])
    assert asked == ["uv>=0.9,<1"]
    assert not packages.has_touched(installer.lines)
    assert packages.has_touched(["Resolved 198 packages in 1 s"])


# ---- pip's settings for uv -------------------------------------------------------------------


def test_uv_is_told_what_the_settings_of_pip_say(environment, tmp_path, monkeypatch):
    import pip_settings

    file = tmp_path / "pip.conf"
    file.write_text(
        "[global]\nindex-url = https://a/simple\ncert = /ca.pem\ntimeout = 60\n"
        "extra-index-url =\n  https://b/simple\n  https://c/simple\n"
        "[install]\nfind_links = /wheels /more\nno-index = false\nno_cache_dir = yes\n"
        "only-binary = :all:\nno-binary = pure,other\npre = true\nkeyring-provider = subprocess\n"
        "[list]\nproxy = http://no\n"
    )
    for name in [name for name in os.environ if name.startswith(("PIP_", "UV_", "SSL_"))]:
        monkeypatch.delenv(name)
    monkeypatch.delenv("ALL_PROXY", raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", str(file))
    monkeypatch.setenv("PIP_INDEX_URL", "https://mine/simple")
    monkeypatch.setenv("PIP_DEFAULT_TIMEOUT", "90")
    monkeypatch.setenv("UV_HTTP_RETRIES", "7")
    monkeypatch.setenv("PIP_RETRIES", "1")
    monkeypatch.setattr(pip_settings, "SYSTEM", tmp_path / "etc")
    told = pip_settings.uv_environment()
    assert {name: told[name] for name in told if name.startswith(("UV_", "SSL_", "ALL_"))} == {
        "UV_DEFAULT_INDEX": "https://mine/simple",
        "UV_INDEX": "https://b/simple https://c/simple",
        "UV_FIND_LINKS": "/wheels,/more",
        "UV_NO_CACHE": "1",
        "UV_HTTP_TIMEOUT": "90",
        "UV_HTTP_RETRIES": "7",  # uv's own setting wins
        "SSL_CERT_FILE": "/ca.pem",
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "UV_PRERELEASE": "allow",
        "UV_KEYRING_PROVIDER": "subprocess",
    }
    wanted = "--no-binary pure --no-binary other --only-binary :all:"
    assert " ".join(pip_settings.uv_options()) == wanted
    assert pip_settings.unknown_to_uv() == []


@pytest.mark.parametrize("value", ["auto", "disabled", "import"])
def test_a_keyring_that_uv_does_not_know_is_said(packages, tmp_path, monkeypatch, capsys, value):
    import pip_settings

    monkeypatch.setattr(packages.Installer, "find_uv", lambda self: "uv")
    monkeypatch.delenv("UV_KEYRING_PROVIDER", raising=False)
    monkeypatch.setenv("PIP_KEYRING_PROVIDER", value)
    packages.Installer(tmp_path, tmp_path, "cpu", "3.11.7", [])
    said = "uv has no keyring-provider import (PIP_KEYRING_PROVIDER), so where a registry asks"
    assert (said in capsys.readouterr().out) == (value == "import")
    passed = pip_settings.uv_environment().get("UV_KEYRING_PROVIDER")
    assert passed == (value if value == "disabled" else None)


def test_the_settings_are_those_that_pip_itself_lists(environment):
    import pip_settings

    command = [sys.executable, "-m", "pip", "config", "list"]
    lines = subprocess.check_output(command, text=True).splitlines()
    listed = {line.partition("=")[0].split(".")[-1] for line in lines}
    assert listed <= set(pip_settings.pip_settings())
