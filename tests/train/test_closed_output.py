"""A run whose lines nobody reads any more, as in `... | head -2`, ends on all ranks, quietly."""

import os
import subprocess
import sys

import pytest

TORCHRUN = "-m torch.distributed.run --standalone --local-addr 127.0.0.1 --nproc-per-node 2"
RUNS = {
    "one rank": "-m course_lib.train --ranks 1",
    "two ranks": "-m course_lib.train --ranks 2",
    "torchrun": f"{TORCHRUN} -m course_lib.train",
}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_without_a_reader_ends_without_a_word(name, tmp_path):
    command = [sys.executable, *RUNS[name].split(), "--every", "1", "--steps", "2000"]
    options = ["--layers", "1", "--hidden", "8", "--heads", "1", "--seq", "8", "--out", "run"]
    run = subprocess.Popen(
        [*command, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    while run.stdout.readline().split()[:1] != ["step"]:
        assert run.poll() is None
    run.stdout.close()
    assert run.stderr.read() == ""
    run.stderr.close()
    assert run.wait() == 0
    records = sorted(path.name for path in (tmp_path / "run").glob("*.jsonl"))
    assert records == ["rank0.jsonl", "rank1.jsonl"][: 1 if name == "one rank" else 2]
