"""The process of a proof: its environment, and the end of everything that it has started."""

import os
import signal
import subprocess
import time
import uuid
from contextlib import suppress

import psutil

MARK = "COURSE_GPU_PROOF"  # every process that a proof starts inherits it
KILL_S = 5.0
OF_A_RANK = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"),
    *("MASTER_ADDR", "MASTER_PORT", "SLURM_RESTART_COUNT", "RUN_FOLDER"),
)


def environment(rehearse: bool) -> dict[str, str]:
    """Return the environment variables of a proof, with a mark of its own.

    Variables that torchrun sets are removed: with them a proof would take itself for a rank of
    another world, and wait for it. A rehearsal sees no GPU, on a machine with one too.
    """
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in OF_A_RANK and not name.startswith(("TORCHELASTIC_", "ROLE_"))
    }
    kept |= {MARK: uuid.uuid4().hex, "COURSE_SHARE_GPU": "1"}
    return kept | ({"CUDA_VISIBLE_DEVICES": ""} if rehearse else {})


def processes_with(name: str, value: str) -> list[psutil.Process]:
    """Return the processes of this machine with such an environment variable.

    A search among descendants is not enough: a process whose parent has died belongs to process 1,
    and ranks and notebook kernels are in sessions of their own.
    """
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.AccessDenied, psutil.NoSuchProcess, OSError):  # zombies included
            if process.environ().get(name) == value:
                found.append(process)
    return found


def end(process: "subprocess.Popen[bytes]", mark: str) -> None:
    """End a proof and everything that it has started: first by a request, then by force."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        time.sleep(0.2)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    give_up_s = time.monotonic() + KILL_S
    while (left := processes_with(MARK, mark)) and time.monotonic() < give_up_s:
        for one in left:
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                one.kill()
        time.sleep(0.05)
