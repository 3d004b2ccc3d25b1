"""ZeRO-2's reduce-scatter: launch each flat parameter's gradients once per round, one at a time.

A round is one backward pass: when the last flat parameter has been launched, the next round may
begin. Before one is launched, the one before it has to complete, so at most two whole gradients of
flat parameters exist: one in flight, and one that backward fills. Notebook 09_zero.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from course_lib.collectives.group import Group
from course_lib.core.errors import CourseError
from course_lib.data_parallel.gradients import require_gradients, used_on_any_rank
from course_lib.zero.flat_param import FlatParam


class Reducer:
    """Reduce-scatters the gradients of flat parameters during backward.

    launched   numbers of the flat parameters launched in this round
    is_open    whether a gradient is complete whose round is not over
    """

    def __init__(self, flat_params: Sequence[FlatParam]) -> None:
        self.flat_params = flat_params
        self.launched: set[int] = set()
        self.is_open = False
        self._in_flight: FlatParam | None = None

    def mark_ready(self, number: int, index: int) -> None:
        """Note that parameter `index` of flat parameter `number` has a gradient.

        Raises:  CourseError for its second one in a round
        """
        flat_param = self.flat_params[number]
        if number in self.launched or index not in flat_param.missing:
            raise CourseError(
                f"rank {dist.get_rank()}, ZeRO: need a forward pass before each backward; got a "
                f"second gradient for {flat_param.names[index]}. Try engine(inputs) again, or one "
                "backward of the sum of losses. (Checkpointing that reuses a parameter: try "
                "use_reentrant=False.)"
            )
        flat_param.used.add(index)
        flat_param.arrived.add(index)
        self.is_open = True

    def launch(self, number: int) -> None:
        """Wait for the reduce_scatter in flight, and launch that of a flat parameter."""
        self.wait()
        self._in_flight = self.flat_params[number]
        self._in_flight.launch_reduce_scatter()
        self.launched.add(number)
        if len(self.launched) == len(self.flat_params):
            self.launched.clear()
            self.is_open = False

    def wait(self) -> None:
        """Wait for the reduce_scatter in flight, if there is one."""
        if self._in_flight is not None:
            self._in_flight.wait_reduce_scatter()
            self._in_flight = None

    @torch.no_grad()
    def flush(self) -> None:
        """Launch the rest of an open round, complete or not, and wait."""
        for number in range(len(self.flat_params)):
            if self.is_open and number not in self.launched:
                self.launch(number)
        self.wait()

    def reset(self) -> None:
        """Begin a new round; wait for the one in flight, because all ranks take part in it."""
        self.wait()
        self.launched.clear()
        self.is_open = False


def agree_on_used(
    flat_params: Sequence[FlatParam], group: Group, find_unused: bool, where: str
) -> None:
    """With find_unused add what any rank has used to `used`; without, require all parameters.

    Cost:    with find_unused one all_reduce of 1 byte per parameter
    Raises:  CourseError that names parameters without a gradient
    """
    params = [(one, index) for one in flat_params for index in range(len(one.params))]
    used = [index in flat_param.used for flat_param, index in params]
    if find_unused:
        flags = used_on_any_rank(used, flat_params[0].flat.device, group)
        for (flat_param, index), flag in zip(params, flags, strict=True):
            flat_param.used |= {index} if flag else set()
        return
    named = zip(params, used, strict=True)
    missing = [
        flat_param.names[index]
        for (flat_param, index), is_used in named
        if not is_used and flat_param.params[index].requires_grad
    ]
    attempt = "backward() before step(), or find_unused=True if the loss does not use them"
    require_gradients(missing, where, attempt)
