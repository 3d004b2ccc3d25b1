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

from course_lib.collectives.group import Place, describe
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


class Message(NamedTuple):
    """An activation or a gradient of a micro-batch, to the model chunk at some depth."""

    forward: bool
    depth: int
    micro_batch: int

    @property
    def border(self) -> tuple[int, int]:
        """A gradient has the shape of the activation that crossed the same border before."""
        return (self.depth if self.forward else self.depth + 1, self.micro_batch)


class Form(NamedTuple):
    """The shape and dtype of a message."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class _Sent(NamedTuple):
    message: Message
    work: dist.Work
    tensor: Tensor  # has to live until it has left


class Routes:
    """One rank's part of a schedule: whom it hears in which order, and when it is heard."""

    def __init__(self, schedule: Schedule, me: int) -> None:
        self.num_stages, self.num_model_chunks = len(schedule), num_model_chunks_of(schedule)
        neighbours = {(me + 1) % self.num_stages, (me - 1) % self.num_stages} - {me}
        self.from_rank = {
            rank: [self.sends(action) for action in sent_from_to(schedule, rank, me)]
            for rank in neighbours
        }
        self.made_at: dict[Message, int] = {}  # the place in its sender's list of actions
        self.taken_at: dict[Message, int] = {}  # and in its receiver's
        self.halved = {
            (action.model_chunk, action.micro_batch)
            for action in schedule[me]
            if action.kind == "backward_weight"
        }  # whose backward comes in two halves
        for rank in neighbours:
            for place, action in enumerate(schedule[rank]):
                if self.source(action) == me:
                    self.taken_at[self.takes(action)] = place
                if self.target(action) == me:
                    self.made_at[self.sends(action)] = place

    def source(self, action: Action) -> int | None:
        """The rank whose message the action needs."""
        return source_of(action, self.num_stages, self.num_model_chunks)

    def target(self, action: Action) -> int | None:
        """The rank to which the action sends."""
        return target_of(action, self.num_stages, self.num_model_chunks)

    def is_last(self, action: Action) -> bool:
        """Does the action stand at the end of the model, where the loss is?"""
        return action.depth(self.num_stages) == self.num_stages * self.num_model_chunks - 1

    def takes(self, action: Action) -> Message:
        """The message that an action needs."""
        depth = action.depth(self.num_stages)
        return Message(action.kind == "forward", depth, action.micro_batch)

    def sends(self, action: Action) -> Message:
        """The message that an action makes."""
        forward = action.kind == "forward"
        depth = action.depth(self.num_stages) + (1 if forward else -1)
        return Message(forward, depth, action.micro_batch)


class Mailbox:
    """The messages of one rank during one step.

    forms   what is known of the messages' shapes, by border; an activation that is not yet in it
            travels behind a header that tells its shape, and is noted here
    """

    def __init__(
        self,
        place: Place,
        routes: Routes,
        forms: dict[tuple[int, int], Form],
        device: torch.device,
    ) -> None:
        self.place, self.routes, self.forms, self.device = place, routes, forms, device
        self.headers = not forms
        self._to_come = {rank: deque(order) for rank, order in routes.from_rank.items()}
        self._posted: dict[Message, tuple[dist.Work, Tensor]] = {}
        self._sent: dict[int, list[_Sent]] = defaultdict(list)
        self._at_home: dict[Message, Tensor] = {}  # from one chunk of this rank to its next

    def receive(self, action: Action) -> Tensor | None:
        """Wait for what the action needs; None if it needs nothing from elsewhere."""
        source = self.routes.source(action)
        if source is None:
            return None
        message = self.routes.takes(action)
        if source == self.place.me:
            return self._at_home.pop(message)
        while message not in self._posted:
            self._post(source)
        if not self.headers and self._to_come[source]:
            self._post(source)
        work, tensor = self._posted.pop(message)
        work.wait()
        self._let_go(source, self.routes.made_at[message])
        return tensor

    def send(self, action: Action, tensor: Tensor) -> None:
        """Let the outcome of an action leave, if anybody waits for it."""
        target = self.routes.target(action)
        if target is None:
            return
        message, tensor = self.routes.sends(action), tensor.detach().contiguous()
        if target == self.place.me:
            self._at_home[message] = tensor
            return
        self._check_form(message, tensor, action)
        if message.forward and self.headers:
            header = _header(self.forms[message.border]).to(self.device)
            self._isend(message, header, target)
        self._isend(message, tensor, target)

    def finish(self) -> None:
        """Wait until everything has arrived."""
        for sent in self._sent.values():
            for one in sent:
                one.work.wait()
        self._sent.clear()

    def _isend(self, message: Message, tensor: Tensor, target: int) -> None:
        self._sent[target].append(_Sent(message, self.place.isend(tensor, target), tensor))

    def _post(self, source: int) -> None:
        """Post the receive of the next message that comes from a rank."""
        message = self._to_come[source].popleft()
        if message.forward and self.headers:
            header = torch.empty(2 + MAX_DIMS, dtype=torch.int64, device=self.device)
            self.place.irecv(header, source).wait()
            self.forms[message.border] = _form_of(header.tolist())
        shape, dtype = self.forms[message.border]
        tensor = torch.empty(shape, dtype=dtype, device=self.device)
        self._posted[message] = self.place.irecv(tensor, source), tensor

    def _let_go(self, rank: int, place: int) -> None:
        """The rank has come to `place` in its actions: what it has taken by then has arrived."""
        kept = []
        for sent in self._sent[rank]:
            if self.routes.taken_at[sent.message] <= place:
                sent.work.wait()
            else:
                kept.append(sent)
        self._sent[rank] = kept

    def _check_form(self, message: Message, tensor: Tensor, action: Action) -> None:
        """Every message has the form that its receiver has made room for."""
        form = Form(tuple(tensor.shape), tensor.dtype)
        where = f"rank {dist.get_rank()}, Pipeline, {action.label}"
        if form.dtype not in DTYPES or len(form.shape) > MAX_DIMS:
            raise ShapeError(
                f"{where}: need a stage's output with a floating dtype and at most {MAX_DIMS} dims "
                f"for the next stage; got {describe(tensor)}. Try to cut the model elsewhere."
            )
        if self.headers and message.forward:
            self.forms[message.border] = form
        elif form != self.forms[message.border]:
            shape, dtype = self.forms[message.border]
            raise ShapeError(
                f"{where}: need {describe(torch.empty(shape, dtype=dtype, device='meta'))}, as in "
                f"the first step with inputs of these shapes; got {describe(tensor)}. "
                "Try a new Pipeline on every rank."
            )


def _header(form: Form) -> Tensor:
    """The form as whole numbers: the dtype, how many dims, the dims."""
    rest = [0] * (MAX_DIMS - len(form.shape))
    return torch.tensor([DTYPES.index(form.dtype), len(form.shape), *form.shape, *rest])


def _form_of(header: Sequence[int]) -> Form:
    dtype, num_dims, *dims = header
    return Form(tuple(dims[:num_dims]), DTYPES[dtype])
