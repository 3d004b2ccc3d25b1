"""Wrong batch scripts are found in the right line by the right rule; right ones are left alone.

In `tests/jobs/wrong` a line that is wrong ends in the rule's name, as «late-directive»; the mark is
taken out before anybody looks.
"""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from course_lib.jobs.lint.check import RULES, lint_job
from course_lib.jobs.lint.script import Script
from course_lib.jobs.lint.shell import read_commands
from course_lib.jobs.profile import Profile
from course_lib.jobs.site_commands import add_site_commands

ROOT = Path(__file__).resolve().parents[2]
JOBS = ROOT / "tests" / "jobs"
MARK = re.compile(r"«([a-z-]+)»")
WRONG = sorted((JOBS / "wrong").glob("*.sbatch"))
RIGHT = sorted([*(JOBS / "right").glob("*.sbatch"), *(ROOT / "cluster").glob("*.sbatch")])


def marked(path: Path) -> tuple[str, list[tuple[int, str]]]:
    """The script without marks, and where they stood."""
    text = path.read_bytes().decode()  # read_text would take carriage returns away
    lines = enumerate(text.split("\n"), start=1)
    return MARK.sub("", text), [(n, mark) for n, line in lines for mark in MARK.findall(line)]


def found_in(text: str, **options: object) -> list[tuple[int, str]]:
    return [(one.line, one.rule) for one in lint_job(text, JOBS, **options)]


@pytest.mark.parametrize("path", WRONG, ids=lambda path: path.stem)
def test_a_wrong_script_is_found_in_its_line(path):
    text, expected = marked(path)
    assert expected
    assert found_in(text) == expected


@pytest.mark.parametrize("path", RIGHT, ids=lambda path: path.stem)
def test_a_right_script_is_left_alone(path):
    assert found_in(path.read_text()) == []


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_every_rule_is_shown_by_a_wrong_script(rule):
    assert any(list(rule(Script(marked(path)[0], JOBS))) for path in WRONG)


@pytest.mark.skipif(not shutil.which("shellcheck"), reason="apt-get install shellcheck")
def test_shellcheck_agrees_that_the_scripts_of_the_course_are_right():
    scripts = sorted((ROOT / "cluster").glob("*.sbatch"))
    done = subprocess.run(["shellcheck", *scripts], capture_output=True, text=True)
    assert done.stdout == ""


def test_a_missing_folder_is_looked_for_from_where_sbatch_is_called(tmp_path):
    text = "#!/bin/bash\n#SBATCH --output=logs/%j.out\ntrue\n"
    assert [one.rule for one in lint_job(text, tmp_path)] == ["no-log-folder"]
    (tmp_path / "logs").mkdir()
    assert lint_job(text, tmp_path) == []
    elsewhere = text.replace("#SBATCH", "#SBATCH --chdir=elsewhere\n#SBATCH")
    assert [one.rule for one in lint_job(elsewhere, tmp_path)] == ["no-log-folder"]


def test_a_folder_of_the_cluster_is_not_missed_on_a_laptop():
    text = "#!/bin/bash\n#SBATCH --output=/no-such-top/logs/%j.out\ntrue\n"
    assert found_in(text) == []


def test_a_profile_says_what_the_site_does_not_have():
    profile = Profile(name="small", time_limit="1:00:00", max_nodes=2, gpus_per_node=4)
    text = "#!/bin/bash\n#SBATCH -t 1-0\n#SBATCH -N 3\n#SBATCH --gpus-per-node=h100:8\nsrun date\n"
    assert found_in(text) == []
    assert found_in(text, profile=profile) == [(line, "too-much") for line in (2, 3, 4)]
    fits = text.replace("1-0", "60").replace("-N 3", "-N 2").replace("h100:8", "h100:4")
    assert found_in(fits, profile=profile) == []


@pytest.mark.parametrize(
    ("head", "found"),
    [
        ("-p gpu", []),
        ("--partition=gpu,cpu", []),
        ("--partition=gpus", [(2, "unknown-partition")]),
        ("-p cpu,gpus", [(2, "unknown-partition")]),
        ("-p gpus -M other", []),
        ("--nodes=1", []),
    ],
)
def test_a_partition_has_to_be_one_that_slurm_has(head, found):
    text = f"#!/bin/bash\n#SBATCH {head}\nsrun python train.py\n"
    assert found_in(text, partitions=("cpu", "gpu")) == found
    assert found_in(text) == []


@pytest.mark.parametrize("asked", ["--gres=gpu:8", "--gpus=8", "-G h100:16"])
def test_a_profile_counts_the_gpus_of_a_node_however_they_are_asked_for(asked):
    profile = Profile(name="small", time_limit="1:00:00", max_nodes=2, gpus_per_node=2)
    text = f"#!/bin/bash\n#SBATCH -N 2\n#SBATCH {asked}\nsrun date\n"
    assert found_in(text, profile=profile) == [(3, "too-much")]
    for fits in ("--gres=gpu:2", "--gpus=4", "-G h100:3", "--gpus-per-node=h100", "--gres=tmp:9"):
        assert found_in(text.replace(asked, fits), profile=profile) == []


@pytest.mark.parametrize(
    ("asked", "fits"),
    [
        ("--mem=65G", "--mem=64G"),
        ("--mem=70000", "--mem=65536M"),
        ("--mem=1T", "--mem=0"),
        ("--mem-per-cpu=5G -c 4 --ntasks-per-node=4", "--mem-per-cpu=4G -c 4 --ntasks-per-node=4"),
        ("--mem-per-gpu=33G --gpus-per-node=2", "--mem-per-gpu=32G --gpus-per-node=2"),
        ("--mem-per-gpu=33G -G 4 -N 2", "--mem-per-gpu=33G"),
    ],
)
def test_a_profile_knows_the_memory_of_a_node(asked, fits):
    profile = Profile(name="small", gpus_per_node=4, max_nodes=2, node_memory_gib=64)
    text = f"#!/bin/bash\n#SBATCH {asked}\nsrun date\n"
    (found,) = lint_job(text, JOBS, profile)
    assert (found.line, found.rule) == (2, "too-much")
    assert found.what.endswith("and profile small has at most 64 GiB on a node")
    assert found_in(text.replace(asked, fits), profile=profile) == []
    unknown = Profile(name="any", gpus_per_node=4, max_nodes=2)
    assert found_in(text, profile=unknown) == []


@pytest.mark.parametrize("number", ["9" * 5000, "²", "٣"])
def test_numbers_that_no_job_has_are_no_numbers(number):
    options = ("nodes", "time", "mem", "ntasks", "gpus-per-node", "array", "cpus-per-task")
    head = "".join(f"#SBATCH --{name}={number}\n" for name in options)
    run = f"srun --nodes={number} --ntasks={number} torchrun --nproc-per-node={number} a.py\n"
    assert found_in(f"#!/bin/bash\n{head}{run}", profile=Profile(name="x", node_memory_gib=1))


def test_a_variable_that_grows_is_not_spelt_out_for_ever():
    text = "#!/bin/bash\n" + "\n".join(f'{a}="{f"${b}" * 1000}"' for a, b in ("ab", "bc", "ca"))
    assert found_in(f"{text}\ntorchrun $a\n") == found_in("#!/bin/bash\n\n\n\ntorchrun x\n")


@pytest.mark.parametrize(
    ("asked", "fix"),
    [("120   # two hours", ""), ("120:00", ""), ("2 # h", "2:00:00"), ("0:30", "0:30:00")],
)
def test_only_a_time_of_minutes_is_suspicious(asked, fix):
    found = lint_job(f"#!/bin/bash\n#SBATCH --time={asked}\nsrun date\n", JOBS)
    assert [one.fix.partition(" for hours")[0] for one in found] == [f"Write --time={fix}"] * bool(
        fix
    )


def test_a_file_that_may_set_the_host_is_believed():
    text, _ = marked(JOBS / "wrong" / "nobody_is_head.sbatch")
    assert found_in(text.replace("set -euo", ". ./hosts.sh\nset -euo")) == []
    assert found_in(text.replace("set -euo", "ls .\nset -euo")) == [(8, "nothing-in-it")]


def test_every_finding_says_why_and_what_to_write():
    for path in WRONG:
        for one in lint_job(marked(path)[0], JOBS):
            assert one.what
            assert one.why[-1] not in ".!"
            assert one.fix[-1] == "."


ODD = ["", "\n", "#!/bin/bash", "#!/bin/bash\n'", "#!/bin/bash\n$( ( <<A\n", "\0\n#SBATCH -N"]
LONG = ['srun "' + "$(a) " * 200, "srun " + "$(" * 200, "A=$A$A$A\nsrun $A\n" * 50]


@pytest.mark.parametrize("text", [*ODD, *LONG], ids=range(len(ODD + LONG)))
def test_no_text_is_too_odd_to_look_at(text):
    assert all(1 <= line <= text.count("\n") + 1 for line, _ in found_in(text))


def test_single_quotes_keep_a_word_from_being_filled_in():
    (command,) = read_commands('srun bash -c \'echo $A\' "$B \\$C" \\\n  $(echo "d e") # $E')
    assert [word.live for word in command.words] == [
        "srun",
        "bash",
        "-c",
        "",
        "$B C",
        '$(echo "d e")',
    ]
    assert [word.line for word in command.words][-1] == 2


class TestCommand:
    """`course lint-job FILE`."""

    def run(self, path: Path) -> tuple[int, str]:
        app = typer.Typer(rich_markup_mode=None)
        add_site_commands(app)
        done = CliRunner().invoke(app, ["lint-job", str(path)])
        return done.exit_code, done.output

    def test_exit_code_1_with_findings(self, tmp_path):
        path = tmp_path / "job.sbatch"
        path.write_text("#!/bin/bash\n#SBATCH --nodes=1\necho\n#SBATCH --time=1:00:00\n")
        code, told = self.run(path)
        assert code == 1
        assert f"{path}:4: a directive after the first command" in told
        assert "why: sbatch stops reading there" in told
        assert "fix: Move it up, before line 3." in told
        assert told.endswith("\n1 finding.\n")

    def test_exit_code_0_without(self):
        code, told = self.run(ROOT / "cluster" / "requeue.sbatch")
        assert (code, told.strip()) == (0, "requeue.sbatch: nothing found.")

    def test_no_such_file_is_one_sentence(self, tmp_path):
        code, told = self.run(tmp_path / "none.sbatch")
        assert code == 2
        assert "none.sbatch" in told
