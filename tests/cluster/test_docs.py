"""The pages about clusters: every command in them is typed here, in its order, on a live Slurm."""

import io
import os
import re
import shlex
import shutil
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from course_lib.core.records import read_runs
from course_lib.display import last_run, wire_run
from course_lib.jobs.submissions import find_submission
from tests.cluster.slurmbox import MISSING, PACKAGES
from tests.terminal import ROOT, commands, run, started

DOCS = ROOT / "docs"
FILES = {
    "my_training.py": "raise SystemExit\n",
    "my_sweep.py": "import time\ntime.sleep(1000)\n",
    "plain.sbatch": '#!/bin/bash\n#SBATCH --nodes=1\n# site\n# environment\npython "$@"\n',
    "my_own.sbatch": "#!/bin/bash\n# SBATCH --nodes=2\nsrun torchrun train.py\n",
}


@dataclass(frozen=True)
class Step:
    """A command of a page, a piece of what it says, and what is added to keep it short."""

    command: str
    says: str
    add: tuple[str, str] = ("", "")  # these words, after those
    fails: bool = False

    def take(self, course: Callable[..., str]) -> None:
        """Type it, in this process: Python starts only once."""
        after, words = self.add
        command = self.command.replace(after, f"{after} {words}", 1) if after else self.command
        assert self.says in course(*shlex.split(command)[1:], fails=self.fails)


DRY = ("course submit", "--dry-run")
TAKEN = "# nothing speaks against it"
STUDENT = (
    Step("course cluster init --yes", "site.toml is written"),
    Step("course cluster profiles", "site (default)"),
    Step("course submit 04 --nodes 2 --dry-run", TAKEN),
    Step(
        "course submit 04 --nodes 2",
        "04_collectives-1 is handed in",
        add=("2", "--gpus 1 -- --sizes 4 4096 --turns 3"),
    ),
    Step("course status", "04_collectives-1"),
    Step("course logs -f 04_collectives-1", "broadcast     4 MiB"),
    Step("course collect", "records of 2 of 2 ranks in runs/04_collectives-1"),
    Step("course submit 06 --nodes 2 --gpus 1 --time 0:10:00 -- --turns 3", TAKEN, add=DRY),
    Step("course submit my_training.py -- --lr 0.1", TAKEN, add=DRY),
    Step(
        "course submit -m course_lib.train --script requeue -- "
        "--strategy fsdp --steps 20 --save-every 5",
        TAKEN,
        add=DRY,
    ),
    Step(
        "course submit my_sweep.py --array 0-3%2",
        "my_sweep-1 is handed in",
        add=("my_sweep.py", "--script plain.sbatch"),
    ),
    Step("course status my_sweep-1", "my_sweep-1_3"),
    Step("course logs my_sweep-1_3", ""),
    Step("course cancel my_sweep-1_1", "my_sweep-1_1 is cancelled"),
    Step("course lint-job my_own.sbatch", "1 finding", fails=True),
)
OPERATOR = (
    Step("course cluster init", "site.toml is written"),
    Step("course cluster profiles", "site (default)"),
    Step("course submit 00 --nodes 2 --profile site --dry-run", TAKEN),
    Step("course lint-job cluster/many_nodes.sbatch --profile site", "nothing found"),
    Step("course submit 04 --nodes 2 --profile test", TAKEN, add=DRY),
)
MAKE = {
    "make cluster": "-m tools.cluster",
    'make cluster CLUSTER_ARGS="--nodes 4 --gpus 4"': "-m tools.cluster --nodes 4 --gpus 4",
    "make test-cluster": "faults_nodes.py",
}
BESIDES = (
    f"apt-get install --no-install-recommends {PACKAGES}",
    "sinfo",
    "course logs -f 04_collectives-1",  # as for students
    "course collect",
)


@pytest.fixture
def login_node(slurm, tmp_path, monkeypatch) -> None:
    """A learner's copy of the course on a cluster; to whatever is asked the answer is Enter."""
    shutil.copytree(ROOT / "cluster", tmp_path / "cluster")
    (tmp_path / "cluster/profiles/site.toml").unlink(missing_ok=True)
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", io.StringIO("\n" * 10))


def test_the_students_page_leads_to_a_picture(login_node, slurm, course):
    for step in STUDENT:
        step.take(course)
    assert "TCPStore.cpp" not in course("logs", "04_collectives-1")
    job_id = find_submission("04_collectives-1")[0].job_id
    assert [job["NumNodes"] for job in slurm.show(job_id)] == ["2"]
    assert [record.rank for record in read_runs("runs/04_collectives-1")] == [0, 1]
    assert "our ring took" in wire_run(last_run("04_collectives"))[1]
    course("collect", "04_collectives-1")
    assert len(read_runs("runs/04_collectives-1")) == 2


def test_the_operators_page_works(login_node, slurm, course):
    for step in OPERATOR:
        step.take(course)
    assert "idle" in slurm.run("sinfo").stdout


@pytest.mark.parametrize("command", MAKE)
def test_its_make_targets_start_what_it_says(command):
    assert MAKE[command] in run(f"{command} --dry-run", ROOT)


def test_every_command_of_the_pages_is_typed_here():
    for page, known in (
        ("student", [step.command for step in STUDENT]),
        ("operator", [*(step.command for step in OPERATOR), *MAKE, *BESIDES]),
    ):
        assert sorted(commands((DOCS / f"cluster_{page}.md").read_text())) == sorted(known)


def test_from_laptop_to_cluster_in_ten_lines():
    (first, *_) = (DOCS / "cluster_student.md").read_text().split("\n## ")
    assert len(commands(first)) <= 10


# ---- make cluster ------------------------------------------------------------------------------


def processes_of(conf: str) -> list[psutil.Process]:
    """All whose environment names this cluster."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("SLURM_CONF") == conf:
                found.append(process)
        except psutil.Error:
            continue
    return found


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
def test_a_cluster_by_hand_stays_until_it_is_ended_and_leaves_nothing(ending, tmp_path, until):
    if shutil.which("slurmctld", path=f"{os.environ['PATH']}:/usr/sbin") is None:
        pytest.skip(MISSING)
    with started("exec python -m tools.cluster --nodes 1 --gpus 1", ROOT) as process:
        found = None
        while found is None:
            line = process.stdout.readline()
            assert line, "it ended before it said how to use it"
            found = re.search(r"export SLURM_CONF=(.*)", line)
        conf = found[1]
        with subprocess.Popen(["sleep", "1000"], env=os.environ | {"SLURM_CONF": conf}) as other:
            run("sbatch -o /dev/null --wrap 'sleep 1000'", tmp_path, SLURM_CONF=conf)
            until(lambda: "1" in run("squeue -h -t R -o %i", tmp_path, SLURM_CONF=conf), "it runs")
            process.send_signal(ending)
            said = process.communicate(timeout=60)[0]
            assert (process.returncode, said.splitlines()[-1]) == (
                0,
                "The cluster and its jobs are ended.",
            )
            assert not Path(conf).parent.exists()
            assert [left.pid for left in processes_of(conf)] == [other.pid]
            other.kill()
