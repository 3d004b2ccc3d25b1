"""Pictures of recomputation: bytes by strategy, and its price in time, beside published values.

Published values are those of Korthikanti et al. 2022: activation memory of models that are split
over 8 GPUs by tensor parallelism (figure 7, which the authors computed), and times of one layer on
8 A100 GPUs (table 4, measured). Notebook 03_recompute.
"""

from collections.abc import Mapping

from matplotlib.figure import Figure

from course_lib.core.parallelism import Parallelism
from course_lib.core.presets import MODELS
from course_lib.core.records import Ledger
from course_lib.cost.flops import forward_flop, recompute_flop
from course_lib.cost.published import rows
from course_lib.display.compare import Voices, compare
from course_lib.display.memory import memory
from course_lib.memory.layer_bytes import Pass, total

PAPER = "Korthikanti et al. 2022"
SIZES = ("22B", "175B", "530B", "1T")  # of the models in the paper
_BILLIONS = (22, 175, 530, 1000)
_ROWS = {  # in table 4
    "none": "Baseline no recompute",
    "selective": "Selective Recompute",
    "full": "Baseline with recompute",
}


def strategies(predicted: Mapping[str, int], measured: Mapping[str, Ledger], title: str) -> Figure:
    """Draw the peak of each strategy twice: as the formula predicts it, and as it was measured."""
    bars: dict[str, Ledger] = {}
    for how, ledger in measured.items():
        formula = Ledger()
        formula.add(0.0, activations=predicted[how])
        bars |= {f"{how}: formula": formula, f"{how}: measured": ledger}
    return memory(bars, title)


def published_memory(title: str) -> Figure:
    """Draw the activation memory of large models by strategy: our formula, and the paper's."""
    curves = {
        how: Voices(
            formula=[share_of_none(size, how) for size in SIZES],
            published=(_BILLIONS, [published_share(size, how) for size in SIZES]),
        )
        for how in ("selective", "full")
    }
    return compare(
        _BILLIONS,
        curves,
        title,
        x_label="parameters (billion)",
        y_label="% of the bytes without recompute",
        log_x=True,
        names={"published": "published (computed by the authors)"},
        note="activations of one GPU out of 8, with tensor parallelism; sequences of 2,048 tokens",
        source=f"{PAPER}, figure 7",
    )


def share_of_none(size: str, how: str) -> float:
    """Return the bytes that one layer of a model of the paper keeps, in % of those without."""
    layer = Pass(
        spec=MODELS[f"megatron-{size.lower()}"],
        batch=1,
        seq=2048,
        flash=False,
        dropout=True,
        parallelism=Parallelism(tp=8),
    )
    return 100 * total(layer.kept_layer(how)) / total(layer.kept_layer())


def published_share(size: str, how: str) -> float:
    """Return the same percentage as the paper has it."""
    (row,) = (
        row
        for row in rows("korthikanti22")
        if row["table"].startswith("Figure 7") and (row["model"], row["method"]) == (size, how)
    )
    return float(row["value"])


def price(flop: Mapping[str, float], time: Mapping[str, float], title: str) -> Figure:
    """Draw the time of a step against its FLOPs, both as multiples of those without recompute."""
    paper = published_price()
    return compare(
        list(flop.values()),
        Voices(
            formula=lambda multiple: multiple,
            measurement=list(time.values()),
            published=([each[0] for each in paper.values()], [each[1] for each in paper.values()]),
        ),
        title,
        x_label="FLOPs, as a multiple of none",
        y_label="time, as a multiple of none",
        names={"formula": "time as FLOPs"},
        note="from left to right: none, selective, full; the fastest of 10 steps",
        source=f"{PAPER}, table 4 (FLOPs: our count): one layer of a 22B model on 8 A100 GPUs",
    )


def published_price() -> dict[str, tuple[float, float]]:
    """Return FLOPs and time of one layer by strategy, as multiples of those without recompute."""
    ms = {
        row["method"]: float(row["value"])
        for row in rows("korthikanti22")
        if row["table"].startswith("Table 4") and row["value_name"] == "combined_ms"
    }
    layer = forward_flop(MODELS["megatron-22b"], 4, 2048) | {"logits": 0}
    none = 3 * sum(layer.values())
    return {
        how: (1 + recompute_flop(layer, how) / none, ms[row] / ms[_ROWS["none"]])
        for how, row in _ROWS.items()
    }
