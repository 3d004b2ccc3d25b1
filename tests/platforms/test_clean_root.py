"""Gradescope's zip in a root folder of its own, as its documentation lays a container out.

It has this system's packages and nothing else of this machine: /autograder/source/setup.sh runs
once and builds an environment, /autograder/run_autograder for each submission.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest

from course_tools.platforms.bundle import autograder_files, write_autograder
from tests.platforms.test_exports import POINTS, WRONG

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
ENTER = """
set -e
cd "$1"
shift
mkdir -p root
mount --bind root root
for top in usr etc var opt; do
  mkdir -p "root/$top" "upper/$top" "scratch/$top"
  mount -t overlay overlay "root/$top" \\
    -o "lowerdir=/$top,upperdir=upper/$top,workdir=scratch/$top"
done
for top in bin sbin lib lib32 lib64; do
  test -e "root/$top" || cp -a "/$top" root/ 2>/dev/null || true
done
mkdir -p root/proc root/dev root/tmp root/root root/run root/old root/autograder
chmod 1777 root/tmp
mount -t proc proc root/proc
mount --rbind /dev root/dev
mount --bind autograder root/autograder
cd root
pivot_root . old
exec chroot . sh -c 'umount -l /old && cd / && exec "$@"' sh "$@"
"""
UNSHARE = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", ENTER, "sh")


def inside(folder: Path, *words: str) -> subprocess.CompletedProcess:
    """Run a command in the clean root folder; nothing but its file system outlives it."""
    kept = {name: text for name, text in os.environ.items() if name.startswith("PIP_")}
    return subprocess.run(
        [*UNSHARE, str(folder), *words],
        env={"PATH": PATH, "HOME": "/root", "LANG": "C.UTF-8", **kept},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )


@pytest.fixture
def root(tmp_path) -> Path:
    folder = tmp_path / "container"
    (folder / "autograder").mkdir(parents=True)
    if inside(folder, "true").returncode:
        pytest.skip("need root, and overlay file systems, for a root folder of its own")
    return folder


def unpack(archive: Path, home: Path) -> None:
    """Unpack the zip as Gradescope does: /autograder/source, and run_autograder above it."""
    subprocess.run(["unzip", "-q", archive, "-d", home / "source"], check=True)
    (home / "source/run_autograder").rename(home / "run_autograder")


def results_of(root: Path, submission: Path) -> dict:
    """Grade a submission there; return results.json."""
    home = root / "autograder"
    for name in ("submission", "results"):
        subprocess.run(["rm", "-rf", home / name], check=True)
        (home / name).mkdir()
    (home / "submission/hw.ipynb").write_bytes(submission.read_bytes())
    done = inside(root, "/autograder/run_autograder")
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((home / "results/results.json").read_text())


@pytest.mark.timeout(3600)
def test_gradescopes_scripts_run_in_a_root_folder_of_its_own(toy, root, tmp_path):
    home = root / "autograder"
    write_autograder(tmp_path / "toy.zip", autograder_files(toy.home))
    unpack(tmp_path / "toy.zip", home)
    done = inside(root, "/autograder/source/setup.sh")
    assert done.returncode == 0, done.stdout + done.stderr
    right = results_of(root, toy.hand_in("ann.ipynb"))
    assert (right["score"], right["output"]) == (30, "Every exercise was judged.")
    found = results_of(root, toy.hand_in("bob.ipynb", toy_1=WRONG, toy_3=""))
    by_name = {test["name"]: test for test in found["tests"]}
    assert found["score"] == 15
    assert [by_name[key]["score"] for key in POINTS] == [5, 10, 0]
    assert "Subtracted, not added." in by_name["toy-1"]["output"]
    assert by_name["toy-3"]["output"].startswith("not done")
    assert by_name["toy-2"] | {"output": ""} == {
        **{"name": "toy-2", "score": 10, "max_score": 10, "status": "passed"},
        **{"output": "", "visibility": "visible"},
    }
