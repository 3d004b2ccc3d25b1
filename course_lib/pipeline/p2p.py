"""Point-to-point communication between pipeline stages: no tags, no deadlock, no blocking sends.

Messages between two ranks match by their order. So a rank posts its receives in the order in which
the other rank sends, which follows from the schedule (`CommPlan`), and it posts each receive one
message early. Sends are asynchronous: `StageComm` keeps a sent tensor alive until a later message
from the receiver proves that it has arrived. Notebook 08_pipeline.
"""

from collections import defaultdict, deque
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.collectives.group import GroupMember, describe
from course_lib.core.errors import ShapeError
from course_lib.pipeline.actions import (
    Action,
    Schedule,
    placement_of,
    sent_from_to,
    source_of,
    target_of,
)

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
MAX_DIMS = 8


class StageMessage(NamedTuple):
    """Identity of a message: activation or gradient, depth of the receiving chunk, micro-batch."""

    forward: bool
    depth: int
    micro_batch: int

    @property
    def border(self) -> tuple[int, int]:
        """Key of its shape: a gradient has the shape of the activation that came the other way."""
        return (self.depth if self.forward else self.depth + 1, self.micro_batch)


class TensorMeta(NamedTuple):
    """Shape and dtype of a message."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class _Sent(NamedTuple):
    """Asynchronous send that may still be in progress."""

    message: StageMessage
    work: dist.Work
    tensor: Tensor  # kept alive until the send has completed


class CommPlan:
    """Communication plan of one rank for a schedule: computed once, used in every step.

    placement         rank of each model chunk, by depth
    from_rank         by neighboring rank: the messages it sends here, in order
    sent_at           by received message: position of the sending action in its rank's list
    needed_at         by sent message: position of the action that needs it in its rank's list
    split_backwards   (model chunk, micro-batch) of each backward that is split into I and W; where
                      W follows at once, and no other rank waits for I, both are one in I
    """

    def __init__(self, schedule: Schedule, me: int, *, splits_all: bool = False) -> None:
        self.me, self.num_stages, self.placement = me, len(schedule), placement_of(schedule)
        pairs = list(pairwise(self.placement))
        neighbors = {rank for pair in pairs if me in pair for rank in pair} - {me}
        self.from_rank = {
            rank: [self.sends(action) for action in sent_from_to(schedule, rank, me)]
            for rank in neighbors
        }
        self.sent_at: dict[StageMessage, int] = {}
        self.needed_at: dict[StageMessage, int] = {}
        self.split_backwards = {
            (weight.model_chunk, weight.micro_batch)
            for before, weight in pairwise(schedule[me])
            if weight.kind == "backward_weight"
            and (splits_all or not self._are_one(before, weight))
        }
        for rank in neighbors:
            for position, action in enumerate(schedule[rank]):
                if self.source(action) == me:
                    self.needed_at[self.needs(action)] = position
                if self.target(action) == me:
                    self.sent_at[self.sends(action)] = position

    def _are_one(self, before: Action, weight: Action) -> bool:
        """Return whether nothing is gained by splitting: W follows its I, whose result stays."""
        own = ("backward_input", weight.model_chunk, weight.micro_batch)
        same = own == (before.kind, before.model_chunk, before.micro_batch)
        return same and self.target(before) in (None, self.me)

    def source(self, action: Action) -> int | None:
        """Return the rank whose message the action needs; None if it needs none."""
        return source_of(action, self.num_stages, self.placement)

    def target(self, action: Action) -> int | None:
        """Return the rank to which the action sends; None if it sends nothing."""
        return target_of(action, self.num_stages, self.placement)

    def is_last(self, action: Action) -> bool:
        """Return whether the action's layers are the last ones, where the loss is computed."""
        return action.depth(self.num_stages) == len(self.placement) - 1

    def needs(self, action: Action) -> StageMessage:
        """Return the message that an action receives."""
        depth = action.depth(self.num_stages)
        return StageMessage(action.kind == "forward", depth, action.micro_batch)

    def sends(self, action: Action) -> StageMessage:
        """Return the message that an action sends."""
        forward = action.kind == "forward"
        depth = action.depth(self.num_stages) + (1 if forward else -1)
        return StageMessage(forward, depth, action.micro_batch)


class StageComm:
    """Communication of one rank with its neighbors during one step.

    metas   shape and dtype by border. In the first step with inputs of new shapes it is empty:
            then a header with its shape precedes each activation, and `metas` is filled in
    """

    def __init__(
        self,
        member: GroupMember,
        plan: CommPlan,
        metas: dict[tuple[int, int], TensorMeta],
        device: torch.device,
    ) -> None:
        self.member, self.plan, self.metas, self.device = member, plan, metas, device
        self.headers = not metas
        self._unposted = {rank: deque(order) for rank, order in plan.from_rank.items()}
        self._posted: dict[StageMessage, tuple[dist.Work, Tensor]] = {}
        self._sent: dict[int, list[_Sent]] = defaultdict(list)
        self._local: dict[StageMessage, Tensor] = {}  # from one chunk of this rank to its next

    def receive(self, action: Action) -> Tensor | None:
        """Wait for the action's input and return it; None if it needs no message."""
        source = self.plan.source(action)
        if source is None:
            return None
        message = self.plan.needs(action)
        if source == self.member.rank:
            return self._local.pop(message)
        while message not in self._posted:
            self._post(source)
        if not self.headers and self._unposted[source]:
            self._post(source)  # one message early, so that it can arrive while this rank computes
        work, tensor = self._posted.pop(message)
        work.wait()
        self._free_sent(source, self.plan.sent_at[message])
        return tensor

    def send(self, action: Action, tensor: Tensor) -> None:
        """Start to send the output of an action, if another action needs it."""
        target = self.plan.target(action)
        if target is None:
            return
        message, tensor = self.plan.sends(action), tensor.detach().contiguous()
        if target == self.member.rank:
            self._local[message] = tensor
            return
        self._check_meta(message, tensor, action)
        if message.forward and self.headers:
            header = _header(self.metas[message.border]).to(self.device)
            self._isend(message, header, target)
        self._isend(message, tensor, target)

    def finish(self) -> None:
        """Wait until all sends have completed."""
        for sent in self._sent.values():
            for one in sent:
                one.work.wait()
        self._sent.clear()

    def _isend(self, message: StageMessage, tensor: Tensor, target: int) -> None:
        self._sent[target].append(_Sent(message, self.member.isend(tensor, target), tensor))

    def _post(self, source: int) -> None:
        """Post the receive of the next message from a rank; in a first step, read its header."""
        message = self._unposted[source].popleft()
        if message.forward and self.headers:
            header = torch.empty(2 + MAX_DIMS, dtype=torch.int64, device=self.device)
            self.member.irecv(header, source).wait()
            self.metas[message.border] = _meta_of(header.tolist())
        shape, dtype = self.metas[message.border]
        tensor = torch.empty(shape, dtype=dtype, device=self.device)
        self._posted[message] = self.member.irecv(tensor, source), tensor

    def _free_sent(self, rank: int, position: int) -> None:
        """Free what the rank needed for its actions up to `position`: it has received all that."""
        in_progress = []
        for sent in self._sent[rank]:
            if self.plan.needed_at[sent.message] <= position:
                sent.work.wait()
            else:
                in_progress.append(sent)
        self._sent[rank] = in_progress

    def _check_meta(self, message: StageMessage, tensor: Tensor, action: Action) -> None:
        """Check that a message has the shape and dtype for which its receiver allocates memory."""
        meta = TensorMeta(tuple(tensor.shape), tensor.dtype)
        where = f"rank {dist.get_rank()}, Pipeline, {action.label}"
        if meta.dtype not in DTYPES or len(meta.shape) > MAX_DIMS:
            raise ShapeError(
                f"{where}: need a stage's output with a floating dtype and at most {MAX_DIMS} dims "
                f"for the next stage; got {describe(tensor)}. Try to cut the model elsewhere."
            )
        if self.headers and message.forward:
            self.metas[message.border] = meta
        elif meta != self.metas[message.border]:
            shape, dtype = self.metas[message.border]
            raise ShapeError(
                f"{where}: need {describe(torch.empty(shape, dtype=dtype, device='meta'))}, as in "
                f"the first step with inputs of these shapes; got {describe(tensor)}. "
                "Try a new Pipeline on every rank."
            )


def _header(meta: TensorMeta) -> Tensor:
    """Encode shape and dtype as integers: index of the dtype, number of dims, dims."""
    rest = [0] * (MAX_DIMS - len(meta.shape))
    return torch.tensor([DTYPES.index(meta.dtype), len(meta.shape), *meta.shape, *rest])


def _meta_of(header: Sequence[int]) -> TensorMeta:
    """Decode a header."""
    dtype, num_dims, *dims = header
    return TensorMeta(tuple(dims[:num_dims]), DTYPES[dtype])
