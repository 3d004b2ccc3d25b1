"""The pictures of the deck 14_checkpoint, drawn by the functions that the notebook calls."""

from course_lib.checkpoint import cost
from course_lib.checkpoint import pictures as lesson
from course_lib.core import Event, Link
from course_lib.core.shards import Box
from course_lib.display import Voices, compare

WIRE = Link(name="slow Ethernet", latency_s=1e-3, bytes_per_s=40e6)
MIB_8, DISK, P = 8 * 2**20, 40e6, 4


def _events(rank, *parts):
    events, now_s = [], 0.0
    for kind, label, seconds in parts:
        events.append(
            Event(rank=rank, kind=kind, label=label, start_s=now_s, end_s=now_s + seconds)
        )
        now_s += seconds
    return events


def saves():
    """A save through rank 0 and by every rank, by formula."""
    gather_s = MIB_8 * (P - 1) / P / WIRE.bytes_per_s
    write_s = cost.save_s_sharded(MIB_8, P, DISK)
    through = _events(0, ("gather", "gather", gather_s), ("write", "write", MIB_8 / DISK))
    for rank in range(1, P):
        through += _events(rank, ("gather", "gather", gather_s))
    sharded = [e for rank in range(P) for e in _events(rank, ("write", "write", write_s))]
    runs = {"through rank 0": through, "every rank": sharded}
    return lesson.saves(runs, MIB_8, f"predicted: {WIRE}; disks of 40 MB/s each")[0]


def storage():
    """Time of a save over the number of writers, with storage that saturates."""
    ranks = [1, 2, 4, 8, 16, 20, 32, 64, 128]
    num_bytes = cost.bytes_of_checkpoint(8 * 10**9)

    def seconds(p, storage_bytes_per_s):
        return cost.save_s_sharded(num_bytes, p, 2e9, storage_bytes_per_s)

    curves = {
        "storage of 40 GB/s": Voices(formula=[seconds(p, 40e9) for p in ranks]),
        "unlimited storage": Voices(formula=[seconds(p, float("inf")) for p in ranks]),
    }
    one_s, all_s = seconds(1, 40e9), seconds(128, 40e9)
    title = f"8 billion parameters: {one_s:.0f} s with one writer, {all_s:.1f} s with 128"
    axes = {"x_label": "ranks that write 2 GB/s each", "y_label": "save (s)"}
    return compare(ranks, curves, title, log=True, **axes)


def resharding():
    """Boxes of 4 ranks, and of the 2 that load them."""
    by_4 = [Box((at, 0), (size, 6)) for at, size in ((0, 3), (3, 3), (6, 3), (9, 1))]
    by_2 = [Box((at, 0), (size, 6)) for at, size in ((0, 5), (5, 5))]
    return lesson.boxes((10, 6), by_4, by_2)[0]


def overlap():
    """A plain and an asynchronous save beside steps, with example times."""
    step = (("forward", "F", 0.01), ("backward", "B", 0.02))
    plain = _events(0, *step, *step, ("wait", "save", 0.12), *step, *step, *step, *step)
    ahead = _events(0, *step, *step, ("wait", "save", 0.03), *step, *step, *step, *step)
    ahead.append(Event(rank=0, kind="write", label="write", start_s=0.09, end_s=0.18))
    return lesson.overlap({"save": plain, "save_async": ahead}, link="example times")[0]


def intervals():
    """Young's and Daly's best intervals."""
    return lesson.best_intervals()[0]


def llama():
    """The overhead over the interval, for failures as often as in Llama 3's training."""
    mtbf_s = cost.LLAMA3_S / cost.LLAMA3_FAILURES
    return lesson.overhead_curve(30, mtbf_s, 600, f"{cost.LLAMA3_GPUS:,} GPUs")[0]


def pictures():
    """All pictures by the names the deck calls them."""
    draws = (saves, storage, resharding, overlap, intervals, llama)
    return {draw.__name__: draw() for draw in draws}
