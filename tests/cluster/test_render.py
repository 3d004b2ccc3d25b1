"""What is handed in: a script's own lines with job and profile filled in, and nothing run by it."""

import os
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from course_lib.core.errors import CourseError
from course_lib.jobs.job import Job, find_program, fitted, read_array
from course_lib.jobs.lint.check import lint_job
from course_lib.jobs.lint.directives import read_directives
from course_lib.jobs.profile import Profile, read_profile
from course_lib.jobs.render import render

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted(path.stem for path in (ROOT / "cluster").glob("*.sbatch"))
SITE = Profile(
    name="site",
    partition="gpu",
    account="project_42",
    qos="high",
    gpus_per_node=4,
    gpu_type="h100",
    cpus_per_gpu=8,
    time_limit="4:00:00",
    max_nodes=4,
    modules=("cuda/12.6",),
    environment=('source "$HOME/env/bin/activate"',),
    scratch="/scratch/me",
    network_interface="ib0",
)
JOB = Job(name="06_ddp", program="cluster/exercises/06_ddp.py", nodes=2, run_folder="runs/c/1")


def asked(text: str) -> dict[str, str]:
    """What sbatch reads, by option; each of them once."""
    directives = read_directives(text)
    assert len({one.option for one in directives}) == len(directives)
    return {one.option: one.value for one in directives}


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_script_is_filled_in_and_right(script, tmp_path):
    (tmp_path / "runs/c/1").mkdir(parents=True)
    job = replace(JOB, script=script, nodes=1 if script == "one_node" else 2, array="1-3%2")
    text = render(job, SITE)
    assert lint_job(text, tmp_path, SITE) == []
    found = asked(text)
    tasks = 4 if script == "srun_python" else 1
    assert found["ntasks-per-node"] == str(tasks)
    assert int(found["cpus-per-task"]) * tasks == 32
    assert (found["gpus-per-node"], found["partition"]) == ("h100:4", "gpu")
    assert (found["account"], found["qos"], found["time"]) == ("project_42", "high", "0:30:00")
    assert (found["array"], found["output"]) == ("1-3%2", "runs/c/1/log-%A_%a.out")


def test_only_what_is_filled_in_differs_from_the_script():
    own = (ROOT / "cluster" / "many_nodes.sbatch").read_text().split("\n")
    text = render(JOB, SITE).split("\n")
    begin, end = text.index("# environment"), text.index("set -euo pipefail # end at the first "
        "command that fails, also within a pipe")  # fmt: skip
    assert text[begin + 1 : end - 1] == [
        "module load cuda/12.6",
        'source "$HOME/env/bin/activate"',
        "export SCRATCH=/scratch/me",
        "export NCCL_SOCKET_IFNAME=ib0",
        "export GLOO_SOCKET_IFNAME=ib0",
        "export RUN_FOLDER=runs/c/1",
        "export RANKS_PER_NODE=4",
        "set -- cluster/exercises/06_ddp.py",
    ]
    assert text[end:] == own[own.index(text[end]) :]
    new = [line for line in text[:begin] if line not in own]
    assert all(line.startswith("#SBATCH --") for line in new)


def test_a_site_without_gpus_is_asked_for_none():
    found = asked(render(JOB, Profile(name="cpus", cpus_per_gpu=4, max_nodes=2)))
    assert "gpus-per-node" not in found
    assert found["cpus-per-task"] == "8"
    assert not {"partition", "account", "qos", "array"} & set(found)


def test_what_is_0_in_a_profile_is_left_to_the_site():
    assert "cpus-per-task" not in asked(render(JOB, Profile(name="any", max_nodes=2)))


WORDS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20)


@settings(max_examples=30)
@given(arguments=st.lists(WORDS, max_size=4))
def test_arguments_arrive_as_they_are_and_nothing_of_them_is_run(arguments):
    text = render(replace(JOB, arguments=tuple(arguments)), SITE)
    assert asked(text)["nodes"] == "2"
    begin = text.index("\nset -- ") + 1
    line = text[begin : text.index("\n\nset -euo")]
    shown = subprocess.run(
        ["bash", "-c", f'{line}\nprintf "%s\\0" "$@"'], capture_output=True, check=True
    )
    assert shown.stdout.decode().split("\0")[:-1] == [JOB.program, *arguments]


@pytest.mark.parametrize(
    "trap", ["; touch trap", "$(touch trap)", "`touch trap`", "'; touch trap'"]
)
def test_a_trap_in_any_text_is_not_sprung(trap, tmp_path):
    site = replace(SITE, modules=(trap,), environment=(), scratch=trap)
    job = replace(JOB, script="one_node", nodes=1, program=trap, arguments=(trap,))
    played = 'module() { :; }\ntorchrun() { printf "%s\\n" "$@"; }\n'
    done = subprocess.run(
        ["bash", "-c", played + render(job, site)], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.stdout.split("\n")[-3:] == [trap, trap, ""]
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_a_blank_stays_one_word(tmp_path):
    found = asked(render(replace(JOB, run_folder="runs/my folder/1"), SITE))
    assert found["output"] == "runs/my folder/1/log-%j.out"


@pytest.mark.parametrize(
    "change",
    [
        {"name": "a b"},
        {"name": "x\n#SBATCH --uid=0"},
        {"name": ""},
        {"run_folder": "runs/a\n#SBATCH --uid=0"},
        {"run_folder": 'runs/"'},
        {"run_folder": "runs/%j"},
        {"run_folder": ""},
        {"program": ""},
        {"arguments": ("a\0b",)},
        {"nodes": 0},
        {"gpus_per_node": -1},
        {"ranks_per_node": 0},
        {"time_limit": "30:00"},
        {"time_limit": "0:00:00"},
        {"array": "1-"},
        {"array": "5-1"},
        {"array": "1-2000"},
        {"array": "1%0"},
        {"array": "1-3 --uid=0"},
    ],
    ids=str,
)
def test_what_no_scheduler_could_take_is_refused(change):
    with pytest.raises(CourseError, match=r"need .*; got "):
        replace(JOB, **change)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"nodes": 5}, "at most 4 nodes; got 5"),
        ({"gpus_per_node": 8}, "at most 4 GPUs on a node; got 8"),
        ({"time_limit": "5:00:00"}, "at most 4:00:00 of time; got 5:00:00"),
        ({"script": "many_node"}, "need one of accelerate, deepspeed, many_nodes"),
    ],
)
def test_more_than_the_profile_has_is_refused(change, told):
    with pytest.raises(CourseError, match=told):
        render(replace(JOB, **change), SITE)


def test_a_script_without_the_two_lines_is_refused(tmp_path):
    path = tmp_path / "own.sbatch"
    path.write_text("#!/bin/bash\n# site\ntrue\n")
    with pytest.raises(CourseError, match="'# environment'"):
        render(replace(JOB, script=str(path)), SITE)
    path.write_text("#!/bin/bash\n#SBATCH --nodes=7\n# site\n# environment\ntrue\n")
    assert asked(render(replace(JOB, script=str(path)), SITE))["nodes"] == "2"


def test_a_script_that_is_no_text_is_refused(tmp_path):
    (tmp_path / "own.sbatch").write_bytes(b"\x7fELF\xff")
    with pytest.raises(CourseError, match=r"own\.sbatch: need a text in UTF-8"):
        render(replace(JOB, script=str(tmp_path / "own.sbatch")), SITE)


@pytest.mark.parametrize("own", ["#SBATCH -N 7 -t 5", "#SBATCH -N7\n#SBATCH --time 5"])
def test_however_a_script_asks_what_the_job_says_counts(own, tmp_path):
    path = tmp_path / "own.sbatch"
    path.write_text(f"#!/bin/bash\n{own}\n# site\n# environment\ntrue\n")
    last = {
        one.option: one.value
        for one in read_directives(render(replace(JOB, script=str(path)), SITE))
    }
    assert (last["nodes"], last["time"]) == ("2", "0:30:00")


def test_what_a_job_leaves_open_is_the_profiles():
    job = fitted(JOB, SITE)
    assert (job.script, job.gpus_per_node, job.ranks_per_node) == ("many_nodes", 4, 4)
    assert fitted(replace(JOB, nodes=1), SITE).script == "one_node"
    assert fitted(JOB, Profile(name="cpus", max_nodes=2)).ranks_per_node == 2
    assert fitted(replace(JOB, ranks_per_node=3, array="1-4"), SITE).gpu_hours == 2 * 4 * 0.5 * 4


def test_a_program_is_a_lesson_that_has_a_script_or_a_path():
    for text in ("4", "04", "04_collectives"):
        assert Path(find_program(text)).name == "04_collectives.py"
    assert find_program(__file__) == __file__
    for text in ("3", "03", "1", "4_", "", "none.py"):
        with pytest.raises(CourseError, match=rf"got '{text}'. Try a lesson .*\(00, 04, 05, 06"):
            find_program(text)


def test_a_module_is_looked_for_and_not_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("own/part.py", "own/__main__.py", "own/sub/__init__.py", "bad.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("raise RuntimeError('it was run')")
    for name in ("course_lib.train", "torch.distributed.run", "timeit", "own", "own.part", "bad"):
        assert find_program("-m", name) == "-m"
    wrong = ("", "no.such.module", "own.nothing", "own.sub", "own.part.x", "a b", "__main__", "..")
    for name in wrong:
        with pytest.raises(CourseError, match=rf"need a module .*; got {re.escape(repr(name))}"):
            find_program("-m", name)


def test_submit_says_that_there_is_no_such_module(course):
    told = course("submit", "-m", "no.such.module", "--dry-run", fails=True)
    assert "need a module that `python -m` finds from this folder; got 'no.such.module'." in told
    assert len(told.splitlines()) == 1


def test_a_module_is_run_by_its_name():
    assert replace(JOB, program="course_lib.train").words == ("-m", "course_lib.train")
    assert replace(JOB, program="-m", arguments=("a.b",)).words == ("-m", "a.b")
    for path in ("train.py", "my.train.py", "cluster/exercises/06_ddp.py", "./a.b"):
        assert replace(JOB, program=path).words == (path,)


@pytest.mark.parametrize(
    ("text", "array_tasks"),
    [("3", (3,)), ("0-3", (0, 1, 2, 3)), ("1,3,5", (1, 3, 5)), ("0-6:3%2", (0, 3, 6))],
)
def test_an_array_has_the_tasks_that_slurm_means(text, array_tasks):
    assert read_array(text) == array_tasks


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("#SBATCH --nodes=2   # machines", [("nodes", "2")]),
        ("#SBATCH --nodes=2# x", [("nodes", "2")]),
        ("#SBATCH--nodes=2", [("nodes", "2")]),
        ("#SBATCH\t-N2 -n 4", [("nodes", "2"), ("ntasks", "4")]),
        ("#SBATCH --part gpu", [("partition", "gpu")]),
        ("#SBATCH --output='a b/%j'", [("output", "a b/%j")]),
        ("#SBATCH --exclusive --hold", [("exclusive", ""), ("hold", "")]),
        ("#SBATCH --node=2", [("--node", "2")]),
        (" #SBATCH --nodes=2", []),
        ("##SBATCH --nodes=2", []),
        (":\n#SBATCH --nodes=2", []),
    ],
)
def test_directives_are_read_as_sbatch_reads_them(line, expected):
    found = read_directives(f"#!/bin/bash\n\n# comment\n{line}\n")
    assert [(one.option, one.value) for one in found] == expected
    assert [one.is_known for one in found] == [not name.startswith("-") for name, _ in expected]


def played(script: str, folder: Path, *words: str, **variables: str) -> tuple[int, str]:
    """The script on a machine where srun and torchrun only say what they were given."""
    for name in ("srun", "torchrun"):
        (folder / name).write_text(f'#!/bin/bash\nprintf "%s\\n" {name} "$@"\n')
    (folder / "scontrol").write_text("#!/bin/bash\nprintf 'node1\\nnode2\\n'\n")
    for name in ("srun", "torchrun", "scontrol"):
        (folder / name).chmod(0o755)
    job = {"SLURM_JOB_ID": "20007", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "node[1-2]"}
    job |= {"PATH": f"{folder}:{os.environ['PATH']}", **variables}
    path = ROOT / "cluster" / f"{script}.sbatch"
    done = subprocess.run(
        ["bash", path, *words], env=job, cwd=folder, capture_output=True, text=True
    )
    return done.returncode, done.stdout + done.stderr


def test_an_array_task_of_a_sweep_adds_the_words_of_its_line(tmp_path):
    (tmp_path / "list").write_text("--size 1\n--size 2 --name 'a b $(touch trap)'\n\n")
    sweep = {"SWEEP": "list", "SLURM_GPUS_ON_NODE": "3"}
    code, told = played("sweep", tmp_path, "x.py", SLURM_ARRAY_TASK_ID="2", **sweep)
    assert code == 0
    assert told.split("\n")[-6:] == ["x.py", "--size", "2", "--name", "a b $(touch trap)", ""]
    assert "--nproc-per-node=3" in told
    assert "--rdzv-endpoint=node1:28007" in told
    assert not (tmp_path / "trap").exists()
    for array_task in ("3", "4"):
        code, told = played("sweep", tmp_path, "x.py", SLURM_ARRAY_TASK_ID=array_task, **sweep)
        assert (code, told) == (2, f"list: need a line {array_task} with words; there is none.\n")


def test_a_line_with_an_open_quote_ends_the_array_task(tmp_path):
    (tmp_path / "list").write_text("--name 'open\n")
    code, told = played("sweep", tmp_path, "x.py", SLURM_ARRAY_TASK_ID="1", SWEEP="list")
    assert code != 0
    assert "quote" in told
    assert "torchrun" not in told


@pytest.mark.parametrize("cores", ["", "8"])
def test_srun_takes_the_cores_that_were_asked_for_and_else_all_there_are(cores, tmp_path):
    for script in ("many_nodes", "srun_python"):
        text = (ROOT / "cluster" / f"{script}.sbatch").read_text()
        (tmp_path / "own.sbatch").write_text(text.replace("srun --kill", "env; srun --kill"))
        asked_for = {"SLURM_CPUS_PER_TASK": cores} if cores else {}
        code, told = played(str(tmp_path / "own"), tmp_path, "x.py", **asked_for)
        found = [line for line in told.split("\n") if line.startswith("SRUN_CPUS_PER_TASK=")]
        assert (code, found) == (0, [f"SRUN_CPUS_PER_TASK={cores}"] if cores else [])


def test_a_sweep_that_is_no_array_says_so(tmp_path):
    code, told = played("sweep", tmp_path, "x.py")
    assert code != 0
    assert "need a job array: sbatch --array=1-3" in told


def test_ranks_are_the_gpus_or_what_is_named_or_two(tmp_path):
    for variables, ranks in (
        ({}, 2),
        ({"SLURM_GPUS_ON_NODE": "4"}, 4),
        ({"SLURM_GPUS_ON_NODE": "4", "RANKS_PER_NODE": "3"}, 3),
    ):
        code, told = played("one_node", tmp_path, "x.py", **variables)
        assert (code, told) == (0, f"torchrun\n--standalone\n--nproc-per-node={ranks}\nx.py\n")


def test_the_profiles_of_the_course_fit_the_job_that_names_nothing():
    for name in ("laptop", "slurm", "test"):
        assert "set -- cluster/exercises/06_ddp.py" in render(JOB, read_profile(name))
