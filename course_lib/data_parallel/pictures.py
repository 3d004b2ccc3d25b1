"""Pictures of data parallelism: what threads gain, stragglers, published scaling, local SGD.

Every function takes what the notebook has measured and draws it beside the formula.
Notebook 05_data_parallel.
"""

from collections.abc import Callable, Mapping, Sequence
from statistics import mean

from matplotlib.figure import Figure

from course_lib.cost import published
from course_lib.data_parallel import cost
from course_lib.data_parallel.parameter_server import Update, loss_at, smoothed
from course_lib.display.compare import Voices, compare

SLEEP = "sleep of rank 3 in a step, as a multiple of the others'"
PLAYBOOK = "N. Tazi et al., The Ultra-Scale Playbook, 2025, nodes of 8 H100, assets {files}"


def at_once(
    times: Mapping[str, Sequence[Sequence[float]]],
    p_values: Sequence[int],
    num_cores: int,
    title: str,
) -> Figure:
    """Draw `lab.at_once`: the time of p pieces of work at once, over that of one piece."""
    curves = {}
    for name, ratios in times.items():
        formula: Callable[[float], float] | None = None
        if name == "Python, threads":
            formula = float  # one thread at a time
        elif name == "Python, processes":
            formula = lambda p: max(1.0, p / num_cores)  # noqa: E731 - as many at once as cores
        curves[name] = Voices(formula=formula, measurement=[min(turns) for turns in ratios])
    return compare(
        p_values,
        curves,
        title,
        note=f"{num_cores} cores; the fastest of {len(next(iter(times.values()))[0])} turns",
        x_label="pieces of work at once, p",
        y_label="time, as a multiple of one piece alone",
    )


def pace(
    slowdowns: Sequence[int],
    steps_s: Callable[[float], Sequence[float]],
    bsp_s: Sequence[Sequence[float]],
    free_s: Sequence[float],
    title: str,
) -> Figure:
    """Draw the time of as many gradients as there are workers, in rounds and asynchronously."""
    curves = {
        "BSP": Voices(formula=lambda k: max(steps_s(k)), measurement=bsp_s),
        "asynchronous": Voices(
            formula=lambda k: len(steps_s(k)) / sum(1 / t for t in steps_s(k)), measurement=free_s
        ),
    }
    return compare(
        slowdowns,
        curves,
        title,
        x_label=SLEEP,
        y_label="time for 3 gradients (s)",
    )


def staleness(
    slowdowns: Sequence[int],
    steps_s: Callable[[float], Sequence[float]],
    runs: Sequence[Sequence[Update]],
    title: str,
    worker: int = 3,
) -> Figure:
    """Draw the mean staleness of one worker: formula, simulated order, and the server's count."""
    simulated = []
    for k in slowdowns:
        order = cost.arrival_order(steps_s(k), len(runs[0]))
        ages = zip(order, cost.staleness_of(order), strict=True)
        simulated.append(mean(age for who, age in ages if who == worker))
    voices = Voices(
        formula=lambda k: cost.mean_staleness(steps_s(k), worker),
        simulation=simulated,
        measurement=[mean_staleness(updates, worker) for updates in runs],
    )
    return compare(
        slowdowns,
        voices,
        title,
        x_label=SLEEP,
        y_label="staleness of rank 3's gradients (updates)",
    )


def mean_staleness(updates: Sequence[Update], worker: int) -> float:
    """Return the mean staleness of one worker's updates."""
    return mean(update.staleness for update in updates if update.workers == (worker,))


def losses_by_update(bsp: Sequence[Update], free: Sequence[Update], title: str) -> Figure:
    """Draw the smoothed losses of a synchronous and an asynchronous run over their updates."""
    curves = {"BSP": smoothed(bsp), "asynchronous": smoothed(free)[: len(bsp)]}
    voices = {name: Voices(measurement=values) for name, values in curves.items()}
    return compare(range(1, len(bsp) + 1), voices, title, x_label="updates", y_label="loss")


def losses_by_time(
    bsp: Sequence[Update], free: Sequence[Update], times_s: Sequence[float], title: str
) -> Figure:
    """Draw the smoothed losses of a synchronous and an asynchronous run over time."""
    curves = {"BSP": loss_at(bsp, times_s), "asynchronous": loss_at(free, times_s)}
    voices = {name: Voices(measurement=values) for name, values in curves.items()}
    return compare(times_s, voices, title, x_label="time (s)", y_label="loss")


def busiest_link(
    p_values: Sequence[int], ring: Sequence[float], server: Sequence[float], title: str
) -> Figure:
    """Draw the bytes that the busiest rank sends in a step, in n: of a ring, and of a server."""
    curves = {
        "ring": Voices(formula=lambda p: 2 * (p - 1) / p, measurement=ring),
        "server": Voices(formula=lambda p: p - 1, measurement=server),
    }
    return compare(p_values, curves, title, x_label="ranks p", y_label="bytes sent per step, in n")


def published_scaling() -> tuple[list[int], list[float], list[float]]:
    """Return GPUs, tokens/s per GPU and all-reduce bandwidth, both in % of those on one node.

    Source:  The Ultra-Scale Playbook, dp_scaling and pp_comm_bandwidth (all_reduce of 256 MB)
    """
    rows = published.rows("ultrascale_figures")
    speed = _series(rows, "dp_scaling (", "tokens_per_s_per_gpu")
    bandwidth = _series(rows, "pp_comm_bandwidth 256MB", "AllReduce GB/s (mean)")
    gpus = sorted(speed)
    return (
        gpus,
        [100 * speed[count] / speed[8] for count in gpus],
        [100 * bandwidth[count // 8] / bandwidth[1] for count in gpus],
    )


def scaling_on_gpus(title: str) -> Figure:
    """Draw the published tokens/s per GPU and all-reduce bandwidth over the number of GPUs."""
    gpus, speed, bandwidth = published_scaling()
    curves = {
        "tokens/s per GPU": Voices(formula=[100.0] * len(gpus), published=(gpus, speed)),
        "bandwidth of all_reduce, 256 MB": Voices(published=(gpus, bandwidth)),
    }
    source = PLAYBOOK.format(files="dp_scaling, pp_comm_bandwidth")
    note = "a model of 1.3 billion parameters, 256 sequences of 4,096 tokens per step"
    return compare(
        gpus,
        curves,
        title,
        note=note,
        source=source,
        names={"formula": "if GPUs kept their speed"},
        x_label="GPUs",
        y_label="% of the value on one node",
        log_x=True,
    )


def local_sgd(periods: Sequence[int], losses: Mapping[str, Sequence[float]], title: str) -> Figure:
    """Draw the last loss over the steps between two communications, for each method."""
    curves = {name: Voices(measurement=values) for name, values in losses.items()}
    note = "4 ranks, inner optimizer SGD; DiLoCo's outer one: learning rate 0.7, momentum 0.9"
    figure = compare(
        periods,
        curves,
        title,
        note=note,
        log_x=True,
        x_label="steps between two all-reduces, H",
        y_label="loss of the last 16 steps",
    )
    least = min(min(values) for values in losses.values())
    figure.axes[0].set_ylim(bottom=0.8 * least)
    return figure


def _series(rows: Sequence[Mapping[str, str]], figure: str, series: str) -> dict[int, float]:
    """Return the values of one series of a published figure by x."""
    return {
        int(float(row["x"])): float(row["value"])
        for row in rows
        if row["figure"].startswith(figure) and row["series"] == series
    }
