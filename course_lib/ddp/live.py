"""A DDP step with buckets of one size, predicted. Notebook 06_ddp measures it, too."""

from course_lib.core.live import Curves, Drawing, Live, lanes_of
from course_lib.core.presets import MODELS
from course_lib.core.units import format_bytes, format_seconds
from course_lib.cost.flops import train_step_flop
from course_lib.cost.hardware import H100, links_of_rings
from course_lib.cost.params import count_params
from course_lib.ddp.cost import StepCost, ddp_step, exposed_s, ready_by_share, step_s

LINKS, NUMBERS, SEQ = links_of_rings(H100), [1, 2, 4, 8, 16, 32, 64, 128, 256], 1024
PIECES = 256  # of the gradients, each complete when its part of backward is computed


def cost_on_h100(model: str, sequences: int) -> StepCost:
    """Return the times of a rank at 40 % of an H100's peak, and its gradients in bf16."""
    compute_s = train_step_flop(MODELS[model], sequences, SEQ) / (0.4 * H100.peak())
    ready_s = ready_by_share([1] * PIECES, compute_s * 2 / 3)
    piece_bytes = 2 * count_params(MODELS[model]) // PIECES
    grads = (piece_bytes,) * PIECES
    return StepCost(forward_s=compute_s / 3, ready_s=ready_s, grad_bytes=grads)


def buckets_drawing(model: str, sequences: int, p: int, link: str, num_buckets: int) -> Drawing:
    """Return the lanes of rank 0, and the step over the number of buckets; the best is named."""
    cost, over = cost_on_h100(model, sequences), LINKS[link]
    total = sum(cost.grad_bytes)
    steps_s = {k: step_s(cost, total // k, p, over) for k in NUMBERS}
    best = min(NUMBERS, key=steps_s.__getitem__)
    size, exposed = total // num_buckets, exposed_s(cost, total // num_buckets, p, over)
    is_best = "the best here" if num_buckets == best else f"the best here is {best}"
    events = [event for event in ddp_step(cost, size, p, over) if event.rank == 0]
    steps_ms = {"step": [1e3 * steps_s[k] for k in NUMBERS]}
    return Drawing(
        finding=f"{num_buckets} bucket{'s' * (num_buckets > 1)} of {format_bytes(size)}: "
        f"{format_seconds(exposed)} of communication exposed in a step of "
        f"{format_seconds(steps_s[num_buckets])}; {is_best}",
        panels=[
            lanes_of(events, "time (s)"),
            Curves(x=NUMBERS, ys=steps_ms, x_label="buckets", y_label="step (ms)", log="x"),
        ],
        note=f"predicted: {over}, {p} ranks, H100 at 40 % of its peak, {SEQ} tokens a sequence",
    )


BUCKETS = Live(
    name="bucket_sizes",
    lesson="06_ddp",
    question="How large is a good bucket?",
    choices={
        "model": (["gpt2", "gpt2-xl", "llama-1b"], "gpt2-xl"),
        "sequences": ([1, 2, 4, 8, 16], 4),
        "p": ([2, 8, 64], 8),
        "link": ([*LINKS], "InfiniBand, 1 adapter"),
        "num_buckets": (NUMBERS, 1),
    },
    compute=buckets_drawing,
)
