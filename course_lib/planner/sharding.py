"""Intra-operator parallelism: how p GPUs share each matrix product of a chain.

Alpa's second half. Each product Y = X W has a few ways to be split, each with messages of its own,
and each needs X in one layout and leaves Y in one. Where neighbours disagree, the tensor between
them is resharded. To choose is an integer program. For product v and way i let s_vi be 1 if v takes
way i, else 0; d_vi the seconds of its messages, and R_vij those of resharding from way i of v to
way j of v + 1:

    minimize    sum_v sum_i s_vi d_vi  +  sum_v sum_ij s_vi s_(v+1)j R_vij
    so that     sum_i s_vi = 1 for every v,   s_vi in {0, 1}

(A solver wants it linear: e_vij takes the place of s_vi s_(v+1)j, with sum_j e_vij = s_vi and
sum_i e_vij = s_(v+1)j.) Every way computes the same FLOP per GPU, so only messages count. In a
graph with branches, this needs a solver. On a chain, dynamic programming finds the optimum of the
same program: what follows a product depends only on the way of that product. Memory is no part of
it. Notebook 12_planner.

Source: Zheng et al. 2022 (Alpa), section 4
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from course_lib.core.errors import CourseError
from course_lib.planner.cluster import Cluster

LAYOUTS = ("whole", "tokens", "hidden")  # of [tokens, hidden]: on each GPU, or split by a dim


class ChainProduct(NamedTuple):
    """A product of a chain: [tokens, inputs] x [inputs, outputs]."""

    name: str
    inputs: int
    outputs: int


class SplitWay(NamedTuple):
    """A way to share a product: what is split, the layout that it takes, and the one it leaves.

    forward, backward   the collective of each pass, and the tensor that it sends: X, W or Y
    """

    split: str
    takes: str
    leaves: str
    forward: tuple[str, str] = ("", "")
    backward: tuple[str, str] = ("", "")


WAYS = (
    # every GPU has all tokens and some columns of W; the gradient of X is a sum over the GPUs
    SplitWay("columns", "whole", "hidden", backward=("all_reduce", "X")),
    # the same, but X comes split by tokens: it is gathered, and its gradient summed and split
    SplitWay("columns", "tokens", "hidden", ("all_gather", "X"), ("reduce_scatter", "X")),
    # every GPU has some columns of X and the rows of W that meet them; Y is a sum over the GPUs
    SplitWay("rows", "hidden", "whole", forward=("all_reduce", "Y")),
    # the same, but each GPU gets the sum of its tokens only; backward gathers the gradient of Y
    SplitWay("rows", "hidden", "tokens", ("reduce_scatter", "Y"), ("all_gather", "Y")),
    # every GPU has some tokens and all of W (data parallelism); its gradient is a sum
    SplitWay("tokens", "tokens", "tokens", backward=("all_reduce", "W")),
)

CollectiveClock = Callable[[str, float], float]  # (kind, bytes of the whole tensor) -> seconds


def collective_clock(cluster: Cluster, size: int, stride: int = 1) -> CollectiveClock:
    """Return the seconds of collectives of `size` GPUs of a cluster, for a `ShardedChain`."""

    def collective_s(kind: str, num_bytes: float) -> float:
        each = num_bytes / size if kind == "all_to_all" else num_bytes  # a GPU sends only its part
        return cluster.collective_s(kind, each, size, stride)

    return collective_s


@dataclass(frozen=True)
class ShardedChain:
    """A chain of products on GPUs that are as many as `collective_s` assumes.

    tokens        rows of every X and Y
    collective_s  seconds of a collective by its kind and the bytes of the whole tensor
    enters, ends  layouts in which the first X is there and the last Y is wanted
    number_bytes  of a number of X, W or Y

    Raises: CourseError for no product, one that does not fit the next, or an unknown layout
    """

    products: Sequence[ChainProduct]
    tokens: int
    collective_s: CollectiveClock
    enters: str = "whole"
    ends: str = "whole"
    number_bytes: int = 2

    def __post_init__(self) -> None:
        if not self.products:
            raise CourseError("ShardedChain: need at least one product; got none.")
        for layout in (self.enters, self.ends):
            if layout not in LAYOUTS:
                raise CourseError(
                    f"ShardedChain: need a layout out of {', '.join(LAYOUTS)}; got {layout!r}."
                )
        for one, following in zip(self.products, self.products[1:], strict=False):
            if one.outputs != following.inputs:
                raise CourseError(
                    f"ShardedChain: need as many inputs of {following.name} as outputs of "
                    f"{one.name}; got {following.inputs} and {one.outputs}."
                )

    def way_s(self, product: ChainProduct, way: SplitWay) -> float:
        """Return the seconds of the messages of a product that is split that way: d_vi."""
        numbers = {
            "X": self.tokens * product.inputs,
            "W": product.inputs * product.outputs,
            "Y": self.tokens * product.outputs,
        }
        passes = [(kind, sent) for kind, sent in (way.forward, way.backward) if kind]
        return sum(self.collective_s(kind, numbers[x] * self.number_bytes) for kind, x in passes)

    def reshard_s(self, width: int, before: str, after: str) -> float:
        """Return the seconds to change the layout of [tokens, width], and back of its gradient.

        To split what every GPU has costs nothing; the way back is a gather.
        """
        if before == after:
            return 0.0
        num_bytes = self.tokens * width * self.number_bytes
        if "whole" in (before, after):
            return self.collective_s("all_gather", num_bytes)
        return 2 * self.collective_s("all_to_all", num_bytes)

    def seconds(self, ways: Sequence[SplitWay]) -> float:
        """Return the seconds of all messages when each product is split in its way."""
        layout, total_s = self.enters, 0.0
        for product, way in zip(self.products, ways, strict=True):
            total_s += self.reshard_s(product.inputs, layout, way.takes) + self.way_s(product, way)
            layout = way.leaves
        return total_s + self.reshard_s(self.products[-1].outputs, layout, self.ends)

    def best(self) -> list[SplitWay]:
        """Return the ways that need the fewest seconds in all.

        For each layout that may lie between two products: the cheapest ways up to there.
        """
        reached: dict[str, tuple[float, list[SplitWay]]] = {self.enters: (0.0, [])}
        for product in self.products:
            found: dict[str, tuple[float, list[SplitWay]]] = {}
            for way in WAYS:
                own_s = self.way_s(product, way)
                for layout, (before_s, ways) in reached.items():
                    total_s = before_s + self.reshard_s(product.inputs, layout, way.takes) + own_s
                    if way.leaves not in found or total_s < found[way.leaves][0]:
                        found[way.leaves] = total_s, [*ways, way]
            reached = found
        return min((ways for _, ways in reached.values()), key=self.seconds)
