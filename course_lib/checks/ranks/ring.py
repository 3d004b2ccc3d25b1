"""Exercise 4 of 00_ranks: pass a message to the right without a deadlock."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf, nan
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.checks.edits import Edit, Own
from course_lib.checks.exercise import Cause, Exercise
from course_lib.checks.expectations import (
    DIGITS_LOST,
    Demand,
    Numbers,
    OnlyKinds,
    Traffic,
    Untouched,
)
from course_lib.checks.on_ranks import At, OnRanks, Trouble
from course_lib.checks.ranks.parts import (
    ELSEWHERE,
    KEEPS,
    STILL_THERE,
    Returned,
    dropped,
    watch_in_turn,
)

FIRST, SECOND = "3 numbers", "3 other numbers"
OTHER_CIRCLE = "another circle of ranks"
INPUTS = {
    FIRST: torch.ones(3),
    SECOND: torch.tensor([2.0, 3.0, 5.0]),
    "a matrix of float64": torch.tensor([[1.5, 2.0], [0.1234567, 3.0]]).double() / 3,
    "1 integer": torch.tensor([2]),
    "nan and inf": torch.tensor([nan, 7.0, -inf]),
    OTHER_CIRCLE: torch.tensor([3.0]),
}
CIRCLES = (0, 1, 2, 3), (1, 0, 2, 3)  # ranks from left to right; the second in OTHER_CIRCLE

ALL_SEND = Cause("Everybody is in a send, and a send waits until somebody receives.")
ALL_RECEIVE = Cause(
    "Everybody is in a recv, and a recv waits until somebody sends: some ranks have to send first, "
    "and nobody receives twice."
)
GONE = Cause(
    "A rank waits for one that has returned: either that one left out its send or its recv, or "
    "this one makes one too many. Every rank sends once and receives once."
)
NOTHING_CAME = Cause(
    "Nothing can come from the left without a receive: make a tensor with torch.empty_like(x), and "
    "receive from `left` into it."
)
WRONG_PARTNER = Cause("A rank has the wrong partner: send to `right`, receive from `left`.")
FOLLOW = Cause("Follow the arrows: each rank's call needs its partner's call at the same time.")
TWO_NEIGHBORS = Cause("Every rank has two neighbors, `left` and `right`, also in a world of 3.")
P2P_ONLY = Cause("Use send and recv, or isend and irecv.")
FROM_ANYONE = Cause(
    "A receive without a source takes whatever comes first. Where the circle differs from call to "
    "call and a rank is late, that is another call's message: receive from `left`."
)
ANOTHER_SIZE = Cause(
    "The tensors sent and received differ in size or dtype: use torch.empty_like(x). If that "
    "is what you use, a rank has sent or received once too often, and meets the next call."
)
KEEP_SENDING = Cause(
    "isend gives a handle: keep it, and call wait() on it before you return, or the message may be "
    "lost."
)
KEEP_RECEIVING = Cause(
    "irecv gives a handle, and until its wait() returns, the message may not be there: keep it, "
    "and call wait() on it before you return, or call recv."
)
OVERWRITTEN = Cause("Receive into a tensor of its own: torch.empty_like(x).")
OWN = Cause("That is its own x: return the tensor that was received into.")
FROM_RANK = Cause(
    "That is from rank - 1, which stands elsewhere in this circle: use `left` and `right`, and do "
    "not compute the neighbors from `rank`."
)
FROM_THE_RIGHT = Cause("That is the right neighbor's: send to `right`, receive from `left`.")
THE_SENDER = Cause(
    "That is a rank: dist.recv returns who sent. Return the tensor it received into."
)
NOBODY_SENT = Cause(
    "Nobody sent these numbers: until a message comes into it, torch.empty holds whatever the "
    "memory held. Return the tensor that was received into."
)
CLEANED = Cause("A nan or an inf is a message like any other: return what came, as it came.")
ONE_MESSAGE = Cause("One message is enough: each rank sends its x once, and nothing else.")


@dataclass
class Passed(Returned):
    """Observation of one call, and how many receives it started, ended or not."""

    receives: int = 0


def _neighbor(circle: Sequence[int], rank: int, step: int, p: int) -> int:
    """Return the rank that is so many steps further to the right, in a circle of p ranks."""
    ranks = [each for each in circle if each < p]
    return ranks[(ranks.index(rank) + step) % p]


def _circle(label: str) -> Sequence[int]:
    return CIRCLES[label == OTHER_CIRCLE]


def _pass_on(rank: int, answer: Callable[..., Tensor]) -> dict[str, Passed]:
    p = dist.get_world_size()
    call_board = cast(Any, dist.group.WORLD).tracer.call_board
    started = list[int]()

    def counted(*given: Any) -> Any:
        before = sum(post.kind == "recv" for post in call_board.history(rank))
        result = answer(*given)
        started.append(sum(post.kind == "recv" for post in call_board.history(rank)) - before)
        return result

    arguments = {
        label: (one * 10**rank, rank, *(_neighbor(_circle(label), rank, s, p) for s in (-1, 1)))
        for label, one in INPUTS.items()
    }
    seen = watch_in_turn(counted, arguments)
    return {
        label: Passed(**vars(one), receives=count)
        for (label, one), count in zip(seen.items(), started, strict=True)
    }


def _of(step: int) -> Callable[[At], Tensor]:
    """Return the x of the rank that is so many steps further to the right."""
    return lambda at: (
        INPUTS[at.label] * 10 ** _neighbor(_circle(at.label), at.rank, step, at.world_size)
    )


def _of_rank_before(at: At) -> Tensor | str:
    in_other = at.label == OTHER_CIRCLE
    return INPUTS[at.label] * 10 ** ((at.rank - 1) % at.world_size) if in_other else ELSEWHERE


def _of_the_first_call(at: At) -> Tensor | str:
    first = At(at.run, at.rank, FIRST)
    return _of(-1)(first) if at.label == SECOND else ELSEWHERE


def _cleaned(at: At, got: Tensor, _item: None) -> bool:
    """Return whether only what is nan or inf has become another number."""
    sent = _of(-1)(at)
    finite = sent.isfinite()
    return not bool(finite.all()) and torch.equal(got[finite], sent[finite])


def _names_its_sender(at: At) -> bool:
    return all(call.peer is not None for call in at.seen.calls if call.kind == "recv")


def _nobodys(at: At, got: Tensor, _item: None) -> bool:
    everybody = torch.stack([_of(step)(at) for step in range(at.world_size)])
    return got.shape == everybody[0].shape and not torch.isin(got, everybody).any()


def _has_ended(kind: str) -> Callable[[At], bool]:
    return lambda at: any(call.kind == kind for call in at.seen.calls)


def _all_in(kind: str) -> Callable[[Trouble], bool]:
    return lambda trouble: not trouble.returned and all(wait.kind == kind for wait in trouble.waits)


def _receives_from_anyone(trouble: Trouble) -> bool:
    return any(wait.kind == "recv" and len(wait.waits_for) > 1 for wait in trouble.waits)


def _waits_for_one_that_returned(trouble: Trouble) -> bool:
    return any(not set(wait.waits_for).isdisjoint(trouble.returned) for wait in trouble.waits)


def _wrong_partner(trouble: Trouble) -> bool:
    """Return whether no circle has all these sends go right and receives come from left."""
    step, p = {"send": 1, "recv": -1}, len(trouble.waits) + len(trouble.returned)
    return all(
        any(
            wait.kind in step
            and tuple(wait.waits_for) != (_neighbor(circle, wait.rank, step[wait.kind], p),)
            for wait in trouble.waits
        )
        for circle in CIRCLES
    )


def _of_p2p_only(trouble: Trouble) -> bool:
    return set(trouble.mismatched) <= {"send", "recv"}


def _by_pairs(x: Tensor, rank: int, left: int, right: int) -> Tensor:
    received, partner = torch.empty_like(x), rank ^ 1
    first, second = (dist.send, dist.recv) if rank % 2 == 0 else (dist.recv, dist.send)
    first(x if first is dist.send else received, partner)
    second(x if second is dist.send else received, partner)
    return received


def _returns_too_early(x: Tensor, rank: int, left: int, right: int) -> Tensor:
    received = torch.empty_like(x)
    sending, receiving = dist.isend(x, right), dist.irecv(received, left)
    if sending:
        sending.wait()
    return received if receiving else x


def _receives_nothing(x: Tensor, rank: int, left: int, right: int) -> Tensor:
    return torch.empty_like(x)


def _keeps_a_buffer(x: Tensor, rank: int, left: int, right: int) -> Tensor:
    received = _buffers.setdefault((x.shape, x.dtype), torch.empty_like(x))
    sending = dist.isend(x, right)
    dist.recv(received, left)
    if sending:
        sending.wait()
    return received


def _sends_float32(x: Tensor, rank: int, left: int, right: int) -> Tensor:
    received = torch.empty(x.shape)
    sending = dist.isend(x.float(), right)
    dist.recv(received, left)
    if sending:
        sending.wait()
    return received.to(x.dtype)


def _returns_the_sender(x: Tensor, rank: int, left: int, right: int) -> int | None:
    sending = dist.isend(x, right)
    sender = dist.recv(torch.empty_like(x), left)
    if sending:
        sending.wait()
    return sender


def _drops_the_handle(x: Tensor, rank: int, left: int, right: int) -> Tensor:
    received = torch.empty_like(x)
    dist.isend(x, right)
    dist.recv(received, left)
    return received


def _never_waits(x: Tensor, rank: int, left: int, right: int) -> Tensor:
    received = torch.empty_like(x)
    sending = dist.isend(x, right)
    dist.recv(received, left)
    return received if sending else x


def _gathers(x: Tensor, rank: int, left: int, right: int) -> Tensor:
    everybody = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(everybody, x)
    return everybody[left]


def _there_and_back(x: Tensor, rank: int, left: int, right: int) -> Tensor:
    received = torch.empty_like(x)
    for to, of in ((right, left), (left, right), (right, left)):
        sending = dist.isend(x, to)
        dist.recv(received, of)
        if sending:
            sending.wait()
    return received


_buffers: dict[Any, Tensor] = {}
AGAIN = "if rank == 0:\n    dist.recv(received, left)\n"
COMPUTED = "p = dist.get_world_size()\nleft, right = (rank - 1) % p, (rank + 1) % p\n"
EVEN = "rank % 2 == 0"
SEND_FIRST = f"{EVEN}:\n        dist.send(x, "

RING = Exercise(
    key="ranks-4",
    title="pass to the right without a deadlock",
    check=OnRanks(
        observe_on_rank=_pass_on,
        worlds=(3, 2, 4),
        trouble=(
            ("hang", dropped("send"), KEEP_SENDING),
            ("hang", dropped("recv"), KEEP_RECEIVING),
            ("hang", _receives_from_anyone, FROM_ANYONE),
            ("hang", _waits_for_one_that_returned, GONE),
            ("hang", _wrong_partner, WRONG_PARTNER),
            ("hang", _all_in("send"), ALL_SEND),
            ("hang", _all_in("recv"), ALL_RECEIVE),
            ("hang", "", FOLLOW),
            ("raised", "MeshError", TWO_NEIGHBORS),
            ("mismatch", _of_p2p_only, ANOTHER_SIZE),
            ("mismatch", "", P2P_ONLY),
        ),
        expect=(
            OnlyKinds(("send", "recv"), P2P_ONLY),
            Untouched(OVERWRITTEN),
            Demand(lambda at: at.seen.receives > 0, "calls neither recv nor irecv", NOTHING_CAME),
            Demand(
                _has_ended("recv"),
                "returns without knowing whether its message has come",
                KEEP_RECEIVING,
            ),
            Demand(_names_its_sender, "receives from anyone", FROM_ANYONE),
            Numbers(
                "value",
                _of(-1),
                predicates=((lambda _at, got, _item: isinstance(got, int), THE_SENDER),),
                causes=(
                    (KEEPS, _of_the_first_call),
                    (OWN, _of(0)),
                    (FROM_RANK, _of_rank_before),
                    (FROM_THE_RIGHT, _of(1)),
                ),
                otherwise=((_cleaned, CLEANED), (_nobodys, NOBODY_SENT)),
                look=Cause("Who sent this number?"),
            ),
            Traffic(ONE_MESSAGE, lambda _at: 1, lambda at: INPUTS[at.label].nbytes),
            Demand(
                _has_ended("send"),
                "returns without knowing whether its message has left",
                KEEP_SENDING,
            ),
            STILL_THERE,
        ),
        success="The left neighbor's message on 2, 3 and 4 ranks, one message sent by each.",
    ),
    wrong=(
        Edit(EVEN, "True", ALL_SEND),
        Edit(EVEN, "False", ALL_RECEIVE),
        Edit(
            "left)\n    else:\n        dist.recv(received, left)",
            "src=None)\n    else:\n        dist.recv(received)",
            FROM_ANYONE,
        ),
        Edit("return received", "return torch.nan_to_num(received)", CLEANED),
        Own(_by_pairs, TWO_NEIGHBORS),
        Edit("received = ", "left, right = right, left\nreceived = ", FROM_THE_RIGHT),
        Edit("return received", "return x", OWN),
        Edit("return received", "return x.copy_(received)", OVERWRITTEN),
        Edit("torch.empty_like(x)", "x", OVERWRITTEN),
        Own(_returns_too_early, KEEP_RECEIVING),
        Edit("return received", "return torch.zeros_like(x)", NOBODY_SENT),
        Edit("received = ", "x = x if rank % 2 == 0 else x[:1].clone()\nreceived = ", ANOTHER_SIZE),
        Edit("torch.empty_like(x)", "torch.empty(3)", ANOTHER_SIZE),
        Own(_returns_the_sender, THE_SENDER),
        Edit("received = ", "if rank == 0:\n    return x\nreceived = ", GONE),
        Edit("received = ", "if rank == 1:\n    return x\nreceived = ", GONE),
        Edit(f"{SEND_FIRST}right", f"{SEND_FIRST}left", WRONG_PARTNER),
        Edit("received = ", f"{COMPUTED}received = ", FROM_RANK),
        Edit(
            "received = ",
            "left = (rank - 1) % dist.get_world_size()\nreceived = ",
            WRONG_PARTNER,
        ),
        Edit("return received", "dist.recv(received, left)\nreturn received", ALL_RECEIVE),
        Edit("return received", f"{AGAIN}return received", ANOTHER_SIZE),
        Own(_sends_float32, DIGITS_LOST),
        Own(_receives_nothing, NOTHING_CAME),
        Own(_keeps_a_buffer, KEEPS),
        Own(_drops_the_handle, KEEP_SENDING),
        Own(_never_waits, KEEP_SENDING),
        Own(_gathers, P2P_ONLY),
        Own(_there_and_back, ONE_MESSAGE),
    ),
)
