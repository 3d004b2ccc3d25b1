"""Lesson 00's script speaks in turn."""

import subprocess
import sys
from itertools import pairwise

import pytest

from course_lib.core.records import read_runs
from tests.cluster_exercises.scripts_on_ranks import SCRIPTS


@pytest.mark.parametrize("world_size", [1, 3])
def test_the_script_speaks_in_turn_and_leaves_records(tmp_path, world_size):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    torchrun += ["--local-addr", "127.0.0.1", "--nproc-per-node", str(world_size)]
    command = [*torchrun, str(SCRIPTS / "00_hello_ranks.py"), "--record-to", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    *hello, total = done.stdout.splitlines()
    assert hello == [
        f"rank {rank} of {world_size}: local rank {rank} on node 0" for rank in range(world_size)
    ]
    assert total == "the sum over all ranks is " + "1" * world_size
    records = read_runs(tmp_path)
    assert [record.rank for record in records] == list(range(world_size))
    turns = [e for record in records for e in record.events if e.kind == "compute"]
    assert all(before.end_s <= after.start_s for before, after in pairwise(turns))
    assert all(-1 < event.start_s < 60 for record in records for event in record.events)
