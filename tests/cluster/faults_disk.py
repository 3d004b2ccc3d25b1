"""A disk that is full, or a quota that is used up: nothing half is left, and the reason is told.

`make test-cluster` runs these.
"""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from course_lib.core.records import read_runs
from course_lib.jobs.submissions import read_submissions
from tests.cluster.slurmbox import MISSING, SlurmBox

BLOB = Path("blob")
WRITES = """
import os, sys
from pathlib import Path
from course_lib.core.records import RunRecord
folder = Path(os.environ["RUN_FOLDER"]) / "records" / "0.0"
for rank in (0, 1):
    steps = [{"step": n, "start_s": n, "end_s": n + 1} for n in range(1000)]
    record = RunRecord(rank=rank, world_size=2, steps=steps)
    record.write(folder / f"rank{rank}.jsonl")
    while rank == 0:
        try:
            with open("blob", "ab") as file:
                file.write(bytes(4096))
        except OSError:
            break
"""


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlurmBox]:
    """A cluster of one node; the current folder, on all machines, is a disk of half a MiB."""
    if shutil.which("slurmctld", path="/usr/sbin:/usr/local/sbin") is None:
        pytest.skip(MISSING)
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=512k", "none", str(disk)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a small disk needs root, and the right to mount one")
    try:
        monkeypatch.chdir(disk)
        with SlurmBox(nodes=1) as box:
            monkeypatch.setenv("SLURM_CONF", box.env["SLURM_CONF"])
            yield box
    finally:
        monkeypatch.chdir(tmp_path)
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


@pytest.fixture
def plain(tmp_path: Path) -> str:
    """A batch script that runs its program without torchrun."""
    path = tmp_path / "plain.sbatch"
    head = "#!/bin/bash\n#SBATCH --nodes=1\n#SBATCH --output=log.out\n#SBATCH --gpus-per-node=1\n"
    path.write_text(f'{head}# site\n\n# environment\n\npython "$@"\n')
    return str(path)


def fill() -> None:
    """Leave not a byte."""
    try:
        with BLOB.open("ab", buffering=0) as file:
            while file.write(bytes(4096)):
                pass
    except OSError:
        assert shutil.disk_usage(".").free == 0


def test_a_job_that_fills_the_disk_leaves_no_half_record(small, plain, course):
    Path("fills.py").write_text(WRITES)
    told = course("submit", "--script", plain, "--profile", "test", "fills.py")
    assert "fills-1 is handed in" in told
    (job,) = small.wait(read_submissions()[0].job_id)
    assert (job["JobState"], job["ExitCode"]) == ("FAILED", "1:0")
    for command in ("status", "collect"):
        said = course(command, "fills-1", fails=True)
        assert f"course {command}: need room for " in said
        assert "got No space left on device. Delete something" in said
    BLOB.unlink()
    assert "FAILED (exit code 1)" in course("status", "fills-1")
    assert "records of 1 of 2 ranks" in course("collect", "fills-1")
    (record,) = read_runs("runs/fills-1")
    assert (record.rank, len(record.steps)) == (0, 1000)


def test_a_submit_on_a_full_disk_leaves_nothing(small, plain, course):
    Path("program.py").touch()
    ask = ("submit", "--script", plain, "--profile", "test", "program.py")
    course(*ask)
    fill()
    told = course(*ask, fails=True)
    assert "No space left on device" in told
    assert len(told.splitlines()) == 1
    BLOB.unlink()
    (first,) = read_submissions()
    in_slurm = small.run("squeue", "-h", "-t", "all", "-o", "%F").stdout.split()
    assert (first.id, in_slurm) == ("program-1", [first.job_id])
    assert [path.name for path in Path("runs/cluster").iterdir() if path.is_dir()] == ["program-1"]
    assert "program-2 is handed in" in course(*ask)
