"""Lesson 00 outside of the notebook: ranks say in turn who they are, then add up 10**rank.

torchrun --standalone --local-addr 127.0.0.1 --nproc-per-node 4 cluster/exercises/00_hello_ranks.py

Each rank leaves its run record in runs/00_hello_ranks, or where `--record-to` says.
"""

import argparse
import os
import time

import torch
import torch.distributed as dist

from course_lib.ranks import launch, span


def hello(rank: int) -> float:
    """Speak in turn, with the names torchrun gave this rank; return the sum of 10**rank."""
    for turn in range(dist.get_world_size()):
        if turn == rank:
            with span("compute", f"rank {rank}"):
                print(
                    f"rank {rank} of {dist.get_world_size()}: local rank "
                    f"{os.environ['LOCAL_RANK']} on node {os.environ.get('GROUP_RANK', '0')}",
                    flush=True,
                )
                time.sleep(0.01)  # let what was printed reach the terminal before the next one
        dist.barrier()
    x = torch.tensor([10.0**rank])
    dist.all_reduce(x)
    if rank == 0:
        print(f"the sum over all ranks is {x.item():.0f}", flush=True)
    return x.item()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record-to", default="runs/00_hello_ranks", metavar="FOLDER")
    launch(hello, record_to=parser.parse_args().record_to)
