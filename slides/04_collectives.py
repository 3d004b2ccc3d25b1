"""The pictures of the deck 04_collectives, drawn by the functions that the notebook calls."""

from dataclasses import dataclass
from pathlib import Path

from course_lib.collectives import messages
from course_lib.core import Link
from course_lib.cost import bandwidth, network
from course_lib.display import (
    Voices,
    compare,
    frames_from_messages,
    own_everything,
    stepper,
    timelines,
    waiting,
)

UPLINK = Link(latency_s=0.0, bytes_per_s=1e6)
WIRE = Link(name="slow wire", latency_s=10e-3, bytes_per_s=20e6)
TIME_OF_TENSOR = {"x_label": "tensor (bytes)", "y_label": "time (s)", "log": True}


@dataclass(frozen=True)
class Svg:
    """A drawn SVG that is saved like a figure."""

    text: str

    def savefig(self, path, **_options):
        """Write it beside where a figure would write its PNG."""
        Path(path).with_suffix(".svg").write_text(self.text, encoding="utf-8")


@dataclass(frozen=True)
class Wait:
    """One rank that waits, for the picture of the circle."""

    rank: int
    waits_for: tuple[int, ...]
    kind: str = "send"
    where: str = "dist.send(x, (rank + 1) % 4)"
    line: int = 3


def postman():
    """One sender against a tree, played."""
    runs = {
        "one sender": messages.simulate(messages.star_broadcast_messages(8, 5e6), UPLINK),
        "everyone helps": messages.simulate(messages.tree_broadcast_messages(8, 5e6), UPLINK),
    }
    alone_s, helped_s = (messages.end_of(events) for events in runs.values())
    sends = {name: [e for e in events if e.kind == "send"] for name, events in runs.items()}
    return timelines(sends, f"5 MB over 1 MB/s: {helped_s:g} s in place of {alone_s:g} s")


def circle():
    """Four ranks that all send first."""
    return waiting([Wait(rank, ((rank + 1) % 4,)) for rank in range(4)], 4)


def ring():
    """Three steps of a reduce-scatter."""
    frames = frames_from_messages(messages.ring_reduce_scatter_messages(4), own_everything(4))
    return Svg(stepper(frames, "Reduce-scatter on four ranks").svg)


def bytes_sent():
    """What each rank sends in an all-reduce, on paper and played."""
    ranks = [1, 2, 3, 4, 6, 8, 12, 16]
    played = [
        sum(m.num_bytes for m in messages.ring_all_reduce_messages(p, 1.0) if m.sender == 0)
        for p in ranks
    ]
    voices = Voices(formula=lambda p: 2 * (p - 1) / p, simulation=played)
    title = f"{played[-1]:.2f} n on {ranks[-1]} ranks"
    return compare(ranks, voices, title, x_label="ranks p", y_label="bytes sent by a rank, in n")


def crossover():
    """Ring and doubling over a slow wire."""
    sizes = [2**k for k in range(14, 25, 2)]
    algorithms = {
        "ring": (network.ring_all_reduce_s, messages.ring_all_reduce_messages),
        "doubling": (
            network.recursive_doubling_all_reduce_s,
            messages.recursive_doubling_messages,
        ),
    }
    curves = {
        name: Voices(
            formula=lambda n, cost_s=cost_s: cost_s(n, 4, WIRE),
            simulation=[messages.end_of(messages.simulate(build(4, n), WIRE)) for n in sizes],
        )
        for name, (cost_s, build) in algorithms.items()
    }
    title = f"4 ranks, {WIRE}: from {network.crossover_bytes(4, WIRE) / 1e6:.2g} MB on the ring"
    return compare(sizes, curves, title, **TIME_OF_TENSOR)


def busbw():
    """n / t and bus bandwidth over one perfect wire."""
    wire, n, ranks = Link(latency_s=0.0, bytes_per_s=25e9), 1e9, [2, 4, 8, 16, 32, 64]

    def rate(p):
        return n / network.ring_all_reduce_s(n, p, wire)

    curves = {
        "n / t": Voices(formula=[rate(p) / 1e9 for p in ranks]),
        "bus bandwidth": Voices(
            formula=[bandwidth.bus_factor("all_reduce", p) * rate(p) / 1e9 for p in ranks]
        ),
    }
    title = f"A perfect wire of 25 GB/s: n / t says {rate(64) / 1e9:.1f} GB/s on 64 ranks"
    return compare(ranks, curves, title, x_label="ranks p", y_label="GB/s")


def pictures():
    """All pictures by the names the deck calls them."""
    drawn = (postman, circle, ring, bytes_sent, crossover, busbw)
    return {draw.__name__: draw() for draw in drawn}
