"""Cut the state of whole parameters into pieces and join it again, to save and load it.

ZeRO saves two kinds of state: this rank's shard, for the same rank of an equal group, and the full
state of one process, which fits any number of ranks. A checkpoint of shards that fits any number of
ranks, too, needs each piece as boxes of its parameter. Notebook 09_zero.
"""

from collections.abc import Container, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from course_lib.core.errors import CourseError
from course_lib.core.shards import Shard, boxes_of_range
from course_lib.data_parallel.gradients import some_names
from course_lib.zero.flat_layout import Piece

# optimizer state that is one number per parameter: never cut or joined
COUNTERS = ("step", "mu_product", "eta", "mu")


def on_host(value: Any) -> Any:
    """Return a copy of a tensor in the host's memory, and any other value as it is."""
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value


def need_keys(state: Container[str], keys: Sequence[str], where: str, attempt: str) -> None:
    """Check that a state to load has all it needs.

    Raises:  CourseError that names what it lacks
    """
    missing = [key for key in keys if key not in state]
    if missing:
        raise CourseError(
            f"{where}: need a state with {some_names(keys)}; got one without "
            f"{some_names(missing)}. Try {attempt}."
        )


def numbered_groups(param_groups: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return parameter groups as a plain optimizer saves them: parameters by number."""
    numbered, first = [], 0
    for group in param_groups:
        last = first + len(group["params"])
        numbered.append({**group, "params": list(range(first, last))})
        first = last
    return numbered


def cut_state(key: str, value: Any, piece: Piece, like: Tensor) -> Any:
    """Return the part of a parameter's saved optimizer state that belongs to a piece."""
    if not isinstance(value, Tensor):
        return value
    return value.clone() if key in COUNTERS else piece.of(value).to(like, copy=True)


def range_shard(shape: tuple[int, ...], start: int, piece: Tensor) -> Shard:
    """Return a piece of a flattened parameter, or of its optimizer state, as boxes of the whole.

    Shapes:  [numbers], those from `start` on
    """
    boxes = boxes_of_range(shape, start, start + len(piece))
    parts = piece.detach().split([box.numel for box in boxes])
    pieces = [(box, part.view(box.sizes)) for box, part in zip(boxes, parts, strict=True)]
    return Shard(shape, pieces)


def join_state(
    pieces: Sequence[tuple[int, dict[str, Any]]], shape: tuple[int, ...]
) -> dict[str, Any]:
    """Return the optimizer state of a whole parameter from (start, state) of each of its pieces."""
    ordered = [state for _, state in sorted(pieces, key=lambda piece: piece[0])]
    whole: dict[str, Any] = dict(ordered[0]) if ordered else {}
    for key, value in whole.items():
        if isinstance(value, Tensor) and key not in COUNTERS:
            whole[key] = torch.cat([state[key] for state in ordered]).view(shape)
    return whole
