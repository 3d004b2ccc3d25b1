"""Exercise 3 of 15_context_parallel: which pairs of chunks a rank computes in a step of a ring."""

from collections.abc import Collection
from typing import Any

from course_lib.checks.cases import Case, Cases, whole
from course_lib.checks.edits import Edit
from course_lib.checks.exercise import Cause, Exercise, failed


def _cases() -> list[Case]:
    return [
        (f"rank {rank} of {p} with the keys of rank {source}", (rank, source, p))
        for p in (2, 3, 1, 5, 16)
        for rank in range(p)
        for source in range(p)
        if p < 16 or (rank * source) % 7 == 3
    ]


CHUNKS = Cause("Rank r holds chunks r and 2p - 1 - r of 2p: an early one and its mirror image.")
PAIRS = Cause("Return a list of pairs, (query chunk, key chunk).")
FUTURE = Cause("Keys of a later chunk than the queries are empty: a causal mask removes them.")
DIAGONAL = Cause("A chunk of queries sees half of its own keys: this pair has to be computed, too.")
BACKWARDS = Cause("A query sees earlier keys: the number of the key chunk is at most the query's.")
FOREIGN = Cause("The keys are those of the rank that sent them, source; the queries stay at home.")
BY_RANK = Cause("Compare the chunks, not the ranks: rank 0 holds the latest chunk of all.")
ORDER = Cause("The query chunk comes first in a pair.")
ONE_PAIR = Cause("Compare each of the two query chunks with each of the two key chunks.")


def _words(pairs: Any, *_arguments: int) -> str:
    """Return pairs of chunks in words, sorted. Raises: CheckFailed for anything else"""
    if not isinstance(pairs, Collection) or isinstance(pairs, str):
        raise failed(f"need a list of pairs; got {pairs!r}", PAIRS)
    found = [(*map(whole, pair),) if isinstance(pair, tuple | list) else () for pair in pairs]
    if any(len(pair) != 2 for pair in found):
        raise failed(f"need a list of pairs; got {pairs!r}", PAIRS)
    return " ".join(f"({query}, {key})" for query, key in sorted(found)) or "no pair"


QUERIES, KEYS = "(rank, 2 * p - 1 - rank)", "(source, 2 * p - 1 - source)"
RETURN = "[(q, k) for q in queries for k in keys if k <= q]"

ZIGZAG = Exercise(
    key="context_parallel-3",
    title="which blocks are empty",
    check=Cases(
        cases=_cases,
        show=_words,
        look="Write down the chunks of both ranks; a key chunk up to the query chunk is needed.",
        success="Right for all steps of 1 to 16 ranks: with foreign keys, two pairs each.",
    ),
    wrong=(
        Edit("if k <= q", "if k < q", DIAGONAL),
        Edit("if k <= q", "if k >= q", BACKWARDS),
        Edit(" if k <= q", "", FUTURE),
        Edit("if k <= q", "if source <= rank", BY_RANK),
        Edit(QUERIES, "(rank, 2 * p - rank)", CHUNKS, also=((KEYS, "(source, 2 * p - source)"),)),
        Edit(
            QUERIES,
            "(2 * rank, 2 * rank + 1)",
            CHUNKS,
            also=((KEYS, "(source * 2, source * 2 + 1)"),),
        ),
        Edit(QUERIES, "(rank, rank + p)", CHUNKS, also=((KEYS, "(source, source + p)"),)),
        Edit(KEYS, QUERIES, FOREIGN),
        Edit("[(q, k) for", "[(k, q) for", ORDER),
        Edit(RETURN, "[(q, k) for q, k in zip(queries, keys) if k <= q]", ONE_PAIR),
        Edit(RETURN, f"iter({RETURN})", PAIRS),
        Edit(RETURN, "[q for q in queries for k in keys if k <= q]", PAIRS),
    ),
)
