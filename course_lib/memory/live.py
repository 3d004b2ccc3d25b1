"""Where the bytes of a rank go: the calculator of notebook 01_memory."""

from typing import Any

from course_lib.core.live import Bars, Drawing, Live
from course_lib.core.presets import MODELS
from course_lib.core.recipes import RECIPES
from course_lib.core.units import GIB, format_bytes
from course_lib.cost.flops import RECOMPUTE
from course_lib.cost.hardware import DEVICES
from course_lib.memory.calculator import KINDS, Setup

_SIZES = [1, 2, 4, 8, 16, 32, 64]  # of a parallel axis
_BATCHES = [2**n for n in range(11)]


def bytes_at_peak(setup: Setup) -> dict[str, int]:
    """Return the bytes of the fullest rank at its peak, by kind."""
    ledger = setup.fullest
    at = ledger.totals().index(ledger.peak_bytes())
    return {kind: ledger.bytes_by_kind[kind][at] for kind in KINDS}


def setup_alt(setup: Setup) -> str:
    """Return the finding in words, ending with the options of the setup."""
    return f"{setup_finding(setup)} {setup.text()}"


def setup_finding(setup: Setup) -> str:
    """Return in words whether the setup fits, and the largest micro-batch that does."""
    peak, limit = setup.peak_bytes, setup.device.memory_bytes
    verb = "fits in" if peak <= limit else "does not fit in"
    used = f", MFU {setup.mfu():.1%}" if setup.step_time_s else ""
    return (
        f"{format_bytes(peak)} {verb} {format_bytes(limit)}; largest micro-batch that fits: "
        f"{setup.largest_batch()}{used}."
    )


def bars_of(setups: dict[str, Setup]) -> Bars:
    """Return a bar for each setup by name, and the memory of the GPU of the first."""
    device = next(iter(setups.values())).device
    rows = {
        name: {kind: num_bytes / GIB for kind, num_bytes in bytes_at_peak(setup).items()}
        for name, setup in setups.items()
    }
    limit = (device.memory_bytes / GIB, f"{device.name} holds {device.memory_bytes / GIB:.0f} GiB")
    return Bars(rows=rows, x_label="fullest rank at its peak (GiB)", limit=limit)


def setup_drawing(**values: Any) -> Drawing:
    """Return the bar of a setup."""
    setup = Setup(**values)
    return Drawing(
        finding=setup_finding(setup),
        panels=[bars_of({"peak": setup})],
        command=f"course memory {setup.text()}",
    )


CALCULATOR = Live(
    name="calculator",
    lesson="01_memory",
    question="Where do the bytes of a training step go, and which choice makes it fit?",
    choices={
        "model": ([*MODELS], "llama-8b"),
        "gpu": ([*DEVICES], "h100"),
        "recipe": ([*RECIPES], "bf16"),
        "batch": (_BATCHES, 1),
        "seq": ([2**n for n in range(6, 18)], 4096),
        "micro_batches": (_BATCHES, 1),
        "recompute": ([*RECOMPUTE], "none"),
        "dp": (_SIZES, 1),
        "zero": [0, 1, 2, 3],
        "tp": (_SIZES[:4], 1),
        "pp": (_SIZES, 1),
        "cp": (_SIZES[:4], 1),
        "ep": (_SIZES, 1),
        "sequence_parallel": False,
        "unfused": False,
    },
    compute=setup_drawing,
)
