"""All-reduces by size, and step by step. Notebook 04_collectives."""

from collections.abc import Callable

from course_lib.collectives import messages
from course_lib.core.links import Link
from course_lib.core.live import Curves, Drawing, Live, Squares
from course_lib.core.units import format_bytes
from course_lib.cost import network
from course_lib.cost.hardware import find_device
from course_lib.cost.network import AnyLink

RING, DOUBLING, HALVING = "ring", "doubling", "halving-doubling"
Cost = Callable[[float, int, AnyLink], float]
COSTS: dict[str, Cost] = {
    RING: network.ring_all_reduce_s,
    DOUBLING: network.recursive_doubling_all_reduce_s,
    HALVING: network.halving_doubling_all_reduce_s,
}
MESSAGES: dict[str, Callable[[int, float], list[messages.Message]]] = {
    RING: messages.ring_all_reduce_messages,
    DOUBLING: messages.recursive_doubling_messages,
    HALVING: messages.halving_doubling_messages,
}
NVLINK = find_device("h100").links["NVLink"] / 1e9
SIZES = [10.0**k for k in range(3, 11)]


def winners(p: int, link: Link) -> list[tuple[float, str]]:
    """Return (bytes, name): which all-reduce is fastest from which size on, from 1 kB to 10 GB.

    A time is a line in the bytes, so two sizes of each all-reduce give all the others.
    """
    largest, found = 1e10, list[tuple[float, str]]()
    lines = {}
    for name, cost_s in COSTS.items():
        latency_s = cost_s(0, p, link)
        lines[name] = latency_s, (cost_s(largest, p, link) - latency_s) / largest
    for step in range(7001):
        size = 10 ** (3 + step / 1000)
        times_s = {name: round(line[0] + line[1] * size, 15) for name, line in lines.items()}
        name = min(times_s, key=lambda one: times_s[one])
        if not found or found[-1][1] != name:
            found.append((size, name))
    return found


def wire_of(latency_us: float, gb_per_s: float) -> Link:
    """Return the link of these numbers."""
    return Link(name="each wire", latency_s=latency_us * 1e-6, bytes_per_s=gb_per_s * 1e9)


def sizes_drawing(p: int, latency_us: float, gb_per_s: float) -> Drawing:
    """Return the time of each all-reduce by size; the finding says which is fastest where."""
    link = wire_of(latency_us, gb_per_s)
    (_, first), *later = winners(p, link)
    changes = ", ".join(f"{name} from {format_bytes(size)} on" for size, name in later)
    fastest = f"for small tensors, {changes}" if later else "at every size"
    times_s = {name: [cost_s(size, p, link) for size in SIZES] for name, cost_s in COSTS.items()}
    curves = Curves(x=SIZES, ys=times_s, x_label="tensor (bytes)", y_label="time (s)", log="xy")
    finding = f"{p} ranks: {first} is fastest {fastest}"
    return Drawing(finding=finding, panels=[curves], note=f"{link}")


BY_SIZE = Live(
    name="explore_all_reduces",
    lesson="04_collectives",
    question="Which all-reduce is the fastest for a message of which size?",
    choices={
        "p": ([2, 3, 4, 6, 8, 16, 64, 512], 8),
        "latency_us": ([1, 3, 10, 50], 3),
        "gb_per_s": (sorted({1.25, 25.0, 50.0, 300.0, NVLINK}), NVLINK),
    },
    compute=sizes_drawing,
)


def sums_after(algorithm: str, p: int, step: int) -> list[list[set[int]]]:
    """Return whose numbers each rank has added up in each shard, [rank][shard], after a step.

    The messages of a step leave at once: what one of them brings, no other sends on.
    """
    held = [[{rank} for _ in range(p)] for rank in range(p)]
    for now in range(1, step + 1):
        before = [[set(one) for one in shards] for shards in held]
        for message in MESSAGES[algorithm](p, 1.0):
            if message.step != now:
                continue
            whole = algorithm == DOUBLING  # its messages carry the whole tensor
            for part in (
                range(p) if whole else range(message.shard, message.shard + message.num_shards)
            ):
                got = before[message.sender][part]
                kept = held[message.receiver][part] if message.adds else set()
                held[message.receiver][part] = kept | got
    return held


def steps_drawing(algorithm: str, p: int, step: int) -> Drawing:
    """Return whose numbers each rank holds in each shard after a step."""
    moves = MESSAGES[algorithm](p, 1.0)
    last = max(one.step for one in moves)
    now = min(step, last)
    held = sums_after(algorithm, p, now)
    done = sum(len(one) == p for shards in held for one in shards)
    rows = {
        f"rank {rank}": [
            ("+".join(map(str, sorted(one))), len(one) if len(one) < p else -1) for one in shards
        ]
        for rank, shards in enumerate(held)
    }
    sent = sum(one.num_bytes for one in moves if one.sender == 0 and one.step <= now)
    return Drawing(
        finding=f"{algorithm}, step {now} of {last}: {done} of {p * p} shards are complete, rank 0 "
        f"has sent {sent:.3g} tensors",
        panels=[Squares(rows=rows, x_label="shards: whose numbers are in the sum; pale: complete")],
    )


STEPS = Live(
    name="all_reduce_steps",
    lesson="04_collectives",
    question="How does a sum reach every rank, step by step?",
    choices={"algorithm": [*MESSAGES], "p": ([2, 4, 8], 4), "step": (0, 14, 1)},
    compute=steps_drawing,
)
