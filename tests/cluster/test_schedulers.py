"""Slurm and this machine, asked the same, behave the same: one law for both schedulers."""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from course_lib.jobs.job import Job
from course_lib.jobs.local.scheduler import LocalRunner
from course_lib.jobs.scheduler import GONE, JobState, NoAnswerError, Scheduler, SchedulerError
from course_lib.jobs.slurm import NO_CLUSTER, Slurm

HEAD = """#!/bin/bash
#SBATCH --job-name=law
#SBATCH --output=log-%A_%a.txt
#SBATCH --time=0:05:00
#SBATCH --open-mode=append
"""
BOTH = pytest.mark.parametrize("scheduler", ["slurm", "local"], indirect=True)
WITHIN_S = 120.0


@pytest.fixture
def scheduler(request, tmp_path, monkeypatch) -> Scheduler:
    """One of the two, with the current folder for its jobs."""
    monkeypatch.chdir(tmp_path)
    if request.param == "local":
        return LocalRunner(tmp_path / "local")
    request.getfixturevalue("slurm")
    return Slurm(pauses_s=())


@pytest.fixture
def hand_in(scheduler, tmp_path) -> Callable[..., str]:
    """Hand in a script of these lines; returns the job's id."""
    return handing_in(scheduler, tmp_path)


@pytest.fixture
def hand_in_here(tmp_path, monkeypatch) -> tuple[Scheduler, Callable[..., str]]:
    """This machine, and how a script is handed in to it."""
    monkeypatch.chdir(tmp_path)
    runner = LocalRunner(tmp_path / "local")
    return runner, handing_in(runner, tmp_path)


def handing_in(scheduler: Scheduler, folder: Path) -> Callable[..., str]:
    def do(body: str, *, token: str = "a-token", head: str = "", **options) -> str:
        if "array" in options:
            head += f"#SBATCH --array={options['array']}\n"
        script = folder / "law.sbatch"
        script.write_text(f"{HEAD}{head}{body}\n")
        scheduler.check(script)
        job = Job(program="none.py", name="law", run_folder=str(folder), **options)
        return scheduler.submit(script, job, token)

    return do


def until(is_so: Callable[[], bool], what: str) -> None:
    give_up = time.monotonic() + WITHIN_S
    while not is_so():
        assert time.monotonic() < give_up, f"never: {what}"
        time.sleep(0.05)


def ended(scheduler: Scheduler, job_id: str) -> list[JobState]:
    until(lambda: all(one.is_final for one in scheduler.states(job_id)), f"{job_id} ended")
    return scheduler.states(job_id)


def log_of(state: JobState) -> str:
    return Path(state.log).read_text()


@BOTH
def test_a_job_runs_and_leaves_its_output(scheduler, hand_in, tmp_path):
    (job,) = ended(
        scheduler, hand_in("pwd; echo $SLURM_JOB_NAME $SLURM_NNODES; echo $((2 > 1)) >&2")
    )
    assert (job.state, job.exit_code, job.restarts) == ("COMPLETED", 0, 0)
    assert log_of(job) == f"{tmp_path}\nlaw 1\n1\n"
    assert Path(job.log).parent == tmp_path


@BOTH
@pytest.mark.parametrize(("body", "code"), [("exit 7", 7), ("kill -9 $$", 137)])
def test_exit_codes_are_kept(scheduler, hand_in, body, code):
    (job,) = ended(scheduler, hand_in(body))
    assert (job.state, job.exit_code) == ("FAILED", code)


@BOTH
def test_every_task_of_an_array_has_a_state_and_a_log(scheduler, hand_in):
    body = (
        "echo $SLURM_ARRAY_TASK_ID of $SLURM_ARRAY_TASK_COUNT; exit $((SLURM_ARRAY_TASK_ID == 3))"
    )
    jobs = ended(scheduler, hand_in(body, array="1,3-4%1"))
    assert [(job.array_task, job.state) for job in jobs] == [
        (1, "COMPLETED"),
        (3, "FAILED"),
        (4, "COMPLETED"),
    ]
    assert [log_of(job) for job in jobs] == ["1 of 3\n", "3 of 3\n", "4 of 3\n"]


@BOTH
def test_a_cancelled_job_leaves_no_process(scheduler, hand_in, tmp_path):
    body = "setsid sleep 1000 & echo $! > pid; sleep 1000"
    job_id, pid = hand_in(body), tmp_path / "pid"
    until(lambda: pid.exists() and bool(pid.read_text()), "the job began")
    assert [one.state for one in scheduler.states(job_id)] == ["RUNNING"]
    scheduler.cancel(job_id)
    (job,) = ended(scheduler, job_id)
    assert (job.state, job.exit_code) == ("CANCELLED", None)
    until(lambda: not psutil.pid_exists(int(pid.read_text())), "its process ended")


@BOTH
def test_one_array_task_is_cancelled_and_the_others_go_on(scheduler, hand_in, tmp_path):
    body = "until [ -e go ]; do sleep 0.1; done; echo went"
    job_id = hand_in(body, array="0-2")
    until(lambda: any(one.state == "RUNNING" for one in scheduler.states(job_id)), "it runs")
    scheduler.cancel(f"{job_id}_1")
    (tmp_path / "go").touch()
    states = [one.state for one in ended(scheduler, job_id)]
    assert states == ["COMPLETED", "CANCELLED", "COMPLETED"]
    assert [one.state for one in scheduler.states(f"{job_id}_1")] == ["CANCELLED"]


def test_a_local_job_that_is_requeued_counts_its_restarts(hand_in_here):
    scheduler, hand_in = hand_in_here
    body = """echo attempt ${SLURM_RESTART_COUNT:-0}
if [ -z "${SLURM_RESTART_COUNT:-}" ]; then scontrol requeue $SLURM_JOB_ID; sleep 1000; fi"""
    (job,) = ended(scheduler, hand_in(body))
    assert (job.state, job.restarts) == ("COMPLETED", 1)
    assert [line for line in log_of(job).splitlines() if "attempt" in line] == [
        "attempt 0",
        "attempt 1",
    ]


@BOTH
def test_a_missing_output_folder_fails_alike(scheduler, hand_in):
    (job,) = ended(scheduler, hand_in("true", head="#SBATCH --output=nowhere/log.txt\n"))
    assert (job.state, job.exit_code) == ("FAILED", 128 + 53)


@BOTH
def test_tasks_of_srun_know_their_place(scheduler, hand_in):
    place = "$SLURM_PROCID of $SLURM_NTASKS on $SLURM_NODEID"
    body = f"srun --label bash -c 'echo at {place}; exit $SLURM_PROCID'"
    head = "#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=2\n"
    (job,) = ended(scheduler, hand_in(body, head=head, nodes=2))
    assert (job.state, job.exit_code) == ("FAILED", 3)
    found = sorted(line.partition("at ")[2] for line in log_of(job).splitlines() if "at " in line)
    assert found == ["0 of 4 on 0", "1 of 4 on 0", "2 of 4 on 1", "3 of 4 on 1"]


@BOTH
def test_a_script_that_cannot_run_is_refused(scheduler, tmp_path):
    script = tmp_path / "bad.sbatch"
    script.write_text("#!/bin/bash\n#SBATCH --nodes=77\nif true; then\n")
    with pytest.raises(SchedulerError, match=r"Node count|More processors|cannot read"):
        scheduler.check(script)


@BOTH
def test_a_job_is_found_by_its_token(scheduler, hand_in):
    first, second = hand_in("true", token="one-7"), hand_in("true", token="two-7")
    assert (scheduler.find("one-7"), scheduler.find("two-7")) == (first, second)
    assert scheduler.find("three-7") is None
    ended(scheduler, second)


@BOTH
def test_nothing_of_a_surrounding_job_gets_into_a_job(scheduler, hand_in, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_NAME", "outer")
    monkeypatch.setenv("SLURM_LEFT_OVER", "outer")
    (job,) = ended(scheduler, hand_in("echo $SLURM_JOB_NAME ${SLURM_LEFT_OVER:-clean}"))
    assert log_of(job) == "law clean\n"


@BOTH
def test_a_job_finds_the_python_it_was_handed_in_with(scheduler, hand_in, monkeypatch):
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    (job,) = ended(scheduler, hand_in("command -v python torchrun"))
    folder = Path(sys.executable).parent
    assert log_of(job) == f"{folder}/python\n{folder}/torchrun\n"


@BOTH
def test_a_job_that_nobody_knows_is_gone(scheduler):
    assert [one.state for one in scheduler.states("987654")] == [GONE]
    scheduler.cancel("987654")


ACCOUNTED = """17_1|COMPLETED|0:0|12
17_3|CANCELLED by 1000|0:15|3
17_4|FAILED|7:0|0
"""


@pytest.fixture
def pretended(tmp_path, monkeypatch) -> Callable[..., None]:
    """Put commands into PATH that say this, to stdout and stderr, and end with this code."""

    def put(name: str, out: str = "", err: str = "", code: int = 0) -> None:
        (tmp_path / f"{name}.out").write_text(out)
        (tmp_path / f"{name}.err").write_text(err)
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\ncat {path}.out\ncat {path}.err >&2\nexit {code}\n")
        path.chmod(0o755)

    monkeypatch.setattr("course_lib.jobs.slurm.python_first", lambda: f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return put


def test_what_the_controller_forgot_the_accounting_knows(pretended):
    pretended("scontrol", err="slurm_load_jobs error: Invalid job id specified\n", code=1)
    pretended("sacct", ACCOUNTED)
    found = Slurm().states("17")
    assert [(one.array_task, one.state, one.exit_code, one.seconds) for one in found] == [
        (1, "COMPLETED", 0, 12.0),
        (3, "CANCELLED", None, 3.0),
        (4, "FAILED", 7, 0.0),
    ]
    assert [one.array_task for one in Slurm().states("17_3")] == [3]
    pretended("sacct", err="Slurm accounting storage is disabled\n", code=1)
    assert [one.state for one in Slurm().states("17")] == [GONE]


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        (
            "sbatch: error: Batch job submission failed: Job violates policy\n",
            "Batch job submission",
        ),
        ("allocation failure: Invalid partition name specified\n", "Invalid partition name"),
        ("sbatch: unrecognized option '--tiem=1'\n", "sbatch: unrecognized option '--tiem=1'"),
        ("", "it says nothing"),
    ],
)
def test_what_sbatch_refuses_is_one_sentence(pretended, tmp_path, said, sentence):
    pretended("sbatch", err=said, code=1)
    job = Job(name="law", program="none.py", run_folder=str(tmp_path))
    for refused in (
        lambda: Slurm().check(tmp_path / "a.sbatch"),
        lambda: Slurm().submit(tmp_path / "a.sbatch", job, "a-token"),
    ):
        with pytest.raises(SchedulerError) as error:
            refused()
        assert str(error.value).startswith(f"Slurm does not take it: {sentence}")
        assert "\n" not in str(error.value)


def test_a_submit_whose_answer_got_lost_is_not_handed_in_twice(pretended, tmp_path):
    lost = "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation\n"
    pretended("sbatch", err=lost, code=1)
    pretended("squeue", "16 another\n17 a-token\n")
    said: list[str] = []
    job = Job(name="law", program="none.py", run_folder=str(tmp_path))
    slurm = Slurm(pauses_s=(0.0, 0.0), say=said.append)
    assert slurm.submit(tmp_path / "a.sbatch", job, "a-token") == "17"
    assert len(said) == 1
    with pytest.raises(NoAnswerError, match="Socket timed out on send/recv operation', 3 times"):
        slurm.submit(tmp_path / "a.sbatch", job, "b-token")


def test_without_slurm_the_laptop_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("course_lib.jobs.slurm.python_first", lambda: str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SchedulerError, match=r"sbatch: need Slurm's commands .* --profile laptop"):
        Slurm().check(tmp_path / "a.sbatch")


def test_what_a_job_waited_for_is_told_only_while_it_waits(pretended):
    for state, reason in (("PENDING", "Resources"), ("CANCELLED", ""), ("COMPLETED", "")):
        pretended("scontrol", f"JobId=17 JobState={state} Reason=Resources ExitCode=0:0\n")
        assert [(one.state, one.reason) for one in Slurm().states("17")] == [(state, reason)]


def test_a_cluster_that_is_gone_for_good_is_not_asked_again(pretended, tmp_path, monkeypatch):
    def asked_again(sentence: str) -> None:
        raise AssertionError(sentence)

    slurm = Slurm(pauses_s=(0.0,), say=asked_again)
    monkeypatch.delenv("SLURM_CONF", raising=False)
    for said in NO_CLUSTER:
        pretended("scontrol", err=f"scontrol: error: x\nscontrol: fatal: {said}\n", code=1)
        with pytest.raises(SchedulerError, match=rf"got '{said}.* or --profile laptop\.$"):
            slurm.states("17")
    gone = tmp_path / "gone.conf"
    monkeypatch.setenv("SLURM_CONF", str(gone))
    pretended("scontrol", "JobId=17 JobState=RUNNING Reason=None ExitCode=0:0\n")
    with pytest.raises(SchedulerError, match=rf"got SLURM_CONF={gone}, .* or --profile laptop\.$"):
        slurm.states("17")
    gone.touch()
    assert [one.state for one in slurm.states("17")] == ["RUNNING"]


def test_a_cluster_is_here_where_its_controller_answers(pretended, monkeypatch):
    monkeypatch.delenv("SLURM_CONF", raising=False)
    slurm = Slurm(pauses_s=())
    pretended("sinfo", "gpu* up 1:00:00 2 idle node[1-2]\n")
    assert slurm.is_here()
    pretended("sinfo", err=f"sinfo: fatal: {NO_CLUSTER[1]}\n", code=1)
    assert not slurm.is_here()
    pretended("sinfo", err="slurm_load_partitions: Socket timed out\n", code=1)
    with pytest.raises(NoAnswerError):
        slurm.is_here()
    monkeypatch.setenv("SLURM_CONF", "/no/such.conf")
    with pytest.raises(SchedulerError, match="which is not there"):
        slurm.is_here()


def test_local_jobs_run_one_at_a_time_in_their_order(tmp_path, hand_in_here):
    scheduler, hand_in = hand_in_here
    first = hand_in(
        "echo first begins >> all; until [ -e go ]; do sleep 0.1; done; echo first >> all"
    )
    second, third = hand_in("echo second >> all"), hand_in("echo third >> all")
    until((tmp_path / "all").exists, "the first began")
    assert [one.state for one in scheduler.states(second)] == ["PENDING"]
    scheduler.cancel(third)
    assert [one.state for one in ended(scheduler, third)] == ["CANCELLED"]
    (tmp_path / "go").touch()
    assert [one.state for one in ended(scheduler, second)] == ["COMPLETED"]
    assert (tmp_path / "all").read_text().splitlines() == ["first begins", "first", "second"]
    assert int(first) < int(second) < int(third)


def test_a_local_job_is_ended_at_its_time_limit(hand_in_here):
    scheduler, hand_in = hand_in_here
    (job,) = ended(scheduler, hand_in("sleep 1000", time_limit="0:00:01"))
    assert (job.state, job.exit_code) == ("TIMEOUT", None)
    assert job.seconds >= 1


def test_a_local_job_whose_runner_was_killed_is_told_and_can_be_cleared(hand_in_here, tmp_path):
    scheduler, hand_in = hand_in_here
    job_id = hand_in("echo $PPID $$ > pids; sleep 1000")
    until(
        lambda: (tmp_path / "pids").exists() and bool((tmp_path / "pids").read_text()), "it began"
    )
    runner, script = (int(word) for word in (tmp_path / "pids").read_text().split())
    os.kill(runner, signal.SIGKILL)
    (job,) = ended(scheduler, job_id)
    assert (job.state, job.exit_code) == ("NODE_FAIL", None)
    assert psutil.pid_exists(script)
    scheduler.cancel(job_id)
    until(lambda: not psutil.pid_exists(script), "its process ended")
    (after,) = ended(scheduler, hand_in("true"))
    assert after.state == "COMPLETED"
