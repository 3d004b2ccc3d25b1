"""Where activations of two runs on different meshes part: by the mean square of all elements.

A module's output lies on the ranks in parts that only its method knows: some of the sequences, of
the tokens, or of the heads, or a copy. However it is divided, all ranks and micro-batches together
have the same elements, each as many times as there are copies. So their mean square is the same,
and a rank that reads other data, drops other values, or adds a bias twice has another one.
"""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from course_lib.debugging.gradient_types import TOLERANCES
from course_lib.debugging.value_records import RankValues, Value
from course_lib.debugging.wholes import axes_of

ROOT = "model"  # the name of the whole module's input and output
OF_STAGE = re.compile(r"chunks\.\d+(\.|$)")  # before a name in this rank's part of a pipeline
WHAT = {
    "input": "all ranks together read other data than the reference: sampler, order, shares",
    "forward": "the output of {} is another one: the input of the model, and what is computed "
    "before, seem to be right",
    "backward": "the gradient of the output of {} is another one: forward seems to be right",
}
ALL_RIGHT = "activations and their gradients seem to be right: who sums gradients, over which ranks"


@dataclass
class _Squares:
    """All outputs of a module in a step: the sum of squares, the elements, and of one its shape.

    is_mixed   called for tensors that are divided in different ways, such as queries and keys
    """

    rank: int
    shape: tuple[int, ...]
    dtype: str
    total: float = 0.0
    count: int = 0
    is_mixed: bool = False

    def add(self, rank: int, value: Value) -> None:
        """Add an output."""
        self.is_mixed |= rank == self.rank and value.shape[1:] != self.shape[1:]
        self.total += value.norm**2
        self.count += math.prod(value.shape)


def where_activations_part(
    run: Sequence[RankValues], right: Sequence[RankValues], step: int
) -> str:
    """Return where in a step activations, or their gradients, part first; "" if none are known.

    It is evidence and no proof: a fault that keeps all squares, as a permutation does, escapes it.
    """
    known, compared = [1.0, *_scales(run)], 0
    for phase, what in WHAT.items():
        own, truth = _squares(run, step, phase), _squares(right, step, phase)
        for name, one in truth.items():
            here = own.get(name)
            if here is None or not one.total or one.is_mixed or here.is_mixed:
                continue
            if phase == "backward" and here.count != one.count:
                continue  # each copy may have a term of this gradient
            compared += 1
            ratio = here.total * one.count / (one.total * here.count)
            like = [one.count / here.count, *(known if phase == "backward" else known[:1])]
            limit = TOLERANCES.get(one.dtype, 1e-9)
            if not any(math.isclose(ratio, value, rel_tol=limit) for value in like):
                return what.format(name)
    return ALL_RIGHT if compared else ""


def _squares(run: Sequence[RankValues], step: int, phase: str) -> dict[str, _Squares]:
    """Return by module what all ranks and micro-batches have of its output."""
    found: dict[str, _Squares] = {}
    for one, axes in zip(run, axes_of(run), strict=True):
        stage, num_stages = axes.get("pp", (0, 1))
        for value in one.values.values():
            name = OF_STAGE.sub("", value.name)
            is_between = name == ROOT and num_stages > 1 and (stage or phase != "input")
            if value.key[:2] == (step, phase) and name and not is_between:
                new = _Squares(one.rank, value.shape, value.dtype)
                found.setdefault(name, new).add(one.rank, value)
    return found


def _scales(run: Sequence[RankValues]) -> Iterator[float]:
    """Yield the squares of a loss's possible factors: a mean over ranks undoes a multiple."""
    sizes = [size for _, size in axes_of(run)[0].values() if size > 1]
    for number in range(1, len(sizes) + 1):
        for some in combinations(sizes, number):
            yield from (math.prod(some) ** 2, math.prod(some) ** -2)
