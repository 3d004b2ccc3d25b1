"""How long pictures take, in milliseconds: `python -m tests.benchmarks.bench_display`.

A slider feels immediate when its picture comes within 100 ms.
"""

import time
from collections.abc import Callable
from statistics import median

from course_lib.collectives.messages import Message
from course_lib.core import Event
from course_lib.display import (
    explore,
    frames_from_messages,
    own_everything,
    stepper,
    timeline,
    timelines,
)
from course_lib.display.show import png_bytes
from course_lib.memory.explorer import calculator

REPEATS = 15


def turns(num_ranks: int, num_micro_batches: int) -> list[Event]:
    """Ranks that run forward and backward in turn, and talk beneath the backward passes."""
    return [
        Event(rank=rank, kind=kind, start_s=start, end_s=start + long, label=f"{letter}{turn}")
        for rank in range(num_ranks)
        for turn in range(num_micro_batches)
        for kind, letter, offset, long in (
            ("forward", "F", 0.0, 1.0),
            ("backward", "B", 1.0, 2.0),
            ("all_reduce", "", 1.5, 1.4),
        )
        for start in [rank + 3 * turn + offset]
    ]


def ring(world_size: int) -> list[Message]:
    """The messages of a reduce-scatter on a ring."""
    return [
        Message(
            step=step + 1,
            sender=rank,
            receiver=(rank + 1) % world_size,
            shard=(rank - step) % world_size,
            adds=True,
        )
        for step in range(world_size - 1)
        for rank in range(world_size)
    ]


def median_ms(work: Callable[[int], object]) -> tuple[float, float]:
    """Medians of wall clock and own CPU time of some runs after one to warm up.

    The run's number is handed over. On a machine that does other things too, only the CPU time
    says what a picture costs.
    """
    wall, cpu = [], []
    for repeat in range(REPEATS + 1):
        starts = time.perf_counter(), time.process_time()
        work(repeat)
        wall.append(time.perf_counter() - starts[0])
        cpu.append(time.process_time() - starts[1])
    return 1e3 * median(wall[1:]), 1e3 * median(cpu[1:])


def measure() -> dict[str, tuple[float, float]]:
    """Median milliseconds, wall clock and CPU, by what was drawn."""
    small, large = turns(4, 10), turns(8, 21)
    picture = explore(
        lambda p, m: timeline(turns(p, m), f"{p} ranks, {m} turns"),
        alt="{p} ranks, {m} turns",
        p=(2, 8, 4),
        m=(2, 40, 8),
    )

    calc = calculator("--model llama-405b --gpu h200 --tp 8 --pp 8")

    def move(repeat: int) -> None:
        picture.sliders["m"].value = 8 + repeat % 2

    def move_calculator(repeat: int) -> None:
        calc.sliders["batch"].value = (32, 64)[repeat % 2]

    return {
        f"timeline, {len(small)} events": median_ms(lambda _: png_bytes(timeline(small, "small"))),
        f"timeline, {len(large)} events": median_ms(lambda _: png_bytes(timeline(large, "large"))),
        f"two timelines, {2 * len(small)} events": median_ms(
            lambda _: png_bytes(timelines({"predicted": small, "measured": small}, "two"))
        ),
        "explore, one slider moved": median_ms(move),
        "calculator, one slider moved": median_ms(move_calculator),
        "stepper, 8 ranks": median_ms(
            lambda _: stepper(frames_from_messages(ring(8), own_everything(8)), "ring")
        ),
    }


if __name__ == "__main__":
    for name, (wall_ms, cpu_ms) in measure().items():
        print(f"{name:32} {wall_ms:6.1f} ms   (CPU {cpu_ms:5.1f} ms)")
