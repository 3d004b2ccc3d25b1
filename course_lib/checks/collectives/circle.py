"""Exercise 2 of 04_collectives: break the circle."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from course_lib.checks.collectives.parts import (
    ALL_WAITED,
    DROPPED,
    KEEPS,
    MESSAGES,
    NOT_A_TENSOR,
    NOT_AFRESH,
    ONE_TENSOR,
    OUTSIDE,
    SENDS_FIRST,
    STILL_THERE,
    TROUBLE,
    UNLIKE,
    WORLDS,
    WRITES,
    Given,
    both_calls,
    count,
    given,
    me,
    rounds,
    swap,
    waited_for,
    watch_call,
)
from course_lib.checks.edits import Edit, Own
from course_lib.checks.exercise import Cause, Exercise
from course_lib.checks.expectations import Numbers, OnlyKinds, Traffic, Untouched
from course_lib.checks.on_ranks import At, Observed, OnRanks

OWN = Cause("That is your own tensor: return what you received.")
FROM_RIGHT = Cause("That is the right neighbor's: receive from rank - 1.")
ONE_MESSAGE = Cause("Only the left neighbor's x is needed.")
ONE_ROUND = Cause(
    "A rank waits for one of its messages before it has started the other, and its neighbors wait "
    "for that rank. Start both, then wait for both."
)
DTYPE = Cause("Send, receive and return in the dtype of x: do not convert it.")
NOT_WHAT_CAME = Cause("That is not the left neighbor's x: print what comes in and what you return.")
FROM_MESSAGES = Cause("Build it from isend and irecv.")


def _pass(rank: int, answer: Callable[..., Any], given: Given) -> dict[str, Observed]:
    x = given.of(rank)
    return {str(given): watch_call(given.call, answer, x, x=x)}


def _of(distance: int) -> Callable[[At], Tensor]:
    """Return a function that returns what the rank so far to the right was given."""
    return lambda at: given(at).of((at.rank + distance) % at.world_size)


def _not_waited(at: At, _got: Any, _item: None) -> bool:
    return min(count(at, "send"), count(at, "recv")) == 0


def _to_everyone(x: Tensor) -> Tensor:
    rank, p = me()
    came = {0: x}
    for distance in range(1, p):
        came[distance] = torch.empty_like(x)
        swap(x, (rank + distance) % p, came[distance], (rank - distance) % p)
    return came[1]


def _one_buffer(x: Tensor, buffers: dict[Any, Tensor] = {}) -> Tensor:  # noqa: B006
    rank, p = me()
    incoming = buffers.setdefault((x.shape, x.dtype), torch.empty_like(x))
    swap(x, (rank + 1) % p, incoming, (rank - 1) % p)
    return incoming


def _one_message(x: Tensor, messages: dict[Any, Tensor] = {}) -> Tensor:  # noqa: B006
    rank, p = me()
    incoming = torch.empty_like(x)
    out = messages.setdefault((x.shape, x.dtype), x.clone())
    swap(out, (rank + 1) % p, incoming, (rank - 1) % p)
    return incoming


CIRCLE = Exercise(
    key="collectives-2",
    title="break the circle",
    check=OnRanks(
        observe_on_rank=_pass,
        worlds=WORLDS[:-1],
        runs=both_calls(
            lambda _p: (
                {"given": Given()},
                {"given": Given((2, 3), torch.int64)},
                {"given": Given(dtype=torch.float32, rank_1=True)},
            )
        ),
        trouble=TROUBLE,
        expect=(
            ALL_WAITED,
            Numbers(
                "value",
                _of(-1),
                causes=((OWN, _of(0)), (FROM_RIGHT, _of(1))),
                dtype=DTYPE,
                predicates=(NOT_AFRESH, NOT_A_TENSOR),
                otherwise=((_not_waited, DROPPED),),
                look=NOT_WHAT_CAME,
            ),
            STILL_THERE,
            Untouched(WRITES),
            OnlyKinds(MESSAGES, FROM_MESSAGES),
            waited_for(lambda _p: 1),
            Traffic(ONE_MESSAGE, max_messages=lambda _at: 1),
            rounds(lambda _p: 1, ONE_ROUND),
        ),
        success="2 to 4 and 6 ranks: one message each, in one round.",
    ),
    wrong=(
        Edit(
            "sending = dist.isend",
            "dist.send",
            SENDS_FIRST,
            also=(
                ("receiving = dist.irecv", "dist.recv"),
                ("sending.wait()", "pass"),
                ("receiving.wait()", "pass"),
            ),
        ),
        Edit(
            "isend(x, (rank + 1)",
            "isend(x, (rank - 1)",
            FROM_RIGHT,
            also=(("irecv(incoming, (rank - 1)", "irecv(incoming, (rank + 1)"),),
        ),
        Edit("return incoming", "return x", OWN),
        Edit("return incoming", "return incoming + x", NOT_WHAT_CAME),
        Edit(
            "isend(x, (rank + 1)",
            "isend(x, (rank + 2)",
            NOT_WHAT_CAME,
            also=(("irecv(incoming, (rank - 1)", "irecv(incoming, (rank - 2)"),),
        ),
        Edit(
            "incoming = torch.empty_like(x)",
            "incoming = x",
            WRITES,
            also=(("isend(x", "isend(x.clone()"),),
        ),
        Own(_to_everyone, ONE_MESSAGE),
        Edit(
            "sending.wait()",
            "rank % 2 and sending.wait()",
            ONE_ROUND,
            also=(("receiving = ", "if rank % 2 == 0:\n    sending.wait()\nreceiving = "),),
        ),
        Edit(
            "sending = ",
            "if rank:\n    dist.recv(incoming, (rank - 1) % p)\nsending = ",
            ONE_ROUND,
            also=(
                ("receiving = dist.irecv", "if rank == 0:\n    dist.recv"),
                ("receiving.wait()", "pass"),
            ),
        ),
        Edit("sending.wait()", "pass", DROPPED),
        Edit("receiving.wait()", "pass", DROPPED),
        Edit("    sending.wait()\n    receiving.wait()", "    pass", DROPPED),
        Edit("sending = dist.isend", "dist.isend", DROPPED, also=(("sending.wait()", "pass"),)),
        Edit("torch.empty_like(x)", "torch.empty(x.shape)", UNLIKE),
        Edit("return incoming", "return incoming.float()", DTYPE),
        Edit("return incoming", "return incoming, x", ONE_TENSOR),
        Own(_one_buffer, KEEPS),
        Own(_one_message, KEEPS),
        Edit(
            "(rank + 1) % p",
            "(rank + 1) % 4",
            OUTSIDE,
            also=(("(rank - 1) % p", "(rank - 1) % 4"),),
        ),
        Edit(
            "return incoming",
            "return dist.all_reduce(x.clone()) or incoming",
            FROM_MESSAGES,
        ),
    ),
)
