"""The pictures of the deck 04_collectives, drawn by the functions that the notebook calls."""

from dataclasses import dataclass
from pathlib import Path

from course_lib.collectives import messages
from course_lib.core import Link, TwoLevelLink
from course_lib.cost import bandwidth, network
from course_lib.display import Voices, compare, timelines, waiting, wires
from course_lib.display.shards import all_frames_svg

UPLINK = Link(latency_s=0.0, bytes_per_s=1e6)
WIRE = Link(name="slow wire", latency_s=10e-3, bytes_per_s=20e6)
INSIDE = Link(name="a fast one", latency_s=1e-3, bytes_per_s=200e6)
NODES = TwoLevelLink(inside=INSIDE, outside=WIRE, ranks_per_node=2)
SIZES = [2**k for k in range(14, 25, 2)]


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
    """One sender beside a tree, simulated."""
    runs = {
        "one sender": messages.simulate(messages.star_broadcast_messages(8, 5e6), UPLINK),
        "everyone helps": messages.simulate(messages.tree_broadcast_messages(8, 5e6), UPLINK),
    }
    alone_s, helped_s = (messages.end_of(events) for events in runs.values())
    sends = {name: [e for e in events if e.kind == "send"] for name, events in runs.items()}
    return timelines(sends, f"5 MB over 1 MB/s: {helped_s:g} s instead of {alone_s:g} s")


def circle():
    """Four ranks that all send first."""
    return waiting([Wait(rank, ((rank + 1) % 4,)) for rank in range(4)], 4)


def ring():
    """Three steps of a reduce-scatter."""
    return Svg(wires.reduce_scatter_steps(4).svg)


def bytes_sent():
    """Draw the bytes that each rank sends in an all-reduce, by formula and simulation."""
    ranks = [1, 2, 3, 4, 6, 8, 12, 16]
    played = [
        sum(m.num_bytes for m in messages.ring_all_reduce_messages(p, 1.0) if m.sender == 0)
        for p in ranks
    ]
    voices = Voices(formula=lambda p: 2 * (p - 1) / p, simulation=played)
    title = f"On {ranks[-1]} ranks, each rank sends {played[-1]:.2f} n"
    return compare(ranks, voices, title, x_label="ranks p", y_label="bytes sent by a rank, in n")


def halving():
    """Four rounds of halving-doubling."""
    steps = wires.halving_doubling_steps(4)
    return Svg(all_frames_svg(steps.frames, steps.title, width_px=1500))


def crossover():
    """Ring, doubling and halving-doubling over a slow wire."""
    figure, _ = wires.all_reduces(SIZES, 4, WIRE)
    return figure


def two_levels():
    """A flat ring and a hierarchical all-reduce on two nodes of two ranks."""
    figure, _ = wires.two_levels(SIZES, 4, NODES)
    return figure


def nccl():
    """Published bus bandwidth by size, beside a ring fitted to it."""
    figure, _ = wires.published_by_size()
    return figure


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
    """Return all pictures by the names that the deck uses."""
    drawn = (
        *(postman, circle, ring, bytes_sent, halving, crossover, two_levels),
        *(busbw, nccl),
    )
    return {draw.__name__: draw() for draw in drawn}
