"""The formulas against what was published: tables to their digits, drawn bars to their pixels."""

import csv
from dataclasses import replace
from decimal import ROUND_DOWN, ROUND_HALF_UP, Decimal
from pathlib import Path

import pytest

from course_lib.core import MODELS
from course_lib.core.parallelism import Parallelism
from course_lib.core.recipes import BF16, FP32, Recipe
from course_lib.core.units import GIB
from course_lib.memory import activations, count_params, model_states, params_on_rank
from tests.tables import every

DATA = Path(__file__).parents[1] / "data"
METHODS = {  # name in figure 7 -> how
    "none": {},
    "SP": {"sequence_parallel": True},
    "selective": {"recompute": "selective"},
    "SP+selective": {"sequence_parallel": True, "recompute": "selective"},
    "full": {"recompute": "full"},
}
# the playbook's figures: bf16 weights and gradients, Adam in fp32, no master copy
PLAYBOOK = Recipe(weight_bytes=2, grad_bytes=2)


def rows(name, **only):
    with (DATA / name).open() as file:
        lines = [line for line in file if not line.startswith("#")]
    return [row for row in csv.DictReader(lines) if all(row[key] == only[key] for key in only)]


@every(rows("zero_table1.csv"))
def test_zero_table_1_to_its_printed_digits(row):
    num_params = {"7.5B": 7_500_000_000, "128B": 128 * 10**9, "1T": 10**12}[row["model"]]
    parallelism = Parallelism(dp=int(row["dp"]), zero=int(row["zero_stage"]))
    num_bytes = sum(model_states(num_params, BF16, parallelism=parallelism).values())
    printed = Decimal(row["GB"])
    exact = Decimal(num_bytes) / 10**9
    # the paper rounds the 7.5B column and cuts the others off (513.5 is printed as 513)
    rounding = ROUND_HALF_UP if row["model"] == "7.5B" else ROUND_DOWN
    assert exact.quantize(printed, rounding) == printed


@pytest.mark.parametrize(
    ("num_params", "without_gb", "with_gb"),
    [(10**9, 16, 20), (7 * 10**9, 112, 140), (70 * 10**9, 1120, 1400), (405 * 10**9, 6480, 8100)],
)
def test_states_without_and_with_an_fp32_accumulator(num_params, without_gb, with_gb):
    assert sum(model_states(num_params, "bf16").values()) == without_gb * 10**9
    accumulated = model_states(num_params, "bf16+fp32-accumulator")
    assert sum(accumulated.values()) == with_gb * 10**9


def per_layer(spec, method):
    how = dict(METHODS[method])
    parallelism = Parallelism(tp=8, sequence_parallel=how.pop("sequence_parallel", False))
    one, two = (
        activations(
            replace(spec, num_layers=n),
            1,
            2048,
            flash=False,
            dropout=True,
            parallelism=parallelism,
            **how,
        )
        for n in (1, 2)
    )
    return sum(two.values()) - sum(one.values())


@every(rows("korthikanti22.csv", what="figure 7"))
def test_korthikanti_figure_7(row):
    spec = MODELS[f"megatron-{row['model']}"]
    percent = 100 * per_layer(spec, row["method"]) / per_layer(spec, "none")
    # the figure prints no numbers: these were read off the bars, good to 0.15 points (the same
    # reading, 62.04, stands for 61.96 and for 61.90)
    assert percent == pytest.approx(float(row["value"]), abs=0.15)


@pytest.mark.parametrize("model", ["22b", "175b", "530b", "1t"])
def test_korthikanti_figure_1_to_the_last_bit(model):
    spec = MODELS[f"megatron-{model}"]
    pp, chunks = {"22b": (1, 1), "175b": (8, 3), "530b": (35, 3), "1t": (64, 1)}[model]
    batch = 4 if model == "22b" else 1
    printed = {row["name"]: float(row["value"]) for row in rows(
        "korthikanti22.csv", what="figure 1", model=model)}  # fmt: skip
    for name, sp, recompute in (("none", False, "none"), ("SP+selective", True, "selective")):
        held = activations(
            spec,
            batch,
            2048,
            flash=False,
            dropout=True,
            recompute=recompute,
            parallelism=Parallelism(tp=8, pp=pp, sequence_parallel=sp),
            num_model_chunks=chunks,
        )
        layers = sum(held[part] for part in ("attention", "mlp", "dropout masks"))
        layers += held["norms"] * 2 * spec.num_layers // (2 * spec.num_layers + (pp == 1))
        assert layers / GIB == printed[f"activations {name} GiB/GPU"]
    matrices = 12 * spec.num_layers * spec.hidden**2
    states = model_states(matrices // (8 * pp), "bf16+fp32-grads")
    assert sum(states.values()) / GIB == printed["params+optimizer GiB/GPU"]


@every(rows("ultrascale_recompute.csv"))
def test_playbook_memory_by_recomputation(row):
    hidden, layers, heads = {
        "1B": (2048, 16, 32),
        "3B": (3072, 28, 24),
        "8B": (4096, 32, 32),
        "70B": (8192, 80, 64),
        "405B": (16384, 126, 128),
    }[row["model"]]
    seq = int(row["seq"])
    spec = replace(
        MODELS["gpt2"],
        hidden=hidden,
        num_layers=layers,
        num_heads=heads,
        ffn_hidden=4 * hidden,
        vocab=128256,
        max_seq=seq,
    )
    if row["kind"] == "activations":
        held = activations(spec, 1, seq, flash=False, dropout=True, recompute=row["recompute"])
        # the figure leaves out the last norm and the logits
        num_bytes = sum(held.values()) - held["logits"] - 2 * seq * hidden
    else:
        num_bytes = model_states(count_params(spec), FP32)[row["kind"]]
    assert num_bytes / GIB == float(row["GiB"])


SPLITS = {
    "No Parallelism (TP-1)": {},
    "No Parallelism": {},
    "1B model": {},
    "8B model": {},
    "70B model": {},
    "TP=8": {"tp": 8},
    "TP=16": {"tp": 16},
    "TP=8 (with SP)": {"tp": 8, "sequence_parallel": True},
    "TP=16 (with SP)": {"tp": 16, "sequence_parallel": True},
    "PP=8": {"pp": 8},
    "TP=2 CP=1": {"tp": 2},
    "TP=2 CP=4": {"tp": 2, "cp": 4},
    "DP=8": {"dp": 8},
    "DP=8 Zero-1": {"dp": 8, "zero": 1},
    "DP=8 Zero-2": {"dp": 8, "zero": 2},
    "DP=8 Zero-3": {"dp": 8, "zero": 3},
}
MODEL_OF = {"tp": "70b", "tp_sp": "70b", "1B model": "1b", "70B model": "70b"}


@every(rows("ultrascale_memory.csv", kind="activations"))
def test_playbook_activations_by_degrees(row):
    name = MODEL_OF.get(row["panel"]) or MODEL_OF.get(row["figure"], "8b")
    llama, seq = MODELS[f"llama-{name}"], int(row["seq"])
    hidden = llama.hidden  # the figure counts an MLP of GELU and 4h, and keys for every head
    spec = replace(
        llama, gated=False, ffn_hidden=4 * hidden, num_kv_heads=None, norm="layer", bias=True
    )
    parallelism = Parallelism(**SPLITS[row["panel"]])
    held = activations(spec, 1, seq, dropout=True, recompute="selective", parallelism=parallelism)
    tokens = seq // parallelism.cp
    layers = sum(held.values()) - held["logits"] - held["embedding"]
    layers -= (
        2
        * tokens
        * hidden
        // (parallelism.tp if parallelism.sequence_parallel else 1)
        * (parallelism.pp == 1)
    )
    assert layers / GIB == float(row["GiB"])


@every(row for row in rows("ultrascale_memory.csv", seq="1024") if row["kind"] != "activations")
def test_playbook_states_by_degrees(row):
    name = MODEL_OF.get(row["panel"]) or MODEL_OF.get(row["figure"], "8b")
    spec, parallelism = MODELS[f"llama-{name}"], Parallelism(**SPLITS[row["panel"]])
    num_params = count_params(spec) // parallelism.tp  # norms split too, which the figure does
    if parallelism.pp > 1:
        num_params = params_on_rank(spec, parallelism)
    num_bytes = model_states(num_params, PLAYBOOK, parallelism=parallelism)[row["kind"]]
    # the figures' parameter counts are rounded, to 0.3 % at worst
    assert num_bytes / GIB == pytest.approx(float(row["GiB"]), rel=0.003)
