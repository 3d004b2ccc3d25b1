"""The pictures of the deck 06_ddp, drawn by the functions that the notebook calls."""

from dataclasses import dataclass, replace

from course_lib.core import MODELS, Link
from course_lib.ddp import cost
from course_lib.ddp import pictures as lesson_pictures
from course_lib.display import timelines, waiting
from course_lib.models import GPT, next_tokens, token_batch, token_loss

WIRE = Link(name="Ethernet", latency_s=2e-3, bytes_per_s=80e6)
LINKS = {"80 MB/s": WIRE, "20 MB/s": replace(WIRE, bytes_per_s=20e6)}
NUMBERS = (1, 2, 3, 4, 6, 8, 12, 24)
NUM_LAYERS, LAYER_BYTES = 24, 2**17
COST = cost.StepCost(
    forward_s=NUM_LAYERS * 1.5e-3,
    ready_s=cost.ready_by_share([1] * NUM_LAYERS, NUM_LAYERS * 3e-3),
    grad_bytes=(LAYER_BYTES,) * NUM_LAYERS,
)
N = NUM_LAYERS * LAYER_BYTES


@dataclass(frozen=True)
class Wait:
    """One rank that waits, for the picture of the hang."""

    rank: int
    waits_for: tuple[int, ...]
    kind: str = "all_reduce"
    where: str = "loss.backward()"
    line: int = 4


def ready():
    """The order in which the gradients of a small GPT become ready."""
    gpt, order = GPT(MODELS["tiny"]), []
    inputs, targets = next_tokens(token_batch(0, batch=4, seq=16, vocab=256))
    names = {param: name for name, param in gpt.named_parameters()}
    for param in names:
        param.register_post_accumulate_grad_hook(lambda param: order.append(names[param]))
    token_loss(gpt(inputs), targets).backward()
    return lesson_pictures.ready_order([*names.values()], order)[0]


def rank_0(num_buckets, **more):
    """The predicted step on one rank: the other one looks the same."""
    events = cost.ddp_step(COST, N / num_buckets, 2, WIRE, **more)
    return [_short(event) for event in events if event.rank == 0]


def _short(event):
    """`bucket 3` as `3`, which fits into a narrow box."""
    return replace(event, label=event.label.removeprefix("bucket "))


def hidden():
    """The same step, without and with overlap."""
    runs = {"sent after backward": rank_0(6, overlap=False), "sent as they fill": rank_0(6)}
    late_s, early_s = (max(event.end_s for event in events) for events in runs.values())
    title = f"Predicted for six buckets: {early_s * 1e3:.0f} ms instead of {late_s * 1e3:.0f} ms"
    return timelines(runs, title, link=WIRE)


def ends():
    """One bucket, the best number, and a bucket per layer."""
    best = N // cost.best_bucket_bytes(COST, 2, WIRE, [N // k for k in NUMBERS])
    runs = {f"{k} bucket{'s' * (k > 1)}": rank_0(k) for k in (1, best, NUM_LAYERS)}
    title = f"One bucket hides nothing; {NUM_LAYERS} buckets queue up"
    return timelines(runs, title, link=WIRE)


def sizes():
    """Time of a step over the number of buckets on two links: formula and simulation."""
    return lesson_pictures.sweep(COST, LINKS, NUMBERS)[0]


def hang():
    """Rank 2 has one batch more."""
    return waiting([Wait(2, (0, 1, 3))], 4)


def pictures():
    """All pictures by the names the deck calls them."""
    return {draw.__name__: draw() for draw in (ready, hidden, ends, sizes, hang)}
