"""A parameter server: rank 0 holds the weights and steps; the other ranks send it gradients.

The synchronous server waits for all workers of a round and applies the mean of their gradients:
bulk-synchronous training, with the numbers of one process. The asynchronous server applies each
gradient as soon as it is received: nobody waits for a straggler, but the weights may have changed
since the gradient was computed. The number of updates in between, its staleness, is counted.
Notebook 05_data_parallel.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib.collectives.group import Group
from course_lib.core.errors import CourseError, MeshError
from course_lib.data_parallel.composition import check_same_parameters
from course_lib.data_parallel.naive_ddp import broadcast_state
from course_lib.ranks import span

_LossOf = Callable[[nn.Module, int], Tensor]
REQUEST, PAYLOAD = 1, 2  # the tags of a worker's rank, and of the push that follows


@dataclass(frozen=True, kw_only=True)
class Update:
    """One update of the server's weights.

    workers     global ranks of the gradients in it: one worker, or all of a round
    staleness   number of updates applied between the worker's pull of the weights and this one
    loss        mean loss of the workers, on the weights they had
    time_s      when it was applied, from the common start
    """

    workers: tuple[int, ...]
    staleness: int
    loss: float
    time_s: float


class ParameterServer:
    """Train `module` with the group's first rank as the server and all others as workers.

    Every rank makes one and calls the same method; all start and end with the server's weights.
    `optimizer` steps on the server only. Buffers are sent with gradients and weights: the server
    keeps those of the last push. A trainable parameter without a gradient sends zeros.

    straggler_s   seconds that the rank `straggler` sleeps in each of its steps

    Cost:   a push of the gradients and a pull of the weights for each gradient, all of them over
            the server's link
    Raises: MeshError without a worker; CourseError unless all parameters have one dtype
    Source: Li et al. 2014 (Scaling Distributed Machine Learning with the Parameter Server),
            abstract
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        group: Group = None,
        *,
        straggler: int = 1,
        straggler_s: float = 0.0,
    ) -> None:
        check_same_parameters(module.named_parameters(), group, "ParameterServer")
        self.module, self.optimizer, self.group = module, optimizer, group
        self.server, *self.workers = dist.get_process_group_ranks(group)
        self._sleep_s = straggler_s if dist.get_rank() == straggler else 0.0
        params = list(module.parameters())
        if not self.workers:
            raise MeshError("ParameterServer: need 2 ranks or more; got 1. Try Ranks(3).")
        if len({param.dtype for param in params}) != 1:
            raise CourseError("ParameterServer: need parameters of one dtype. Try module.float().")
        self._trained = [param for param in params if param.requires_grad]
        self._buffers = list(module.buffers())
        self._weights = [*params, *self._buffers]
        self._number = params[0].detach().new_zeros(())  # sent along: the loss, or whether to go on
        broadcast_state(module, group)

    def synchronous(self, loss_of: _LossOf, num_rounds: int) -> list[Update]:
        """Train in rounds: each update takes the mean of all workers' gradients.

        `loss_of(module, step)` is what a worker computes; step counts its own steps. Return the
        updates on the server, and an empty list on a worker.
        """
        return self._run(loss_of, lambda: self._serve_rounds(num_rounds), num_rounds)

    def asynchronous(
        self, loss_of: _LossOf, num_updates: int, *, order: Sequence[int] | None = None
    ) -> list[Update]:
        """Train without rounds: each gradient is an update, applied when it is received.

        `order` fixes the worker of each update, which makes a run repeatable; otherwise the first
        request is served first. Gradients received after the last update are discarded.
        """
        if order is not None and len(order) < num_updates:
            raise CourseError(
                f"asynchronous: need a worker for each of {num_updates} updates; got {len(order)}."
            )
        return self._run(loss_of, lambda: self._serve_each(num_updates, order), num_updates)

    def _run(self, loss_of: _LossOf, serve: Callable[[], list[Update]], count: int) -> list[Update]:
        if count < 1:
            raise CourseError(f"ParameterServer: need 1 update or more; got {count}.")
        dist.barrier(self.group)  # everyone's clock starts here
        self._start_s = time.perf_counter()
        if dist.get_rank() == self.server:
            return serve()
        self._work(loss_of)
        return []

    # -- the server -------------------------------------------------------------------------

    def _serve_rounds(self, num_rounds: int) -> list[Update]:
        updates = []
        for number in range(num_rounds):
            pushes = [self._receive_push(worker) for worker in self.workers]
            updates.append(self._apply(pushes, tuple(self.workers), staleness=0))
            for worker in self.workers:
                self._send_weights(worker, go_on=number < num_rounds - 1)
        return updates

    def _serve_each(self, num_updates: int, order: Sequence[int] | None) -> list[Update]:
        updates: list[Update] = []
        pulled_at = dict.fromkeys(self.workers, 0)
        for number in range(num_updates + len(self.workers) - 1):  # a last push of all the others
            ordered = order is not None and number < num_updates
            worker = order[number] if ordered and order else self._next_request()
            push = self._receive_push(worker, requested=not ordered)
            if number < num_updates:
                updates.append(self._apply([push], (worker,), number - pulled_at[worker]))
            pulled_at[worker] = number + 1
            self._send_weights(worker, go_on=number < num_updates - 1)
        return updates

    def _next_request(self) -> int:
        """Return the worker whose request is received first."""
        worker = torch.zeros(1, dtype=torch.long)
        dist.irecv(worker, group=self.group, tag=REQUEST).wait()  # type: ignore[union-attr]
        return int(worker)

    def _receive_push(self, worker: int, *, requested: bool = False) -> Tensor:
        if not requested:
            dist.recv(torch.zeros(1, dtype=torch.long), worker, group=self.group, tag=REQUEST)
        push = _flat(self._like_push())
        dist.recv(push, worker, group=self.group, tag=PAYLOAD)
        return push

    def _apply(self, pushes: Sequence[Tensor], workers: tuple[int, ...], staleness: int) -> Update:
        """Step with the mean of the pushes; keep the buffers of the last one."""
        loss, *grads = _unflatten(torch.stack([*pushes]).mean(0), self._like_push())
        for param, grad in zip(self._trained, grads, strict=False):  # buffers stand behind them
            param.grad = grad.clone()
        with span("optimizer", f"U{'+'.join(map(str, workers))}"):
            self.optimizer.step()
        _copy(self._buffers, _unflatten(pushes[-1], self._like_push())[1 + len(self._trained) :])
        time_s = time.perf_counter() - self._start_s
        return Update(workers=workers, staleness=staleness, loss=loss.item(), time_s=time_s)

    def _send_weights(self, worker: int, *, go_on: bool) -> None:
        dist.send(_flat([self._number + go_on, *self._weights]), worker, group=self.group)

    # -- a worker ---------------------------------------------------------------------------

    def _work(self, loss_of: _LossOf) -> None:
        """Compute, push and pull until the server sends the last weights."""
        step, go_on = 0, True
        while go_on:
            with span("compute", f"step {step}"):
                time.sleep(self._sleep_s)
                self.module.zero_grad()
                loss = loss_of(self.module, step)
                loss.backward()
            self._push(loss)
            go_on = self._pull()
            step += 1

    def _push(self, loss: Tensor) -> None:
        grads = [torch.zeros_like(x) if x.grad is None else x.grad for x in self._trained]
        push = _flat([self._number + loss.detach(), *grads, *self._buffers])
        request = torch.tensor([dist.get_rank()])
        started = [
            dist.isend(request, self.server, self.group, REQUEST),
            dist.isend(push, self.server, self.group, PAYLOAD),
        ]
        for message in started:
            message.wait()  # type: ignore[union-attr]

    def _pull(self) -> bool:
        like = [self._number, *self._weights]
        weights = _flat(like)
        dist.recv(weights, self.server, group=self.group)
        go_on, *parts = _unflatten(weights, like)
        _copy(self._weights, parts)
        return bool(go_on)

    def _like_push(self) -> list[Tensor]:
        """Return tensors shaped like the parts of a push: a loss, the gradients, the buffers."""
        return [self._number, *self._trained, *self._buffers]


def smoothed(updates: Sequence[Update], window: int = 5) -> list[float]:
    """Return, for each update, the mean loss of the last `window` updates."""
    losses = [update.loss for update in updates]
    return [mean(losses[max(0, n + 1 - window) : n + 1]) for n in range(len(losses))]


def loss_at(updates: Sequence[Update], times_s: Sequence[float]) -> list[float]:
    """Return the smoothed loss of the last update at each time; before the first, the first."""
    losses = smoothed(updates)
    done = [sum(update.time_s <= time_s for update in updates) for time_s in times_s]
    return [losses[max(0, count - 1)] for count in done]


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate tensors into one flat message, in the dtype of the first."""
    return torch.cat([tensor.detach().to(tensors[0]).flatten() for tensor in tensors])


def _unflatten(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Split a flat message into parts with the shapes of `like`."""
    parts = flat.split([tensor.numel() for tensor in like])
    return [part.view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]


@torch.no_grad()
def _copy(tensors: Sequence[Tensor], parts: Sequence[Tensor]) -> None:
    for tensor, part in zip(tensors, parts, strict=True):
        tensor.copy_(part)
