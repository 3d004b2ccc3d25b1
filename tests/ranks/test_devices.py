"""Which device a rank computes on, by what torchrun and Slurm say of it; no GPU is needed."""

import os
import subprocess
import sys

import pytest
import torch

from course_lib.ranks.world import one_gpu_each, rank_device, why_cpu

SHARES = "so they use the CPU. Try --gpus-per-node=4, or COURSE_SHARE_GPU=1."
NO_CUDA = "Slurm gave this node 4 GPUs and PyTorch sees none"
TASK = {"SLURM_PROCID": "6", "SLURM_NTASKS": "8"}  # rank 6 of 8 is itself a task of srun
LAUNCHED = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "TORCHELASTIC_RUN_ID": "7"}
CASES = {  # GPUs that the rank sees, GPUs of the job on its node, more: its device, what is said
    "torchrun, all GPUs of the node": (4, 4, LAUNCHED, "cuda:2", ""),
    "torchrun, too few GPUs": (1, 1, LAUNCHED, "cpu", SHARES),
    "torchrun, without Slurm": (4, 0, {}, "cuda:2", ""),
    "torchrun, one GPU, shared": (1, 0, {"COURSE_SHARE_GPU": "1"}, "cuda:0", ""),
    "srun, --gpus-per-node=4": (4, 4, TASK, "cuda:2", ""),
    "srun, --gpus-per-task=1": (1, 4, TASK, "cuda:0", ""),
    "srun, --gpus-per-task=2": (2, 8, TASK, "cuda:0", ""),
    "srun, four tasks on one GPU": (1, 1, TASK, "cpu", SHARES),
    "torchrun inside of such a task": (1, 4, LAUNCHED | TASK, "cpu", SHARES),
    "no CUDA": (0, 4, TASK, "cpu", NO_CUDA),
    "no GPU": (0, 0, {}, "cpu", ""),
}


@pytest.mark.parametrize(("seen", "given", "more", "device", "said"), CASES.values(), ids=CASES)
def test_a_rank_uses_the_gpu_that_it_sees(seen, given, more, device, said, monkeypatch):
    for name in ("SLURM_PROCID", "SLURM_NTASKS", "TORCHELASTIC_RUN_ID", "COURSE_SHARE_GPU"):
        monkeypatch.delenv(name, raising=False)
    place = {"RANK": "6", "WORLD_SIZE": "8", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "4"}
    if given:
        place["SLURM_GPUS_ON_NODE"] = str(given)
    else:
        monkeypatch.delenv("SLURM_GPUS_ON_NODE", raising=False)
    for name, value in {**place, **more}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: seen)
    assert str(rank_device()) == device
    assert said in why_cpu()
    assert bool(why_cpu()) == bool(said)
    assert one_gpu_each() == (device != "cpu" and "COURSE_SHARE_GPU" not in more)  # else no NCCL


def test_a_script_says_once_why_it_computes_on_the_cpu():
    gpus = {"SLURM_GPUS_ON_NODE": "4", "CUDA_VISIBLE_DEVICES": ""}
    code = "from course_lib.ranks import launch; launch(print, 'ran')"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=os.environ | gpus, capture_output=True, text=True)
    assert done.stdout == "0 ran\n"
    assert done.stderr.count(NO_CUDA) == 1
