"""Real torchrun: a job goes on after a rank was killed, and without an agent and its ranks."""

import os
import re
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch

from course_lib.checkpoint import latest
from course_lib.core import find_model
from course_lib.core.records import read_runs
from course_lib.train.config import TrainConfig
from course_lib.train.trainer import train
from tests.train.training_runs import losses

CONFIG = TrainConfig(
    model=find_model("tiny"), strategy="zero1", global_batch=8, seq=8, dtype="float64", every=0
)
OPTIONS = [
    *("-m", "course_lib.train", "--strategy", "zero1", "--global-batch", "8", "--seq", "8"),
    *("--dtype", "float64", "--every", "0", "--steps", "100000", "--save-every", "2"),
    *("--out", "run"),
]
SLOW = """
import os
if "RANK" in os.environ:  # so that there are not too many steps to compare
    import time
    from course_lib.train.progress import ProgressBar
    ProgressBar.step = lambda self: time.sleep(0.1)
"""
TIMES = "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3"


class Agents:
    """torchrun's agents of one job, in a folder: 0 hosts the rendezvous, 1 comes and goes."""

    def __init__(self, folder: Path) -> None:
        (folder / "sitecustomize.py").write_text(SLOW)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.folder, self.started = folder, []

    def start(self, number: int) -> psutil.Popen:
        command = [
            *(str(Path(sys.executable).parent / "torchrun"), "--nnodes", "1:2"),
            *("--nproc-per-node", "2", "--max-restarts", "9", "--monitor-interval", "0.1"),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{self.port}"),
            *("--rdzv-conf", f"is_host={'false' if number else 'true'},{TIMES}"),
            *("--local-addr", "127.0.0.1", *OPTIONS),
        ]
        path = os.pathsep.join([str(self.folder), os.environ.get("PYTHONPATH", "")])
        own = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
        with (self.folder / f"log{len(self.started)}").open("w") as log:
            agent = psutil.Popen(
                command, cwd=self.folder, env=os.environ | own | {"PYTHONPATH": path},
                stdout=log, stderr=log,
            )  # fmt: skip
        self.started.append(agent)
        return agent

    def latest(self) -> tuple[int, int]:
        """Step of the latest checkpoint, and the ranks that have saved it."""
        found = latest(self.folder / "run" / "checkpoints")
        return (found.step, found.manifest.world_size) if found else (0, 0)

    def end(self) -> None:
        """Leave no process."""
        for agent in self.started:
            with suppress(psutil.NoSuchProcess):
                for process in [*agent.children(recursive=True), agent]:
                    process.kill()
            agent.wait()


@pytest.fixture
def agents(tmp_path):
    job = Agents(tmp_path)
    yield job
    job.end()


def test_a_job_goes_on_by_itself_without_a_rank_without_an_agent_and_with_it_again(
    agents, until, alone
):
    host, other = agents.start(0), agents.start(1)
    until(lambda: agents.latest()[1] == 4, "four ranks have saved", 100)

    next(one for one in other.children() if one.environ().get("LOCAL_RANK") == "1").kill()
    step, _ = agents.latest()
    until(lambda: agents.latest()[0] > step + 2, "they are four again, and go on", 100)

    other.kill()
    until(lambda: agents.latest()[1] == 2, "two ranks go on", 100)

    other = agents.start(1)
    until(lambda: agents.latest()[1] == 4, "they are four again", 100)

    for agent in (host, other):
        agent.send_signal(signal.SIGTERM)
    for agent in (host, other):
        assert agent.wait(100)
    step, _ = agents.latest()
    records = read_runs(agents.folder / "run")
    found = {one["step"]: one["loss"] for record in records for one in record.steps}
    assert sorted(found) == list(range(step))  # none is lost, none was done in vain at the end
    never_stopped = losses(alone(train, TrainConfig(**vars(CONFIG) | {"steps": step})))
    whole = torch.tensor([found[n] for n in range(step)])
    torch.testing.assert_close(whole, torch.tensor(never_stopped), rtol=1e-9, atol=0)
    logs = "".join(path.read_text() for path in agents.folder.glob("log*"))
    assert not re.search("CourseError|--out: need", logs)
