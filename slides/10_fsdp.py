"""The pictures of the deck 10_fsdp, drawn by the functions that the notebook calls."""

from course_lib.core import Link, TwoLevelLink
from course_lib.display import Voices, compare
from course_lib.fsdp.cost import (
    UnitSizes,
    UnitTimes,
    fsdp_step,
    fsdp_step_s,
    peak_param_bytes,
)
from course_lib.fsdp.pictures import hybrid_steps, params_by_formula, prefetch_steps, ring_sums

WIRE = Link(name="slow Ethernet", latency_s=2e-3, bytes_per_s=10e6)
SIZES = UnitSizes(numels=(0, *[2**16] * 5), p=2)
TIMES = UnitTimes(forward_s=(0.015,) * 5, backward_s=(0.03,) * 5)
GPT2_ROOT, GPT2_BLOCK, GPT2_BLOCKS = 39_385_344, 7_087_872, 12
WAYS = {"on demand": False, "prefetch": True}


def teeth():
    """Parameters of GPT-2 over a step."""
    sizes = UnitSizes(numels=(GPT2_ROOT, *[GPT2_BLOCK] * GPT2_BLOCKS), p=4)
    return params_by_formula(sizes, "GPT-2")[0]


def prefetch():
    """A step on one rank, both ways."""
    runs = {name: fsdp_step(TIMES, SIZES, 2, WIRE, prefetch=ahead) for name, ahead in WAYS.items()}
    return prefetch_steps(runs, f"predicted: {WIRE}")[0]


def wires():
    """Time over the bandwidth of the link."""
    speeds = [4, 6, 8, 12, 16, 24, 32]

    def step_ms(mb_per_s, ahead):
        link = Link(latency_s=WIRE.latency_s, bytes_per_s=mb_per_s * 1e6)
        return 1e3 * fsdp_step_s(TIMES, SIZES, 2, link, prefetch=ahead)

    curves = {
        name: Voices(simulation=[step_ms(speed, ahead) for speed in speeds])
        for name, ahead in WAYS.items()
    }
    computing_ms = TIMES.compute_s * 1e3
    title = f"Computing takes {computing_ms:.0f} ms; with prefetch, a fast link adds little to it"
    labels = {"x_label": "bandwidth of the link (MB/s)", "y_label": "step (ms)"}
    return compare(speeds, curves, title, **labels)


def units():
    """The peak over the number of units."""
    numel, counts = 8_030_000_000, [1, 2, 4, 8, 16, 32]

    def peak_gb(count):
        sizes = UnitSizes(numels=(0, *[numel // count] * count), p=8, compute_bytes=2)
        return peak_param_bytes(sizes) / 1e9

    peaks = Voices(formula=[peak_gb(count) for count in counts])
    title = "8 billion parameters on 8 ranks: with many units, shards dominate the peak"
    labels = {"x_label": "units", "y_label": "parameters on a rank (GB)"}
    note = "shards in fp32, gathered in bf16"
    return compare(counts, peaks, title, note=note, **labels)


def hybrid():
    """A step on two nodes of two ranks, both ways, computing nothing."""
    inside = Link(name="fast Ethernet", latency_s=1e-3, bytes_per_s=40e6)
    link = TwoLevelLink(inside=inside, outside=WIRE, ranks_per_node=2)
    times = UnitTimes(forward_s=(0.0,) * 4, backward_s=(0.0,) * 4)
    numels = (0, *[2**16] * 4)
    ways = {
        "sharded over 4": UnitSizes(numels=numels, p=4),
        "hybrid 2 x 2": UnitSizes(numels=numels, p=2, replicas=2),
    }
    runs = {name: fsdp_step(times, sizes, 4, link) for name, sizes in ways.items()}
    return hybrid_steps(runs, f"predicted: {link}")[0]


def sums():
    """The error of a bf16 sum over its ranks."""
    return ring_sums()[0]


def pictures():
    """All pictures by the names the deck calls them."""
    return {draw.__name__: draw() for draw in (teeth, prefetch, wires, units, hybrid, sums)}
