"""Draw the README's picture: two ways to sum over four ranks, predicted and then measured.

python -m docs.predict_run_compare
"""

import time
from pathlib import Path

import torch
import torch.distributed as dist

from course_lib.collectives import recursive_doubling_all_reduce, ring_all_reduce
from course_lib.core import Link
from course_lib.cost.network import recursive_doubling_all_reduce_s, ring_all_reduce_s
from course_lib.display import Voices, compare
from course_lib.ranks import Ranks

WIRE = Link(name="a slow wire", latency_s=20e-3, bytes_per_s=20e6)
WORLD_SIZE = 4
SIZES_BYTES = [4 * 4**k for k in range(5, 12)]
REPEATS = 3
METHODS = {
    "ring": (ring_all_reduce, ring_all_reduce_s),
    "doubling": (recursive_doubling_all_reduce, recursive_doubling_all_reduce_s),
}


def times_s(rank, method):
    """Seconds of each repetition at each size, as this rank saw them."""
    found = []
    for num_bytes in SIZES_BYTES:
        tensor = torch.full((num_bytes // 4,), 10.0**rank)
        found.append([])
        for _ in range(REPEATS):
            dist.barrier()
            start_s = time.perf_counter()
            method(tensor.clone())
            found[-1].append(time.perf_counter() - start_s)
    return found


def main():
    """Measure both on real ranks, and draw them on their formulas."""
    voices = {}
    for name, (method, formula_s) in METHODS.items():
        with Ranks(WORLD_SIZE, link=WIRE) as ranks:
            by_rank = torch.tensor(ranks.run(times_s, method))
        voices[name] = Voices(
            formula=lambda num_bytes, cost_s=formula_s: cost_s(num_bytes, WORLD_SIZE, WIRE),
            measurement=by_rank.amax(0).tolist(),  # it is done when the last rank is
        )
    figure = compare(
        SIZES_BYTES,
        voices,
        "Doubling wins for small messages, the ring for large ones",
        x_label="bytes to sum over 4 ranks",
        y_label="seconds",
        log=True,
        note=f"4 real processes on one machine; their messages take the time of {WIRE}.",
    )
    figure.savefig(Path(__file__).with_name("predict_run_compare.png"), dpi=130)


if __name__ == "__main__":
    main()
