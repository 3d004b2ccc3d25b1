"""Build what is handed out, in build/release: a wheel, and a zip for students.

Both are made from the last commit, never from what somebody has written into a notebook since. The
zip has the notebooks without solutions, pages for learners and the wheel, which has the checks.
Only the standard library, git, and pip of the environment.
"""

import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OUT = Path("build", "release")
PAGES = tuple(
    f"{name}.md"
    for name in ("glossary", "cluster_student", "checkpoints", "engines", "models", "planner")
)
NOON = (1980, 1, 1, 12, 0, 0)  # the same commit gives the same zip
NAME = "distributed-training-course"
README = """\
# Distributed training, taken apart: {version}

The lessons, without solutions. You need Python 3.11 or newer, and 3 GB of disk. On Linux, the first
`pip` line keeps PyTorch small: without it, pip brings the GPU libraries.

    python3 -m venv .venv
    .venv/bin/pip install --index-url https://download.pytorch.org/whl/cpu torch=={torch}
    .venv/bin/pip install --constraint requirements.lock {wheel}
    .venv/bin/jupyter lab notebooks/00_ranks.ipynb

`course check 00`, typed in a terminal of JupyterLab, checks the exercises of a lesson, and
`course progress` shows all of them. Words are in `docs/glossary.md`.
"""


def version_of(root):
    """The version that pyproject.toml says, the one place where it stands."""
    return re.search(r'^version = "([^"]+)"', (root / "pyproject.toml").read_text(), re.M)[1]


def git(*words):
    """Return the output of a git command."""
    return subprocess.check_output(["git", *words], cwd=str(ROOT), text=True)


def commit_into(folder):
    """Put the files of the last commit into a folder."""
    folder.mkdir(parents=True)
    archive = folder.with_suffix(".tar")
    git("archive", "--output", str(archive.resolve()), "HEAD")
    with tarfile.open(str(archive)) as tar:
        tar.extractall(str(folder))
    archive.unlink()


def build_wheel(source, out):
    """Let pip build the wheel of a source; returns its path."""
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--no-deps", "--wheel-dir", str(out), str(source)], check=True)
    (wheel,) = out.glob("*.whl")
    return wheel


def student_files(source, wheel):
    """The files of the students' zip, by their name in it."""
    pyproject = (source / "pyproject.toml").read_text()
    torch = re.search(r'"torch==([^";]+)"', pyproject)[1]
    readme = README.format(version=version_of(source), torch=torch, wheel=wheel.name)
    files = {"README.md": readme.encode(), wheel.name: wheel.read_bytes()}
    for path in [
        source / "LICENSE",
        source / "requirements.lock",
        *(source / "docs" / page for page in PAGES),
    ]:
        files[path.relative_to(source).as_posix()] = path.read_bytes()
    for path in sorted((source / "notebooks").glob("*.ipynb")):
        files[f"notebooks/{path.name}"] = path.read_bytes()
    return files


def write_zip(path, files):
    """Write a zip whose bytes depend on nothing but the files."""
    with zipfile.ZipFile(str(path), "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in sorted(files.items()):
            archive.writestr(zipfile.ZipInfo(name, NOON), content, zipfile.ZIP_DEFLATED)


def main():
    """Build both, and say where they are."""
    out = ROOT / OUT
    shutil.rmtree(str(out), ignore_errors=True)
    source = out / "source"
    if git("status", "--porcelain"):
        print("Changes that are not committed are left out: a release is made of a commit.")
    commit_into(source)
    version = version_of(source)
    wheel = build_wheel(source, out)
    bundle = out / f"{NAME}-{version}-students.zip"
    folder = f"{NAME}-{version}"
    files = student_files(source, wheel)
    write_zip(bundle, {f"{folder}/{name}": content for name, content in files.items()})
    shutil.rmtree(str(source))
    for path in (wheel, bundle):
        print(f"{path.relative_to(ROOT)}  {path.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
