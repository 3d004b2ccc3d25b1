"""Interactive picture: which part of a step computes, over the tensor-parallel degree.

Everything is a formula, so a slider responds at once. Notebook 07_tensor_parallel.
"""

from collections.abc import Sequence

from matplotlib.figure import Figure

from course_lib.core.presets import MODELS
from course_lib.cost.flops import train_step_flop
from course_lib.cost.hardware import H100, nodes_of
from course_lib.cost.traffic import traffic_s
from course_lib.display.compare import Voices, compare
from course_lib.display.explore import Explore, explore
from course_lib.tensor_parallel.cost import tensor_traffic

DEGREES = (1, 2, 4, 8, 16, 32)
FLOP_PER_S = 0.35 * H100.peak()  # about what the published runs reach at p = 2


def degree_explorer() -> Explore:
    """Return a picture with sliders for model, tokens per sequence, and adapters per node."""
    models = ["gpt2", "llama-1b", "llama-8b", "llama-70b"]
    return explore(
        by_degree,
        computing_alt,
        model=(models, "llama-8b"),
        seq=([128, 512, 2048, 8192], 2048),
        adapters=([8, 4, 2, 1], 8),
    )


def computing_percent(model: str, seq: int, adapters: int, p: int, batch: int) -> float:
    """Return which part of a step on p H100 computes, if no communication is overlapped."""
    link = nodes_of(H100, adapters=adapters)
    compute_s = train_step_flop(MODELS[model], batch, seq) / p / FLOP_PER_S
    communicate_s = traffic_s(tensor_traffic(MODELS[model], batch, seq), p, link)
    return 100 * compute_s / (compute_s + communicate_s)


def computing_alt(model: str, seq: int, adapters: int) -> str:
    """Return the finding as a sentence: which part of the step computes on 8 and on 16 ranks."""
    inside, outside = (computing_percent(model, seq, adapters, p, 1) for p in (8, 16))
    title = f"{model}, one sequence: computing is {inside:.0f} % of the step on 8 ranks"
    return f"{title}, {outside:.0f} % on 16"


def by_degree(model: str, seq: int, adapters: int, degrees: Sequence[int] = DEGREES) -> Figure:
    """Draw the part of a step that computes, for one sequence and for one per rank."""
    one = [computing_percent(model, seq, adapters, p, 1) for p in degrees]
    more = [computing_percent(model, seq, adapters, p, p) for p in degrees]
    curves = {"1 sequence": Voices(simulation=one), "p sequences": Voices(simulation=more)}
    return compare(
        degrees,
        curves,
        computing_alt(model, seq, adapters),
        x_label="ranks p, 8 per node",
        y_label="computing (% of the step)",
        log_x=True,
        names={"simulation": "formula"},
        note="H100 at 35 % of its peak; a ring, latency 3 µs (NVLink 4), 5 µs (NDR); no overlap",
    )
