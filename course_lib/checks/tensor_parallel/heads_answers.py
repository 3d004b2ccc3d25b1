"""The right answer to exercise 3 of 07_tensor_parallel, and the wrong ones its check must name."""


def rows_of(rank: int, p: int, num_heads: int, num_kv_heads: int, head_dim: int) -> list[int]:
    """Return this rank's heads of q, then of k, then of v."""
    rows, start = list[int](), 0
    for heads in (num_heads, num_kv_heads, num_kv_heads):
        n = heads // p * head_dim
        rows += range(start + rank * n, start + (rank + 1) * n)
        start += heads * head_dim
    return rows


def even_part(rank: int, p: int, num_heads: int, num_kv_heads: int, head_dim: int) -> list[int]:
    n = (num_heads + 2 * num_kv_heads) * head_dim // p
    return list(range(rank * n, (rank + 1) * n))


def every_pth(rank: int, p: int, num_heads: int, num_kv_heads: int, head_dim: int) -> list[int]:
    return list(range(rank, (num_heads + 2 * num_kv_heads) * head_dim, p))


def heads_for_rows(
    rank: int, p: int, num_heads: int, num_kv_heads: int, head_dim: int
) -> list[int]:
    return rows_of(rank, p, num_heads, num_kv_heads, 1)


def keys_like_queries(
    rank: int, p: int, num_heads: int, num_kv_heads: int, head_dim: int
) -> list[int]:
    return rows_of(rank, p, num_heads, num_heads, head_dim)


def queries_only(rank: int, p: int, num_heads: int, num_kv_heads: int, head_dim: int) -> list[int]:
    return rows_of(rank, p, num_heads, 0, head_dim)


def all_keys(rank: int, p: int, num_heads: int, num_kv_heads: int, head_dim: int) -> list[int]:
    rows = rows_of(rank, p, num_heads, 0, head_dim)
    first = num_heads * head_dim
    return [*rows, *range(first, first + 2 * num_kv_heads * head_dim)]


def keys_twice(rank: int, p: int, num_heads: int, num_kv_heads: int, head_dim: int) -> list[int]:
    rows = rows_of(rank, p, num_heads, num_kv_heads, head_dim)
    n = num_kv_heads * head_dim // p
    return [*rows[:-n], *rows[-2 * n : -n]]


def dealt_queries(rank: int, p: int, num_heads: int, num_kv_heads: int, head_dim: int) -> list[int]:
    """Deal heads of q out in turn, those of k and v in blocks of neighbors."""
    heads = range(rank, num_heads, p)
    queries = [head * head_dim + i for head in heads for i in range(head_dim)]
    return queries + rows_of(rank, p, num_heads, num_kv_heads, head_dim)[len(queries) :]


def keys_first(rank: int, p: int, num_heads: int, num_kv_heads: int, head_dim: int) -> list[int]:
    rows = rows_of(rank, p, num_heads, num_kv_heads, head_dim)
    n = num_heads * head_dim // p
    return rows[n:] + rows[:n]


def nested(rank: int, p: int, num_heads: int, num_kv_heads: int, head_dim: int) -> list[range]:
    n = num_heads // p * head_dim
    return [range(rank * n, (rank + 1) * n)]


def starts_in_heads(
    rank: int, p: int, num_heads: int, num_kv_heads: int, head_dim: int
) -> list[int]:
    rows, start = list[int](), 0
    for heads in (num_heads, num_kv_heads, num_kv_heads):
        n = heads // p * head_dim
        rows += range(start + rank * n, start + (rank + 1) * n)
        start += heads
    return rows
