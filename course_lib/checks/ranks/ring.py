"""Exercise 4 of 00_ranks: pass a message to the right without a deadlock."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.checks.edits import Edit, Own
from course_lib.checks.exercise import Cause, Exercise
from course_lib.checks.expectations import (
    Demand,
    Numbers,
    OnlyKinds,
    Traffic,
    Untouched,
)
from course_lib.checks.on_ranks import At, Observed, OnRanks, Trouble, watch

INPUTS = {
    "3 numbers": torch.ones(3),
    "a matrix of float64": torch.tensor([[1.5, 2.0], [2.5, 3.0]]).double(),
    "1 integer": torch.tensor([2]),
}

ALL_SEND = Cause("Everybody is in a send, and a send waits until somebody receives.")
ALL_RECEIVE = Cause("Everybody is in a recv, and a recv waits until somebody sends.")
GONE = Cause(
    "A rank returned without receiving what another one sends it, or without sending what another "
    "one waits for: every rank does both."
)
WRONG_PARTNER = Cause("A rank has the wrong partner: send to `right`, receive from `left`.")
FOLLOW = Cause("Follow the arrows: each rank's call needs its partner's call at the same time.")
TWO_NEIGHBORS = Cause("Every rank has two neighbours, `left` and `right`, also in a world of 3.")
P2P_ONLY = Cause("Use send and recv, or isend and irecv.")
ANOTHER_SIZE = Cause(
    "The tensors sent and received differ in size or dtype: use torch.empty_like(x)."
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
FROM_THE_RIGHT = Cause("That is the right neighbour's: send to `right`, receive from `left`.")
THE_SENDER = Cause(
    "That is a rank: dist.recv returns who sent. Return the tensor it received into."
)
NOBODY_SENT = Cause(
    "Nobody sent these numbers: until a message comes into it, torch.empty holds whatever the "
    "memory held. Return the tensor that was received into."
)
ONE_MESSAGE = Cause("One message is enough: each rank sends its x once, and nothing else.")


def _pass_on(rank: int, answer: Callable[..., Tensor]) -> dict[str, Observed]:
    p = dist.get_world_size()
    return {
        label: watch(answer, x, rank, (rank - 1) % p, (rank + 1) % p, x=x)
        for label, one in INPUTS.items()
        for x in [one * 10**rank]
    }


def _of(step: int) -> Callable[[At], Tensor]:
    """Return the x of the rank that is so many steps further to the right."""
    return lambda at: INPUTS[at.label] * 10 ** ((at.rank + step) % at.world_size)


def _nobodys(at: At, got: Tensor, _item: None) -> bool:
    everybody = torch.stack([_of(step)(at) for step in range(at.world_size)])
    return got.shape == everybody[0].shape and not torch.isin(got, everybody).any()


def _has_ended(kind: str) -> Callable[[At], bool]:
    return lambda at: any(call.kind == kind for call in at.seen.calls)


def _dropped(kind: str) -> Callable[[Trouble], bool]:
    return lambda trouble: any(post.kind == kind for _, post in trouble.dropped)


def _all_in(kind: str) -> Callable[[Trouble], bool]:
    return lambda trouble: not trouble.returned and all(wait.kind == kind for wait in trouble.waits)


def _waits_for_one_that_returned(trouble: Trouble) -> bool:
    return any(not set(wait.waits_for).isdisjoint(trouble.returned) for wait in trouble.waits)


def _wrong_partner(trouble: Trouble) -> bool:
    """Return whether a rank sends to another one than its right, or receives from another one."""
    step, p = {"send": 1, "recv": -1}, len(trouble.waits) + len(trouble.returned)
    return any(
        wait.kind in step and tuple(wait.waits_for) != ((wait.rank + step[wait.kind]) % p,)
        for wait in trouble.waits
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


EVEN = "rank % 2 == 0"
SEND_FIRST = f"{EVEN}:\n        dist.send(x, "

RING = Exercise(
    key="ranks-4",
    title="pass to the right without a deadlock",
    check=OnRanks(
        observe_on_rank=_pass_on,
        worlds=(3, 2, 4),
        trouble=(
            ("hang", _dropped("send"), KEEP_SENDING),
            ("hang", _dropped("recv"), KEEP_RECEIVING),
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
            Demand(
                _has_ended("recv"),
                "returns without knowing whether its message has come",
                KEEP_RECEIVING,
            ),
            Numbers(
                "value",
                _of(-1),
                predicates=((lambda _at, got, _item: isinstance(got, int), THE_SENDER),),
                causes=((OWN, _of(0)), (FROM_THE_RIGHT, _of(1))),
                otherwise=((_nobodys, NOBODY_SENT),),
                look=Cause("Who sent this number?"),
            ),
            Traffic(ONE_MESSAGE, lambda _at: 1, lambda at: INPUTS[at.label].nbytes),
            Demand(
                _has_ended("send"),
                "returns without knowing whether its message has left",
                KEEP_SENDING,
            ),
        ),
        success="The left neighbour's message on 2, 3 and 4 ranks, one message sent by each.",
    ),
    wrong=(
        Edit(EVEN, "True", ALL_SEND),
        Edit(EVEN, "False", ALL_RECEIVE),
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
        Own(_drops_the_handle, KEEP_SENDING),
        Own(_never_waits, KEEP_SENDING),
        Own(_gathers, P2P_ONLY),
        Own(_there_and_back, ONE_MESSAGE),
    ),
)
