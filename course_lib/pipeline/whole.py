"""1F1B in one short file: one stage on each rank, and a step in three phases.

It says what a rank does, and nothing else. `engine.py` runs any schedule, several model chunks,
tied weights and any sizes with the same messages. Notebook 08_pipeline.
"""

from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib.collectives.group import Group, member_of
from course_lib.core.errors import CourseError


class WholePipeline:
    """The stages of a model in the order of the ranks; this rank has one of them.

    loss = WholePipeline(stage, loss_of, activation).step(inputs, targets)

    loss_of      mean loss of the last stage's output and targets
    activation   any tensor of the shape and dtype that stages pass on

    Cost:    a rank keeps at most p - rank activations; per micro-batch and border two messages
    Source:  Narayanan et al. 2019 (PipeDream), section 3.2; 2021 (Megatron-LM), section 2.2
    """

    def __init__(
        self,
        stage: nn.Module,
        loss_of: Callable[[Tensor, Tensor], Tensor],
        activation: Tensor,
        group: Group = None,
    ) -> None:
        self.stage, self.loss_of, self.activation = stage, loss_of, activation
        self.me = member_of(group, "WholePipeline")
        self.first, self.last = self.me.rank == 0, self.me.rank == self.me.size - 1

    def step(self, inputs: Sequence[Tensor], targets: Sequence[Tensor]) -> Tensor | None:
        """Add the gradient of the mean loss over m micro-batches; return it on the last rank.

        Raises:  CourseError unless the micro-batches are equally large
        """
        m = len(inputs)
        if m != len(targets) or len({len(x) for x in (*inputs, *targets)}) != 1:
            raise CourseError(
                "WholePipeline.step: need as many inputs as targets, all equally large; got "
                f"{[*map(len, inputs)]} and {[*map(len, targets)]}. Try batch.chunk(m)."
            )
        self.begun = deque[tuple[Tensor, Tensor]]()  # micro-batches whose backward is to come
        self.sent = list[tuple[dist.Work, Tensor]]()  # nobody waits before the end: no deadlock
        self.losses = list[Tensor]()
        # Phase 1, warm-up: as many forwards as there are stages behind this one
        warm_up = min(self.me.size - 1 - self.me.rank, m)
        pairs = zip(inputs, targets, strict=True)
        for pair in islice(pairs, warm_up):
            self._forward(*pair, m)
        # Phase 2, steady state: one forward, one backward for each of the pairs that are left
        for pair in pairs:
            self._forward(*pair, m)
            self._backward()
        # Phase 3, cool-down: the backwards that are left
        for _ in range(warm_up):
            self._backward()
        for work, _ in self.sent:
            work.wait()
        return torch.stack(self.losses).sum() if self.last else None

    def _forward(self, x: Tensor, target: Tensor, m: int) -> None:
        x = x if self.first else self._receive(self.me.rank - 1).requires_grad_()
        y = self.stage(x)
        if self.last:
            y = self.loss_of(y, target) / m
            self.losses.append(y.detach())
        else:
            self._send(y.detach().contiguous(), self.me.rank + 1)
        self.begun.append((x, y))

    def _backward(self) -> None:
        x, y = self.begun.popleft()
        y.backward(None if self.last else self._receive(self.me.rank + 1))
        if not self.first:
            self._send(torch.zeros_like(x) if x.grad is None else x.grad, self.me.rank - 1)

    def _receive(self, source: int) -> Tensor:
        self.me.irecv(x := torch.empty_like(self.activation), source).wait()
        return x

    def _send(self, x: Tensor, to: int) -> None:
        self.sent = [one for one in self.sent if not one[0].is_completed()]  # frees what has left
        self.sent.append((self.me.isend(x, to), x))
