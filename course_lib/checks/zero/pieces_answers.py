"""Exercise 1 of 09_zero: the right answer, and the wrong ones that its check must name."""

from collections.abc import Callable, Sequence

Pieces = list[tuple[int, int, int]]
Sizes = Sequence[int]


def pieces_of(sizes: Sizes, p: int, rank: int) -> Pieces:
    """Return the overlap of tensor and shard: the right answer."""
    return _overlaps(sizes, *_shard(sizes, p, rank))


def _shard(sizes: Sizes, p: int, rank: int) -> tuple[int, int]:
    n = -(-sum(sizes) // p)
    return rank * n, (rank + 1) * n


def _overlaps(sizes: Sizes, low: int, high: int, *, in_row: bool = False) -> Pieces:
    found, begin = [], 0
    for index, size in enumerate(sizes):
        first, last = max(low, begin), min(high, begin + size)
        if first < last:
            shift = 0 if in_row else begin
            found.append((index, first - shift, last - shift))
        begin += size
    return found


def not_rounded(sizes: Sizes, p: int, rank: int) -> list[tuple[int, float, float]]:
    """Compute n as a float, so that pieces begin between two numbers."""
    n, found, begin = sum(sizes) / p, [], 0
    for index, size in enumerate(sizes):
        first, last = max(rank * n, begin), min((rank + 1) * n, begin + size)
        if first < last:
            found.append((index, first - begin, last - begin))
        begin += size
    return found


def _rounded_down(sizes: Sizes, p: int, rank: int) -> Pieces:
    n = sum(sizes) // p
    return _overlaps(sizes, rank * n, (rank + 1) * n)


def _rest_for_the_last(sizes: Sizes, p: int, rank: int) -> Pieces:
    n = sum(sizes) // p
    return _overlaps(sizes, rank * n, sum(sizes) if rank == p - 1 else (rank + 1) * n)


def _one_more(sizes: Sizes, p: int, rank: int) -> Pieces:
    n, rest = divmod(sum(sizes), p)
    low = rank * n + min(rank, rest)
    return _overlaps(sizes, low, low + n + (rank < rest))


def _in_the_row(sizes: Sizes, p: int, rank: int) -> Pieces:
    return _overlaps(sizes, *_shard(sizes, p, rank), in_row=True)


def _in_the_shard(sizes: Sizes, p: int, rank: int) -> Pieces:
    found, offset = [], 0
    for index, start, stop in pieces_of(sizes, p, rank):
        found.append((index, offset, offset + stop - start))
        offset += stop - start
    return found


def _from_zero(sizes: Sizes, p: int, rank: int) -> Pieces:
    return [(index, 0, stop - start) for index, start, stop in pieces_of(sizes, p, rank)]


def _stands_still(sizes: Sizes, p: int, rank: int) -> Pieces:
    low, high = _shard(sizes, p, rank)
    firsts = [(index, low, min(high, size)) for index, size in enumerate(sizes)]
    return [(index, first, last) for index, first, last in firsts if first < last]


def _goes_on_in_pieces(sizes: Sizes, p: int, rank: int) -> Pieces:
    low, high = _shard(sizes, p, rank)
    found, begin = [], 0
    for index, size in enumerate(sizes):
        first, last = max(low, begin), min(high, begin + size)
        if first < last:
            found.append((index, first - begin, last - begin))
            begin += size
    return found


def _lengths(sizes: Sizes, p: int, rank: int) -> Pieces:
    return [(index, start, stop - start) for index, start, stop in pieces_of(sizes, p, rank)]


def _inclusive(sizes: Sizes, p: int, rank: int) -> Pieces:
    return [(index, start, stop - 1) for index, start, stop in pieces_of(sizes, p, rank)]


def _with_empty(sizes: Sizes, p: int, rank: int) -> Pieces:
    low, high = _shard(sizes, p, rank)
    found, begin = [], 0
    for index, size in enumerate(sizes):
        first, last = max(low, begin), min(high, begin + size)
        if first <= last:
            found.append((index, first - begin, last - begin))
        begin += size
    return found


def _with_padding(sizes: Sizes, p: int, rank: int) -> Pieces:
    padded = [*sizes]
    if padded:
        padded[-1] += -sum(sizes) % p
    return pieces_of(padded, p, rank)


def _whole_tensors(sizes: Sizes, p: int, rank: int) -> Pieces:
    low, high = _shard(sizes, p, rank)
    begins = [sum(sizes[:index]) for index in range(len(sizes))]
    return [(index, 0, sizes[index]) for index, begin in enumerate(begins) if low <= begin < high]


def _each_tensor_cut(sizes: Sizes, p: int, rank: int) -> Pieces:
    found = []
    for index, size in enumerate(sizes):
        n = -(-size // p)
        first, last = min(size, rank * n), min(size, (rank + 1) * n)
        found += [(index, first, last)] if first < last else []
    return found


def _first_hit_only(sizes: Sizes, p: int, rank: int) -> Pieces:
    return pieces_of(sizes, p, rank)[:1]


def _whole_inside(sizes: Sizes, p: int, rank: int) -> Pieces:
    return [piece for piece in pieces_of(sizes, p, rank) if piece[1:] == (0, sizes[piece[0]])]


WRONG: tuple[tuple[str, Callable[[Sizes, int, int], Pieces], str], ...] = (
    (
        "rounded down",
        _rounded_down,
        "Rounded down: what is left over at the end belongs to nobody, and would never be "
        "trained. A shard is ceil(numel / p) long.",
    ),
    (
        "rest for the last",
        _rest_for_the_last,
        "The last rank has a longer shard: collectives want equal ones. Round up, and fill up.",
    ),
    (
        "first ranks one more",
        _one_more,
        "The first ranks have one number more: collectives want equal shards. Round up on every "
        "rank, and let the last one be filled up with zeros.",
    ),
    (
        "counted in the flat parameter",
        _in_the_row,
        "Those are indices into the flat parameter: count from where the tensor begins.",
    ),
    (
        "counted in the shard",
        _in_the_shard,
        "Those are places in the shard: count from where the tensor begins.",
    ),
    (
        "from zero",
        _from_zero,
        "Every piece begins at 0: what earlier ranks own of its tensor comes before it.",
    ),
    (
        "begin stands still",
        _stands_still,
        "begin is still 0 for every tensor: after each one, add its size.",
    ),
    (
        "begin goes on in pieces only",
        _goes_on_in_pieces,
        "begin goes on only where there is a piece: add the size of every tensor.",
    ),
    ("lengths", _lengths, "The third number is where the piece stops, not how long it is."),
    ("inclusive", _inclusive, "stop is one behind the last number, as in a slice."),
    (
        "empty pieces",
        _with_empty,
        "There is an empty piece: leave out tensors that do not reach in.",
    ),
    (
        "padding",
        _with_padding,
        "The padding at the end belongs to no tensor: the last piece stops where its tensor does.",
    ),
    (
        "whole tensors",
        _whole_tensors,
        "Those are whole tensors, so ranks own unequal parts: where a shard begins has nothing "
        "to do with where a tensor begins.",
    ),
    (
        "each tensor by itself",
        _each_tensor_cut,
        "You cut each tensor by itself; here the flat parameter of all tensors is cut, once.",
    ),
    (
        "one piece only",
        _first_hit_only,
        "Only the first piece: a shard reaches over as many tensors as fit.",
    ),
    (
        "only what lies inside",
        _whole_inside,
        "Only tensors that lie in the shard as a whole: parts of them count, too.",
    ),
)
