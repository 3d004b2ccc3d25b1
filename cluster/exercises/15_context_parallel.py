r"""Lesson 15 outside of the notebook: which form of context parallelism is fastest on your cluster?

torchrun --standalone --local-addr 127.0.0.1 --nproc-per-node 2 \
    cluster/exercises/15_context_parallel.py

All ranks share one sequence. They compute causal attention, forward and backward, as a ring, with
an all-gather and with Ulysses, for several lengths; the forms take turns. Predict first: from which
length on is the ring faster than the all-gather? Run it on one node, then on two. Each rank writes
its run record to runs/15_context_parallel, or where `--record-to` says.
"""

import argparse
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

from course_lib.context_parallel.cost import FORMS, AttentionSizes
from course_lib.context_parallel.lab import ATTENTION, own_qkv
from course_lib.context_parallel.layouts import LAYOUTS
from course_lib.core import CourseError
from course_lib.core.units import format_bytes
from course_lib.ranks import launch, span
from course_lib.ranks.timing import largest_difference
from course_lib.ranks.world import rank_device

Found = dict[str, float]


def sizes_of(args: argparse.Namespace) -> list[AttentionSizes]:
    """Return the attention of each length.

    Raises: CourseError for heads that do not fit together
    """
    numbers = {"num_heads": args.heads, "kv_heads": args.kv_heads, "head_dim": args.head_dim}
    return [AttentionSizes(seq=seq, number_bytes=args.number_bytes, **numbers) for seq in args.seqs]


def forms_for(sizes: AttentionSizes, p: int) -> list[str]:
    """Return the forms that are possible on p ranks: Ulysses needs p to divide the heads."""
    fits = sizes.num_heads % p == 0 and (sizes.kv_heads % p == 0 or p % sizes.kv_heads == 0)
    return [form for form in FORMS if form != "Ulysses" or fits]


def step(form: str, sizes: AttentionSizes, layout: str) -> tuple[float, list[torch.Tensor]]:
    """Return the seconds of forward and backward, and the output with three gradients."""
    rank, p = dist.get_rank(), dist.get_world_size()
    made = own_qkv(rank, p, sizes, layout)
    q, k, v, grad = (x.detach().to(rank_device()).requires_grad_() for x in made)
    dist.barrier()
    start_s = time.perf_counter()
    with span("compute", f"{form}, {sizes.seq} tokens"):
        o = ATTENTION[form](q, k, v, layout=layout, seq=sizes.seq)
        o.backward(grad.detach())
        if o.is_cuda:
            torch.cuda.synchronize()
    grads = [x.grad for x in (q, k, v) if x.grad is not None]
    return time.perf_counter() - start_s, [o.detach(), *grads]


def sweep(rank: int, args: argparse.Namespace) -> dict[int, Found]:
    """Return the fastest step of each form, in seconds, by length; the slowest rank counts."""
    found, apart = dict[int, Found](), 0.0
    for sizes in sizes_of(args):
        forms = forms_for(sizes, dist.get_world_size())
        seconds: dict[str, list[float]] = {form: [] for form in forms}
        results = {}
        for _ in range(args.turns + 1):
            for form in forms:
                own_s, results[form] = step(form, sizes, args.layout)
                slowest = torch.tensor(own_s, device=rank_device(), dtype=torch.float64)
                dist.all_reduce(slowest, dist.ReduceOp.MAX)
                seconds[form].append(slowest.item())
        found[sizes.seq] = {form: min(times[1:]) for form, times in seconds.items()}
        first, *others = results.values()
        apart = max(apart, *(largest_difference(first, other) for other in others))
        if rank == 0:
            print_table(found[sizes.seq], sizes, args.layout)
    if rank == 0:
        print(f"largest difference between the forms, on rank 0: {apart:.1e}", flush=True)
    return found


def print_table(found: Found, sizes: AttentionSizes, layout: str) -> None:
    """Print a line per form: the time of the slowest rank, and what rank 0 sends."""
    p = dist.get_world_size()
    print(f"{sizes.seq} tokens on {p} ranks, {layout}; forward and backward", flush=True)
    for form, form_s in sorted(found.items(), key=lambda pair: pair[1]):
        sent = format_bytes(sum(FORMS[form](sizes, p, 0, layout)))
        print(f"{form:>12}: {form_s * 1e3:8.1f} ms, {sent} sent by rank 0", flush=True)


def read_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line; end with a message where they make no sense."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--seqs", type=int, nargs="+", default=[512, 2048], help="tokens, all ranks"
    )
    parser.add_argument("--heads", type=int, default=8, help="of the queries")
    parser.add_argument("--kv-heads", type=int, default=4, help="of the keys and of the values")
    parser.add_argument("--head-dim", type=int, default=64, help="numbers of a head")
    parser.add_argument("--number-bytes", type=int, default=4, choices=(2, 4, 8), help="2: bf16")
    parser.add_argument("--layout", default="zigzag", choices=LAYOUTS, help="which tokens where")
    parser.add_argument("--turns", type=int, default=5, help="of each form, after a warm-up")
    parser.add_argument("--record-to", default="runs/15_context_parallel", metavar="FOLDER")
    arguments = parser.parse_args(words)
    try:
        sizes_of(arguments)
    except CourseError as problem:
        parser.error(str(problem))
    if arguments.turns < 1:
        parser.error("need --turns above 0")
    return arguments


if __name__ == "__main__":
    arguments = read_arguments()
    launch(sweep, arguments, record_to=arguments.record_to)
