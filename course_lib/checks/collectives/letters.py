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
    MESSAGES,
    NOT_A_TENSOR,
    NOT_ALIASED,
    ONE_TENSOR,
    OUTSIDE,
    SENDS_FIRST,
    STUCK,
    TROUBLE,
    WORLDS,
    WRITES,
    rounds,
    waited_for,
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
from course_lib.checks.on_ranks import At, Observed, OnRanks, watch

FILE_IT = Cause("Rank s needs your shard s, and you file its letter under s.")
OWN_LOST = Cause("The letter to yourself is lost: copy your own shard.")
LAST_DISTANCE = Cause("The last distance is missing: count from 1 to p - 1, both included.")
FILED_LATE = Cause("Filed by time of arrival: the letter of rank s belongs to place s.")
STEP_SENT = Cause("A step is a distance, not a rank: send shard `to`.")
STEP_TWICE = Cause(
    "A step is a distance, not a rank: send shard `to`, and file what comes under `source`."
)
UNDER_TO = Cause("Filed under the rank you send to: it belongs to place `source`.")
SAME = Cause("Everyone got the same letter of you: send shard `to`, not shard `rank`.")
ONE_LETTER = Cause("Send each rank its own shard only.")
TOO_MANY = Cause("One letter to each other rank is enough.")
ONE_BY_ONE = Cause(
    "In each round every rank sends one letter and receives one: start both before you wait for "
    "either, and give all ranks the same distance."
)
DTYPE = Cause("Return letters of the dtype of x, as torch.zeros_like(x) is.")
FROM_MESSAGES = Cause("Build it from exchange.")


@dataclass(frozen=True)
class Mail:
    """Letters of `length` numbers; with `rank_1`, those of all ranks but that one are zeros."""

    length: int = 2
    dtype: torch.dtype = torch.int64
    rank_1: bool = False

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        return f"{name} letters [{self.length}]" + (", zeros but from rank 1" * self.rank_1)

    def of(self, rank: int, p: int) -> Tensor:
        """Return the letters that a rank writes, [to, length]."""
        written = 100 * (rank + 1) + torch.arange(p * self.length).view(p, self.length)
        letters = (written * (rank == 1 or not self.rank_1)).to(self.dtype)
        return letters * DIGITS if self.dtype == torch.float64 else letters


def _deliver(rank: int, answer: Callable[..., Any], mail: Mail) -> dict[str, Observed]:
    x = mail.of(rank, dist.get_world_size()).flatten()
    return {str(mail): watch(answer, x, x=x)}


def _filed(letter: Callable[[int, int, int], tuple[int, int] | None]) -> Callable[[At], Tensor]:
    """Return a function that returns a rank's letters; `letter(rank, place, p)` is (from, to).

    Both are taken modulo p; a place for which it returns None is empty.
    """

    def value(at: At) -> Tensor:
        mail, p = at.options["mail"], at.world_size
        letters = [letter(at.rank, place, p) for place in range(p)]
        empty = torch.zeros(mail.length, dtype=mail.dtype)
        return torch.cat([mail.of(one[0] % p, p)[one[1] % p] if one else empty for one in letters])

    return value


def _own(rank: int, place: int) -> tuple[int, int] | None:
    return (rank, rank) if place == rank else None


def _num_bytes(at: At) -> int:
    mail = at.options["mail"]
    return mail.length * mail.dtype.itemsize


EXCHANGE = "exchange(letters[to], to, places[source], source)"
OWN_COPIED = "places[rank].copy_(letters[rank])"

LETTERS = Exercise(
    key="collectives-6",
    title="all-to-all",
    check=OnRanks(
        observe_on_rank=_deliver,
        worlds=WORLDS,
        runs=lambda _p: (
            {"mail": Mail()},
            {"mail": Mail(3, torch.float64)},
            {"mail": Mail(1, torch.float32, rank_1=True)},
        ),
        trouble=TROUBLE,
        expect=(
            ALL_WAITED,
            Numbers(
                "value",
                _filed(lambda rank, place, p: (place, rank)),
                dtype=DTYPE,
                predicates=(NOT_A_TENSOR,),
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
            Untouched(WRITES),
            NOT_ALIASED,
            OnlyKinds(MESSAGES, FROM_MESSAGES),
            waited_for(lambda p: p - 1),
            Traffic(TOO_MANY, max_messages=lambda at: at.world_size - 1),
            Traffic(ONE_LETTER, max_bytes=lambda at: (at.world_size - 1) * _num_bytes(at)),
            rounds(lambda p: p - 1, ONE_BY_ONE),
        ),
        success="1 to 5 ranks, one letter to each other rank, in p - 1 rounds.",
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
        Edit(EXCHANGE, f"if letters[to].any():\n    {EXCHANGE}", STUCK),
        Edit(
            "for step in range(1, p):",
            "dist.all_to_all(list(places), list(letters))\nfor step in range(0):",
            FROM_MESSAGES,
        ),
    ),
)
