"""A sample of `make faults`: ranks are killed, and nothing is lost; where it is, that is found."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FORGETFUL = """
from unittest import mock
from course_lib.checkpoint import loading
from tests.checkpoint import faults_kill
read = loading.Reader.fill
def fill(self, name, box, out):
    if "exp_avg_sq" not in name:
        read(self, name, box, out)
    else:
        out.zero_()
with mock.patch.object(loading.Reader, "fill", fill):
    faults_kill.main()
"""


def faults(*how):
    command = [sys.executable, *how, "--seed", "2"]
    variables = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True)


def test_ranks_killed_in_every_phase_resume_and_end_bit_equal():
    done = faults("-m", "tests.checkpoint.faults_kill", "--kills", "5")
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    phases = {row[0]: int(row[1]) + int(row[2]) for row in rows[1:-1]}
    names = ("step", "staging", "writing", "publishing", "pruning")
    assert phases == dict.fromkeys(names, 1)
    assert rows[-1][:2] == ["5", "kills,"]


def test_a_resume_that_forgets_some_state_is_found_out():
    done = faults("-c", FORGETFUL, "--kills", "5")
    assert done.returncode == 1
    assert "Tensor-likes are not equal!" in done.stderr
