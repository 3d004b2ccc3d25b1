"""The time of one layer of experts, over the ranks that share it. Notebook 16_experts."""

from typing import Any

from course_lib.core.live import Curves, Drawing, Live
from course_lib.core.presets import MODELS
from course_lib.cost.hardware import H100
from course_lib.expert_parallel.cost import level_bytes

TOKENS, ON_NODE, FLOP_PER_S = 4096, 8, 0.4 * H100.peak()
EPS = (1, 2, 4, 8, 16, 32, 64)
LIMITS = {"any": None, "4": 4, "2": 2, "1": 1}
NOTE = (
    f"{TOKENS:,} tokens per rank, bf16; H100 at 40 % of its peak, NVLink inside a node, "
    "InfiniBand NDR between nodes; no overlap"
)


def layer_ms(
    model: str, ep: int, fullest: float, sends_once: bool, most_nodes: str
) -> tuple[float, float]:
    """Return the milliseconds of a layer's forward: experts, and dispatch and combine.

    fullest   copies of the fullest rank divided by the mean
    """
    spec, experts = MODELS[model], MODELS[model].experts
    copies = TOKENS * (experts.active if experts else 1)
    wide = experts.ffn_hidden if experts else spec.ffn_hidden
    compute_s = 6 * copies * spec.hidden * wide * fullest / FLOP_PER_S  # three matrices
    inside, outside = level_bytes(
        2.0 * copies * spec.hidden,
        ep,
        min(ep, ON_NODE),
        experts.active if experts else 1,
        sends_once=sends_once,
        most_nodes=LIMITS[most_nodes],
    )
    nvlink, ndr = H100.links["NVLink"], H100.links["InfiniBand NDR"]
    return 1e3 * compute_s, 2e3 * fullest * max(inside / nvlink, outside / ndr)


def experts_curves(model: str, fullest: float, sends_once: bool, most_nodes: str) -> Curves:
    """Return both times over ep, for equal tokens on each rank."""
    experts = MODELS[model].experts
    eps = [ep for ep in EPS if experts and ep <= experts.count]
    found = [layer_ms(model, ep, fullest, sends_once, most_nodes) for ep in eps]
    computed, sent = zip(*found, strict=True)
    ys = {"experts": computed, "dispatch and combine": sent}
    y_label = "ms of a layer's forward"
    return Curves(x=eps, ys=ys, x_label="ep, 8 ranks per node", y_label=y_label, log="x")


def experts_drawing(**values: Any) -> Drawing:
    """Return the curves, and as the finding the milliseconds on the most ranks."""
    curves = experts_curves(**values)
    experts_ms, sent_ms = (ys[-1] for ys in curves.ys.values())
    return Drawing(
        finding=f"{values['model']} on {curves.x[-1]} ranks: experts {experts_ms:.1f} ms, "
        f"exchange {sent_ms:.1f} ms",
        panels=[curves],
        note=NOTE,
    )


EXPERTS = Live(
    name="expert_explorer",
    lesson="16_experts",
    question="How many ranks can share the experts before their exchange takes longer than they?",
    choices={
        "model": (["deepseek-v3", "qwen3-30b-a3b", "mixtral-8x7b"], "deepseek-v3"),
        "fullest": ([1.0, 1.2, 1.5, 2.0, 3.0], 1.2),
        "sends_once": True,
        "most_nodes": ([*LIMITS], "any"),
    },
    compute=experts_drawing,
)
