"""Exercise 4 of 00_ranks: pass a message to the right without a deadlock."""

from collections.abc import Callable, Sequence
from math import inf, nan
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.checks.edits import Edit, Own
from course_lib.checks.exercise import Cause, Exercise
from course_lib.checks.judge import ByExample
from course_lib.checks.properties import DIGITS, SEEDS
from course_lib.checks.ranks.parts import KEEPS, VALUE, call_in_turn
from course_lib.checks.watch import ALWAYS, CHANGED, UNWAITED
from course_lib.core import Event

INPUTS = {
    "3 numbers": torch.ones(3),
    "3 other numbers": torch.tensor([2.0, 3.0, 5.0]),
    "a matrix of float64": torch.tensor([[1.5, 2.0], [0.1234567, 3.0]]).double() / 3,
    "1 integer": torch.tensor([2]),
    "nan and inf": torch.tensor([nan, 7.0, -inf]),
}
CIRCLES = (0, 1, 2, 3), (1, 0, 2, 3)  # ranks from left to right
CALLS = "calls"

FOLLOW = Cause(
    "Follow the arrows below: a send waits until its receiver comes to its recv, and a recv for "
    "its sender. So some ranks have to send first, and others to receive first; every rank sends "
    "once, to `right`, and receives once, from `left`."
)
FITTING = Cause(
    "Use send and recv, or isend and irecv, once each in every call, with tensors of one size and "
    "dtype (torch.empty_like(x)): who sends or receives once too often meets the next call."
)
TWO_CALLS = Cause(
    "Each rank makes two calls: it sends x to `right`, and it receives from `left` into a tensor "
    "made with torch.empty_like(x). No more is needed."
)
TWO_NEIGHBORS = Cause("Every rank has two neighbors, `left` and `right`, also in a world of 3.")
FROM_ANYONE = Cause(
    "A receive without a source takes whatever comes first. Where the circle differs from call to "
    "call and a rank is late, that is another call's message: receive from `left`."
)
FROM_RANK = Cause(
    "This circle has another order: use `left` and `right`, and do not compute the neighbors from "
    "`rank`."
)
FROM_THE_RIGHT = Cause("That is the right neighbor's: send to `right`, receive from `left`.")
KEEP_HANDLE = Cause(
    "isend and irecv give a handle, and until its wait() returns, the message may not have left, "
    "or come: keep it, and call wait() on it before you return."
)
OVERWRITTEN = Cause(
    "Receive into a tensor of its own, torch.empty_like(x), and leave the rest as it was."
)
OWN = Cause("That is its own x: return the tensor that was received into.")
THE_SENDER = Cause(
    "That is a rank: dist.recv returns who sent. Return the tensor it received into."
)
CLEANED = Cause("A nan or an inf is a message like any other: return what came, as it came.")
LOOK = Cause("Return the tensor that was received into, as it came, and what came in this call.")


def _observe(rank: int, answer: Callable[..., Tensor], changing: bool = False) -> dict[str, Any]:
    """Pass messages in one circle, or in circles that are `changing` from call to call."""
    arguments = {}
    for number, (label, one) in enumerate(INPUTS.items()):
        is_other = changing and number % 2 > 0
        circle = [each for each in CIRCLES[is_other] if each < dist.get_world_size()]
        place = circle.index(rank)
        left, right = circle[place - 1], circle[(place + 1) % len(circle)]
        where = f"{label}{', in another circle' if is_other else ''}"
        arguments[where] = (one * 10**rank, rank, left, right)
    return call_in_turn(answer, arguments, _facets)


def _facets(
    calls: Sequence[Event], _result: Any, _x: Tensor, _rank: int, left: int, right: int
) -> dict[str, Any]:
    """Return the calls, in any order: `send of 12 bytes to right`."""
    peers = {"send": ("to", right, "right"), "recv": ("from", left, "left")}
    words = []
    for call in calls:
        word, usual, name = peers.get(call.kind, ("", call.peer, ""))
        peer = "anyone" if call.peer is None else f"rank {call.peer}"
        where = f"{word} {name if call.peer == usual else peer}".strip()
        words.append(f"{call.kind} of {call.num_bytes} bytes {where}".strip())
    return {CALLS: sorted(words)}


# --- wrong answers


def _keeps_a_buffer(x: Tensor, rank: int, left: int, right: int) -> Tensor:
    received = _buffers.setdefault((x.shape, x.dtype), torch.empty_like(x))
    sending = dist.isend(x, right)
    dist.recv(received, left)
    if sending:
        sending.wait()
    return received


def _drops_the_handle(x: Tensor, rank: int, left: int, right: int) -> Tensor:
    received = torch.empty_like(x)
    dist.isend(x, right)
    dist.recv(received, left)
    return received


def _returns_too_early(x: Tensor, rank: int, left: int, right: int) -> Tensor:
    received = torch.empty_like(x)
    sending, receiving = dist.isend(x, right), dist.irecv(received, left)
    if sending:
        sending.wait()
    return received if receiving else x


_buffers: dict[Any, Tensor] = {}
BEGIN, END, EVEN = "received = ", "return received", "rank % 2 == 0"
RECEIVES = "left)\n    else:\n        dist.recv(received, left)"
COMPUTED = "p = dist.get_world_size()\nleft, right = (rank - 1) % p, (rank + 1) % p\n"
IN_FLOAT32 = "kind, x = x.dtype, x.float()\nreceived = "

RING = Exercise(
    key="ranks-4",
    title="pass to the right without a deadlock",
    check=ByExample(
        observe_on_rank=_observe,
        worlds=(3, 2, 4),
        runs=lambda _p: ({}, {"changing": True}),
        facets=(UNWAITED, CALLS, CHANGED, VALUE, *ALWAYS),
        rtol=0.0,
        looks=(
            *(("hang", FOLLOW), ("mismatch", FITTING), (UNWAITED, KEEP_HANDLE), (VALUE, LOOK)),
            *((CALLS, TWO_CALLS), (CHANGED, OVERWRITTEN)),
        ),
        success="The left neighbor's message on 2, 3 and 4 ranks, one message sent by each.",
    ),
    wrong=(
        Edit(EVEN, "True", FOLLOW),
        Edit(EVEN, "False", FOLLOW),
        Edit(RECEIVES, "src=None)\n    else:\n        dist.recv(received)", FROM_ANYONE),
        Edit(BEGIN, f"left = right = rank ^ 1\n{BEGIN}", TWO_NEIGHBORS),
        Edit(BEGIN, f"left, right = right, left\n{BEGIN}", FROM_THE_RIGHT),
        Edit(BEGIN, f"{COMPUTED}{BEGIN}", FROM_RANK),
        Edit(END, "return x", OWN),
        Edit(END, "return x.copy_(received)", OVERWRITTEN),
        Edit(END, "return torch.nan_to_num(received)", CLEANED),
        Edit(END, "return torch.zeros_like(x)", LOOK),
        Edit(END, f"dist.recv(received, left)\n{END}", FOLLOW),
        Edit("torch.empty_like(x)", "torch.empty(3)", FITTING),
        Edit(END, "return left", THE_SENDER),
        Edit(BEGIN, IN_FLOAT32, DIGITS, also=((END, f"{END}.to(kind)"),)),
        Own(_keeps_a_buffer, KEEPS),
        Own(_drops_the_handle, KEEP_HANDLE),
        Own(_returns_too_early, KEEP_HANDLE),
        SEEDS,
    ),
)
