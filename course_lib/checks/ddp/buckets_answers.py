"""Exercise 1 of 06_ddp: the right answer, and the wrong ones that its check must name."""

from collections.abc import Callable, Iterable

from torch import nn

Buckets = list[list[nn.Parameter]]


def buckets_of(module: nn.Module, bucket_bytes: int) -> Buckets:
    """Pack trainable parameters from the last to the first, in this order: the right answer."""
    trainable = [param for param in module.parameters() if param.requires_grad]
    return _packed(reversed(trainable), bucket_bytes)


def _bytes_of(param: nn.Parameter) -> int:
    return param.numel() * param.element_size()


def _packed(
    params: Iterable[nn.Parameter],
    bucket_bytes: int,
    size: Callable[[nn.Parameter], int] = _bytes_of,
) -> Buckets:
    buckets: Buckets = []
    filled = 0
    for param in params:
        if not buckets or filled + size(param) > bucket_bytes:
            buckets.append([])
            filled = 0
        buckets[-1].append(param)
        filled += size(param)
    return buckets


# --- what the check compares a wrong answer with


def _trainable(module: nn.Module) -> list[nn.Parameter]:
    return [param for param in module.parameters() if param.requires_grad]


def _in_forward_order(module: nn.Module, bucket_bytes: int) -> Buckets:
    return _packed(_trainable(module), bucket_bytes)


def _cut_forward(module: nn.Module, bucket_bytes: int) -> Buckets:
    return _packed(_trainable(module), bucket_bytes)[::-1]


def _forward_inside(module: nn.Module, bucket_bytes: int) -> Buckets:
    return [bucket[::-1] for bucket in buckets_of(module, bucket_bytes)]


def _with_frozen(module: nn.Module, bucket_bytes: int) -> Buckets:
    return _packed(reversed(list(module.parameters())), bucket_bytes)


def _tied_twice(module: nn.Module, bucket_bytes: int) -> Buckets:
    named = module.named_parameters(remove_duplicate=False)
    return _packed(reversed([param for _, param in named if param.requires_grad]), bucket_bytes)


def _over_the_limit(module: nn.Module, bucket_bytes: int) -> Buckets:
    buckets: Buckets = []
    filled = bucket_bytes
    for param in reversed(_trainable(module)):
        if filled >= bucket_bytes:
            buckets.append([])
            filled = 0
        buckets[-1].append(param)
        filled += _bytes_of(param)
    return buckets


def _never_exactly_full(module: nn.Module, bucket_bytes: int) -> Buckets:
    return _packed(reversed(_trainable(module)), bucket_bytes - 1)


def _by_elements(module: nn.Module, bucket_bytes: int) -> Buckets:
    return _packed(reversed(_trainable(module)), bucket_bytes, nn.Parameter.numel)


def _four_bytes_each(module: nn.Module, bucket_bytes: int) -> Buckets:
    return _packed(reversed(_trainable(module)), bucket_bytes, lambda param: 4 * param.numel())


def _last_one_lost(module: nn.Module, bucket_bytes: int) -> Buckets:
    return buckets_of(module, bucket_bytes)[:-1]


def _filled_not_reset(module: nn.Module, bucket_bytes: int) -> Buckets:
    buckets: Buckets = []
    filled = 0
    for param in reversed(_trainable(module)):
        if not buckets or filled + _bytes_of(param) > bucket_bytes:
            buckets.append([])
        buckets[-1].append(param)
        filled += _bytes_of(param)
    return buckets


def _first_not_counted(module: nn.Module, bucket_bytes: int) -> Buckets:
    buckets: Buckets = []
    filled = 0
    for param in reversed(_trainable(module)):
        if not buckets or filled + _bytes_of(param) > bucket_bytes:
            buckets.append([param])
            filled = 0
        else:
            buckets[-1].append(param)
            filled += _bytes_of(param)
    return buckets


def _into_any_bucket(module: nn.Module, bucket_bytes: int) -> Buckets:
    buckets: Buckets = []
    for param in reversed(_trainable(module)):
        room = bucket_bytes - _bytes_of(param)
        fits = [bucket for bucket in buckets if sum(map(_bytes_of, bucket)) <= room]
        if not fits:
            fits = [[]]
            buckets.append(fits[0])
        fits[0].append(param)
    return buckets


def _tied_by_last_name(module: nn.Module, bucket_bytes: int) -> Buckets:
    named = reversed(list(module.named_parameters(remove_duplicate=False)))
    return _packed(dict.fromkeys(param for _, param in named if param.requires_grad), bucket_bytes)


def _empty_at_the_end(module: nn.Module, bucket_bytes: int) -> Buckets:
    return buckets_of(module, bucket_bytes) or [[]]


def _with_empties(module: nn.Module, bucket_bytes: int) -> Buckets:
    """Return the buckets if the list starts with an empty one, and one too large follows it."""
    buckets: Buckets = [[]]
    filled = 0
    for param in reversed(_trainable(module)):
        if filled + _bytes_of(param) > bucket_bytes:
            buckets.append([])
            filled = 0
        buckets[-1].append(param)
        filled += _bytes_of(param)
    return buckets


def _large_left_out(module: nn.Module, bucket_bytes: int) -> Buckets:
    small = [param for param in _trainable(module) if _bytes_of(param) <= bucket_bytes]
    return _packed(reversed(small), bucket_bytes)


def _one_each(module: nn.Module, bucket_bytes: int) -> Buckets:
    return [[param] for param in reversed(_trainable(module))]


WRONG: tuple[tuple[str, Callable[[nn.Module, int], Buckets], str], ...] = (
    ("forward order", _in_forward_order, "Backward begins at the end: last parameter first."),
    (
        "cut in forward order",
        _cut_forward,
        "Packed from the first parameter on, and the list turned around: the bucket that is not "
        "full has to be the last one to leave. Reverse the parameters, then pack.",
    ),
    (
        "forward order inside",
        _forward_inside,
        "Inside a bucket, too, the parameter that is ready first comes first.",
    ),
    (
        "frozen parameters",
        _with_frozen,
        "A frozen parameter never gets a gradient, and its bucket would wait for ever: leave out "
        "what does not require one.",
    ),
    (
        "tied weight twice",
        _tied_twice,
        "A tied weight has two names, and one gradient: it would be reduced twice. "
        "module.parameters() gives it once.",
    ),
    (
        "over the limit",
        _over_the_limit,
        "Over the limit: open a new bucket before a parameter that does not fit any more.",
    ),
    ("never exactly full", _never_exactly_full, "A bucket may be exactly full, not only below."),
    ("elements for bytes", _by_elements, "Those are elements: multiply by element_size()."),
    ("always 4 bytes", _four_bytes_each, "Not every number has 4 bytes: ask element_size()."),
    (
        "last bucket lost",
        _last_one_lost,
        "The last bucket, which is not full, is missing: its gradients would never be sent.",
    ),
    (
        "an empty bucket",
        _with_empties,
        "There is an empty bucket: open one only when there is a parameter to put into it.",
    ),
    (
        "large ones left out",
        _large_left_out,
        "A parameter larger than the limit travels alone, but it has to travel.",
    ),
    (
        "an empty one at the end",
        _empty_at_the_end,
        "Where nothing is trained there is no bucket: append the last one only if it holds one.",
    ),
    (
        "filled not reset",
        _filled_not_reset,
        "A new bucket is empty: begin to count its bytes at 0.",
    ),
    (
        "first one not counted",
        _first_not_counted,
        "The parameter that opens a bucket fills it, too: count its bytes.",
    ),
    (
        "into any bucket with room",
        _into_any_bucket,
        "A parameter went back into an earlier bucket, which then has to wait for it: only the "
        "newest bucket takes more.",
    ),
    (
        "tied by its last name",
        _tied_by_last_name,
        "A tied weight is complete with its first use, which backward reaches last: it belongs "
        "where its first name is.",
    ),
    ("one each", _one_each, "A bucket a parameter: what fits goes into the same bucket."),
)
