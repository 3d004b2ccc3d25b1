"""How the gradients of flat rows leave: each row once a round, and one is under way at a time.

A round is one backward pass: when the last row has left, the next round may begin. Before a row
leaves, the one before it has to arrive, so no more than two whole rows of gradients are there: one
under way, one that backward fills. Notebook 09_zero.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from course_lib.collectives.group import Group
from course_lib.core.errors import CourseError
from course_lib.zero.flat_param import FlatRow


class GradientRounds:
    """The rounds of some rows.

    left      numbers of the rows that have left in this round
    is_open   has a gradient come whose round is not over?
    """

    def __init__(self, rows: Sequence[FlatRow]) -> None:
        self.rows = rows
        self.left: set[int] = set()
        self.is_open = False
        self._under_way: FlatRow | None = None

    def note(self, number: int, index: int) -> None:
        """Parameter `index` of row `number` has a gradient.

        Raises:  CourseError for its second one in a round
        """
        row = self.rows[number]
        if number in self.left or index not in row.missing:
            raise CourseError(
                f"rank {dist.get_rank()}, ZeRO: need a forward pass before each backward; got a "
                f"second gradient for {row.names[index]}. Try engine(inputs) again, or one "
                "backward of the sum of losses. (Checkpointing that reuses a parameter: try "
                "use_reentrant=False.)"
            )
        row.used.add(index)
        self.is_open = True

    def send(self, number: int) -> None:
        """Let a row leave."""
        self.settle()
        self._under_way = self.rows[number]
        self._under_way.send()
        self.left.add(number)
        if len(self.left) == len(self.rows):
            self.left.clear()
            self.is_open = False

    def settle(self) -> None:
        """Wait for the row that is under way."""
        if self._under_way is not None:
            self._under_way.settle()
            self._under_way = None

    @torch.no_grad()
    def end(self) -> None:
        """Send what has not left in an open round, full or not, and wait."""
        for number in range(len(self.rows)):
            if self.is_open and number not in self.left:
                self.send(number)
        self.settle()

    def forget(self) -> None:
        """No gradient has come. What is under way arrives first: all ranks have to take part."""
        self.settle()
        self.left.clear()
        self.is_open = False


def agree_on_used(rows: Sequence[FlatRow], group: Group, find_unused: bool, where: str) -> None:
    """A parameter is used if any rank has a gradient of it; without find_unused all have to be.

    Cost:    with find_unused one all_reduce, a byte a parameter
    Raises:  CourseError that names parameters without a gradient
    """
    params = [(row, index) for row in rows for index in range(len(row.params))]
    if find_unused:
        used = [index in row.used for row, index in params]
        flags = torch.tensor(used, dtype=torch.uint8, device=rows[0].flat.device)
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=group)
        for (row, index), flag in zip(params, flags.tolist(), strict=True):
            row.used |= {index} if flag else set()
        return
    unused = [row.names[index] for row, index in params if index not in row.used]
    if unused:
        raise CourseError(
            f"rank {dist.get_rank()}, {where}: need a gradient for every parameter; got none for "
            f"{', '.join(unused[:4])}{f' and {len(unused) - 4} more' * (len(unused) > 4)}. "
            "Try backward() before step(), or find_unused=True if the loss does not use them."
        )
