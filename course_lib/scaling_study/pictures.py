"""Pictures of a study, each with a sentence that states the finding and one number."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import nan
from statistics import median

from matplotlib.figure import Figure

from course_lib.core.records import Ledger, RunRecord
from course_lib.core.units import GIB, MIB, format_bytes
from course_lib.display.compare import Voices, compare
from course_lib.display.gpu_links import links
from course_lib.display.losses import descents, losses
from course_lib.display.memory import memory
from course_lib.display.paired_bars import Pair, paired_bars
from course_lib.scaling_study.aggregate import GOOD, STATES, Comparison
from course_lib.scaling_study.curves import SMOOTHED, smooth, spread, steps_to
from course_lib.scaling_study.playbook import SOURCE, fit, playbook_runs, series
from course_lib.scaling_study.prediction import states_of
from course_lib.scaling_study.report import name_of
from course_lib.scaling_study.results import Result, Results, in_order

_Picture = tuple[Figure, str]  # and what it shows, in words
FITTED = (1, 4)  # nodes
RUNS = {"formula": "(connects them)", "measurement": "published runs"}
Draw = Callable[[Sequence[Result], str], _Picture | None]


def throughput(results: Sequence[Result], name: str) -> _Picture | None:
    """Draw tokens per second beside the ideal, the one-rank throughput times the ranks."""
    pairs = [
        Pair(
            name=_line(result),
            measured=result.experiment.tokens_per_s / 1e3,
            predicted=_unless_alone(result, result.prediction.tokens_per_s / 1e3),
            ideal=_ideal(result),
        )
        for result in in_order(results)
    ]
    best = max(results, key=lambda result: result.experiment.tokens_per_s)
    title = f"{name}: {_line(best)} is the fastest, {best.experiment.tokens_per_s:,.0f} tokens/s"
    return paired_bars(pairs, title, x_label="throughput (thousand tokens/s)"), f"{title}."


def efficiency(results: Sequence[Result], name: str) -> _Picture | None:
    """Draw the scaling efficiency, speed-up divided by ranks; about 80 % is good."""
    pairs = _compared(results, lambda beside: beside.efficiency_percent, lambda f, p: f / p * 100)
    if not pairs:
        return None
    good = sum((pair.measured or 0) >= GOOD for pair in pairs)
    title = f"{name}: {good} of {len(pairs)} runs reach an efficiency of {GOOD} %"
    figure = paired_bars(
        pairs,
        title,
        x_label="efficiency (% of one rank's throughput, per rank)",
        words="{:.0f}".format,
        limit=100,
        limit_words="ideal",
    )
    return figure, f"{title}."


def peak_memory(results: Sequence[Result], name: str) -> _Picture | None:
    """Draw the peak memory of any rank; on GPUs beside the prediction."""
    known = [result for result in results if result.experiment.peak_bytes is not None]
    if not known:
        return None
    least = min(known, key=lambda result: result.experiment.peak_bytes or 0)
    most = max(result.experiment.peak_bytes or 0 for result in known)
    unit, word = (GIB, "GiB") if most >= GIB else (MIB, "MiB")
    pairs = [
        Pair(
            name=_line(result),
            measured=(result.experiment.peak_bytes or 0) / unit,
            predicted=_tensor_peak(result, unit),
        )
        for result in in_order(known)
    ]
    held = format_bytes(least.experiment.peak_bytes or 0)
    title = f"{name}: {_line(least)} has the lowest peak, {held} per rank"
    return paired_bars(
        pairs, title, x_label=f"peak memory of the fullest rank ({word})"
    ), f"{title}."


def states(results: Sequence[Result], name: str) -> _Picture | None:
    """Draw the bytes of parameters, gradients and optimizer state per rank: the stages of ZeRO."""
    found = [result for result in in_order(results) if any(result.experiment.held.values())]
    if not any(result.experiment.run.parallelism.zero for result in found):
        return None
    measured = {_line(one): _ledger(one.experiment.held) for one in found}
    (least, fewest) = min(measured.items(), key=lambda item: item[1].peak_bytes())
    bars = {}
    for result in found:
        bars[_line(result)] = measured[_line(result)]
        bars["formula" + "\u200b" * len(bars)] = _ledger(states_of(result.experiment.run))
    title = (
        f"{name}: {least} keeps the least, {format_bytes(fewest.peak_bytes())} of states per rank"
    )
    return memory(bars, title), f"{title}."


def loss_curves(results: Sequence[Result], name: str) -> _Picture | None:
    """Draw all loss curves of one batch, which should coincide."""
    curves = {
        _line(one): one.experiment.losses for one in in_order(results) if one.experiment.losses
    }
    if not curves:
        return None
    apart = spread(curves.values())
    title = f"The losses of {len(curves)} runs of {name} are at most {apart:.2g} apart"
    return losses(curves, title), f"{title}."


def topology(results: Results) -> _Picture | None:
    """Draw the links between GPUs of the machine with most of them."""
    found = [one.machine.get("gpu_links") or [] for one in results.experiments]
    matrix = max(found, key=len, default=[])
    if len(matrix) < 2:
        return None
    title = f"{len(matrix)} GPUs reach each other over {' and '.join(_kinds(matrix))}"
    return links(matrix, title), f"{title}."


def link_matrix(matrix: Sequence[Sequence[str]], whose: str) -> _Picture:
    """Draw a matrix of links; the title says whether some links are closer than others.

    whose   "This machine" or "An example"
    """
    kinds = _kinds(matrix)
    finding = "some linked more closely than others" if len(kinds) > 1 else f"all over {kinds[0]}"
    title = f"{whose}: {len(matrix)} GPUs, {finding}"
    rows = " | ".join(" ".join(row) for row in matrix)
    return links(matrix, title), f"{title}; rows: {rows}"


def step_times(records: Sequence[RunRecord]) -> _Picture:
    """Draw the measured time of each step of each rank; the title is about the run of one rank."""
    curves = {
        f"rank {record.rank} of {record.world_size}": [
            1e3 * (step["end_s"] - step["start_s"]) for step in record.steps
        ]
        for record in records
    }
    first, *_ = alone = curves["rank 0 of 1"]
    times = first / median(alone)
    title = f"One rank: the first step takes {times:.1f} times as long as the median step"
    figure = compare(
        range(1, len(alone) + 1),
        {name: Voices(measurement=found) for name, found in curves.items()},
        title,
        x_label="step",
        y_label="time of a step (ms)",
    )
    return figure, f"{title}, {first:.0f} ms; later ones vary"


def convergence(results: Results) -> _Picture | None:
    """Draw losses of one model as the batch grows and the warm-up shrinks: which falls first?"""
    found = [one for one in in_order(results.judged()) if one.experiment.run.warmup]
    if len(found) < 2 or found[0].experiment.run.ranks > 1:
        return None
    curves: dict[tuple[str, str], list[list[float]]] = {}
    for one in sorted(found, key=lambda one: -one.experiment.run.warmup):
        run = one.experiment.run
        name = f"batch {run.global_batch}", f"warm-up {run.warmup}"
        curves.setdefault(name, []).append(smooth(one.experiment.losses))
    (first, (whole, *_)), *_ = curves.items()
    needs = {name: steps_to(whole[-1], group[0]) or len(whole) for name, group in curves.items()}
    fastest = min(needs, key=lambda name: needs[name])
    title = (
        f"{', '.join(fastest).capitalize()}: {needs[fastest]} steps to the loss that "
        f"{', '.join(first)} reaches in {len(whole)}"
    )
    words = f"{', '.join(first)} after {len(whole)} steps: {whole[-1]:.2f}"
    note = f"Means of {SMOOTHED} steps."
    if dotted := [", ".join(name) for name, group in curves.items() if len(group) > 1]:
        note += f" Dots: {' and '.join(dotted)}, with the model split over ranks."
    return descents(curves, title, target=whole[-1], target_words=words, note=note), f"{title}."


def strong_scaling() -> _Picture:
    """Draw the efficiency of data parallelism over nodes, and the law fitted to two of the runs."""
    runs = series("1B")
    law = fit(runs, *FITTED)
    base_s = runs[1].step_s

    def percent(nodes: float, step_s: float) -> float:
        return 100 * base_s / (nodes * step_s)

    found = {nodes: percent(nodes, run.step_s) for nodes, run in runs.items()}
    last = max(runs)
    said = percent(last, law.step_s(last))
    title = (
        f"Data parallelism keeps {found[last]:.0f} % efficiency on {last} nodes; "
        f"the law fitted to {' and '.join(map(str, FITTED))} nodes says {said:.0f} %"
    )
    figure = compare(
        [*found],
        Voices(
            formula=lambda n: percent(n, law.fixed_s + law.shared_s / n),
            published=([*found], [*found.values()]),
        ),
        title,
        x_label="nodes of 8 H100s",
        y_label="efficiency (% of one node)",
        log_x=True,
        source=f"{SOURCE}: 1B, plain DP, 256 sequences per step in micro-batches of one",
        names={"formula": "fixed + shared / n, fitted to two runs"},
    )
    for nodes in FITTED:
        figure.axes[0].annotate(
            "fitted", (nodes, found[nodes]), (0, -18), textcoords="offset points", ha="center"
        )
    return figure, title


def replicas_over_tp() -> _Picture:
    """Draw the throughput of one replica over its TP degree, for three sizes of micro-batches."""
    by_size = {size: _replicas("1B", size, nodes) for size, nodes in ((1, 2), (4, 16), (8, 16))}
    drops = [100 * (1 - found[16] / found[8]) for found in by_size.values()]
    title = (
        f"Across nodes, TP 16 makes a replica {min(drops):.0f} to {max(drops):.0f} % slower than "
        "TP 8 does in one node"
    )
    degrees = [1, 2, 4, 8, 16]
    names = {1: "1 sequence, on 2 nodes", 4: "4 sequences, on 16 nodes", 8: "8, on 16 nodes"}
    figure = compare(
        degrees,
        {
            names[size]: _joined([found.get(degree, nan) for degree in degrees])
            for size, found in by_size.items()
        },
        title,
        x_label="GPUs of a replica (TP degree); a node has 8",
        y_label="thousand tokens/s per replica",
        log_x=True,
        source=f"{SOURCE}: 1B, DP x TP without ZeRO, by size of the micro-batch",
        names=RUNS,
    )
    return figure, f"{title}; with one sequence {by_size[1][16]:.0f} instead of {by_size[1][8]:.0f}"


def far_off() -> _Picture:
    """Draw the throughput of four layouts over nodes; one of them has two runs far below."""
    layouts = {
        "DP": series("1B", zero=1),
        "DP x TP 2": series("1B", tp=2, zero=1),
        "DP x PP 2": series("1B", pp=2, zero=1),
        "DP x PP 4": series("1B", pp=4, zero=1),
    }
    nodes = [*layouts["DP"]]
    low, left, right = (layouts["DP x PP 4"][n].tokens_per_s_per_gpu for n in (8, 4, 16))
    title = f"DP x PP 4 on 8 nodes is {right / low:.0f} times slower per GPU than on 16"
    figure = compare(
        nodes,
        {
            name: _joined([found[n].tokens_per_s_per_gpu / 1e3 for n in nodes])
            for name, found in layouts.items()
        },
        title,
        x_label="nodes of 8 H100s",
        y_label="thousand tokens/s per GPU",
        log=True,
        source=f"{SOURCE}: 1B, ZeRO-1, micro-batches of one sequence",
        names=RUNS,
    )
    return figure, f"{title}: {low:,.0f} tokens/s per GPU, between {left:,.0f} and {right:,.0f}"


BY_SET: tuple[Draw, ...] = (throughput, efficiency, peak_memory, states, loss_curves)
OF_ALL = (convergence, topology)


def pictures(results: Results) -> Iterator[_Picture]:
    """Yield all pictures of a study: those of each model and batch, then the links."""
    for name, found in results.sets().items():
        yield from filter(None, (draw(found, name) for draw in BY_SET))
    yield from filter(None, (draw(results) for draw in OF_ALL))


def _compared(
    results: Sequence[Result],
    measured: Callable[[Comparison], float],
    predicted: Callable[[float, int], float],
) -> list[Pair]:
    """Return a pair for each run of several ranks, with the run of one rank beside it.

    predicted   from the speed-up that the cost model says, and the number of ranks
    """
    return [
        Pair(
            name=_line(result),
            measured=measured(result.comparison),
            predicted=predicted(_predicted_factor(result), result.experiment.run.ranks),
        )
        for result in in_order(results)
        if result.experiment.run.ranks > 1 and result.comparison
    ]


def _kinds(matrix: Sequence[Sequence[str]]) -> list[str]:
    """Return the kinds of links between different GPUs."""
    return sorted({cell for row in matrix for cell in row} - {"X"})


def _line(result: Result) -> str:
    ranks = result.experiment.run.ranks
    return f"{name_of(result.experiment.run)}, {ranks} rank{'s' * (ranks > 1)}"


def _unless_alone(result: Result, value: float) -> float | None:
    """Return the prediction, but for the run of one rank from which its speed was taken."""
    return None if result.experiment is result.baseline else value


def _tensor_peak(result: Result, unit: int) -> float | None:
    """Return the predicted peak of a GPU: a CPU process also grows by libraries and caches."""
    told = result.prediction
    return None if told.machine.cores is not None else told.peak_bytes / unit


def _ideal(result: Result) -> float | None:
    baseline, ranks = result.baseline, result.experiment.run.ranks
    return None if baseline is None else ranks * baseline.tokens_per_s / 1e3


def _predicted_factor(result: Result) -> float:
    alone = result.baseline.tokens_per_s if result.baseline else 1.0
    return result.prediction.tokens_per_s / alone


def _ledger(held: Mapping[str, int]) -> Ledger:
    ledger = Ledger()
    ledger.add(0.0, **{kind: int(held.get(kind, 0)) for kind in STATES})
    return ledger


def _replicas(model: str, micro_batch: int, nodes: int) -> dict[int, float]:
    """Return thousand tokens/s of a replica, by its TP degree."""
    return {
        run.tp: run.tokens_per_s_per_replica / 1e3
        for run in sorted(playbook_runs(), key=lambda run: (run.tp, run.tokens_per_s_per_gpu))
        if (run.model, run.pp, run.zero) == (model, 1, 0)
        and (run.micro_batch, run.nodes) == (micro_batch, nodes)
        and run.tokens_per_s_per_gpu
    }


def _joined(values: Sequence[float]) -> Voices:
    """Return values with a line through them."""
    return Voices(formula=values, measurement=values)
