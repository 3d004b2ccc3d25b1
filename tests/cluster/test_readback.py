"""A real Slurm reads the scripts as `lint` and `render` do: jobs are handed in on hold, read back,
and cancelled."""

import re
from pathlib import Path

import pytest

from course_lib.jobs.job import Job, fitted
from course_lib.jobs.lint.check import lint_job
from course_lib.jobs.lint.script import Script
from course_lib.jobs.profile import read_profile
from course_lib.jobs.render import render

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted((ROOT / "cluster").glob("*.sbatch"))
LINTED = sorted([*(ROOT / "tests" / "jobs").glob("*/*.sbatch"), *SCRIPTS])
REFUSED = {"crlf", "no-shebang", "unknown-option", "short-equals", "no-time"}
TOO_BIG = re.compile(
    r"partition|Node count|[Tt]ime limit|feature|More processors|[Nn]ode config"
    r"|generic resource|container|--image"
)


def held(slurm, path: Path, *options: str) -> dict[str, str] | str:
    """What Slurm makes of a script, or why it refuses it."""
    done = slurm.run("sbatch", "--hold", "--parsable", *options, str(path), check=False)
    if done.returncode:
        return done.stderr
    (job, *_) = slurm.show(done.stdout.strip())
    slurm.run("scancel", job["JobId"])
    return job


def test_slurm_refuses_what_lint_says_and_counts_nodes_and_tasks_alike(slurm, tmp_path):
    compared = refused = 0
    for path in LINTED:
        text = re.sub("«[a-z-]+»", "", path.read_bytes().decode())
        (tmp_path / path.name).write_bytes(text.encode())
        rules, script = {one.rule for one in lint_job(text, tmp_path)}, Script(text, tmp_path)
        job = held(slurm, tmp_path / path.name)
        if isinstance(job, str):
            is_look_alike = "look-alike" in rules and "Invalid directive" in job
            assert rules & REFUSED or is_look_alike or TOO_BIG.search(job), (path.name, job)
            refused += bool(rules & REFUSED)
            continue
        assert not rules & REFUSED, path.name
        tasks = str(script.nodes * script.tasks_per_node)
        found = (job["NumNodes"].partition("-")[0], job["NumTasks"])
        assert (path.name, *found) == (path.name, str(script.nodes), tasks)
        compared += 1
    assert refused >= 6
    assert compared >= 40


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_slurm_understands_what_is_rendered(path, slurm, tmp_path):
    nodes = 1 if path.stem == "one_node" else 2
    job = Job(
        name="read.back_1",
        program="x.py",
        script=str(path),
        nodes=nodes,
        time_limit="0:20:00",
        run_folder=str(tmp_path / "runs"),
    )
    profile = read_profile("test")
    (tmp_path / "job.sbatch").write_text(render(job, profile))
    found = held(slurm, tmp_path / "job.sbatch")
    tasks = fitted(job, profile).ranks_per_node if path.stem == "srun_python" else 1
    assert found["JobName"] == "read.back_1"
    assert (found["NumNodes"].partition("-")[0], found["NumTasks"]) == (
        str(nodes),
        str(nodes * tasks),
    )
    assert int(found["CPUs/Task"]) * tasks == 4
    assert found["TresPerNode"] == "gres:gpu:2"
    assert (found["TimeLimit"], found["Partition"]) == ("00:20:00", "gpu")
    assert found["Requeue"] == "1" or path.stem != "requeue"
    assert found["StdOut"] == f"{tmp_path}/runs/log-{found['JobId']}.out"
