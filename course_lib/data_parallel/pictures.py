"""Pictures of lesson 05: threads, stragglers, staleness, published scaling, local SGD.

Each function takes what the notebook has measured, and returns a figure and its alt text. Where
the measured values may be left out, it draws formula and simulation alone.

Notebook 05_data_parallel.
"""

from collections.abc import Callable, Mapping, Sequence
from statistics import mean, median

from matplotlib.figure import Figure

from course_lib.collectives import messages
from course_lib.core.records import Event
from course_lib.cost import published
from course_lib.data_parallel import cost
from course_lib.data_parallel.parameter_server import Update, loss_at, smoothed
from course_lib.display.compare import Voices, compare
from course_lib.display.timeline import timelines

BSP, ASYNCHRONOUS, STRAGGLER = "BSP", "asynchronous", 3
SLEEP = f"sleep of rank {STRAGGLER} in a step, as a multiple of the others'"
PLAYBOOK = "N. Tazi et al., The Ultra-Scale Playbook, 2025, nodes of 8 H100, assets {files}"


def at_once(
    times: Mapping[str, Sequence[Sequence[float]]], p_values: Sequence[int], num_cores: int
) -> tuple[Figure, str]:
    """Draw `lab.at_once`: the time of p pieces of work at once, over that of one piece."""
    curves = {}
    for name, ratios in times.items():
        formula: Callable[[float], float] | None = None
        if name == "Python, threads":
            formula = float  # one thread at a time
        elif name == "Python, processes":
            formula = lambda p: max(1.0, p / num_cores)  # noqa: E731 - as many at once as cores
        curves[name] = Voices(formula=formula, measurement=[min(turns) for turns in ratios])
    two = p_values.index(2)
    threads, processes = (min(times[f"Python, {way}"][two]) for way in ("threads", "processes"))
    title = (
        f"In threads, two Python loops take {threads:.1f} times as long as one; "
        f"in processes, {processes:.1f}"
    )
    figure = compare(
        p_values,
        curves,
        title,
        note=f"{num_cores} cores; the fastest of {len(next(iter(times.values()))[0])} turns",
        x_label="pieces of work at once, p",
        y_label="time, as a multiple of one piece alone",
    )
    return figure, f"{title}; threads share one interpreter"


def rounds(runs: Mapping[str, Sequence[Event]]) -> tuple[Figure, str]:
    """Draw the steps of BSP and of asynchronous workers over time; rank 3 is the straggler."""
    shown = {
        name: [event for event in events if event.kind in ("compute", "optimizer", "wait")]
        for name, events in runs.items()
    }
    number = sum(event.kind == "optimizer" for event in shown[BSP])  # the server steps once a round
    end_s = max(event.end_s for event in shown[BSP])
    title = f"{BSP} waits for rank {STRAGGLER}: {number} rounds take {end_s * 1e3:.0f} ms"
    return timelines(shown, title), f"{title}; asynchronous workers do not wait for one another"


def pace(
    slowdowns: Sequence[int],
    step_s: float,
    bsp_s: Sequence[Sequence[float]] | None = None,
    free_s: Sequence[float] | None = None,
    sleep_s: float = 0.02,
) -> tuple[Figure, str]:
    """Draw the time of as many gradients as there are workers, in rounds and asynchronously.

    step_s    a step without stragglers, from which the formula starts
    bsp_s     measured rounds by slowdown; `free_s`: measured times of three asynchronous updates
    sleep_s   the part of a step that a worker sleeps: the straggler sleeps longer
    """

    def round_s(k: float) -> float:
        return max(_steps_s(step_s, k, sleep_s))

    def three_s(k: float) -> float:
        steps_s = _steps_s(step_s, k, sleep_s)
        return len(steps_s) / sum(1 / t for t in steps_s)

    curves = {
        BSP: Voices(formula=round_s, measurement=bsp_s),
        ASYNCHRONOUS: Voices(formula=three_s, measurement=free_s),
    }
    first, last = slowdowns[0], slowdowns[-1]
    in_rounds, apart = round_s(last) / round_s(first), three_s(last) / three_s(first)
    if bsp_s is not None and free_s is not None:
        in_rounds, apart = median(bsp_s[-1]) / median(bsp_s[0]), free_s[-1] / free_s[0]
    title = (
        f"A straggler makes a round {in_rounds:.1f} times as long, "
        f"3 asynchronous updates {apart:.1f} times"
    )
    figure = compare(slowdowns, curves, title, x_label=SLEEP, y_label="time for 3 gradients (s)")
    return figure, f"{title}; only a round waits for the straggler"


def _steps_s(step_s: float, slowdown: float, sleep_s: float) -> list[float]:
    """Return the seconds of a step of three workers, of which the last sleeps longer."""
    return [step_s, step_s, step_s + sleep_s * (slowdown - 1)]


def staleness(
    slowdowns: Sequence[int],
    step_s: float,
    runs: Sequence[Sequence[Update]],
    sleep_s: float = 0.02,
) -> tuple[Figure, str]:
    """Draw the straggler's mean staleness: formula, simulated order, and the server's count."""
    simulated = [
        cost.simulated_staleness(_steps_s(step_s, k, sleep_s), STRAGGLER, len(runs[0]))
        for k in slowdowns
    ]
    counted = [mean_staleness(updates, STRAGGLER) for updates in runs]
    voices = Voices(
        formula=lambda k: cost.mean_staleness(_steps_s(step_s, k, sleep_s), STRAGGLER),
        simulation=simulated,
        measurement=counted,
    )
    title = (
        f"If rank {STRAGGLER} sleeps {slowdowns[-1]} times as long, its gradients are "
        f"{counted[-1]:.1f} updates old on average"
    )
    y_label = f"mean staleness of rank {STRAGGLER} (updates)"
    figure = compare(slowdowns, voices, title, x_label=SLEEP, y_label=y_label)
    return figure, f"{title}; the simulation gives {simulated[-1]:.0f}"


def mean_staleness(updates: Sequence[Update], worker: int) -> float:
    """Return the mean staleness of one worker's updates."""
    return mean(update.staleness for update in updates if update.workers == (worker,))


def losses_by_update(bsp: Sequence[Update], free: Sequence[Update]) -> tuple[Figure, str]:
    """Draw the smoothed losses of a synchronous and an asynchronous run over their updates."""
    curves = {BSP: smoothed(bsp), ASYNCHRONOUS: smoothed(free)[: len(bsp)]}
    title = f"Loss after {len(bsp)} updates: {_ends(curves)}"
    voices = {name: Voices(measurement=values) for name, values in curves.items()}
    figure = compare(range(1, len(bsp) + 1), voices, title, x_label="updates", y_label="loss")
    return figure, f"{title}; an update of BSP takes the mean of three gradients"


def losses_by_time(
    bsp: Sequence[Update], free: Sequence[Update], times_s: Sequence[float]
) -> tuple[Figure, str]:
    """Draw the smoothed losses of a synchronous and an asynchronous run over time."""
    curves = {BSP: loss_at(bsp, times_s), ASYNCHRONOUS: loss_at(free, times_s)}
    title = f"Loss after {times_s[-1]:g} s: {_ends(curves)}"
    voices = {name: Voices(measurement=values) for name, values in curves.items()}
    figure = compare(times_s, voices, title, x_label="time (s)", y_label="loss")
    return figure, f"{title}; with one straggler"


def _ends(curves: Mapping[str, Sequence[float]], digits: int = 2) -> str:
    """Return the last value of each curve in words."""
    return ", ".join(f"{name} {values[-1]:.{digits}f}" for name, values in curves.items())


def busiest_link(
    p_values: Sequence[int],
    ring: Sequence[float] | None = None,
    server: Sequence[float] | None = None,
) -> tuple[Figure, str]:
    """Draw the bytes that the busiest rank sends in a step, in n: of a ring, and of a server."""
    simulated = [
        sum(m.num_bytes for m in messages.ring_all_reduce_messages(p, 1.0) if m.sender == 0)
        for p in p_values
    ]
    curves = {
        "ring": Voices(formula=lambda p: 2 * (p - 1) / p, simulation=simulated, measurement=ring),
        "server": Voices(formula=lambda p: p - 1, measurement=server),
    }
    most = server[-1] if server is not None else p_values[-1] - 1
    few = ring[-1] if ring is not None else simulated[-1]
    title = (
        f"On {p_values[-1]} ranks, a server sends {most:.2g} n per step, "
        f"a rank of a ring {few:.3g} n"
    )
    y_label = "bytes sent per step, in n"
    figure = compare(p_values, curves, title, x_label="ranks p", y_label=y_label)
    return figure, f"{title}; a ring stays below 2 n"


def published_scaling() -> tuple[list[int], list[float], list[float]]:
    """Return GPUs, tokens/s per GPU and all-reduce bandwidth, both in % of those on one node.

    Source:  The Ultra-Scale Playbook, dp_scaling and pp_comm_bandwidth (all_reduce, size=256MB)
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


def scaling_on_gpus() -> tuple[Figure, str]:
    """Draw the published tokens/s per GPU and all-reduce bandwidth over the number of GPUs."""
    gpus, speed, bandwidth = published_scaling()
    curves = {
        "tokens/s per GPU": Voices(formula=[100.0] * len(gpus), published=(gpus, speed)),
        'bandwidth of all_reduce of "256MB"': Voices(published=(gpus, bandwidth)),
    }
    title = (
        f"On {gpus[-1]} GPUs: speed per GPU {speed[-1]:.0f} % of that on {gpus[0]}, "
        f"bandwidth {bandwidth[-1]:.0f} %"
    )
    figure = compare(
        gpus,
        curves,
        title,
        note="1.3 billion parameters; 256 sequences of 4,096 tokens per step, in micro-batches "
        "of 1 (on 8 and 128 GPUs: of 2)",
        source=PLAYBOOK.format(files="dp_scaling, pp_comm_bandwidth"),
        names={"formula": "if GPUs kept their speed"},
        x_label="GPUs",
        y_label="% of the value on one node",
        log_x=True,
    )
    return figure, f"{title}, published for nodes of 8 H100"


def local_sgd(periods: Sequence[int], losses: Mapping[str, Sequence[float]]) -> tuple[Figure, str]:
    """Draw the last loss over the steps between two communications, for each method."""
    title = f"Loss at H = {periods[-1]}: {_ends(losses, digits=1)}"
    figure = compare(
        periods,
        {name: Voices(measurement=values) for name, values in losses.items()},
        title,
        note="losses of the replicas, before their mean is taken; 4 ranks, inner optimizer SGD; "
        "DiLoCo's outer one: learning rate 0.7, momentum 0.9",
        log_x=True,
        x_label="steps between two all-reduces, H",
        y_label="loss of the last 16 steps",
    )
    least = min(min(values) for values in losses.values())
    figure.axes[0].set_ylim(bottom=0.8 * least)
    return figure, f"{title}, after 64 steps on 4 ranks"


def _series(rows: Sequence[Mapping[str, str]], figure: str, series: str) -> dict[int, float]:
    """Return the values of one series of a published figure by x."""
    return {
        int(float(row["x"])): float(row["value"])
        for row in rows
        if row["figure"].startswith(figure) and row["series"] == series
    }
