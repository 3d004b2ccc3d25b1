"""How soon a training job takes its first step, and is gone after a failure or Ctrl-C: printed.

python -m tests.benchmarks.bench_train
"""

import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from subprocess import PIPE, Popen

from psutil import Process

from tests.train.test_train import TRAIN, end_of, rank_of, started

REPEATS = 3
ONE_STEP = ("--strategy", "ddp", "--steps", "1", "--every", "1")


def kill_rank_1(_job: Popen[str], family: list[Process]) -> None:
    """As the system does when memory runs out."""
    rank_of(family, 1).kill()


def press_ctrl_c(job: Popen[str], _family: list[Process]) -> None:
    """What a learner does."""
    job.send_signal(signal.SIGINT)


def over_after_s(fail: Callable[[Popen[str], list[Process]], None]) -> float:
    """Seconds from a failure in the middle of training until no process of the job is left."""
    with tempfile.TemporaryDirectory() as folder:
        command = [*TRAIN, "--ranks", "2", "--steps", "100000", "--out", "run"]
        with started(command, Path(folder)) as (job, family):
            start_s = time.perf_counter()
            fail(job, family)
            end_of(job, family)
            return time.perf_counter() - start_s


def first_step_s(*command: str) -> float:
    """Seconds from the command to the line of its first step."""
    start_s = time.perf_counter()
    with Popen([*command, *ONE_STEP], stdout=PIPE, text=True) as job:
        assert job.stdout is not None
        while not job.stdout.readline().startswith("step 1/"):
            assert job.poll() is None
        return time.perf_counter() - start_s


def print_starts() -> None:
    """Print the fastest of a few starts: ranks forked by the command, and those of torchrun."""
    for ranks in (2, 8):
        forked = [*(sys.executable, "-m", "course_lib.train"), "--ranks", str(ranks)]
        torchrun = [*("torchrun", "--nproc-per-node", str(ranks)), *("-m", "course_lib.train")]
        found = {
            name: min(first_step_s(*command) for _ in range(REPEATS))
            for name, command in {"forked": forked, "torchrun": torchrun}.items()
        }
        print(
            f"first step on {ranks} ranks: " + ", ".join(f"{k} {v:.1f} s" for k, v in found.items())
        )


def main() -> None:
    """Print the starts; then the median and the range of a few jobs' ends."""
    print_starts()
    for fail in (kill_rank_1, press_ctrl_c):
        found = [over_after_s(fail) for _ in range(REPEATS)]
        print(
            f"{fail.__name__}: over after {statistics.median(found):.2f} s "
            f"({min(found):.2f} to {max(found):.2f}), {REPEATS} jobs"
        )


if __name__ == "__main__":
    main()
