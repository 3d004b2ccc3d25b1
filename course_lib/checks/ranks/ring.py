"""Exercise ranks-4 of notebook 00_ranks: pass a message to the right without a deadlock."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from course_lib.checks.exercise import CheckFailed, Exercise, Mistake
from course_lib.checks.expect import Cause, expect_equal, expect_only, expect_traffic, told
from course_lib.checks.ranks.mean import calls_of
from course_lib.core import Event
from course_lib.ranks import RankError, Ranks

Tensor = torch.Tensor


def pass_right(x: Tensor, rank: int, left: int, right: int) -> Tensor:
    """Send x to the rank on the right; return what the rank on the left sent."""
    received = torch.empty_like(x)
    if rank % 2 == 0:
        dist.send(x, right)
        dist.recv(received, left)
    else:
        dist.recv(received, left)
        dist.send(x, right)
    return received


def _ring(rank: int, answer: Callable[..., Tensor], p: int) -> tuple[Tensor, Tensor]:
    x = torch.full((3,), 10.0**rank)
    return answer(x, rank, (rank - 1) % p, (rank + 1) % p), x


def check_pass_right(answer: Callable[..., Tensor]) -> str:
    """Check 2, 3 and 4 ranks: no circular wait, the left neighbor's message, one message sent."""
    for p in (2, 3, 4):
        with Ranks(p) as ranks:
            try:
                found = ranks.run(_ring, answer, p)
            except RankError as error:
                raise told(error, p, _why_stuck(error, p)) from None
            events = ranks.events
        expect_only(events, "send", "recv", says="Use send and recv, or isend and irecv.")
        for rank, (_, x) in enumerate(found):
            look = "Receive into a tensor of its own: torch.empty_like(x)."
            own = torch.full((3,), 10.0**rank)
            expect_equal(x, own, where=f"rank {rank} of {p}, x afterwards", look=look)
        _expect_ended(events, p, "recv", "come: call recv, or wait() on the handle of irecv.")
        for rank, (received, _) in enumerate(found):
            _expect_left(received, rank, p)
        expect_traffic(events, p, max_messages=1, max_bytes=12, says="One message is enough.")
        handle = "left: isend gives a handle; keep it, and call wait() on it before you return."
        _expect_ended(events, p, "send", handle)
    return "The left neighbour's message on 2, 3 and 4 ranks, one message sent by each."


def _expect_left(received: object, rank: int, p: int) -> None:
    own, left, right = (torch.full((3,), 10.0 ** ((rank + to) % p)) for to in (0, -1, 1))
    everybody = torch.tensor([10.0**other for other in range(p)])
    causes: list[Cause] = [
        (
            lambda got: isinstance(got, int),
            "That is a rank: dist.recv returns who sent. Return the tensor it received into.",
        ),
        (own, "That is its own x: return the tensor that was received into."),
        (right, "That is the right neighbour's: send to `right`, receive from `left`."),
        (
            lambda got: got.shape == left.shape and not torch.isin(got, everybody).any(),
            "Nobody sent these numbers: until a message comes into it, torch.empty holds whatever "
            "the memory held. Return the tensor that was received into.",
        ),
    ]
    look = "Who sent this number?"
    expect_equal(received, left, where=f"rank {rank} of {p}", causes=causes, look=look)


def _expect_ended(events: Sequence[Event], p: int, kind: str, says: str) -> None:
    for rank in range(p):
        if not any(call.kind == kind for call in calls_of(events, rank)):
            raise CheckFailed(
                f"rank {rank} of {p} returns without knowing whether its message has {says}"
            )


def _why_stuck(error: RankError, p: int) -> str:
    if error.report.dropped:
        return "isend gives a handle: keep it, and call wait() on it, or the message may be lost."
    if error.kind == "raised":
        if not any(name == "MeshError" for name, _ in error.failures.values()):
            return ""
        return "Every rank has two neighbours, `left` and `right`, also in a world of 3."
    if error.kind == "mismatch":
        if any(post.kind not in ("send", "recv") for _, post in error.report.mismatch):
            return "Use send and recv only."
        return "The tensors sent and received differ in size or dtype: use torch.empty_like(x)."
    return _why_waiting(error, p) if error.kind == "hang" else ""


def _why_waiting(error: RankError, p: int) -> str:
    for wait in error.waits:
        gone = [rank for rank in wait.waits_for if rank in error.report.returned]
        if gone and wait.kind in ("send", "recv"):
            did = "receiving what" if wait.kind == "send" else "sending what"
            does = "sends" if wait.kind == "send" else "waits for"
            return f"Rank {gone[0]} returned without {did} rank {wait.rank} {does}."
    for wait in error.waits:
        to = {"send": 1, "recv": -1}.get(wait.kind, 0)
        if to and wait.waits_for != ((wait.rank + to) % p,):
            return f"Rank {wait.rank} has the wrong partner: send to `right`, receive from `left`."
    kinds = {wait.kind for wait in error.waits}
    if len(error.waits) == p and kinds == {"send"}:
        return "Everybody is in a send, and a send waits until somebody receives."
    if len(error.waits) == p and kinds == {"recv"}:
        return "Everybody is in a recv, and a recv waits until somebody sends."
    return "Follow the arrows: each rank's call needs its partner's call at the same time."


def _send_first(x: Tensor, rank: int, left: int, right: int) -> Tensor:
    received = torch.empty_like(x)
    dist.send(x, right)
    dist.recv(received, left)
    return received


def _recv_first(x: Tensor, rank: int, left: int, right: int) -> Tensor:
    received = torch.empty_like(x)
    dist.recv(received, left)
    dist.send(x, right)
    return received


def _partner(x: Tensor, rank: int, left: int, right: int) -> Tensor:
    received, partner = torch.empty_like(x), rank ^ 1
    first, second = (dist.send, dist.recv) if rank % 2 == 0 else (dist.recv, dist.send)
    first(x if first is dist.send else received, partner)
    second(x if second is dist.send else received, partner)
    return received


def _turned_round(x: Tensor, rank: int, left: int, right: int) -> Tensor:
    return pass_right(x, rank, right, left)


def _own(x: Tensor, rank: int, left: int, right: int) -> Tensor:
    pass_right(x, rank, left, right)
    return x


def _overwritten(x: Tensor, rank: int, left: int, right: int) -> Tensor:
    x.copy_(pass_right(x, rank, left, right))
    return x


def _received_into_x(x: Tensor, rank: int, left: int, right: int) -> Tensor:
    if rank % 2 == 0:
        dist.send(x, right)
        dist.recv(x, left)
    else:
        dist.recv(x, left)
        dist.send(x, right)
    return x


def _returned_too_early(x: Tensor, rank: int, left: int, right: int) -> Tensor:
    received = torch.empty_like(x)
    sending, receiving = dist.isend(x, right), dist.irecv(received, left)
    if sending:
        sending.wait()
    return received if receiving else x


def _another_tensor(x: Tensor, rank: int, left: int, right: int) -> Tensor:
    pass_right(x, rank, left, right)
    return torch.zeros_like(x)  # what torch.empty may hold


def _another_size(x: Tensor, rank: int, left: int, right: int) -> Tensor:
    return pass_right(x if rank % 2 == 0 else x[:2].clone(), rank, left, right)


def _returns_the_sender(x: Tensor, rank: int, left: int, right: int) -> int | None:
    sending = dist.isend(x, right)
    sender = dist.recv(torch.empty_like(x), left)
    if sending:
        sending.wait()
    return sender


def _rank_0_leaves(x: Tensor, rank: int, left: int, right: int) -> Tensor:
    return x if rank == 0 else _send_first(x, rank, left, right)


def _handle_dropped(x: Tensor, rank: int, left: int, right: int) -> Tensor:
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


RING = Exercise(
    key="ranks-4",
    title="pass to the right without a deadlock",
    check=check_pass_right,
    reference=pass_right,
    mistakes=(
        Mistake("everybody sends first", _send_first, "Everybody is in a send"),
        Mistake("everybody receives first", _recv_first, "Everybody is in a recv"),
        Mistake("pairs, for even worlds only", _partner, "also in a world of 3"),
        Mistake("left for right", _turned_round, "That is the right neighbour's"),
        Mistake("returns its own", _own, "That is its own x"),
        Mistake("x is overwritten", _overwritten, "Receive into a tensor of its own"),
        Mistake("received into x", _received_into_x, "Receive into a tensor of its own"),
        Mistake("returned too early", _returned_too_early, "wait() on the handle of irecv"),
        Mistake("another tensor", _another_tensor, "Nobody sent these numbers"),
        Mistake("another size", _another_size, "differ in size or dtype"),
        Mistake("returns the sender", _returns_the_sender, "dist.recv returns who sent"),
        Mistake("rank 0 leaves", _rank_0_leaves, "Rank 0 returned without receiving what rank 1"),
        Mistake("the handle is dropped", _handle_dropped, "call wait() on it"),
        Mistake("never waits", _never_waits, "call wait() on it"),
        Mistake("a collective", _gathers, "Use send and recv"),
    ),
)
