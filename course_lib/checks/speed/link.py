"""Exercise 2 of 01b_speed: the tokens per rank from which a ring all-reduce hides."""

from random import Random

from course_lib.checks.cases import Case, Cases, real
from course_lib.checks.edits import Edit
from course_lib.checks.exercise import Cause, Exercise


def _cases() -> list[Case]:
    ranks, rates = (1, 2, 3, 8, 1024), ((989.5e12, 450e9, 2), (312e12, 25e9, 4), (1e12, 1e12, 1))
    return _described([(p, *rate) for p in ranks for rate in rates])


def _described(several: list[tuple[int, float, float, int]]) -> list[Case]:
    return [
        (f"{p} ranks, {flop:g} FLOP/s, {link:g} bytes/s, gradients of {size} bytes", one)
        for one in several
        for p, flop, link, size in [one]
    ]


def _drawn(random: Random) -> list[Case]:
    return _described(
        [(random.randint(2, 99), random.uniform(1e14, 1e15), 5e10, 2) for _ in range(3)]
    )


SHARE, BACKWARD = "2 * (p - 1) / p * grad_bytes", "4 / flop_per_s"
WHOLE_STEP = Cause("Only backward can hide the messages: 4 FLOP per parameter and token, not 6.")
FORWARD = Cause("2 FLOP per parameter and token are those of forward; backward has two products.")
ONE_WAY = Cause("A ring sends twice: a reduce-scatter, then an all-gather.")
ALL_RANKS = Cause("A ring of p ranks sends (p - 1) / p of the gradients, twice.")
ALL_SENT = Cause("(p - 1) / p of the gradients are sent per pass: all of them only for large p.")
SIZE = Cause("A gradient has grad_bytes bytes, which need not be 2.")
INVERSE = Cause("That is the inverse: the times are equal where t * compute = send.")

LINK = Exercise(
    key="speed-2",
    title="tokens that hide a link",
    library=("course_lib.cost.roofline:data_parallel_tokens",),
    check=Cases(
        cases=_cases,
        drawn=_drawn,
        show=real,
        unit=" tokens",
        look="Write down both times for one parameter, and solve for the tokens.",
        success="The model's size cancels: only its rates, p and the gradients' bytes count.",
    ),
    wrong=(
        Edit(BACKWARD, "6 / flop_per_s", WHOLE_STEP),
        Edit(BACKWARD, "2 / flop_per_s", FORWARD),
        Edit(SHARE, "(p - 1) / p * grad_bytes", ONE_WAY),
        Edit(SHARE, "2 * (p - 1) * grad_bytes", ALL_RANKS),
        Edit(SHARE, "2 * grad_bytes", ALL_SENT),
        Edit(SHARE, "2 * (p - 1) / p * 2", SIZE),
        Edit("send_s / compute_s", "compute_s / max(send_s, 1e-99)", INVERSE),
    ),
)
