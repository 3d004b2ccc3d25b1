"""Predictions of the cost model for the cluster study, with sliders.

Lesson 13_scaling_study.
"""

from functools import cache

from matplotlib.figure import Figure

from course_lib.core.links import ETHERNET, INFINIBAND, NVLINK, PCIE, Link
from course_lib.core.units import GIB
from course_lib.cost.hardware import find_device
from course_lib.display.explore import Explore, explore
from course_lib.display.paired_bars import Pair, paired_bars
from course_lib.scaling_study.lab import PUBLISHED
from course_lib.scaling_study.machines import Machine
from course_lib.scaling_study.pictures import efficiency_bars
from course_lib.scaling_study.plan import SIZES, find_study
from course_lib.scaling_study.prediction import PredictedRun, predict
from course_lib.scaling_study.study_run import StudyRun

STRATEGIES = ("ddp", "tp", "pp", "zero1", "zero2", "zero3")
BRIDGES = Link(name="PCIe, several bridges", latency_s=20e-6, bytes_per_s=4e9)  # a round figure
LINKS = {link.name: link for link in (NVLINK, INFINIBAND, PCIE, BRIDGES, ETHERNET)}
DEVICES = ["rtx2080ti", "a6000", "a100-80", "h100"]
SHOWS = ["efficiency", "memory"]
MEASURED = ("study-300m", "study-500m", "study-1b")  # smaller models gained nothing
NOTE = "measured: PCIe study, 300M to 1B, on other GPUs; predicted: by formulas alone"
_Rows = dict[str, tuple[PredictedRun, float]]  # with the efficiency in per cent


def study_explorer() -> Explore:
    """Show the predicted cluster study with sliders for model, GPUs, link, GPU type and metric."""
    return explore(
        draw_study,
        study_alt,
        model=([*SIZES], "study-500m"),
        gpus=([2, 4], 2),
        link=([*LINKS], "PCIe"),
        device=(DEVICES, "a6000"),
        show=(SHOWS, "efficiency"),
    )


def draw_study(model: str, gpus: int, link: str, device: str, show: str) -> Figure:
    """Draw a bar for each strategy, beside measurements by others on two GPUs over PCIe."""
    rows, title = rows_of(model, gpus, link, device), study_alt(model, gpus, link, device, show)
    if show == "memory":
        pairs = [Pair(name=name, predicted=one.peak_bytes / GIB) for name, (one, _) in rows.items()]
        there = find_device(device).memory_bytes / GIB
        limit = there if there < 3 * max(pair.predicted or 0 for pair in pairs) else None
        x_label = "peak memory of the fullest rank (GiB)"
        return paired_bars(pairs, title, x_label=x_label, limit=limit, limit_words=device)
    measured = (gpus, link) == (2, PCIE.name) and model in MEASURED
    found = PUBLISHED if measured else {}
    pairs = [
        Pair(name=name, measured=found.get(name), predicted=percent)
        for name, (_, percent) in rows.items()
    ]
    return efficiency_bars(pairs, title, NOTE if found else "by formulas alone")


def study_alt(model: str, gpus: int, link: str, device: str, show: str) -> str:
    """Return the finding in words: the best strategy and its value."""
    rows = rows_of(model, gpus, link, device)
    where = f"{model}, {gpus} x {device}, {link}"
    if show == "memory":
        name, (least, _) = min(rows.items(), key=lambda row: row[1][0].peak_bytes)
        held = f"{least.peak_bytes / GIB:.1f} GiB per rank"
        return f"{where}: {name} is predicted to need the least memory, {held}"
    name, (_, percent) = max(rows.items(), key=lambda row: row[1][1])
    return f"{where}: {name} is predicted to be the most efficient, {percent:.0f} %"


@cache
def rows_of(model: str, gpus: int, link: str, device: str) -> _Rows:
    """Return the prediction of each strategy, and its efficiency relative to one GPU."""
    machine = Machine(device=find_device(device), link=LINKS[link])
    study = find_study("cluster").only(models=[model], ranks=[gpus]).runs
    alone = {run.work: predict(run, machine) for run in study if run.ranks == 1}
    rows = {}
    for strategy in STRATEGIES:
        run = _pick(study, strategy)
        one = predict(run, machine)
        rows[strategy] = one, one.tokens_per_s / alone[run.work].tokens_per_s / gpus * 100
    return rows


def _pick(study: tuple[StudyRun, ...], strategy: str) -> StudyRun:
    """Return the strategy's run with the most micro-batches, and buckets of the usual size."""
    found = [run for run in study if run.label == strategy]
    return max(found, key=lambda run: (run.num_micro_batches, -abs(run.bucket_mib - 25)))
