"""The overhead of checkpoints and failures, over the interval. Notebook 14_checkpoint."""

from course_lib.checkpoint.cost import DAY_S, best_interval_daly, expected_overhead, mtbf_of
from course_lib.core.live import Curves, Drawing, Live

YEAR_S = 365 * DAY_S
MOST_ATTEMPT = 6.0  # an interval with save and restart, in mean times between failures


def tried_intervals_s(save_s: float, mtbf_s: float, restart_s: float) -> list[float]:
    """Return intervals around the best one, without those that hardly ever end."""
    best_s = best_interval_daly(save_s, mtbf_s)
    longest_s = MOST_ATTEMPT * mtbf_s - save_s - restart_s
    intervals_s = [best_s * 2**power for power in range(-4, 5)]
    return [one for one in intervals_s if one <= max(longest_s, best_s)]


def interval_words(save_s: float, mtbf_s: float, restart_s: float, name: str = "") -> str:
    """Return the finding as a sentence: the best interval, and its overhead."""
    best_s = best_interval_daly(save_s, mtbf_s)
    percent = 100 * expected_overhead(best_s, save_s, mtbf_s, restart_s)
    title = f"{name}{', ' if name else ''}a failure every {long_time(mtbf_s)}: save every "
    return title + f"{long_time(best_s)}, overhead {percent:.3g} %"


def interval_note(save_s: float, restart_s: float) -> str:
    """Return what a curve of overheads assumes."""
    return f"a save {long_time(save_s)}, a restart {long_time(restart_s)}; Daly's formula"


def long_time(seconds: float) -> str:
    """Format a long time: `3.1 h`, `13 min`, `30 s`."""
    for size, unit in ((86_400, "days"), (3_600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"


def interval_drawing(
    gpus: int, years_between_failures_of_a_gpu: float, save_s: float, restart_min: float
) -> Drawing:
    """Return the expected overhead over the interval, and the best interval."""
    mtbf_s = mtbf_of(years_between_failures_of_a_gpu * YEAR_S, gpus)
    failing = (save_s, mtbf_s, 60 * restart_min)
    intervals_s = tried_intervals_s(*failing)
    percents = [100 * expected_overhead(one, *failing) for one in intervals_s]
    times = intervals_s[-1] / best_interval_daly(save_s, mtbf_s)
    title = interval_words(*failing, f"{gpus:,} GPUs")
    return Drawing(
        finding=f"{title}; at {times:g} times the interval, {percents[-1]:.3g} %",
        panels=[
            Curves(
                x=[one / 60 for one in intervals_s],
                ys={"overhead": percents},
                x_label="work between two checkpoints (min)",
                y_label="overhead (%)",
                log="x",
            )
        ],
        note=interval_note(save_s, 60 * restart_min),
    )


INTERVAL = Live(
    name="interval_explorer",
    lesson="14_checkpoint",
    question="How often should a training save, and what do failures cost then?",
    choices={
        "gpus": ([8, 64, 512, 4096, 16384, 131072], 16384),
        "years_between_failures_of_a_gpu": ([0.5, 1.0, 2.0, 5.8, 20.0], 5.8),
        "save_s": ([1, 10, 30, 120, 600], 30),
        "restart_min": ([1, 5, 10, 30], 10),
    },
    compute=interval_drawing,
)
