"""Whatever keeps `make` from building the environment is one sentence that says what to do."""

import shutil
import subprocess
import sys

import pytest


@pytest.fixture
def make(project, offline):
    """Run make in the project, with more environment variables if given."""

    def run(target: str, **extra: str) -> subprocess.CompletedProcess[str]:
        settings = offline | extra
        return subprocess.run(
            ["make", target], cwd=project, env=settings, capture_output=True, text=True
        )

    return run


def sentence(done: subprocess.CompletedProcess[str]) -> str:
    """What a failed make says, beside its own last line: one line, or this fails."""
    assert done.returncode != 0
    (said,) = [line for line in done.stderr.splitlines() if line and not line.startswith("make:")]
    return said


def test_no_python_at_all_is_said(make, tmp_path):
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("sh", "make"):
        (tools / name).symlink_to(shutil.which(name))
    said = sentence(make("lab", PATH=str(tools)))
    assert said.startswith("The course needs Python 3.11 or newer; here is none.")
    assert "make lab PYTHON=" in said


def test_an_old_python_is_said(make, fake_python):
    old = fake_python('case "$2" in *print*) echo 3.9.18;; esac')
    said = sentence(make("test", PYTHON=old))
    assert "3.11 or newer" in said
    assert "is 3.9.18" in said


def test_a_python_that_is_not_there_is_said(make):
    said = sentence(make("lab", PYTHON="/no/such/python"))
    assert "/no/such/python is not a Python that runs" in said


def test_a_missing_venv_module_is_said(make, fake_python):
    bare = fake_python(
        'case "$2" in *print*) echo 3.12.3;; venv) echo "$0: No module named venv"; exit 1;; esac',
    )
    said = sentence(make("lab", PYTHON=bare))
    assert said.startswith("Python 3.12.3 came without its venv module.")
    assert "apt install python3-venv" in said


def test_no_registry_is_said_and_nothing_counts_as_ready(make, project, environment):
    done = make("lab", PIP_RETRIES="1", PYTHON=sys.executable)
    assert sentence(done).startswith("The package registry cannot be reached.")
    assert "making .venv" in done.stdout
    assert environment.stamp_of(project / ".venv") == environment.BUILDING


def test_a_full_disk_is_said_before_anything_is_written(environment, project, monkeypatch):
    full = shutil.disk_usage(project)._replace(free=10**8)
    monkeypatch.setattr(environment.shutil, "disk_usage", lambda folder: full)
    with pytest.raises(environment.Problem, match=r"needs 3 GB of disk; 0\.1 GB are free"):
        environment.build(project, project / ".venv")
    assert not (project / ".venv").exists()


def test_the_gpu_build_needs_more_disk(environment, project, monkeypatch):
    room = shutil.disk_usage(project)._replace(free=5 * 10**9)
    monkeypatch.setattr(environment.shutil, "disk_usage", lambda folder: room)
    environment.check_disk(project / ".venv", "cpu")
    with pytest.raises(environment.Problem, match=r"12 GB of disk; 5\.0 GB .*make lab TORCH=cpu"):
        environment.check_disk(project / ".venv", "gpu")
    assert "Free 12 GB" in environment.explain(["Errno 28"], "3.11.0", build="gpu")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("ERROR: Could not install packages due to an OSError: [Errno 28] No space left on "
         "device", "The disk filled up"),
        ("ERROR: [Errno 122] Disk quota exceeded: '/home/me'", "The disk filled up"),
        ("The virtual environment was not created successfully because ensurepip is not",
         "without its venv module"),
        ("WARNING: Retrying (Retry(total=4, connect=None)) after connection broken by "
         "'NewConnectionError'", "registry cannot be reached"),
        ("ReadTimeoutError: HTTPSConnectionPool(host='h', port=443): Read timed out.",
         "registry cannot be reached"),
        ("WARNING: Retrying (Retry(total=4, connect=None)) after connection broken by "
         "'NewConnectionError': /whl/cpu/torch/", "index of PyTorch's CPU builds"),
        ("ReadTimeoutError: HTTPSConnectionPool(host='download.pytorch.org', port=443): Read "
         "timed out.", "make lab TORCH=gpu"),
        ("SSLError(SSLCertVerificationError(1, '[SSL: CERTIFICATE_VERIFY_FAILED]",
         "PIP_CERT"),
        ("ERROR: No matching distribution found for torch==2.13.0",
         "no torch==2.13.0 for Python 3.15.0"),
        ("  cause: Because torch was not found in the package registry and you require "
         "torch==2.13.0, we can conclude that your requirements are unsatisfiable.",
         "no torch for Python 3.15.0"),
        ("  cause: failed to copy file from a to b: No space left on device (os error 28)",
         "The disk filled up"),
        ("  cause: error sending request for url (https://download.pytorch.org/whl/cpu/torch/)",
         "index of PyTorch's CPU builds"),
        ("  cause: error sending request for url (http://127.0.0.1:9/simple/torch/)",
         "registry cannot be reached"),
        ("  cause: invalid peer certificate: UnknownIssuer", "PIP_CERT"),
        ("ERROR: [Errno 13] Permission denied: '/opt/x'", "may not be written to"),
        ("ERROR: something new", "could not be built: ERROR: something new"),
    ],
)  # fmt: skip
def test_each_symptom_has_its_sentence(environment, line, said):
    lines = ["Collecting torch", line, "note: see above"]
    assert said in environment.explain(lines, "3.15.0")
