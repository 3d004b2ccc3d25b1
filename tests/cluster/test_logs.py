"""What `course logs` and `course status` say of a job: what failed first, and no launcher's lines.

`logs` has two logs of a live Slurm of two nodes, of a job that succeeded and of one that failed.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from course_lib.core.plain_text import STRANGE
from course_lib.jobs.failures import find_failure, told
from course_lib.jobs.launcher_lines import WithoutLauncher
from course_lib.jobs.logs import Tail, follow
from course_lib.jobs.scheduler import JobState
from course_lib.jobs.submissions import find_submission, read_submission

LOGS = Path(__file__).parent / "logs"
FAILED = (LOGS / "failed.txt").read_text()
SUCCEEDED = (LOGS / "succeeded.txt").read_text()
SENTENCE = "rank 2, fail.py line 8, in work: ValueError: the loss is nan at step 7"
HEAD = "Traceback (most recent call last):\n"


def traceback(error: str, *frames: str, prefix: str = "") -> str:
    """A traceback as a rank prints it; a frame is `file:line:function`."""
    parts = [frame.split(":") for frame in frames]
    text = HEAD + "".join(f'  File "{f}", line {n}, in {fn}\n    x\n' for f, n, fn in parts)
    return "".join(f"{prefix}{line}\n" for line in (text + error).splitlines())


def report(rank: int, code: str) -> str:
    """What torchrun says of the rank that ended first."""
    return (
        "Root Cause (first observed failure):\n[0]:\n  time      : 2026-11-28_08:04:18\n"
        f"  host      : node2\n  rank      : {rank} (local_rank: 0)\n"
        f"  exitcode  : {code}\n  error_file: <N/A>\n"
    )


MINE = "/home/ada/my.py"
LOST = traceback(
    "RuntimeError: Connection closed by peer [::1]:1", f"{MINE}:9:f", prefix="[rank1]: "
)
LOST_CAUSE = "rank 1, my.py line 9, in f: RuntimeError: Connection closed by peer [::1]:1"
CHAIN = "\nDuring handling of the above exception, another exception occurred:\n\n"
NO_TORCHRUN = "/var/job/slurm_script: line 27: torchrun: command not found"
RECORDED = "/x/site-packages/torch/distributed/elastic/multiprocessing/errors/__init__.py:3:w"
RUN = "/x/site-packages/torch/distributed/run.py:1028:main"
ALONE = "The client socket has timed out after 60000ms while trying to connect to (node1, 29500)."
MEET = "/x/site-packages/torch/distributed/elastic/rendezvous/c10d_rendezvous_backend.py:155:_make"
NOT_MET = (
    traceback(f"torch.distributed.DistNetworkError: {ALONE}", MEET)
    + "\nThe above exception was the direct cause of the following exception:\n\n"
    + traceback(
        "torch.distributed.elastic.rendezvous.api.RendezvousConnectionError: It has failed.",
        *("/x/bin/torchrun:8:<module>", RUN, MEET),
    )
)
CAUSES = {
    "nodes that do not meet": (NOT_MET, f"torchrun: the nodes did not meet: {ALONE}"),
    "two nodes": (FAILED, SENTENCE),
    "nothing at all": ("", ""),
    "a consequence before its cause": (
        LOST + traceback("KeyError: 'lr'", f"{MINE}:3:<module>", prefix="[rank2]: "),
        "rank 2, my.py line 3: KeyError: 'lr'",
    ),
    "only a consequence": (LOST, LOST_CAUSE),
    "the learner's line, not the library's": (
        traceback(
            "E: a", f"{MINE}:3:f", "/x/site-packages/torch/nn.py:7:g", "/c/course_lib/a.py:1:h"
        ),
        "my.py line 3, in f: E: a",
    ),
    "a library's line where there is no other": (
        traceback("E: a", "<frozen runpy>:8:run", "/c/course_lib/train/a.py:1:h"),
        "a.py line 1, in h: E: a",
    ),
    "the last of a chain": (
        traceback("KeyError: 1", f"{MINE}:3:f") + CHAIN + traceback("E: b", f"{MINE}:5:f"),
        "my.py line 5, in f: E: b",
    ),
    "two ranks at the same time": (
        "[rank1]: Traceback (most recent call last):\n[rank0]: Traceback (most recent call last):\n"
        '[rank1]:   File "a.py", line 1, in f\n[rank0]:   File "b.py", line 2, in g\n'
        "[rank1]: E: one\n[rank0]: E: zero\n",
        "rank 1, a.py line 1, in f: E: one",
    ),
    "labels of srun": (
        traceback("E: a", f"{MINE}:3:f", prefix="3: "),
        "task 3, my.py line 3, in f: E: a",
    ),
    "syntax": (
        '  File "a.py", line 4\n    x = = 1\n        ^\nSyntaxError: bad\n',
        "a.py line 4: SyntaxError: bad",
    ),
    "usage": (
        "usage: a.py [-h]\na.py: error: no --foo\n" + report(0, "2 (pid: 7) "),
        "a.py: error: no --foo",
    ),
    "calls that do not match": (
        "mismatch: the ranks made different calls\nrank 0 calls all_reduce\n" + LOST,
        "mismatch: the ranks made different calls",
    ),
    "killed": (
        LOST + report(3, "-9 (pid: 7) (SIGKILL)"),
        "rank 3 on node2: killed (SIGKILL), often because memory ran out",
    ),
    "crashed": (report(3, "-11 (pid: 7) (SIGSEGV)"), "rank 3 on node2: ended by SIGSEGV"),
    "ended by another's end": (LOST + report(1, "-15 (pid: 7) (SIGTERM)"), LOST_CAUSE),
    "an exit code alone": (
        LOST + report(3, "7 (pid: 7) "),
        "rank 3 on node2: ended with exit code 7",
    ),
    "killed without torchrun": ("srun: error: node1: task 3: Killed\n", "task 3: Killed"),
    "torchrun itself": (
        traceback(
            "ValueError: Unsupported nproc_per_node value: gpu", "/x/bin/torchrun:8:<module>", RUN
        ),
        "torchrun: ValueError: Unsupported nproc_per_node value: gpu",
    ),
    "a rank that torch.distributed.elastic records": (
        traceback("E: a", RECORDED, f"{MINE}:3:f"),
        "my.py line 3, in f: E: a",
    ),
    "the shell": (
        f"{NO_TORCHRUN}\nsrun: error: node1: task 0: Exited with exit code 127\n",
        f"its log ends: {NO_TORCHRUN}",
    ),
}


@pytest.mark.parametrize(("text", "cause"), CAUSES.values(), ids=CAUSES)
def test_what_failed_first_is_found(text, cause):
    assert find_failure(text) == cause


def test_a_sentence_says_it_of_the_first_that_failed(tmp_path):
    (tmp_path / "log").write_text(f"\x1b[31m{FAILED}")
    failed = JobState(array_task=3, state="FAILED", exit_code=143, log=str(tmp_path / "log"))
    fine = JobState(array_task=1, state="COMPLETED", log=str(tmp_path / "log"))
    assert told([failed]) == f"FAILED (exit code 143): {SENTENCE}"
    both = "1 COMPLETED, 1 FAILED (exit code 143)"
    assert told([fine, failed]) == f"{both}: array task 3, {SENTENCE}"
    assert told([fine]) == "COMPLETED"
    late = replace(failed, state="TIMEOUT", exit_code=None)
    assert (
        told([late])
        == "TIMEOUT: it ran until its time limit. Try course submit with a longer --time"
    )
    (tmp_path / "log").unlink()
    assert told([failed]) == "FAILED (exit code 143)"


# ---- the launcher's lines --------------------------------------------------------------------


class Pieces:
    """A log that grows by a piece at each look."""

    def __init__(self, *pieces: str) -> None:
        self.pieces = list(pieces)

    def read(self, *, last: bool = False) -> str:
        return self.pieces.pop(0) if self.pieces else ""


def shown(*pieces: str) -> str:
    log = WithoutLauncher(Pieces(*pieces))
    return "".join(log.read(last=n == len(pieces) - 1) for n in range(len(pieces)))


def left_out(count: int) -> str:
    return f"[left out: {count} lines of torchrun and its store; --whole shows them]"


def test_a_job_that_succeeded_ends_with_its_results():
    assert shown(SUCCEEDED).splitlines() == [*SUCCEEDED.splitlines()[:3], left_out(30)]


def test_of_a_job_that_failed_its_ranks_and_slurm_speak():
    lines = shown(FAILED).splitlines()
    own = ("[rank", "srun: ", "slurmstepd", "[left out: ")
    assert [line for line in lines if line and not line.startswith(own)] == []
    assert [line for line in lines if line.startswith("[left")] == [left_out(40), left_out(31)]
    ranks = [line for line in FAILED.splitlines() if line.startswith("[rank")]
    assert [line for line in lines if line.startswith("[rank")] == ranks


@pytest.mark.parametrize("label", ["", " 1: "])
def test_of_nodes_that_do_not_meet_the_program_alone_is_shown(label):
    lines = f"before\n{NOT_MET}after\n".splitlines()
    text = "".join(f"{label}{line}\n" for line in lines)
    assert shown(text).splitlines() == [f"{label}before", left_out(len(lines) - 2), f"{label}after"]


@pytest.mark.parametrize("text", [FAILED, SUCCEEDED])
def test_it_makes_no_difference_when_one_looks(text):
    by_line = shown(*text.splitlines(keepends=True))
    assert by_line == shown(text)
    labelled = "".join(f" 0: {line}" for line in SUCCEEDED.splitlines(keepends=True))
    assert shown(labelled).splitlines()[-1] == left_out(30)


@pytest.mark.parametrize(
    "text",
    [
        traceback("ValueError: mine", f"{MINE}:3:f"),
        traceback(
            "ValueError: Unsupported nproc_per_node value", "/x/bin/torchrun:8:<module>", RUN
        ),
        HEAD,
        "====================\nresults\n----\n\n  rank      : 3\n",
        "[rank0]: frame #0: mine\n\nafter\n",
        "no line feed at the end",
    ],
)
def test_what_is_not_known_to_be_the_launchers_is_shown(text):
    assert shown(text) == text.rstrip("\n") + "\n"


# ---- following -------------------------------------------------------------------------------


class Scripted:
    """A scheduler that gives these states, one at each question; a job writes its log meanwhile."""

    def __init__(self, states: Iterator[JobState]) -> None:
        self.states_, self.asked = states, 0

    def states(self, job_id: str) -> list[JobState]:
        return [next(self.states_)]


def test_while_one_waits_one_is_told_what_for(submission, monkeypatch, tmp_path):
    log = tmp_path / "log"

    def states() -> Iterator[JobState]:
        waits = {"array_task": 0, "state": "PENDING", "log": str(log)}
        yield JobState(**waits, reason="Priority")
        yield JobState(**waits, reason="Resources")
        yield JobState(**waits, reason="Resources")
        yield JobState(array_task=0, state="RUNNING", log=str(log))
        log.write_text(FAILED)
        yield JobState(array_task=0, state="FAILED", exit_code=1, log=str(log))

    script = Scripted(states())
    monkeypatch.setattr("course_lib.jobs.submissions.scheduler_of", lambda *_: script)
    monkeypatch.setattr("course_lib.jobs.logs.time.sleep", lambda _: None)
    monkeypatch.setattr("course_lib.jobs.logs.MOST_S", 0.0)
    one, heard = submission(), []
    text = "".join(follow(one, None, until_over=True, say=heard.append))
    assert heard == ["PENDING (Priority)", "PENDING (Resources)", "RUNNING"]
    assert text == shown(FAILED)
    assert read_submission(one.folder).seen[0].state == "FAILED"
    assert (
        "".join(follow(find_submission("ddp-1")[0], None, until_over=False, whole=True)) == FAILED
    )


def test_a_failed_job_shows_first_what_failed(submission, capsys, monkeypatch, tmp_path):
    from course_lib.cli.commands import main

    monkeypatch.setenv("COLUMNS", "160")
    log = tmp_path / "log"
    log.write_text(FAILED)
    submission("FAILED", log=str(log))
    with pytest.raises(SystemExit):
        main(["logs", "ddp-1"])
    said = capsys.readouterr()
    assert said.err.splitlines() == [f"ddp-1: FAILED: {SENTENCE}"] * 2  # before and after it
    assert said.out == shown(FAILED)
    with pytest.raises(SystemExit):
        main(["status"])
    assert capsys.readouterr().out.splitlines()[-1] == f"ddp-1: FAILED: {SENTENCE}"


def test_a_tail_gives_whole_lines_once(tmp_path):
    log = tmp_path / "log"
    tail = Tail(log)
    assert tail.read() == ""
    parts = [b"one\ntw", b"o \xe2\x82", b"\xac\nthree\r", b"four \x1b[31mred\x1b[0m \x07 \xff end"]
    said = []
    for part in parts:
        with log.open("ab") as file:
            file.write(part)
        said.append(tail.read())
    said.append(tail.read(last=True))
    assert said == ["one\n", "", "two €\nthree\n", "", f"four red {STRANGE} {STRANGE} end\n"]
    assert tail.read(last=True) == ""


def test_a_log_that_begins_anew_is_read_anew(tmp_path):
    log = tmp_path / "log"
    tail = Tail(log)
    log.write_text("first attempt, and a long line\n")
    assert tail.read() == "first attempt, and a long line\n"
    log.write_text("second\n")
    assert tail.read() == "second\n"
