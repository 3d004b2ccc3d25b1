"""Which part of a step computes, over the tensor-parallel degree. Notebook 07_tensor_parallel."""

from course_lib.core.live import Curves, Drawing, Live
from course_lib.core.presets import MODELS
from course_lib.cost.flops import train_step_flop
from course_lib.cost.hardware import H100, nodes_of
from course_lib.cost.traffic import traffic_s
from course_lib.tensor_parallel.cost import tensor_traffic

DEGREES = (1, 2, 4, 8, 16, 32)
FLOP_PER_S = 0.35 * H100.peak()  # about what the published runs reach at p = 2


def computing_percent(model: str, seq: int, adapters: int, p: int, batch: int) -> float:
    """Return which part of a step on p H100 computes, if no communication is overlapped."""
    link = nodes_of(H100, adapters=adapters)
    compute_s = train_step_flop(MODELS[model], batch, seq) / p / FLOP_PER_S
    communicate_s = traffic_s(tensor_traffic(MODELS[model], batch, seq), p, link)
    return 100 * compute_s / (compute_s + communicate_s)


def computing_curves(model: str, seq: int, adapters: int) -> Curves:
    """Return the part that computes, for one sequence and for one per rank."""
    return Curves(
        x=DEGREES,
        ys={
            "1 sequence": [computing_percent(model, seq, adapters, p, 1) for p in DEGREES],
            "p sequences": [computing_percent(model, seq, adapters, p, p) for p in DEGREES],
        },
        x_label="ranks p, 8 per node",
        y_label="computing (% of the step)",
        log="x",
    )


def computing_by_degree(model: str, seq: int, adapters: int) -> Drawing:
    """Return the curves, and which part of the step computes on 8 and on 16 ranks."""
    curves = computing_curves(model, seq, adapters)
    inside, outside = (curves.ys["1 sequence"][DEGREES.index(p)] for p in (8, 16))
    title = f"{model}, one sequence: computing is {inside:.0f} % of the step on 8 ranks"
    note = "H100 at 35 % of its peak; a ring, latency 3 µs (NVLink 4), 5 µs (NDR); no overlap"
    return Drawing(finding=f"{title}, {outside:.0f} % on 16", panels=[curves], note=note)


DEGREE = Live(
    name="degree_explorer",
    lesson="07_tensor_parallel",
    question="From how many ranks on does a tensor-parallel step mostly send?",
    choices={
        "model": (["gpt2", "llama-1b", "llama-8b", "llama-70b"], "llama-8b"),
        "seq": ([128, 512, 2048, 8192], 2048),
        "adapters": ([8, 4, 2, 1], 8),
    },
    compute=computing_by_degree,
)
