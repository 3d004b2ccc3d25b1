"""How the gradients of flat parameters leave: each flat_param once a round, and one is under way at a time.

A round is one backward pass: when the last flat_param has left, the next round may begin. Before a flat_param
leaves, the one before it has to arrive, so no more than two whole flat_params of gradients are there: one
under way, one that backward fills. Notebook 09_zero.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from course_lib.collectives.group import Group
from course_lib.core.errors import CourseError
from course_lib.zero.flat_param import FlatParam


class Reducer:
    """The reducer of some flat_params.

    left      numbers of the flat_params that have left in this round
    is_open   has a gradient come whose round is not over?
    """

    def __init__(self, flat_params: Sequence[FlatParam]) -> None:
        self.flat_params = flat_params
        self.left: set[int] = set()
        self.is_open = False
        self._under_way: FlatParam | None = None

    def note(self, number: int, index: int) -> None:
        """Parameter `index` of flat_param `number` has a gradient.

        Raises:  CourseError for its second one in a round
        """
        flat_param = self.flat_params[number]
        if number in self.left or index not in flat_param.missing:
            raise CourseError(
                f"rank {dist.get_rank()}, ZeRO: need a forward pass before each backward; got a "
                f"second gradient for {flat_param.names[index]}. Try engine(inputs) again, or one "
                "backward of the sum of losses. (Checkpointing that reuses a parameter: try "
                "use_reentrant=False.)"
            )
        flat_param.used.add(index)
        self.is_open = True

    def send(self, number: int) -> None:
        """Let a flat_param leave."""
        self.settle()
        self._under_way = self.flat_params[number]
        self._under_way.send()
        self.left.add(number)
        if len(self.left) == len(self.flat_params):
            self.left.clear()
            self.is_open = False

    def settle(self) -> None:
        """Wait for the flat_param that is under way."""
        if self._under_way is not None:
            self._under_way.settle()
            self._under_way = None

    @torch.no_grad()
    def end(self) -> None:
        """Send what has not left in an open round, full or not, and wait."""
        for number in range(len(self.flat_params)):
            if self.is_open and number not in self.left:
                self.send(number)
        self.settle()

    def forget(self) -> None:
        """No gradient has come. What is under way arrives first: all ranks have to take part."""
        self.settle()
        self.left.clear()
        self.is_open = False


def agree_on_used(
    flat_params: Sequence[FlatParam], group: Group, find_unused: bool, where: str
) -> None:
    """A parameter is used if any rank has a gradient of it; without find_unused all have to be.

    Cost:    with find_unused one all_reduce, a byte a parameter
    Raises:  CourseError that names parameters without a gradient
    """
    params = [
        (flat_param, index) for flat_param in flat_params for index in range(len(flat_param.params))
    ]
    if find_unused:
        used = [index in flat_param.used for flat_param, index in params]
        flags = torch.tensor(used, dtype=torch.uint8, device=flat_params[0].flat.device)
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=group)
        for (flat_param, index), flag in zip(params, flags.tolist(), strict=True):
            flat_param.used |= {index} if flag else set()
        return
    unused = [
        flat_param.names[index] for flat_param, index in params if index not in flat_param.used
    ]
    if unused:
        raise CourseError(
            f"rank {dist.get_rank()}, {where}: need a gradient for every parameter; got none for "
            f"{', '.join(unused[:4])}{f' and {len(unused) - 4} more' * (len(unused) > 4)}. "
            "Try backward() before step(), or find_unused=True if the loss does not use them."
        )
