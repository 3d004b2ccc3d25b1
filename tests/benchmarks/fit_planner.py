"""Fit the planner's constants on published runs: `python tests/benchmarks/fit_planner.py`.

Minimises the mean and median error of all tables together, one constant after the other (a pattern
search on a logarithmic scale), and prints the constants to be written into
course_lib/planner/constants.py and profiles/. `--leave-out 8B` fits without the runs, in any table,
of models whose name ends so.
"""

import argparse
import math
import re
import statistics
from collections.abc import Callable
from functools import cache

from course_lib.planner import constants, predicting
from course_lib.planner.cluster import Cluster, find_cluster
from course_lib.planner.published_runs import PublishedRun, published_runs

# rows of Korthikanti that stay out of every fit: predicted only
KEPT_BACK = ("1T", "530B")
WEIGHTS = {
    "korthikanti": 8,
    "sc21": 5,
    "vtrain": 6,
    "ultrascale": 8,
    "llm-foundry": 8,
    "torchtitan": 4,
}
Setter = Callable[[float], None]


def rows_to_fit(leave_out: str) -> dict[str, list[PublishedRun]]:
    """The runs of each table; of the Playbook's those that use the GPU well."""
    found = {}
    for name in WEIGHTS:
        found[name] = [run for run in published_runs(name) if is_fitted(name, run, leave_out)]
    return {name: runs for name, runs in found.items() if runs}


def is_fitted(name: str, run: PublishedRun, leave_out: str) -> bool:
    if leave_out and shape(run) in shapes_named(leave_out):
        return False
    if name == "korthikanti":
        return run.group not in KEPT_BACK or run.plan.parallelism.dp > 1
    if name == "ultrascale":
        return run.mfu >= 0.2 and run.plan.parallelism.tp <= 8
    return True


def shape(run: PublishedRun) -> tuple[int, ...]:
    return run.model.hidden, run.model.num_layers, run.model.num_heads, run.model.vocab


@cache
def shapes_named(ending: str) -> set[tuple[int, ...]]:
    """The models whose name ends so, by their sizes: another table may name them otherwise."""
    runs = [run for table in WEIGHTS for run in published_runs(table)]
    return {shape(run) for run in runs if is_named(run, ending)}


def is_named(run: PublishedRun, ending: str) -> bool:
    name = run.group.split(",")[0]
    return bool(
        re.search(rf"(?<![\d.]){re.escape(ending)}$", name, re.IGNORECASE)
    )  # 39.1B is no 1B


def cost(tables: dict[str, list[PublishedRun]]) -> float:
    predicting.micro_batch.cache_clear()
    total = 0.0
    for name, runs in tables.items():
        errors = [abs(math.log(run.predicted().step_s / run.step_s)) for run in runs]
        errors = [min(0.4, error) for error in errors]
        total += WEIGHTS[name] * (statistics.mean(errors) + statistics.median(errors)) / 2
    return total / sum(WEIGHTS[name] for name in tables)


def of_module(name: str) -> tuple[str, float, Setter]:
    return name, getattr(constants, name), lambda value: setattr(constants, name, value)


def of_device(*names: str) -> tuple[str, float, Setter]:
    reached = constants.REACHED
    return (
        f"REACHED {names[0]}",
        reached[names[0]],
        lambda value: reached.update(dict.fromkeys(names, value)),
    )


def of_software(name: str, field: str) -> tuple[str, float, Setter]:
    program = constants.SOFTWARE[name]
    return (
        f"{name}.{field}",
        getattr(program, field),
        lambda value: object.__setattr__(program, field, value),
    )


def clusters_named(name: str) -> list[Cluster]:
    """The clusters of all runs with that profile: one for each number of nodes."""
    found = {run.cluster for table in WEIGHTS for run in published_runs(table)}
    return [find_cluster(name), *(cluster for cluster in found if cluster.name == name)]


def of_link(name: str, field: str) -> tuple[str, float, Setter]:
    links = [cluster.outside for cluster in clusters_named(name)]

    def put(value: float) -> None:
        for link in links:
            object.__setattr__(link, field, value)

    return f"{name}.outside.{field}", getattr(links[0], field), put


def of_cluster(name: str, field: str) -> tuple[str, float, Setter]:
    clusters = clusters_named(name)

    def put(value: float) -> None:
        for cluster in clusters:
            object.__setattr__(cluster, field, value)

    return f"{name}.{field}", getattr(clusters[0], field), put


def forget_nanotron() -> None:
    """Set what was fitted on the Playbook to values that assume nothing."""
    programs = {"passes": 1.0, "host_s": 2e-4, "host_tp_s": 2e-4, "step_s": 0.01}
    for field, value in {**programs, "bucket_bytes": 50e6}.items():
        of_software("nanotron", field)[2](value)
    of_link("hf-h100", "latency_s")[2](1e-5)
    of_link("hf-h100", "bytes_per_s")[2](4e10)
    of_cluster("hf-h100", "gather_share")[2](0.9)


def fit(tables: dict[str, list[PublishedRun]], rounds: int, only: str = "") -> dict[str, float]:
    free = [
        of_device("a100-80", "a100-40"),
        of_device("h100", "h200"),
        of_module("HALF_DEPTH"),
        of_module("BYTES_PER_LOGIT"),
        of_module("BYTES_PER_SCORE"),
        of_software("nanotron", "passes"),
        of_software("nanotron", "host_s"),
        of_software("nanotron", "host_tp_s"),
        of_software("nanotron", "step_s"),
        of_software("nanotron", "bucket_bytes"),
        of_software("torchtitan", "passes"),
        of_software("torchtitan", "attention"),
        of_software("torchtitan", "contention"),
        of_software("megatron", "attention"),
        of_link("hf-h100", "latency_s"),
        of_link("hf-h100", "bytes_per_s"),
        of_cluster("hf-h100", "gather_share"),
        of_link("vtrain-a100", "latency_s"),
    ]
    free = [one for one in free if any(word in one[0] for word in only.split(","))]
    values, best, step = {name: value for name, value, _ in free}, cost(tables), 0.2
    for number in range(rounds):
        for name, _, put in free:
            for factor in (1 + step, 1 / (1 + step)):
                moved = False
                while True:
                    put(values[name] * factor)
                    tried = cost(tables)
                    if tried >= best - 1e-6:
                        put(values[name])
                        break
                    best, values[name], moved = tried, values[name] * factor, True
                if moved:
                    break
        print(f"round {number}: {best:.4f}", flush=True)
        step /= 1.7
    return values


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--leave-out", default="", help="a model, by the end of its name")
    parser.add_argument("--only", default="", help="constants whose names contain this")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--neutral", action="store_true", help="forget the Playbook first")
    options = parser.parse_args()
    if options.neutral:
        forget_nanotron()
    for name, value in fit(rows_to_fit(options.leave_out), options.rounds, options.only).items():
        print(f"{name:34} {value:.4g}")
    for table in WEIGHTS:
        usual = [run for run in published_runs(table) if is_fitted(table, run, "")]
        fitted = [run for run in usual if is_fitted(table, run, options.leave_out)]
        left_out = [run for run in usual if run not in fitted]
        kept = [run for run in published_runs(table) if run not in usual]
        for word, some in (("fitted", fitted), ("left out", left_out), ("kept back", kept)):
            if some:
                errors = [abs(run.predicted().step_s / run.step_s - 1) for run in some]
                print(f"{table:12} {word:10} {len(some):5} median {statistics.median(errors):.3f}")
