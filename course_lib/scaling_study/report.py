"""The results of a study as tables, on a terminal and as rows for an HTML page."""

from collections.abc import Iterator, Sequence

from rich.table import Table
from rich.text import Text

from course_lib.core.units import format_bytes, format_seconds
from course_lib.scaling_study.aggregate import GOOD, POOR
from course_lib.scaling_study.results import Result, Results, in_order
from course_lib.scaling_study.study_run import StudyRun

BUSY = 0.8  # of a core: a rank that computes alone has nearly all of it
HEADERS = (
    "strategy",
    "ranks",
    "step",
    "predicted",
    "tokens/s",
    "speed-up",
    "efficiency",
    "TFLOP/s",
    "peak per rank",
    "predicted",
    "peak factor",
    "utilized",
    "last loss",
)
EFFICIENCY = HEADERS.index("efficiency")
SPEED = (0, 1, 2, 3, 4, 5, 6)
MEMORY = (0, 1, 7, 8, 9, 10, 11, 12)


def name_of(run: StudyRun) -> str:
    """Return the name of a run within its set: the strategy, and what else distinguishes it."""
    words = [run.label]
    words += [f"m = {run.num_micro_batches}"] if run.pp > 1 else []
    words += [f"{run.bucket_mib:g} MiB"] if run.bucket_mib != 25 else []
    words += [f"warm-up {run.warmup}"] if run.warmup else []
    return ", ".join(words)


def cells_of(result: Result) -> list[str]:
    """Return one line of the table, as words under `HEADERS`."""
    experiment, told, beside = result.experiment, result.prediction, result.comparison
    alone = experiment is result.baseline
    peak, factor = experiment.peak_bytes, beside.peak_memory_factor if beside else None
    return [
        name_of(experiment.run),
        str(experiment.run.ranks),
        format_seconds(experiment.step_s),
        "" if alone else format_seconds(told.step_s),
        f"{experiment.tokens_per_s:,.0f}",
        f"{beside.speed_up:.2f}" if beside else "",
        f"{beside.efficiency_percent:.0f} %" if beside else "",
        f"{experiment.rank_flop_per_s / 1e12:.3g}",
        "" if peak is None else format_bytes(peak),
        "" if told.machine.cores is not None else format_bytes(told.peak_bytes),
        "" if factor is None else f"{factor:.2f}",
        "" if experiment.utilisation is None else f"{100 * experiment.utilisation:.0f} %",
        f"{experiment.losses[-1]:.4f}" if experiment.losses else "",
    ]


def tables(results: Results) -> Iterator[Table]:
    """Return two tables for each model and batch, as a terminal is not wide enough for one."""
    for name, found in results.sets().items():
        for what, columns in (("speed", SPEED), ("memory, utilization, loss", MEMORY)):
            table = new_table(f"{name}: {what}", [HEADERS[column] for column in columns])
            for result in in_order(found):
                cells = cells_of(result)
                styled = Text(cells[EFFICIENCY], style=style_of(result))
                row = [styled if n == EFFICIENCY else Text(cells[n]) for n in columns]
                table.add_row(*row)
            yield table


def new_table(title: str, headers: Sequence[str]) -> Table:
    """Return a table without lines; the first column is words, the others are numbers."""
    table = Table(
        box=None, padding=(0, 1, 0, 0), header_style="bold", title=Text(title), title_justify="left"
    )
    for number, header in enumerate(headers):
        table.add_column(header, justify="right" if number else "left", no_wrap=True)
    return table


def style_of(result: Result) -> str:
    """Return green for a good efficiency, red for a poor one."""
    beside = result.comparison
    if beside is None or result.experiment.run.ranks == 1:
        return ""
    percent = beside.efficiency_percent
    return "green" if percent >= GOOD else "red" if percent < POOR else ""


def notes(results: Results) -> list[str]:
    """Return the notes that go with the tables."""
    said = [results.made] if results.made else []
    machines = {_machine_words(result) for result in results.judged()}
    said += [f"Made on {' and on '.join(sorted(machines))}."]
    said += [
        "The first quarter of the steps is warm-up and left out. Speed-up and efficiency compare "
        "with the run of one rank on the same batch. The prediction takes its speed of "
        "computing from that run, and only the splitting from formulas. TFLOP/s are per rank. "
        "Utilized is the share of the time in which a rank's core or GPU was busy."
    ]
    if any(result.prediction.machine.cores is not None for result in results.judged()):
        said.append(
            "On a CPU the peak is what a process has grown by, libraries included: a prediction "
            "of tensors is no match for it. Ranks share the cores, so these speed-ups say nothing "
            "about GPUs."
        )
    shares = {_share(result) for result in results.judged() if result.experiment is result.baseline}
    if (least := min(shares, default=1.0)) < BUSY:
        said.append(
            f"A run of one rank had {100 * least:.0f} % of a core: other programs were running, so "
            "these times say little about this machine, and a speed-up can come from a larger "
            "share."
        )
    alone = sum(result.baseline is None for result in results.judged())
    if alone:
        said.append(f"{alone} runs have no run of one rank beside them, and no speed-up.")
    left_out = [f"Left out: {where}: {why}" for where, why in results.left_out.items()]
    return [*said, *left_out]


def _share(result: Result) -> float:
    """Return the device's utilization; 1 on a GPU without a reading, and where none was taken."""
    on_cpu = result.prediction.machine.cores is not None
    return result.experiment.utilisation or 1.0 if on_cpu else 1.0


def _machine_words(result: Result) -> str:
    machine = result.experiment.machine
    gpus = machine.get("gpus") or []
    devices = f"{machine.get('usable_cores', 1):g} CPU cores"
    if machine.get("usable_gpus") and gpus:
        devices = f"{len(gpus)} x {gpus[0]['name']}"
    return f"{devices}, torch {machine.get('torch')}"
