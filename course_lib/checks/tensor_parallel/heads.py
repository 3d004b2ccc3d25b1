"""Exercise 3 of 07_tensor_parallel: whole attention heads for every rank.

Needs no ranks: the check plays them one after another, and sums up what they would send. The
planted mistakes are in `heads_answers.py`.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from course_lib.checks.exercise import CheckFailed, Exercise, Mistake
from course_lib.checks.tensor_parallel import heads_answers as planted
from course_lib.checks.tensor_parallel.parts import expect_close

_Rows = Callable[[int, int, int, int, int], Any]
SEQ = 5


@dataclass(frozen=True)
class Case:
    """An attention whose heads p ranks share, with q, k and v in one tall matrix."""

    p: int
    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def hidden(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_hidden(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def num_rows(self) -> int:
        return self.hidden + 2 * self.kv_hidden

    def head_of(self, row: int) -> tuple[str, int]:
        """Return `("k", 1)`: the matrix and the head that a row belongs to."""
        starts = {"v": self.hidden + self.kv_hidden, "k": self.hidden, "q": 0}
        name = next(name for name, start in starts.items() if row >= start)
        return name, (row - starts[name]) // self.head_dim

    def __str__(self) -> str:
        return (
            f"{self.num_heads} heads, {self.num_kv_heads} of keys and values, "
            f"of {self.head_dim} numbers"
        )


CASES = (
    Case(2, 4, 4, 3),
    Case(3, 6, 6, 2),
    Case(2, 8, 4, 2),
    Case(4, 8, 4, 3),
    Case(1, 3, 1, 2),
    Case(4, 12, 4, 1),
)


def check_heads(answer: _Rows) -> str:
    """Check counts, whole heads, queries beside their keys; then attention, summed over ranks."""
    for case in CASES:
        sizes = (case.num_heads, case.num_kv_heads, case.head_dim)
        by_rank = [_numbers(answer(rank, case.p, *sizes)) for rank in range(case.p)]
        for rank, rows in enumerate(by_rank):
            _judge_rows(rows, f"rank {rank} of {case.p} ({case})", rank, case)
        _judge_shares(by_rank, case)
        _judge_values(by_rank, case)
    return "Whole heads, queries beside their keys; the parts add up to the attention."


def _numbers(rows: Any) -> list[int]:
    if rows is None:
        raise CheckFailed("need a list of row numbers; got None. Does your function return it?")
    if isinstance(rows, Tensor):
        rows = rows.flatten().tolist()
    if not isinstance(rows, Iterable):
        raise CheckFailed(f"need a list of row numbers; got {rows!r}.")
    numbers = list(rows)
    inner = next((row for row in numbers if isinstance(row, Iterable) and _many(row)), None)
    if inner is not None:
        raise CheckFailed(
            f"need one flat list of row numbers; got a list that holds {inner!r}. `rows += range("
            "...)` or rows.extend adds the numbers themselves."
        )
    return [int(row) for row in numbers]


def _many(row: Any) -> bool:
    return not (isinstance(row, Tensor) and row.dim() == 0)


def _judge_rows(rows: list[int], where: str, rank: int, case: Case) -> None:
    outside = [row for row in rows if not 0 <= row < case.num_rows]
    if outside:
        raise CheckFailed(
            f"{where}: there are {case.num_rows} rows; got number {outside[0]}. "
            f"{_why_outside(case)}"
        )
    twice = next((row for row in rows if rows.count(row) > 1), None)
    if twice is not None:
        raise CheckFailed(
            f"{where}: row {twice} comes twice. Where does k start, and where does v? After all "
            f"rows of what lies above; a head has {case.head_dim} rows."
        )
    heads = [case.head_of(row) for row in rows]
    split = next((head for head in heads if heads.count(head) != case.head_dim), None)
    expected = case.num_rows // case.p
    if case.p > 1 and rows == list(range(rank * expected, (rank + 1) * expected)):
        raise CheckFailed(
            f"{where}: got rows {rows[0]} to {rows[-1]}, an even part of the tall matrix. Rank 0 "
            "gets no values that way: q, k and v lie under one another, cut each of the three."
        )
    if split and len(rows) == (case.num_heads + 2 * case.num_kv_heads) // case.p:
        raise CheckFailed(
            f"{where}: got {len(rows)} rows, one for each head: a head has {case.head_dim} rows."
        )
    if split:
        raise CheckFailed(
            f"{where}: got {heads.count(split)} of the {case.head_dim} rows of head {split[1]} of "
            f"{split[0]}. The softmax needs whole dot products, so a head stays on one rank."
        )
    counts = {name: sum(head[0] == name for head in heads) for name in "qkv"}
    needed = {"q": case.hidden // case.p} | dict.fromkeys("kv", case.kv_hidden // case.p)
    for name in "qkv":
        if counts[name] != needed[name]:
            raise CheckFailed(
                f"{where}: need {needed[name]} rows of {name}; got {counts[name]}. "
                f"{_why_count(name, counts, case)}"
            )


def _why_outside(case: Case) -> str:
    if case.num_kv_heads < case.num_heads:
        return "k and v have num_kv_heads heads each, fewer than q."
    return "q starts at row 0, k after it, v after k."


def _why_count(name: str, counts: dict[str, int], case: Case) -> str:
    if counts[name] == 0:
        return f"Which of them are the rows of {name}?"
    if name != "q" and counts[name] == case.kv_hidden:
        return "Its queries read some of the keys only: give it those heads."
    return "Every rank takes as many heads as any other."


def _judge_shares(by_rank: list[list[int]], case: Case) -> None:
    """Demand each row once, in the order q, k, v; a query's keys on the same rank."""
    taken = sorted(row for rows in by_rank for row in rows)
    if taken != list(range(case.num_rows)):
        twice = next(row for row in range(case.num_rows) if taken.count(row) != 1)
        name, head = case.head_of(twice)
        raise CheckFailed(
            f"{case.p} ranks ({case}): head {head} of {name} is taken {taken.count(twice)} times; "
            "every head has one rank. Where do k and v start?"
        )
    queries_per_key = case.num_heads // case.num_kv_heads
    for rank, rows in enumerate(by_rank):
        heads = [case.head_of(row) for row in rows]
        if [name for name, _ in heads] != sorted((name for name, _ in heads), key="qkv".index):
            raise CheckFailed(
                f"rank {rank} of {case.p} ({case}): its rows come in the order "
                f"{', '.join(dict.fromkeys(f'{name}{head}' for name, head in heads))}; its part "
                "of the matrix is cut like the whole: all of q, then k, then v."
            )
        keys = {head for name, head in heads if name == "k"}
        for name, head in heads:
            if name == "q" and head // queries_per_key not in keys:
                raise CheckFailed(
                    f"rank {rank} of {case.p} ({case}): it has head {head} of q, which reads head "
                    f"{head // queries_per_key} of k, on another rank. Neighbouring queries share "
                    "a key: give each rank neighbouring heads of all three."
                )


def _judge_values(by_rank: list[list[int]], case: Case) -> None:
    random = torch.Generator().manual_seed(case.num_rows)
    x, qkv, out = (
        torch.randn(rows, case.hidden, generator=random, dtype=torch.double)
        for rows in (SEQ, case.num_rows, case.hidden)
    )
    total = torch.zeros(SEQ, case.hidden, dtype=torch.double)
    for rows in by_rank:
        columns = [row for row in rows if row < case.hidden]  # `out` reads what q's heads write
        total += _attend(x @ qkv[rows].T, case, case.p) @ out[:, columns].T
    need = _attend(x @ qkv.T, case, 1) @ out.T
    look = "Keep the order of the heads and of the rows in each: query i reads key i / group."
    expect_close(total, need, f"{case.p} ranks ({case}), the sum of all parts", look=look)


def _attend(mixed: Tensor, case: Case, p: int) -> Tensor:
    """Run attention on a part of the heads. Shapes: [seq, rows/p] -> [seq, hidden/p]"""
    sizes = [case.hidden // p, case.kv_hidden // p, case.kv_hidden // p]
    q, k, v = (
        part.unflatten(-1, (-1, case.head_dim)).transpose(0, 1) for part in mixed.split(sizes, -1)
    )
    k, v = (part.repeat_interleave(case.num_heads // case.num_kv_heads, 0) for part in (k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1).flatten(1)


HEADS = Exercise(
    key="tensor_parallel-3",
    title="whole heads",
    check=check_heads,
    reference=planted.rows_of,
    mistakes=(
        Mistake("an even part", planted.even_part, says="cut each of the three"),
        Mistake("heads split across ranks", planted.every_pth, says="a head stays on one rank"),
        Mistake("heads for rows", planted.heads_for_rows, says="one for each head"),
        Mistake("keys like queries", planted.keys_like_queries, says="fewer than q"),
        Mistake("queries only", planted.queries_only, says="Which of them are the rows of k"),
        Mistake("all keys", planted.all_keys, says="give it those heads"),
        Mistake("keys for values", planted.keys_twice, says="and where does v"),
        Mistake("lists in a list", planted.nested, says="one flat list"),
        Mistake("starts in heads", planted.starts_in_heads, says="a head has 3 rows"),
        Mistake("queries dealt out", planted.dealt_queries, says="neighbouring heads of all three"),
        Mistake("keys first", planted.keys_first, says="all of q, then k, then v"),
    ),
)
