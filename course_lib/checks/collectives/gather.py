"""Exercise 3 of 04_collectives: all-gather."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from course_lib.checks.collectives.parts import (
    ALIASED,
    ALL_WAITED,
    KEEPS,
    MESSAGES,
    NOT_A_TENSOR,
    NOT_AFRESH,
    NOT_ALIASED,
    ONE_TENSOR,
    SENDS_FIRST,
    STILL_THERE,
    STUCK,
    TROUBLE,
    WORLDS,
    WRITES,
    Given,
    both_calls,
    given,
    rounds,
    waited_for,
    watch_call,
)
from course_lib.checks.edits import Edit
from course_lib.checks.exercise import Cause, Exercise
from course_lib.checks.expectations import (
    DIGITS_LOST,
    Bytes,
    Demand,
    Numbers,
    OnlyKinds,
    Traffic,
    Untouched,
)
from course_lib.checks.on_ranks import At, Observed, OnRanks

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
    "On a ring, a rank sends to its right neighbor only: send on what came from the left."
)
TO_THE_LEFT = Cause("Send to the right neighbor, and receive from the left one.")
ONE_ROUND = Cause("In each step, start the send and the receive before you wait: use exchange.")
VIEW = Cause("A view keeps the whole tensor it was cut from: return a clone.")
DTYPE = Cause("Make whole with dtype=shard.dtype: without it, torch.zeros makes float32.")
FLAT = Cause("Return one dimension of p * len(shard) numbers, also for shards of other lengths.")
FROM_MESSAGES = Cause("Build it from exchange.")


def _gather(rank: int, answer: Callable[..., Any], given: Given) -> dict[str, Observed]:
    shard = given.of(rank)
    return {f"shards {given}": watch_call(given.call, answer, shard, shard=shard)}


def _whole(place: Callable[[At, int], int | None]) -> Callable[[At], Tensor]:
    """Return a function that returns the shards in the places `place(at, i)`, zeros for None."""

    def value(at: At) -> Tensor:
        ranks = [place(at, i) for i in range(at.world_size)]
        own = given(at).of(0)
        return torch.cat([own * 0 if r is None else given(at).of(r % len(ranks)) for r in ranks])

    return value


_right = _whole(lambda _at, i: i)


def _zeros_left(at: At, got: Any, _item: None) -> bool:
    """Return whether each shard is the right one, or zeros."""
    pairs = zip(
        got.tensor_split(at.world_size), _right(at).tensor_split(at.world_size), strict=True
    )
    return all(torch.equal(shard, right) or not shard.any() for shard, right in pairs)


def _to(at: At, distance: int) -> bool:
    peers = {event.peer for event in at.seen.calls if event.kind == "send"}
    return peers <= {(at.rank + distance) % at.world_size}


def _num_bytes(at: At) -> int:
    return given(at).of(0).nbytes


EXCHANGE = "exchange(out, (rank + 1) % p, incoming, (rank - 1) % p)"

GATHER = Exercise(
    key="collectives-3",
    title="all-gather",
    library=("course_lib.collectives.ring:ring_all_gather",),
    check=OnRanks(
        observe_on_rank=_gather,
        worlds=WORLDS,
        runs=both_calls(
            lambda _p: (
                {"given": Given((2,))},
                {"given": Given((3,), torch.int64)},
                {"given": Given((1,), torch.float32, rank_1=True)},
            )
        ),
        trouble=(("raised", "'tuple' object does not support item", ASSIGNED), *TROUBLE),
        expect=(
            ALL_WAITED,
            Numbers(
                "value",
                _right,
                shape=FLAT,
                dtype=DTYPE,
                predicates=(NOT_AFRESH, NOT_A_TENSOR),
                causes=(
                    (OWN_FIRST, _whole(lambda at, i: at.rank + i)),
                    (OWN_FIRST, _whole(lambda at, i: at.rank - i)),
                    (
                        LAST_STEP,
                        _whole(lambda at, i: None if i == (at.rank + 1) % at.world_size else i),
                    ),
                    (NOT_WRITTEN, _whole(lambda at, i: i if i == at.rank else None)),
                ),
                otherwise=((_zeros_left, TOO_EARLY),),
                look=OFF_BY_ONE,
            ),
            STILL_THERE,
            Untouched(WRITES),
            NOT_ALIASED,
            Bytes(
                "held_bytes",
                lambda at: _num_bytes(at) * at.world_size,
                VIEW,
                what="what it returns keeps alive",
            ),
            OnlyKinds(MESSAGES, FROM_MESSAGES),
            waited_for(lambda p: p - 1),
            Demand(lambda at: _to(at, 1) or not _to(at, -1), "sends to the left", TO_THE_LEFT),
            Demand(lambda at: _to(at, 1), "sends to others than its right neighbor", NEIGHBORS),
            Traffic(TOO_MANY, max_messages=lambda at: at.world_size - 1),
            Traffic(ONE_SHARD, max_bytes=lambda at: _num_bytes(at) * (at.world_size - 1)),
            rounds(lambda p: p - 1, ONE_ROUND),
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
        Edit(
            "shard):",
            "shard, buffers={}):",
            KEEPS,
            also=(
                ("whole = torch", "whole = buffers.setdefault((len(shard), shard.dtype), torch"),
                ("dtype=shard.dtype)", "dtype=shard.dtype))"),
            ),
        ),
        Edit(
            "shard):",
            "shard, before={}):",
            KEEPS,
            also=(
                (
                    "whole = ",
                    "shard = before.setdefault((len(shard), shard.dtype), shard)\nwhole = ",
                ),
            ),
        ),
        Edit(
            EXCHANGE,
            "into = torch.empty_like(whole)\n"
            "exchange(whole, (rank + 1) % p, into, (rank - 1) % p)\n"
            "incoming.copy_(into.tensor_split(p)[(rank - step - 1) % p])",
            ONE_SHARD,
        ),
        Edit(
            "return whole",
            "return torch.cat([shards[(rank - i) % p] for i in range(p)])",
            OWN_FIRST,
        ),
        Edit("return whole", "return whole.roll(-rank * len(shard))", OWN_FIRST),
        Edit(
            EXCHANGE,
            "exchange(shard, (rank + step + 1) % p, incoming, (rank - step - 1) % p)",
            NEIGHBORS,
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
            "(rank - step) % p], shards[(rank - step - 1) % p]",
            "(rank + step) % p], shards[(rank + step + 1) % p]",
            TO_THE_LEFT,
            also=((EXCHANGE, "exchange(out, (rank - 1) % p, incoming, (rank + 1) % p)"),),
        ),
        Edit("return whole", "return torch.cat([whole, whole])[: len(whole)]", VIEW),
        Edit(", dtype=shard.dtype", "", DTYPE),
        Edit(
            ", dtype=shard.dtype",
            "",
            DIGITS_LOST,
            also=(("return whole", "return whole.to(shard.dtype)"),),
        ),
        Edit("return whole", "return shards", ONE_TENSOR),
        Edit(
            EXCHANGE,
            "exchange(shard, (rank + 1) % p, incoming, (rank - 1) % p)\nshard.copy_(incoming)",
            WRITES,
        ),
        Edit("return whole", "return whole if p > 1 else shard", ALIASED),
        Edit("return whole", "return whole.view(p, len(shard))", FLAT),
        Edit("range(p - 1)", "range(p)", TOO_MANY),
        Edit("range(p - 1)", "range(3)", TOO_MANY),
        Edit(
            EXCHANGE,
            "dist.send(out, (rank + 1) % p) if rank % 2 else None\n"
            "dist.recv(incoming, (rank - 1) % p)\n"
            "None if rank % 2 else dist.send(out, (rank + 1) % p)",
            ONE_ROUND,
        ),
        Edit(
            EXCHANGE,
            "dist.send(out, (rank + 1) % p)\ndist.recv(incoming, (rank - 1) % p)",
            SENDS_FIRST,
        ),
        Edit(
            EXCHANGE,
            "if out.any():\n    exchange(out, (rank + 1) % p, incoming, (rank - 1) % p)",
            STUCK,
        ),
        Edit(
            "for step in range(p - 1):",
            "dist.all_gather(list(shards), shard)\nfor step in range(0):",
            FROM_MESSAGES,
        ),
    ),
)
