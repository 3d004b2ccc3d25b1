"""Exercise 6 of 04_collectives: all-to-all."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from course_lib.checks.collectives.parts import (
    ALIASED,
    BYTES,
    LOOKS,
    MEMORY,
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

FILE_IT = Cause("Rank s gets your shard s, and what comes from rank s belongs to place s.")
OWN_LOST = Cause("Your shard for yourself is missing: copy it to its place.")
LAST_DISTANCE = Cause("The last distance is missing: count from 1 to p - 1, both included.")
FILED_LATE = Cause("Stored in the order of arrival: what comes from rank s belongs to place s.")
STEP_SENT = Cause("A step is a distance, not a rank: send shard `to`.")
STEP_TWICE = Cause(
    "A step is a distance, not a rank: send shard `to`, and store what comes in place `source`."
)
UNDER_TO = Cause("Stored in the place of the rank you send to: it belongs to place `source`.")
SAME = Cause("Every rank got the same shard from you: send shard `to`, not shard `rank`.")
ONE_LETTER = Cause("Send each rank its own shard only.")
TOO_MANY = Cause("One message to each other rank is enough.")
ONE_BY_ONE = Cause(
    "In each round every rank sends one shard and receives one: start both before you wait for "
    "either, and give all ranks the same distance."
)
ROWS = Cause("Return a tensor of the shape of x, which may be [n, d]: n tokens of d numbers.")
NO_SUCH_RANK = Cause(
    "There is no such rank or shard. `^` needs p to be a power of two: use (rank + step) % p and "
    "(rank - step) % p."
)


def _deliver(rank: int, answer: Callable[..., Any], given: Given, call: int) -> dict[str, Any]:
    x, p = given.of(rank, call), dist.get_world_size()
    budgets = {SENT: p - 1, BYTES: (p - 1) * (x.nbytes // p), ROUNDS: p - 1}
    return use(answer, x, call=call, label=f"{given}", budgets=budgets)


def _runs(p: int) -> list[dict[str, Any]]:
    """Return shards of two numbers, of tokens of two numbers, and of one number."""
    rows = Given((3 * p, 2), torch.int64)
    return both_calls(Given((2 * p,)), rows, Given((p,), torch.float32, rank_1=True))


EXCHANGE = "exchange(letters[to], to, places[source], source)"
OWN_COPIED = "places[rank].copy_(letters[rank])"
ARRIVED = ("places[source]", "places[step]")

LETTERS = Exercise(
    key="collectives-6",
    title="all-to-all",
    library=("course_lib.collectives.collectives:all_to_all",),
    check=ByMessages(
        observe_on_rank=_deliver,
        worlds=WORLDS,
        runs=_runs,
        looks=(
            *LOOKS,
            *{
                MEMORY: ALIASED,
                SHAPE: ROWS,
                VALUE: FILE_IT,
                SENT: TOO_MANY,
                BYTES: ONE_LETTER,
                ROUNDS: ONE_BY_ONE,
            }.items(),
        ),
        success="1 to 4 and 6 ranks, one shard to each other rank, in p - 1 rounds.",
    ),
    wrong=(
        Edit(OWN_COPIED, "pass", OWN_LOST),
        Edit("range(1, p)", "range(1, p - 1)", LAST_DISTANCE),
        Edit(*ARRIVED, FILED_LATE),
        Edit("letters[to]", "letters[rank]", SAME),
        Edit("letters[to]", "letters[step]", STEP_SENT),
        Edit("letters[to]", "letters[step]", STEP_TWICE, also=(ARRIVED,)),
        Edit("places[source]", "places[to]", UNDER_TO),
        Edit(
            EXCHANGE,
            "came = torch.empty_like(x)\n"
            "exchange(x, to, came, source)\n"
            "places[source].copy_(came.tensor_split(p)[rank])",
            ONE_LETTER,
        ),
        Edit(EXCHANGE, f"{EXCHANGE}\n{EXCHANGE}", TOO_MANY),
        Edit(
            EXCHANGE,
            "for sender in range(p):\n"
            "    if rank == sender:\n"
            "        dist.send(letters[to], to)\n"
            "    if source == sender:\n"
            "        dist.recv(places[source], source)",
            ONE_BY_ONE,
        ),
        Edit("letters[to]", "letters[rank + step]", NO_SUCH_RANK),
        Edit("return filed", "x.copy_(filed)\nreturn filed", CALLERS),
        Edit("return filed", "return filed if p > 1 else x", ALIASED),
        Edit("return filed", "return filed.float()", DTYPE),
        *RETURNS_NEW,
    ),
)
