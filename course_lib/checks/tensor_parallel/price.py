"""Exercise 5 of 07_tensor_parallel, with its planted mistakes: the cost of a split layer."""

from collections.abc import Callable

from course_lib.checks.exercise import CheckFailed, Exercise, Mistake
from course_lib.core import Link

NVLINK = Link(name="NVLink", latency_s=3e-6, bytes_per_s=300e9)
SLOW = Link(name="a slow wire", latency_s=2e-3, bytes_per_s=1e6)
# (compute_s, batch, seq, hidden, p, link)
CASES = (
    (0.4, 3, 50, 20, 3, SLOW),
    (0.4, 1, 64, 32, 1, SLOW),
    (0.4, 1, 64, 32, 2, SLOW),
    (0.012, 2, 4096, 4096, 8, NVLINK),
    (0.012, 1, 2048, 8192, 16, NVLINK),
)
Price = Callable[[float, int, int, int, int, Link], float]


def layer_s(compute_s: float, batch: int, seq: int, hidden: int, p: int, link: Link) -> float:
    """Add a part of the computation and four all-reduces of the output: the right answer."""
    num_bytes = 2 * batch * seq * hidden
    all_reduce_s = 2 * (p - 1) * (link.latency_s + num_bytes / p / link.bytes_per_s)
    return compute_s / p + 4 * all_reduce_s


def check_price(answer: Price) -> str:
    """Check slow and fast links, 1 to 16 ranks."""
    found = [_number(answer(*case)) for case in CASES]
    for case, got in zip(CASES, found, strict=True):
        if not _near(got, layer_s(*case)):
            _, batch, seq, hidden, p, link = case
            raise CheckFailed(
                f"batch {batch}, seq {seq}, hidden {hidden} on {p} ranks over {link}: need "
                f"{layer_s(*case) * 1e3:.6g} ms; got {got * 1e3:.6g} ms. {_why(found)}"
            )
    return "Right for 1 to 16 ranks, on slow and fast links."


def _number(seconds: float) -> float:
    if not isinstance(seconds, float | int) or isinstance(seconds, bool):
        raise CheckFailed(f"need a number of seconds; got {seconds!r}. Does it return it?")
    return seconds


def _near(got: float, need: float) -> bool:
    return abs(got - need) <= 1e-9 * abs(need)


def _why(found: list[float]) -> str:
    """Return the first misconception that explains all the numbers."""
    for wrong, says in WRONG:
        if all(_near(got, wrong(*case)) for case, got in zip(CASES, found, strict=True)):
            return says
    if not _near(found[1], CASES[1][0]):
        return "Try p = 1: one rank has nobody to talk to, and takes compute_s."
    return "Each rank computes its part; then look at the bytes, and at the number of all-reduces."


def _with(num_calls: float = 4, scale: float = 1.0, steps: float = 2.0) -> Price:
    """Return the cost with other numbers of all-reduces, bytes, or steps of a ring."""

    def price(compute_s: float, batch: int, seq: int, hidden: int, p: int, link: Link) -> float:
        num_bytes = 2 * batch * seq * hidden * scale
        each_s = steps * (p - 1) * (link.latency_s + num_bytes / p / link.bytes_per_s)
        return compute_s / p + num_calls * each_s

    return price


def _whole_compute(
    compute_s: float, batch: int, seq: int, hidden: int, p: int, link: Link
) -> float:
    return compute_s - compute_s / p + layer_s(compute_s, batch, seq, hidden, p, link)


def _whole_message(
    compute_s: float, batch: int, seq: int, hidden: int, p: int, link: Link
) -> float:
    num_bytes = 2 * batch * seq * hidden
    return compute_s / p + 8 * (p - 1) * (link.latency_s + num_bytes / link.bytes_per_s)


def _split_message(
    compute_s: float, batch: int, seq: int, hidden: int, p: int, link: Link
) -> float:
    num_bytes = 2 * batch * seq * hidden / p
    return compute_s / p + 8 * (p - 1) * (link.latency_s + num_bytes / p / link.bytes_per_s)


def _no_latency(compute_s: float, batch: int, seq: int, hidden: int, p: int, link: Link) -> float:
    free = Link(name=link.name, latency_s=0.0, bytes_per_s=link.bytes_per_s)
    return layer_s(compute_s, batch, seq, hidden, p, free)


def _one_latency(compute_s: float, batch: int, seq: int, hidden: int, p: int, link: Link) -> float:
    sent_s = 2 * (p - 1) / p * 2 * batch * seq * hidden / link.bytes_per_s
    return compute_s / p + 4 * (link.latency_s + sent_s)


def _p_steps(compute_s: float, batch: int, seq: int, hidden: int, p: int, link: Link) -> float:
    num_bytes = 2 * batch * seq * hidden
    return compute_s / p + 8 * p * (link.latency_s + num_bytes / p / link.bytes_per_s)


def _overlapped(compute_s: float, batch: int, seq: int, hidden: int, p: int, link: Link) -> float:
    talk_s = layer_s(0.0, batch, seq, hidden, p, link)
    return max(compute_s / p, talk_s)


def _all_shared(compute_s: float, batch: int, seq: int, hidden: int, p: int, link: Link) -> float:
    return compute_s / p + layer_s(0.0, batch, seq, hidden, p, link) / p


def _hidden_only(compute_s: float, batch: int, seq: int, hidden: int, p: int, link: Link) -> float:
    """Send the bytes of the weights' gradient, as in data parallelism, not an activation's."""
    num_bytes = 2 * hidden * hidden
    return compute_s / p + 8 * (p - 1) * (link.latency_s + num_bytes / p / link.bytes_per_s)


def _talks_alone(compute_s: float, batch: int, seq: int, hidden: int, p: int, link: Link) -> float:
    return compute_s / p + 4 * (link.latency_s + 2 * batch * seq * hidden / link.bytes_per_s)


HALF = (
    "Half of the talking is missing. Forward has two all-reduces (g), and backward has two (f); "
    "each is a reduce-scatter and an all-gather, 2 (p - 1) steps."
)
ONE_BLOCK = "Attention and MLP, forward and backward: how many all-reduces are that?"
DTYPE = "A number takes 2 bytes in bf16."
WRONG: tuple[tuple[Price, str], ...] = (
    (_with(num_calls=2), HALF),
    (_with(num_calls=1), ONE_BLOCK),
    (_with(num_calls=8), "Twice too many: only one of f and g talks in each direction."),
    (_with(scale=2), DTYPE),
    (_with(scale=0.5), DTYPE),
    (_with(scale=4), "The sums have hidden numbers a token; ffn_hidden stays inside a rank."),
    (_with(steps=1), HALF),
    (_whole_compute, "Each rank computes only its part of the layer: compute_s / p."),
    (_whole_message, "In each step of the ring a rank sends a shard: 1 / p of the bytes."),
    (_split_message, "The sum is whole on every rank: it has batch * seq * hidden numbers."),
    (_no_latency, "Each step of the ring pays the latency, too."),
    (_hidden_only, "Activations travel, not weights: batch * seq * hidden numbers."),
    (_one_latency, "Each step of the ring pays the latency, and an all-reduce has 2 (p - 1)."),
    (_p_steps, "A ring of p ranks has p - 1 steps each way: nobody needs its own shard."),
    (_overlapped, "Nothing hides the talking: the next matrix waits for it. Add the two."),
    (
        _all_shared,
        "Computing becomes less with more ranks; talking does not: divide compute_s only.",
    ),
)

PRICE = Exercise(
    key="tensor_parallel-5",
    title="the price of a split layer",
    check=check_price,
    reference=layer_s,
    mistakes=(
        Mistake("forward only", WRONG[0][0], says="Half of the talking"),
        Mistake("one all_reduce", WRONG[1][0], says="how many all-reduces"),
        Mistake("both talk", WRONG[2][0], says="only one of f and g"),
        Mistake("float32", WRONG[3][0], says="2 bytes in bf16"),
        Mistake("numbers for bytes", WRONG[4][0], says="2 bytes in bf16"),
        Mistake("width of the MLP", WRONG[5][0], says="ffn_hidden stays inside"),
        Mistake("half a ring", WRONG[6][0], says="2 (p - 1) steps"),
        Mistake("computes all", WRONG[7][0], says="compute_s / p"),
        Mistake("whole messages", WRONG[8][0], says="sends a shard"),
        Mistake("split sums", WRONG[9][0], says="whole on every rank"),
        Mistake("no latency", WRONG[10][0], says="pays the latency"),
        Mistake("weights' bytes", WRONG[11][0], says="Activations travel"),
        Mistake("one latency", WRONG[12][0], says="pays the latency, and"),
        Mistake("p steps", WRONG[13][0], says="p - 1 steps each way"),
        Mistake("hidden behind computing", WRONG[14][0], says="Nothing hides"),
        Mistake("shares the talking", WRONG[15][0], says="divide compute_s only"),
        Mistake("talks alone", _talks_alone, says="nobody to talk to"),
    ),
)
