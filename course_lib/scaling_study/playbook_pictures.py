"""Pictures of the Ultra-Scale Playbook's benchmark: strong scaling, TP, runs that are far off.

Lesson 13_scaling_study.
"""

from collections.abc import Sequence
from math import nan

from matplotlib.figure import Figure

from course_lib.display.compare import Voices, compare
from course_lib.scaling_study.playbook import SOURCE, fit, playbook_runs, series

_Picture = tuple[Figure, str]
FITTED = (1, 4)  # nodes
RUNS = {"formula": "(connects them)", "measurement": "published runs"}


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
