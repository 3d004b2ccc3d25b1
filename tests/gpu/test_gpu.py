"""`make gpu` itself: what it reports without a GPU, and that a proof that fails stops no other.

No test depends on the time that a proof takes: rehearsals have wide time limits and no bounds on
times.
"""

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
import torch

from tests.gpu import __main__ as gpu
from tests.gpu import memory, ranks, speed
from tests.gpu.findings import Finding, NeedsGPUError, Proof, equals
from tests.gpu.processes import MARK, environment, processes_with

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-m", "tests.gpu"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_is_one_line_and_nothing_passes():
    ended = subprocess.run(COMMAND, cwd=ROOT, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, gpu.NO_GPU + "\n", "")


def test_a_rehearsal_runs_the_proofs_and_passes_none(tmp_path, capsys, monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "3")  # of another world, which nobody else will join
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    names = ["collectives", "memory", "profiler", "roofline", "step"]
    assert gpu.main(["--rehearse", "--out", str(tmp_path), "--only", *names]) == 0
    (path,) = tmp_path.glob("*.json")
    record = json.loads(path.read_text())
    verdicts = {one["name"]: one["verdict"] for one in record["proofs"]}
    assert verdicts.pop("memory") == "left out: it needs a GPU"
    assert set(verdicts.values()) == {"rehearsed"}
    assert record["about"]["gpu"] == "none: rehearsed on the CPU"
    assert "held" not in capsys.readouterr().out
    sends = [one for one in record["proofs"][0]["found"] if one["what"].startswith("send")]
    assert len(sends) == 2


def test_two_ranks_train_in_some_ways_as_one_process(tmp_path):
    assert gpu.main(["--rehearse", "--out", str(tmp_path), "--only", "shared-gpu"]) == 0


def planted(rehearsal, what):
    """A proof that ends, or does not end, in the given way."""
    if what == "a small GPU":
        raise NeedsGPUError("a larger one")
    yield Finding(what="one", measured=1.0, low=None if what == "no bounds" else 0.0)
    if what == "a number out of bounds":
        yield Finding(what="two", measured=2.0, high=1.0)
    if what == "no number":
        yield Finding(what="two", measured=float("nan"), high=1.0)
    if what == "an error":
        raise RuntimeError("CUDA out of memory")
    if what == "a signal":
        subprocess.Popen(["sleep", "300"])
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "a hang":
        subprocess.Popen(["sleep", "300"])
        subprocess.Popen(["sleep", "300"], start_new_session=True)
        time.sleep(300)


FAILING = ["a number out of bounds", "no number", "an error", "a signal"]
PLANTED = [*FAILING, "a hang", "no bounds", "a small GPU", "-"]
CHILD = """
import sys
from functools import partial
from tests.gpu import __main__ as gpu
from tests.gpu.findings import Proof
from tests.gpu.test_gpu import PLANTED, planted

gpu.all_proofs = lambda: [
    Proof(name=what.replace(" ", "-"), run=partial(planted, what=what)) for what in PLANTED
]
sys.exit(gpu.main())
"""


@pytest.fixture
def own_mark():
    """The value of the variable OWN_MARK in each process that a planted proof starts."""
    return uuid.uuid4().hex


@pytest.fixture
def run_planted(monkeypatch, own_mark):
    """Run a planted proof in a process, as `make gpu` runs its own."""
    popen = subprocess.Popen

    def started(command, *, env, **how):
        env = {**env, "OWN_MARK": own_mark}
        return popen([sys.executable, "-c", CHILD, *command[3:]], env=env, **how)

    monkeypatch.setattr(gpu.subprocess, "Popen", started)

    def run(what, rehearse=True):
        proof = Proof(name=what.replace(" ", "-"), run=planted, limit_s=200.0)
        return gpu.run_all([proof], rehearse, 300.0)[0]

    return run


@pytest.mark.parametrize("what", FAILING)
def test_a_proof_that_goes_wrong_has_failed_and_leaves_no_process(run_planted, own_mark, what):
    result = run_planted(what)
    assert result["verdict"] == "failed"
    assert result["found"][0]["what"] == "one"
    assert processes_with("OWN_MARK", own_mark) == []


class HangingPopen(subprocess.Popen):
    """A process whose time limit passes as soon as it has started two others."""

    num_seen = 0

    def wait(self, timeout=None):
        if timeout is None:
            return super().wait()
        give_up_s = time.monotonic() + timeout
        while HangingPopen.num_seen < 3 and time.monotonic() < give_up_s:
            found = processes_with("OWN_MARK", self.own_mark)
            HangingPopen.num_seen = len(found)
            time.sleep(0.1)
        raise subprocess.TimeoutExpired("a hang", timeout)


def test_a_proof_that_hangs_is_stopped_with_all_that_it_has_started(
    run_planted, own_mark, monkeypatch
):
    monkeypatch.setattr(HangingPopen, "own_mark", own_mark, raising=False)
    monkeypatch.setattr(HangingPopen, "num_seen", 0)

    def started(command, *, env, **how):
        env = {**env, "OWN_MARK": own_mark}
        return HangingPopen([sys.executable, "-c", CHILD, *command[3:]], env=env, **how)

    monkeypatch.setattr(gpu.subprocess, "Popen", started)
    result = run_planted("a hang")
    assert (result["verdict"], result["why"]) == ("failed", "stopped after 200 s")
    assert HangingPopen.num_seen == 3
    assert processes_with("OWN_MARK", own_mark) == []


@pytest.mark.parametrize(
    ("what", "rehearse", "verdict"),
    [
        ("-", True, "rehearsed"),
        ("-", False, "held"),
        ("no bounds", False, "measured, nothing to prove"),
        ("a small GPU", False, "left out: it needs a larger one"),
    ],
)
def test_held_means_that_a_bound_was_checked(run_planted, what, rehearse, verdict):
    assert run_planted(what, rehearse=rehearse)["verdict"] == verdict


def test_a_proof_without_findings_fails():
    assert gpu._verdict([], False) == ("failed", "nothing was found")


def test_a_proof_has_a_mark_and_no_variables_of_a_rank(monkeypatch):
    names = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_RUN_ID", "ROLE_RANK"}
    for name in names:
        monkeypatch.setenv(name, "1")
    one, other = environment(False), environment(True)
    assert not names & (set(one) | set(other))
    assert one["PATH"] == os.environ["PATH"]
    assert one[MARK] != other[MARK]
    assert other["CUDA_VISIBLE_DEVICES"] == ""
    assert one["COURSE_SHARE_GPU"] == "1"


VERDICTS = {
    ("held", "held"): 0,
    ("held", "left out: it needs a GPU"): 0,
    ("held", "failed"): 1,
    ("held", "measured, nothing to prove"): 1,
    ("held", "not reached before the deadline"): 1,
    ("rehearsed", "held"): 1,
}


@pytest.mark.parametrize("verdicts", VERDICTS)
def test_success_means_that_every_proof_held(tmp_path, monkeypatch, verdicts):
    results = [{"name": "x", "verdict": verdict} for verdict in verdicts]
    monkeypatch.setattr(gpu, "run_all", lambda *_: results)
    monkeypatch.setattr(gpu, "about", lambda _: {"gpu": "none", "date": "today"})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert gpu.main(["--out", str(tmp_path)]) == VERDICTS[verdicts]


def test_a_proof_that_the_deadline_does_not_reach_is_no_success(tmp_path, capsys):
    arguments = ["--deadline", "0.5", "--out", str(tmp_path), "--only", "roofline"]
    assert gpu.main(["--rehearse", *arguments]) == 1
    assert "roofline     not reached before the deadline" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["nan", "0", "-1", "inf", "soon"])
def test_a_deadline_is_a_positive_number(capsys, text):
    assert gpu.main(["--rehearse", f"--deadline={text}"]) == 2
    wanted = f"--deadline: need a number of seconds above 0; got {text}.\n"
    assert capsys.readouterr().out == wanted


def test_unknown_names_of_proofs_are_an_error(capsys):
    assert gpu.main(["--rehearse", "--only", "nothing"]) == 2
    assert "need names out of collectives, roofline" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("bounds", "holds"),
    [({}, True), ({"low": 2.0}, True), ({"low": 2.1}, False), ({"high": 1.9}, False)],
)
def test_a_finding_holds_within_its_bounds(bounds, holds):
    finding = Finding(what="x", measured=2.0, **bounds)
    assert (finding.holds, finding.is_bounded) == (holds, bool(bounds))


def test_a_word_is_compared_with_the_expected_one():
    assert equals("backend", "nccl", "nccl").holds
    assert not equals("backend", "gloo", "nccl").holds


def test_one_rank_per_gpu_has_to_use_nccl(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert [ranks.expected_backend(p, False) for p in (1, 2)] == ["nccl", "gloo"]


def test_training_on_the_cpu_fails_on_a_gpu(monkeypatch):
    class OnTheCPU:
        world_size = 1

        def run(self, _):
            return ["gloo"]

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    found = list(ranks._places("ddp", OnTheCPU(), [([1.0], 0)], False))
    assert [one.holds for one in found] == [False, False]


def test_a_difference_of_losses_is_nan_where_a_loss_is():
    assert ranks._difference([1.0, 2.2], [1.0, 2.0]) == pytest.approx(0.1)
    assert ranks._difference([1.0, float("nan")], [1.0, 2.0]) != pytest.approx(0.1, abs=9)


def test_memory_without_a_size_that_fits_fails(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2**20, 2**30))
    last = list(memory.prove_memory(False))[-1]
    assert (last.what, last.holds) == ("sizes measured", False)


def test_fp8_on_an_older_gpu_is_left_out(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    with pytest.raises(NeedsGPUError, match=r"8\.9 for FP8; this GPU has 8\.0"):
        list(speed.prove_fp8(False))
