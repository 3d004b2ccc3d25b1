"""Exercise 2 of 04_collectives: break the circle."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from course_lib.checks.collectives.parts import (
    ALIASED,
    FROM_MESSAGES,
    HANG,
    KEEPS,
    LOOKS,
    MEMORY,
    RETURNS_NEW,
    ROUNDS,
    SENT,
    UNLIKE,
    VALUE,
    WORLDS,
    ByMessages,
    Given,
    both_calls,
    me,
    swap,
    use,
)
from course_lib.checks.edits import Edit, Own
from course_lib.checks.exercise import Cause, Exercise
from course_lib.checks.on_ranks import DTYPE
from course_lib.checks.properties import CALLERS

OWN = Cause("That is your own tensor: return what you received.")
FROM_RIGHT = Cause("That is the right neighbor's: receive from rank - 1.")
ONE_MESSAGE = Cause("Only the left neighbor's x is needed.")
ONE_ROUND = Cause(
    "A rank waits for one of its messages before it has started the other, and its neighbors wait "
    "for that rank. Start both, then wait for both."
)
NOT_WHAT_CAME = Cause("That is not the left neighbor's x: print what comes in and what you return.")


def _pass(rank: int, answer: Callable[..., Any], given: Given, call: int) -> dict[str, Any]:
    budgets = {SENT: 1, ROUNDS: 1}
    return use(answer, given.of(rank, call), call=call, label=f"{given}", budgets=budgets)


def _to_everyone(x: Tensor) -> Tensor:
    rank, p = me()
    came = {0: x}
    for distance in range(1, p):
        came[distance] = torch.empty_like(x)
        swap(x, (rank + distance) % p, came[distance], (rank - distance) % p)
    return came[1]


def _one_message(x: Tensor, messages: dict[Any, Tensor] = {}) -> Tensor:  # noqa: B006
    rank, p = me()
    incoming = torch.empty_like(x)
    out = messages.setdefault((x.shape, x.dtype), x.clone())
    swap(out, (rank + 1) % p, incoming, (rank - 1) % p)
    return incoming


CIRCLE = Exercise(
    key="collectives-2",
    title="break the circle",
    check=ByMessages(
        observe_on_rank=_pass,
        worlds=WORLDS[:-1],
        runs=lambda _p: both_calls(
            Given(), Given((2, 3), torch.int64), Given(dtype=torch.float32, rank_1=True)
        ),
        looks=(
            *LOOKS,
            *{MEMORY: ALIASED, VALUE: NOT_WHAT_CAME, SENT: ONE_MESSAGE, ROUNDS: ONE_ROUND}.items(),
        ),
        success="2 to 4 and 6 ranks: one message each, in one round.",
    ),
    wrong=(
        Edit(
            "sending = dist.isend",
            "dist.send",
            HANG,
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
        Edit("return incoming", "return incoming.float()", DTYPE),
        Edit("torch.empty_like(x)", "torch.empty(x.shape)", UNLIKE),
        Edit(
            "incoming = torch.empty_like(x)",
            "incoming = x",
            CALLERS,
            also=(("isend(x", "isend(x.clone()"),),
        ),
        Edit(
            "sending.wait()",
            "rank % 2 and sending.wait()",
            ONE_ROUND,
            also=(("receiving = ", "if rank % 2 == 0:\n    sending.wait()\nreceiving = "),),
        ),
        Own(_to_everyone, ONE_MESSAGE),
        Own(_one_message, KEEPS),
        Edit("return incoming", "return dist.all_reduce(x.clone()) or incoming", FROM_MESSAGES),
        *RETURNS_NEW,
    ),
)
