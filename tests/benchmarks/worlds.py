"""Where a benchmark runs: on bare processes, as under torchrun, and on the ranks of a notebook."""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def bare_processes(turns: Callable[[int, int], Any], world_size: int, num_turns: int) -> Any:
    """What `turns(rank, num_turns)` gives on rank 0 of plain processes that nobody records."""
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(
            _bare, (turns, world_size, folder, num_turns), nprocs=world_size, start_method="spawn"
        )
        return json.loads(Path(folder, "found.json").read_text())


def recorded_ranks(turns: Callable[[int, int], Any], world_size: int, num_turns: int) -> Any:
    """The same on the ranks of a notebook, where every call is announced and recorded."""
    from course_lib.ranks import Ranks  # not above: spawned processes import this file again

    with Ranks(world_size) as ranks:
        return ranks.run(turns, num_turns)[0]


def _bare(
    rank: int, turns: Callable[[int, int], Any], world_size: int, folder: str, num_turns: int
) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)
    found = turns(rank, num_turns)
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()
