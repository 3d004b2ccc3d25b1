"""The pictures of the deck 12_planner, drawn by the functions that the notebook calls."""

from dataclasses import replace
from functools import cache

from course_lib import planner
from course_lib.core import MODELS
from course_lib.planner import Plan
from course_lib.planner import pictures as lesson
from course_lib.planner.published_runs import published_runs

SIZES = {"hidden": 5120, "num_layers": 40, "num_heads": 40, "ffn_hidden": 13824}
LLAMA13 = replace(MODELS["llama2-7b"], name="llama2-13b", **SIZES)
CLUSTER = planner.find_cluster("selene-a100", num_nodes=4)
TABLES = {
    "Korthikanti 2022": "korthikanti",
    "Megatron SC21": "sc21",
    "vTrain": "vtrain",
    "llm-foundry": "llm-foundry",
}
WAYS = {
    "DP 32": {"dp": 32},
    "ZeRO-1": {"dp": 32, "zero": 1},
    "ZeRO-2": {"dp": 32, "zero": 2},
    "FSDP": {"dp": 32, "zero": 3},
    "PP 4": {"dp": 8, "pp": 4},
    "PP 4, ZeRO-1": {"dp": 8, "pp": 4, "zero": 1},
    "TP 8": {"dp": 4, "tp": 8, "sequence_parallel": True},
}


def predicted(name):
    """The predicted step of one way, for 1,024 sequences."""
    plan = Plan(num_micro_batches=1024 // WAYS[name]["dp"]).with_axes(**WAYS[name])
    return planner.predict(LLAMA13, CLUSTER, plan)


@cache
def searched(global_batch):
    """All plans of a batch."""
    return planner.search(LLAMA13, CLUSTER, global_batch)


def fit():
    """Memory of the ways to use 32 GPUs."""
    return lesson.memory_by_kind({name: predicted(name) for name in WAYS})[0]


def bill():
    """The bill of TP 8."""
    return lesson.bill_waterfall(predicted("TP 8"))[0]


def fitting():
    """The bills of the ways that fit."""
    return lesson.bills_that_fit({name: predicted(name) for name in WAYS})[0]


def front():
    """All plans of the search, and the Pareto front."""
    return lesson.time_against_memory(searched(1024), {"FSDP, b = 1": predicted("FSDP")})[0]


def forgot():
    """Draw the choice of a planner that forgets the bubble."""
    steps = searched(32).steps
    blind = min(steps, key=lambda step: step.step_s - step.bubble_s)
    chosen = {"counts everything": steps[0], "forgets the bubble": blind}
    return lesson.bills_of_choices(chosen, forgot="bubble")[0]


def published():
    """Predictions of four published tables."""
    tables = {name: published_runs(table) for name, table in TABLES.items()}
    return lesson.predicted_against_published(tables)[0]


def errors():
    """Draw the errors of the predictions for the Playbook's runs."""
    return lesson.errors_by_mfu(published_runs("ultrascale"))[0]


def pictures():
    """All pictures by the names the deck calls them."""
    draws = (fit, bill, fitting, front, forgot, published, errors)
    return {draw.__name__: draw() for draw in draws}
