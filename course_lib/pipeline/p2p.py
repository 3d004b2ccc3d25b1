"""What the stages of a pipeline send to one another, without tags and without standing in the way.

Messages between two ranks match by their order, so a rank posts its receives in the order in which
the other one sends, which the schedule tells, and one ahead of its need. Sends do not block; what
was sent is kept until a message of the receiver shows that it has arrived. Notebook 08_pipeline.
"""

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.collectives.group import GroupMember, describe
from course_lib.core.errors import ShapeError
from course_lib.pipeline.actions import (
    Action,
    Schedule,
    num_model_chunks_of,
    sent_from_to,
    source_of,
    target_of,
)

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
MAX_DIMS = 8


class StageMessage(NamedTuple):
    """An activation or a gradient of a micro-batch, to the model chunk at some depth."""

    forward: bool
    depth: int
    micro_batch: int

    @property
    def border(self) -> tuple[int, int]:
        """A gradient has the shape of the activation that crossed the same border before."""
        return (self.depth if self.forward else self.depth + 1, self.micro_batch)


class TensorMeta(NamedTuple):
    """The shape and dtype of a message."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class _Sent(NamedTuple):
    message: StageMessage
    work: dist.Work
    tensor: Tensor  # has to live until it has left


class CommPlan:
    """One rank's part of a schedule: whom it hears in which order, and when it is heard."""

    def __init__(self, schedule: Schedule, me: int) -> None:
        self.num_stages, self.num_model_chunks = len(schedule), num_model_chunks_of(schedule)
        neighbours = {(me + 1) % self.num_stages, (me - 1) % self.num_stages} - {me}
        self.from_rank = {
            rank: [self.sends(action) for action in sent_from_to(schedule, rank, me)]
            for rank in neighbours
        }
        self.made_at: dict[StageMessage, int] = {}  # the position in its sender's list of actions
        self.taken_at: dict[StageMessage, int] = {}  # and in its receiver's
        self.halved = {
            (action.model_chunk, action.micro_batch)
            for action in schedule[me]
            if action.kind == "backward_weight"
        }  # whose backward comes in two halves
        for rank in neighbours:
            for position, action in enumerate(schedule[rank]):
                if self.source(action) == me:
                    self.taken_at[self.takes(action)] = position
                if self.target(action) == me:
                    self.made_at[self.sends(action)] = position

    def source(self, action: Action) -> int | None:
        """The rank whose message the action needs."""
        return source_of(action, self.num_stages, self.num_model_chunks)

    def target(self, action: Action) -> int | None:
        """The rank to which the action sends."""
        return target_of(action, self.num_stages, self.num_model_chunks)

    def is_last(self, action: Action) -> bool:
        """Does the action stand at the end of the model, where the loss is?"""
        return action.depth(self.num_stages) == self.num_stages * self.num_model_chunks - 1

    def takes(self, action: Action) -> StageMessage:
        """The message that an action needs."""
        depth = action.depth(self.num_stages)
        return StageMessage(action.kind == "forward", depth, action.micro_batch)

    def sends(self, action: Action) -> StageMessage:
        """The message that an action makes."""
        forward = action.kind == "forward"
        depth = action.depth(self.num_stages) + (1 if forward else -1)
        return StageMessage(forward, depth, action.micro_batch)


class StageComm:
    """The messages of one rank during one step.

    metas   what is known of the messages' shapes, by border; an activation that is not yet in it
            travels behind a header that tells its shape, and is noted here
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
        self._to_come = {rank: deque(order) for rank, order in plan.from_rank.items()}
        self._posted: dict[StageMessage, tuple[dist.Work, Tensor]] = {}
        self._sent: dict[int, list[_Sent]] = defaultdict(list)
        self._at_home: dict[StageMessage, Tensor] = {}  # from one chunk of this rank to its next

    def receive(self, action: Action) -> Tensor | None:
        """Wait for what the action needs; None if it needs nothing from elsewhere."""
        source = self.plan.source(action)
        if source is None:
            return None
        message = self.plan.takes(action)
        if source == self.member.rank:
            return self._at_home.pop(message)
        while message not in self._posted:
            self._post(source)
        if not self.headers and self._to_come[source]:
            self._post(source)
        work, tensor = self._posted.pop(message)
        work.wait()
        self._free_sent(source, self.plan.made_at[message])
        return tensor

    def send(self, action: Action, tensor: Tensor) -> None:
        """Let the outcome of an action leave, if anybody waits for it."""
        target = self.plan.target(action)
        if target is None:
            return
        message, tensor = self.plan.sends(action), tensor.detach().contiguous()
        if target == self.member.rank:
            self._at_home[message] = tensor
            return
        self._check_meta(message, tensor, action)
        if message.forward and self.headers:
            header = _header(self.metas[message.border]).to(self.device)
            self._isend(message, header, target)
        self._isend(message, tensor, target)

    def finish(self) -> None:
        """Wait until everything has arrived."""
        for sent in self._sent.values():
            for one in sent:
                one.work.wait()
        self._sent.clear()

    def _isend(self, message: StageMessage, tensor: Tensor, target: int) -> None:
        self._sent[target].append(_Sent(message, self.member.isend(tensor, target), tensor))

    def _post(self, source: int) -> None:
        """Post the receive of the next message that comes from a rank."""
        message = self._to_come[source].popleft()
        if message.forward and self.headers:
            header = torch.empty(2 + MAX_DIMS, dtype=torch.int64, device=self.device)
            self.member.irecv(header, source).wait()
            self.metas[message.border] = _meta_of(header.tolist())
        shape, dtype = self.metas[message.border]
        tensor = torch.empty(shape, dtype=dtype, device=self.device)
        self._posted[message] = self.member.irecv(tensor, source), tensor

    def _free_sent(self, rank: int, position: int) -> None:
        """The rank has come to `position` in its actions: what it has taken by then has arrived."""
        kept = []
        for sent in self._sent[rank]:
            if self.plan.taken_at[sent.message] <= position:
                sent.work.wait()
            else:
                kept.append(sent)
        self._sent[rank] = kept

    def _check_meta(self, message: StageMessage, tensor: Tensor, action: Action) -> None:
        """Every message has the meta that its receiver has made room for."""
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
    """The meta as whole numbers: the dtype, how many dims, the dims."""
    rest = [0] * (MAX_DIMS - len(meta.shape))
    return torch.tensor([DTYPES.index(meta.dtype), len(meta.shape), *meta.shape, *rest])


def _meta_of(header: Sequence[int]) -> TensorMeta:
    dtype, num_dims, *dims = header
    return TensorMeta(tuple(dims[:num_dims]), DTYPES[dtype])
