"""How soon a training job and its ranks are gone after a rank was killed, or Ctrl-C: printed.

python -m tests.benchmarks.bench_train
"""

import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from subprocess import Popen

from psutil import Process

from tests.train.test_train import TRAIN, end_of, started

REPEATS = 3


def kill_rank_1(_job: Popen[str], family: list[Process]) -> None:
    """As the system does when memory runs out."""
    next(one for one in family if one.environ().get("RANK") == "1").kill()


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


def main() -> None:
    """Print the median and the range of a few jobs."""
    for fail in (kill_rank_1, press_ctrl_c):
        found = [over_after_s(fail) for _ in range(REPEATS)]
        print(
            f"{fail.__name__}: over after {statistics.median(found):.2f} s "
            f"({min(found):.2f} to {max(found):.2f}), {REPEATS} jobs"
        )


if __name__ == "__main__":
    main()
