"""Every explorer of every lesson: each end of its sliders draws, or says one true sentence."""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations, product
from typing import Any

import pytest

from course_lib.accumulation.explorer import graph_explorer
from course_lib.accumulation.worked_graph import graph_states
from course_lib.checkpoint.explorer import interval_explorer
from course_lib.core import MODELS, CourseError, Link
from course_lib.ddp.cost import StepCost, ddp_step, ready_by_share
from course_lib.ddp.explorer import bucket_explorer
from course_lib.display import Explore, wires
from course_lib.fsdp.explorer import fsdp_explorer
from course_lib.memory.explorer import calculator
from course_lib.mesh.explorer import mesh_explorer
from course_lib.pipeline.explorer import schedule_explorer
from course_lib.planner import Plan
from course_lib.planner.explorer import plan_explorer
from course_lib.ranks.timing import Measured
from course_lib.tensor_parallel.explorer import degree_explorer
from course_lib.zero.explorer import shards_explorer, zero_explorer


def graphs() -> Explore:
    return graph_explorer({"both": graph_states(items_per_step=2), "each": graph_states()})


def buckets() -> Explore:
    cost = StepCost(forward_s=0.1, ready_s=ready_by_share([1] * 4, 0.2), grad_bytes=(100,) * 4)
    links = {
        "fast": Link(latency_s=0.01, bytes_per_s=1e5),
        "slow": Link(latency_s=0.04, bytes_per_s=1e3),
    }
    swept = {
        name: {n: Measured((0.3,), ddp_step(cost, n, 2, link)) for n in (100, 200, 400)}
        for name, link in links.items()
    }
    return bucket_explorer(cost, links, swept, num_buckets=2)


def plans() -> Explore:
    sizes = {"hidden": 5120, "num_layers": 40, "num_heads": 40, "ffn_hidden": 13824}
    model = replace(MODELS["llama2-7b"], name="llama2-13b", **sizes)
    plan = Plan(num_micro_batches=128).with_axes(dp=8, tp=2, pp=2, zero=1)
    return plan_explorer(model, "selene-a100", plan, num_nodes=4)


EXPLORERS: dict[str, Callable[[], Explore]] = {
    "01": calculator,
    "02": graphs,
    "04": wires.explore_all_reduces,
    "06": buckets,
    "07": degree_explorer,
    "08": schedule_explorer,
    "09 shards": shards_explorer,
    "09 stages": zero_explorer,
    "10": fsdp_explorer,
    "11": mesh_explorer,
    "12": plans,
    "14": interval_explorer,
}


def ends(slider: Any) -> tuple[Any, Any]:
    """The first and the last value of a slider, a list of choices or a check box."""
    if hasattr(slider, "min"):
        return slider.min, slider.max
    options = getattr(slider, "options", (False, True))
    return options[0], options[-1]


def corners(explorer: Explore) -> Iterator[dict[str, Any]]:
    """All ends of up to five sliders; of more, the ends of every two, the others at the start."""
    start = explorer.values()
    at = {name: ends(slider) for name, slider in explorer.sliders.items() if slider.value != 0.0}
    for names in combinations(at, min(len(at), 5 if len(at) < 6 else 2)):
        for values in product(*(at[name] for name in names)):
            yield start | dict(zip(names, values, strict=True))


def seen(explorer: Explore, values: dict[str, Any]) -> str:
    """Everything that the picture says for these values, or the sentence in its place."""
    try:
        explorer._draw(**values)
        alt = explorer._alt(**values)
    except CourseError as problem:
        return str(problem)
    assert alt.strip()
    return f"drawn: {alt}"


@pytest.mark.parametrize("lesson", EXPLORERS)
def test_each_end_of_the_sliders_draws_or_says_one_true_sentence(lesson: str) -> None:
    explorer = EXPLORERS[lesson]()
    for values in corners(explorer):
        said = seen(explorer, values)
        if not said.startswith("drawn"):
            got = said.partition("; got ")[2].partition(". Try ")[0]
            assert got, said
            for name, number in re.findall(r"(\w+)=(\d+)", got):
                assert str(values.get(name, number)) == number, (values, said)
