"""1F1B on one screen: the schedule as one function, for one stage on each rank.

It says what a rank does, and nothing else. `engine.py` runs any schedule, several model chunks,
tied weights and any sizes with the same messages. Notebook 08_pipeline.
"""

from collections import deque
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib.collectives.group import Group, member_of
from course_lib.core.errors import CourseError


def one_f_one_b_whole(
    stage: nn.Module,
    inputs: Sequence[Tensor],
    targets: Sequence[Tensor],
    loss_of: Callable[[Tensor, Tensor], Tensor],
    activation: Tensor,
    group: Group = None,
) -> Tensor | None:
    """Add the gradient of the mean loss over m micro-batches; return that loss on the last rank.

    inputs, targets   m equal micro-batches: the first rank uses inputs, the last one targets
    activation        any tensor of the shape and dtype that stages pass on

    Cost:    a rank keeps at most p - rank activations; per micro-batch and border two messages
    Raises:  CourseError unless the micro-batches are equally large
    Source:  Narayanan et al. 2019 (PipeDream), section 3.2; 2021 (Megatron-LM), section 2.2
    """
    me, m = member_of(group, "one_f_one_b_whole"), len(inputs)
    if m != len(targets) or len({len(x) for x in (*inputs, *targets)}) != 1:
        sizes = [len(x) for x in inputs], [len(x) for x in targets]
        raise CourseError(
            f"one_f_one_b_whole: need as many inputs as targets, all equally large; got {sizes[0]} "
            f"and {sizes[1]}. Try batch.chunk(m) with an m that divides it."
        )
    first, last = me.rank == 0, me.rank == me.size - 1
    begun: deque[tuple[Tensor, Tensor]] = deque()  # micro-batches whose backward is to come
    sent: list[tuple[dist.Work, Tensor]] = []  # nobody waits before the end: no deadlock
    total = activation.new_zeros(())

    def receive(source: int) -> Tensor:
        me.irecv(x := torch.empty_like(activation), source).wait()
        return x

    def send(x: Tensor, to: int) -> None:
        sent.append((me.isend(x, to), x))

    def forward(number: int) -> None:
        x = inputs[number] if first else receive(me.rank - 1).requires_grad_()
        y = stage(x)
        if last:
            y = loss_of(y, targets[number]) / m
            total.add_(y.detach())
        else:
            send(y.detach().contiguous(), me.rank + 1)
        begun.append((x, y))

    def backward() -> None:
        x, y = begun.popleft()
        y.backward(None if last else receive(me.rank + 1))
        if not first and x.grad is not None:
            send(x.grad, me.rank - 1)

    # Phase 1, warm-up: as many forwards as there are stages behind this one
    warm_up = min(me.size - 1 - me.rank, m)
    for number in range(warm_up):
        forward(number)
    # Phase 2, steady state: one forward, one backward
    for number in range(warm_up, m):
        forward(number)
        backward()
    # Phase 3, cool-down: the backwards that are left
    for _ in range(warm_up):
        backward()
    for work, _ in sent:
        work.wait()
    return total if last else None
