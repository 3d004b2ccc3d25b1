"""Interactive picture: the time of one layer of experts, over the ranks that share it.

Everything is a formula, so a slider responds at once. Notebook 16_experts.
"""

from matplotlib.figure import Figure

from course_lib.core.presets import MODELS
from course_lib.cost.hardware import H100
from course_lib.display.compare import Voices, compare
from course_lib.display.explore import Explore, explore
from course_lib.expert_parallel.cost import level_bytes

TOKENS, ON_NODE, FLOP_PER_S = 4096, 8, 0.4 * H100.peak()
EPS = (1, 2, 4, 8, 16, 32, 64)
LIMITS = {"any": None, "4": 4, "2": 2, "1": 1}


def expert_explorer() -> Explore:
    """Return a picture with sliders: model, load of the fullest rank, limit on nodes per token."""
    return explore(
        by_ep,
        exposed_alt,
        model=(["mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v3"], "deepseek-v3"),
        fullest=([1.0, 1.2, 1.5, 2.0, 3.0], 1.2),
        sends_once=True,
        most_nodes=(list(LIMITS), "any"),
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


def _degrees(model: str) -> list[int]:
    experts = MODELS[model].experts
    return [ep for ep in EPS if experts and ep <= experts.count]


def exposed_alt(model: str, fullest: float, sends_once: bool, most_nodes: str) -> str:
    """Return the finding as a sentence: milliseconds on the most ranks."""
    ep = _degrees(model)[-1]
    experts_ms, sent_ms = layer_ms(model, ep, fullest, sends_once, most_nodes)
    return f"{model} on {ep} ranks: experts {experts_ms:.1f} ms, exchange {sent_ms:.1f} ms"


def by_ep(model: str, fullest: float, sends_once: bool, most_nodes: str) -> Figure:
    """Draw both times over ep, for equal tokens on each rank."""
    eps = _degrees(model)
    found = [layer_ms(model, ep, fullest, sends_once, most_nodes) for ep in eps]
    computed, sent = zip(*found, strict=True)
    curves = {
        "experts": Voices(formula=computed),
        "dispatch and combine": Voices(formula=sent),
    }
    return compare(
        eps,
        curves,
        exposed_alt(model, fullest, sends_once, most_nodes),
        x_label="ep, 8 ranks per node",
        y_label="ms of a layer's forward",
        log_x=True,
        note=f"{TOKENS:,} tokens per rank, bf16; H100 at 40 % of its peak, NVLink inside a node, "
        "InfiniBand NDR between nodes; no overlap",
    )
