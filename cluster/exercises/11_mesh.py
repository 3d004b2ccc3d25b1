"""Lesson 11 outside of the notebook: which order of the axes is fastest on your cluster?

torchrun --standalone --local-addr 127.0.0.1 --nproc-per-node 8 cluster/exercises/11_mesh.py

The ranks train a small GPT on a mesh, `--mesh pp=2,dp=2,tp=2`, with its axes in every order; the
orders take turns. All of them compute the same, but other axes cross the nodes. Predict first:
which order is fastest, and which slowest? Run it on one node, then on two with half of the ranks on
each. Each rank writes its run record to runs/11_mesh, or where `--record-to` says.
"""

import argparse
import os
import time
from collections.abc import Sequence

import torch.distributed as dist

from course_lib.core import CourseError
from course_lib.core.presets import find_model
from course_lib.core.units import format_bytes
from course_lib.mesh import Mesh, read_mesh
from course_lib.mesh.cost import SUPPORTED, MeshStep, all_orders, axis_sent_bytes
from course_lib.ranks import launch, span
from course_lib.train.mesh_lab import take_step, trainer_of


def name_of(mesh: Mesh) -> str:
    """Return the axes of more than one rank, from the outermost to the innermost one."""
    return " ".join(split_axes(mesh)) or "one rank"


def split_axes(mesh: Mesh) -> dict[str, int]:
    """Return the sizes of the axes of more than one rank."""
    return {axis: size for axis, size in mesh.sizes.items() if size > 1}


def with_all_axes(mesh: Mesh) -> Mesh:
    """Return the same mesh with the axes that it leaves out, outermost and of one rank."""
    return Mesh(**{axis: 1 for axis in SUPPORTED if axis not in mesh.sizes}, **mesh.sizes)


def planned(args: argparse.Namespace) -> list[MeshStep]:
    """Return the step for each order of the axes.

    Raises: CourseError for a mesh, a model or a batch that do not fit together
    """
    return [
        MeshStep(
            spec=find_model(args.model),
            mesh=with_all_axes(mesh),
            batch=args.batch,
            seq=args.seq,
            num_micro_batches=args.num_micro_batches,
        )
        for mesh in all_orders(Mesh(**split_axes(read_mesh(args.mesh))))
    ]


def sweep(rank: int, args: argparse.Namespace) -> dict[str, float]:
    """Return the fastest step of each order of the axes, in seconds."""
    steps = planned(args)
    trainers = {name_of(step.mesh): trainer_of(rank, step) for step in steps}
    seconds: dict[str, list[float]] = {name: [] for name in trainers}
    losses: dict[str, float] = {}
    for _ in range(args.turns + 1):
        for name, trainer in trainers.items():
            dist.barrier()
            start_s = time.perf_counter()
            with span("compute", name):
                losses[name] = take_step(trainer)  # a number: the GPU has finished
            seconds[name].append(time.perf_counter() - start_s)
    found = {name: min(times[1:]) for name, times in seconds.items()}
    if rank == 0:
        print_table(found, steps)
        apart = max(losses.values()) - min(losses.values())
        print(f"largest difference of their losses: {apart:.1e}", flush=True)
    return found


def print_table(found: dict[str, float], steps: Sequence[MeshStep]) -> None:
    """Print one line per order, the fastest first: what rank 0 sends, and what crosses nodes."""
    ranks_per_node = int(os.environ.get("LOCAL_WORLD_SIZE") or dist.get_world_size())
    sent = ", ".join(
        f"{axis} {format_bytes(num_bytes)}" for axis, num_bytes in axis_sent_bytes(steps[0]).items()
    )
    print(f"sent by rank 0 per step: {sent}; {ranks_per_node} ranks per node", flush=True)
    for step in sorted(steps, key=lambda step: found[name_of(step.mesh)]):
        name = name_of(step.mesh)
        crossing = [
            axis for axis in step.mesh.sizes if step.mesh.crosses_nodes(axis, ranks_per_node)
        ]
        where = f"{', '.join(crossing) or 'no axis'} between nodes"
        print(f"{name:>10}: {found[name] * 1e3:8.1f} ms per step, {where}", flush=True)


def read_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line; end with a message where they make no sense."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mesh", default="pp=2,dp=2,tp=2", help="sizes of the axes")
    parser.add_argument("--model", default="small", help="a preset: tiny, small, study-100m ...")
    parser.add_argument("--batch", type=int, default=16, help="sequences of all ranks together")
    parser.add_argument("--seq", type=int, default=64, help="tokens in a sequence")
    parser.add_argument("--num-micro-batches", type=int, default=4, help="of each copy")
    parser.add_argument("--turns", type=int, default=5, help="steps of each order, after a warm-up")
    parser.add_argument("--record-to", default="runs/11_mesh", metavar="FOLDER")
    arguments = parser.parse_args(words)
    try:
        planned(arguments)
    except CourseError as problem:
        parser.error(str(problem))
    if min(arguments.seq, arguments.turns) < 1:
        parser.error("need --seq and --turns above 0")
    return arguments


if __name__ == "__main__":
    arguments = read_arguments()
    launch(sweep, arguments, record_to=arguments.record_to)
