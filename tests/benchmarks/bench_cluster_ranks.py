"""How fast ranks on two nodes of a live Slurm start and answer: printed.

python -m tests.benchmarks.bench_cluster_ranks
"""

import os
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from course_lib.ranks import Ranks
from tests.cluster.slurmbox import SlurmBox

TURNS = 30
ROOT = Path(__file__).resolve().parents[2]


def sum_of_ones(rank: int) -> float:
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    return tensor.item()


def began_s(box: SlurmBox, job_id: int) -> float:
    """When Slurm started the job, to a second, as time.time()."""
    started = box.show(str(job_id))[0]["StartTime"]
    return time.mktime(time.strptime(started, "%Y-%m-%dT%H:%M:%S"))


def main() -> None:
    """Start, first cell, warm calls, restart."""
    os.environ["PYTHONPATH"] = str(ROOT)
    with SlurmBox() as box, tempfile.TemporaryDirectory() as folder:
        os.environ["SLURM_CONF"] = box.env["SLURM_CONF"]
        os.chdir(folder)
        with Ranks(4, cluster="slurm", nodes=2, minutes=5, profile="test") as ranks:
            ranks.run(sum_of_ones)
            first_s = time.time() - began_s(box, ranks._place.nodes.id)
            print(f"from the start of the job to the first result: {first_s:.1f} s (goal 5)")
            for name, fn in (("nothing", lambda rank: rank), ("an all_reduce", sum_of_ones)):
                took_s = []
                for _ in range(TURNS):
                    start_s = time.perf_counter()
                    ranks.run(fn)
                    took_s.append(time.perf_counter() - start_s)
                print(f"warm call of {name}: {statistics.median(took_s) * 1e3:.1f} ms (goal 20)")
            start_s = time.perf_counter()
            ranks.restart()
            ranks.run(sum_of_ones)
            print(f"restart on the same nodes: {time.perf_counter() - start_s:.2f} s")
        os.chdir(ROOT)


if __name__ == "__main__":
    main()
