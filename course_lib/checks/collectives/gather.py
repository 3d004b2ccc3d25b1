"""Exercise 3 of 04_collectives: all-gather."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from course_lib.checks.collectives.parts import (
    ALIASED,
    BYTES,
    HANG,
    HELD,
    LOOKS,
    MEMORY,
    PEERS,
    RETURNS_NEW,
    ROUNDS,
    SENT,
    SHAPE,
    VALUE,
    WORLDS,
    ByMessages,
    Given,
    both_calls,
    use,
)
from course_lib.checks.edits import Edit
from course_lib.checks.exercise import Cause, Exercise
from course_lib.checks.on_ranks import DTYPE
from course_lib.checks.properties import CALLERS

OFF_BY_ONE = Cause("A shard is in the wrong place: is an index off by one?")
TOO_EARLY = Cause(
    "A shard of zeros: it was sent on before it had arrived. wait() for a receive before you send "
    "what it brings (or a step is missing)."
)
INTO_WHOLE = (
    "Receive into shards[i], or shards[i].copy_() it: shards[i] = ... writes nothing there."
)
NOT_WRITTEN = Cause(f"Only your own is there: what came was not written into whole. {INTO_WHOLE}")
ASSIGNED = Cause(INTO_WHOLE)
OWN_FIRST = Cause("Yours comes first on every rank: shard i belongs to place i, wherever it is.")
LAST_STEP = Cause("The right neighbor's shard never came: the last step is missing.")
ONE_SHARD = Cause("Send one shard per step, not the whole tensor.")
TOO_MANY = Cause("After p - 1 steps every shard has been everywhere.")
NEIGHBORS = Cause(
    "On a ring, a rank sends to its right neighbor only, rank + 1: send on what came from the left."
)
ONE_ROUND = Cause("In each step, start the send and the receive before you wait: use exchange.")
A_VIEW = Cause("A view keeps the whole tensor it was cut from: return a clone.")
FLAT = Cause("Return one dimension of p * len(shard) numbers, also for shards of other lengths.")
IN_ORDER = Cause("Return one tensor, in one piece: shard i in place i, in the dtype of shard.")


def _gather(rank: int, answer: Callable[..., Any], given: Given, call: int) -> dict[str, Any]:
    shard, steps = given.of(rank, call), dist.get_world_size() - 1
    budgets = {SENT: steps, BYTES: steps * shard.nbytes, ROUNDS: steps}
    budgets[HELD] = (steps + 1) * shard.nbytes
    seen = use(
        answer,
        shard,
        call=call,
        label=f"shards {given}",
        budgets=budgets,
        name="shard",
        shape=[(steps + 1) * len(shard)],
    )
    for step in seen.values():
        peers = {event.peer for event in step["messages"] if event.kind == "send"}
        step[PEERS] = [f"rank {peer}" for peer in sorted(peers)]
    return seen


EXCHANGE = "exchange(out, (rank + 1) % p, incoming, (rank - 1) % p)"
SEND, RECEIVE = "dist.send(out, (rank + 1) % p)", "dist.recv(incoming, (rank - 1) % p)"

GATHER = Exercise(
    key="collectives-3",
    title="all-gather",
    library=("course_lib.collectives.ring:ring_all_gather",),
    check=ByMessages(
        observe_on_rank=_gather,
        worlds=WORLDS,
        runs=lambda _p: both_calls(
            Given((2,)), Given((3,), torch.int64), Given((1,), torch.float32, rank_1=True)
        ),
        looks=(
            *LOOKS,
            *{
                MEMORY: ALIASED,
                SHAPE: FLAT,
                VALUE: IN_ORDER,
                PEERS: NEIGHBORS,
                SENT: TOO_MANY,
            }.items(),
            *{BYTES: ONE_SHARD, HELD: A_VIEW, ROUNDS: ONE_ROUND}.items(),
        ),
        success="1 to 4 and 6 ranks, p - 1 messages of one shard to the right.",
    ),
    wrong=(
        Edit(
            "shards[(rank - step) % p], shards[(rank - step - 1) % p]",
            "shards[(rank - step) % p].clone(), shards[(rank - step) % p]",
            OFF_BY_ONE,
        ),
        Edit("range(p - 1)", "range(p - 2)", LAST_STEP),
        Edit(
            "for step in",
            "early = [each.clone() for each in shards]\nfor step in",
            TOO_EARLY,
            also=(("out, incoming = shards[", "out, incoming = early["),),
        ),
        Edit("return whole", "return whole.roll(-rank * len(shard))", OWN_FIRST),
        Edit(
            "return whole",
            "return torch.cat([shards[(rank - i) % p] for i in range(p)])",
            OWN_FIRST,
        ),
        Edit(
            EXCHANGE,
            "incoming = torch.empty_like(shard)\n"
            f"{EXCHANGE}\n"
            "shards[(rank - step - 1) % p] = incoming",
            NOT_WRITTEN,
            also=(("whole.tensor_split(p)", "list(whole.tensor_split(p))"),),
        ),
        Edit(EXCHANGE, f"{EXCHANGE}\nshards[0] = incoming", ASSIGNED),
        Edit(
            EXCHANGE,
            "into = torch.empty_like(whole)\n"
            "exchange(whole, (rank + 1) % p, into, (rank - 1) % p)\n"
            "incoming.copy_(into.tensor_split(p)[(rank - step - 1) % p])",
            ONE_SHARD,
        ),
        Edit(
            EXCHANGE,
            "exchange(shard, (rank + step + 1) % p, incoming, (rank - step - 1) % p)",
            NEIGHBORS,
        ),
        Edit("range(p - 1)", "range(p)", TOO_MANY),
        Edit(EXCHANGE, f"{SEND}\n{RECEIVE}", HANG),
        Edit(
            EXCHANGE,
            f"{SEND} if rank % 2 else None\n{RECEIVE}\nNone if rank % 2 else {SEND}",
            ONE_ROUND,
        ),
        Edit(
            EXCHANGE,
            "exchange(shard, (rank + 1) % p, incoming, (rank - 1) % p)\nshard.copy_(incoming)",
            CALLERS,
        ),
        Edit(", dtype=shard.dtype", "", DTYPE),
        Edit("return whole", "return torch.cat([whole, whole])[: len(whole)]", A_VIEW),
        Edit("return whole", "return whole if p > 1 else shard", ALIASED),
        *RETURNS_NEW,
    ),
)
