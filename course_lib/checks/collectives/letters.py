"""Exercise 6 of 04_collectives: all-to-all.

Numbers in a letter tell who wrote it: 100 to 199 are rank 0's, 200 to 299 rank 1's.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.checks.collectives.parts import (
    ALIASED,
    ALL_WAITED,
    DIGITS,
    KEEPS,
    MESSAGES,
    NOT_A_TENSOR,
    NOT_AFRESH,
    NOT_ALIASED,
    ONE_TENSOR,
    OUTSIDE,
    SENDS_FIRST,
    STILL_THERE,
    STUCK,
    TROUBLE,
    WORLDS,
    WRITES,
    Numbered,
    both_calls,
    rounds,
    waited_for,
    watch_call,
)
from course_lib.checks.edits import Edit
from course_lib.checks.exercise import Cause, Exercise
from course_lib.checks.expectations import (
    DIGITS_LOST,
    Numbers,
    OnlyKinds,
    Traffic,
    Untouched,
)
from course_lib.checks.on_ranks import At, Observed, OnRanks

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
DTYPE = Cause("Return the dtype of x, as torch.zeros_like(x) has it.")
SHAPE = Cause("Return a tensor of the shape of x, which may be [n, d]: n tokens of d numbers.")
NO_SUCH_RANK = Cause(
    "There is no such rank or shard. `^` needs p to be a power of two: use (rank + step) % p and "
    "(rank - step) % p."
)
FROM_MESSAGES = Cause("Build it from exchange.")


@dataclass(frozen=True)
class Mail(Numbered):
    """Letters of a shape; with `rank_1`, those of all ranks but that one are zeros."""

    shape: tuple[int, ...] = (2,)
    dtype: torch.dtype = torch.int64
    rank_1: bool = False

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        return (
            f"{name} letters {list(self.shape)}"
            + (", zeros but from rank 1" * self.rank_1)
            + self.which
        )

    def of(self, rank: int, p: int) -> Tensor:
        """Return the letters that a rank writes, [to, *shape]."""
        places = torch.arange(p * torch.Size(self.shape).numel()).view(p, *self.shape)
        written = 100 * (rank + 1) + 50 * self.call + places
        letters = (written * (rank == 1 or not self.rank_1)).to(self.dtype)
        return letters * DIGITS if self.dtype == torch.float64 else letters


def _deliver(rank: int, answer: Callable[..., Any], mail: Mail) -> dict[str, Observed]:
    x = mail.of(rank, dist.get_world_size()).flatten(0, 1)
    return {str(mail): watch_call(mail.call, answer, x, x=x)}


def _filed(letter: Callable[[int, int, int], tuple[int, int] | None]) -> Callable[[At], Tensor]:
    """Return a function that returns a rank's letters; `letter(rank, place, p)` is (from, to).

    Both are taken modulo p; a place for which it returns None is empty.
    """

    def value(at: At) -> Tensor:
        mail, p = at.options["mail"], at.world_size
        letters = [letter(at.rank, place, p) for place in range(p)]
        empty = torch.zeros(mail.shape, dtype=mail.dtype)
        return torch.cat([mail.of(one[0] % p, p)[one[1] % p] if one else empty for one in letters])

    return value


def _own(rank: int, place: int) -> tuple[int, int] | None:
    return (rank, rank) if place == rank else None


def _num_bytes(at: At) -> int:
    return at.options["mail"].of(0, 1).nbytes


EXCHANGE = "exchange(letters[to], to, places[source], source)"
OWN_COPIED = "places[rank].copy_(letters[rank])"

LETTERS = Exercise(
    key="collectives-6",
    title="all-to-all",
    library=("course_lib.collectives.collectives:all_to_all",),
    check=OnRanks(
        observe_on_rank=_deliver,
        worlds=WORLDS,
        runs=both_calls(
            lambda _p: (
                {"mail": Mail()},
                {"mail": Mail((3, 2), torch.float64)},
                {"mail": Mail((1,), torch.float32, rank_1=True)},
            )
        ),
        trouble=(
            ("raised", "index out of range", NO_SUCH_RANK),
            ("raised", "must match", SHAPE),
            *TROUBLE,
        ),
        expect=(
            ALL_WAITED,
            Numbers(
                "value",
                _filed(lambda rank, place, p: (place, rank)),
                dtype=DTYPE,
                shape=SHAPE,
                predicates=(NOT_AFRESH, NOT_A_TENSOR),
                causes=(
                    (OWN_LOST, _filed(lambda r, s, p: None if s == r else (s, r))),
                    (LAST_DISTANCE, _filed(lambda r, s, p: None if s == (r + 1) % p else (s, r))),
                    (FILED_LATE, _filed(lambda r, s, p: (r - s, r))),
                    (FILED_LATE, _filed(lambda r, s, p: (r - s, r) if s else _own(r, s))),
                    (STEP_SENT, _filed(lambda r, s, p: _own(r, s) or (s, (r - s) % p))),
                    (STEP_TWICE, _filed(lambda r, s, p: (r - s, s) if s else _own(r, s))),
                    (UNDER_TO, _filed(lambda r, s, p: (2 * r - s, r))),
                    (SAME, _filed(lambda r, s, p: (s, s))),
                ),
                look=FILE_IT,
            ),
            STILL_THERE,
            Untouched(WRITES),
            NOT_ALIASED,
            OnlyKinds(MESSAGES, FROM_MESSAGES),
            waited_for(lambda p: p - 1),
            Traffic(TOO_MANY, max_messages=lambda at: at.world_size - 1),
            Traffic(ONE_LETTER, max_bytes=lambda at: (at.world_size - 1) * _num_bytes(at)),
            rounds(lambda p: p - 1, ONE_BY_ONE),
        ),
        success="1 to 4 and 6 ranks, one shard to each other rank, in p - 1 rounds.",
    ),
    wrong=(
        Edit(OWN_COPIED, "pass", OWN_LOST),
        Edit("range(1, p)", "range(1, p - 1)", LAST_DISTANCE),
        Edit("places[source]", "places[step]", FILED_LATE),
        Edit("places[source]", "places[step]", FILED_LATE, also=(("places[rank]", "places[0]"),)),
        Edit("letters[to]", "letters[rank]", SAME),
        Edit("letters[to]", "letters[step]", STEP_SENT),
        Edit(
            "letters[to]", "letters[step]", STEP_TWICE, also=(("places[source]", "places[step]"),)
        ),
        Edit("places[source]", "places[to]", UNDER_TO),
        Edit(
            EXCHANGE, "dist.send(letters[to], to)\ndist.recv(places[source], source)", SENDS_FIRST
        ),
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
        Edit("return filed", "x.copy_(filed)\nreturn filed", WRITES),
        Edit("return filed", "return filed if p > 1 else x", ALIASED),
        Edit("return filed", "return filed.double()", DTYPE),
        Edit("return filed", "return places", ONE_TENSOR),
        Edit(
            "x.tensor_split(p)",
            "x.float().tensor_split(p)",
            DIGITS_LOST,
            also=(
                ("zeros_like(x)", "zeros_like(x.float())"),
                ("return filed", "return filed.to(x.dtype)"),
            ),
        ),
        Edit("range(1, p)", "range(1, 4)", OUTSIDE),
        Edit(
            "to, source = (rank + step) % p, (rank - step) % p",
            "to = source = rank ^ step",
            NO_SUCH_RANK,
        ),
        Edit("letters[to]", "letters[rank + step]", NO_SUCH_RANK),
        Edit("zeros_like(x)", "zeros(x.numel(), dtype=x.dtype)", SHAPE),
        Edit("return filed", "return filed.flatten()", SHAPE),
        Edit(
            "(x):",
            "(x, buffers={}):",
            KEEPS,
            also=(
                (
                    "torch.zeros_like(x)",
                    "buffers.setdefault((x.shape, x.dtype), torch.zeros_like(x))",
                ),
            ),
        ),
        Edit(
            "(x):",
            "(x, before={}):",
            KEEPS,
            also=(("x.tensor_split", "before.setdefault((x.shape, x.dtype), x).tensor_split"),),
        ),
        Edit(EXCHANGE, f"if letters[to].any():\n    {EXCHANGE}", STUCK),
        Edit(
            "for step in range(1, p):",
            "dist.all_to_all(list(places), list(letters))\nfor step in range(0):",
            FROM_MESSAGES,
        ),
    ),
)
