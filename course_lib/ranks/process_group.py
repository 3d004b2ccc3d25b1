"""The tracing process group: announces PyTorch's calls to the tracer under the course's names."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from course_lib.core.call_names import purpose
from course_lib.core.errors import MeshError, ShapeError
from course_lib.ranks.call_board import Post, channel_of
from course_lib.ranks.recorder import Recorder
from course_lib.ranks.tracer import CallTracer
from course_lib.ranks.work_handle import TrackedWork


@dataclass(frozen=True)
class CallSignature:
    """Description of one of PyTorch's collective methods: its kind and the role of its arguments.

    `agree` is the index of the argument whose dtype and shape have to be the same on every rank,
    `whole` that of the whole tensor; with `times_p` that argument is only one of p shards.
    """

    kind: str
    agree: int | None
    whole: int | None
    times_p: bool = False


LONGEST_NAME = 32  # of what a call is for: the call board has room for 80 characters in all
ALL_REDUCE = CallSignature("all_reduce", agree=0, whole=0)
ALL_GATHER = CallSignature("all_gather", agree=1, whole=0)
REDUCE_SCATTER = CallSignature("reduce_scatter", agree=0, whole=1)
ALL_TO_ALL = CallSignature("all_to_all", agree=None, whole=1)
COLLECTIVES = {
    "allreduce": ALL_REDUCE,
    "allreduce_coalesced": ALL_REDUCE,
    "allgather": ALL_GATHER,
    "allgather_coalesced": ALL_GATHER,
    "allgather_into_tensor_coalesced": ALL_GATHER,
    "all_gather_single": ALL_GATHER,
    "all_gather_single_coalesced": ALL_GATHER,
    "_allgather_base": ALL_GATHER,
    "reduce_scatter": REDUCE_SCATTER,
    "reduce_scatter_single": REDUCE_SCATTER,
    "reduce_scatter_single_coalesced": REDUCE_SCATTER,
    "reduce_scatter_tensor_coalesced": REDUCE_SCATTER,
    "_reduce_scatter_base": REDUCE_SCATTER,
    "alltoall": ALL_TO_ALL,
    "alltoall_base": ALL_TO_ALL,
    "all_to_all_single": ALL_TO_ALL,
    "broadcast": CallSignature("broadcast", agree=0, whole=0),
    "reduce": CallSignature("reduce", agree=0, whole=0),
    "gather": CallSignature("gather", agree=1, whole=1, times_p=True),
    "scatter": CallSignature("scatter", agree=0, whole=0, times_p=True),
    "barrier": CallSignature("barrier", agree=None, whole=None),
}


class FromAnyone(TrackedWork):
    """Handle of a receive from any source; when it ends, the sender's message is counted."""

    def __init__(
        self, inner: Any, post: Post, tracer: CallTracer, count_from: Callable[[int], None]
    ) -> None:
        super().__init__(inner, post, tracer, watch_end=False, ends_once=True)  # only gloo has it
        self._count_from = count_from

    def _has_ended(self) -> None:
        self._count_from(self._source_rank())


class StagedMessage(TrackedWork):
    """Handle of a send or recv that goes through a copy in host memory.

    Source:  PyTorch's table of backends (torch.distributed): gloo has send and recv for CPUs only
    """

    def __init__(
        self,
        inner: dist.ProcessGroup,
        tensors: list[torch.Tensor],
        peer_and_tag: tuple[int, int],
        post: Post,
        tracer: CallTracer,
    ) -> None:
        self._tensors = tensors if post.kind == "recv" else []
        self._copies = [tensor.detach().cpu() for tensor in tensors]
        work = getattr(inner, post.kind)(self._copies, *peer_and_tag)
        super().__init__(work, post, tracer, watch_end=False, ends_once=True)

    def _has_ended(self) -> None:
        for tensor, copy in zip(self._tensors, self._copies, strict=False):
            tensor.detach().copy_(copy)


class TracedGroup(dist.ProcessGroup):
    """Process group that traces every call of `inner`; `members` are its global ranks.

    is_dry   no other rank is there, as in `dry_world`
    """

    is_dry = False

    def __init__(self, inner: Any, tracer: CallTracer, members: tuple[int, ...], key: str) -> None:
        super().__init__(inner.rank(), inner.size())  # type: ignore[call-arg]
        self.inner, self.tracer, self.members, self.key = inner, tracer, members, key

    @property
    def recorder(self) -> Recorder:
        """Recorder of this rank's events."""
        return self.tracer.recorder

    def collective(self, method: str, args: tuple[Any, ...], kwargs: Any) -> TrackedWork:
        """Announce a collective, start it, and return its handle."""
        call = COLLECTIVES[method]
        options = kwargs.get("opts", args[-1] if args else None)
        root = getattr(options, "rootRank", -1)
        sends, expects = self._sizes(method, args) if call is ALL_TO_ALL else ((), ())
        whole = 0 if call.whole is None else num_bytes_of(args[call.whole])
        post = self.tracer.post(
            call.kind,
            self.members,
            self._signature(call, args, options, root),
            channel=(self.key, self.members),
            num_bytes=whole * (len(self.members) if call.times_p else 1),
            peer=self.members[root] if root >= 0 else -1,
            sends=sends,
            expects=expects,
        )
        work = getattr(self.inner, method)(*args, **kwargs)
        return TrackedWork(work, post, self.tracer, watch_end=getattr(options, "asyncOp", False))

    def _sizes(self, method: str, args: tuple[Any, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the elements that an all_to_all sends to each member, and expects from each.

        Raises: ShapeError where this rank's own tensors and split sizes do not fit together
        """
        outputs, inputs = args[:2]
        if method == "alltoall":
            self._check_list(outputs, inputs)
            return tuple(t.numel() for t in inputs), tuple(t.numel() for t in outputs)
        output_splits, input_splits = args[2:4]
        sends = self._elements("input", inputs, input_splits)
        return sends, self._elements("output", outputs, output_splits)

    def _check_list(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> None:
        where, p = f"rank {self.tracer.rank}, all_to_all", len(self.members)
        if not len(outputs) == len(inputs) == p:
            raise ShapeError(
                f"{where}: need lists of {p} tensors, one for each rank; got {len(outputs)} "
                f"outputs and {len(inputs)} inputs."
            )
        sizes = [t.numel() for t in (*outputs, *inputs)]
        if len(set(sizes)) > 1 and not inputs[0].is_cuda:
            raise ShapeError(
                f"{where}: gloo needs tensors of one size; got outputs of {sizes[:p]} and inputs "
                f"of {sizes[p:]} elements. Try all_to_all_single with split sizes."
            )

    def _elements(self, name: str, tensor: torch.Tensor, splits: list[int]) -> tuple[int, ...]:
        rows, p = len(tensor) if tensor.dim() else 0, len(self.members)
        sizes = splits or [rows // p] * p
        if len(sizes) != p or sum(sizes) != rows or min(sizes) < 0:
            raise ShapeError(
                f"rank {self.tracer.rank}, all_to_all: need {p} {name} splits that add up to the "
                f"{rows} rows of the {name}; got {splits or 'none'}. "
                f"Try {name}_split_sizes={_even_split(rows, p)}."
            )
        return tuple(size * (tensor.numel() // max(rows, 1)) for size in sizes)

    def _signature(
        self, call: CallSignature, args: tuple[Any, ...], options: Any, root: int
    ) -> str:
        op = getattr(getattr(options, "reduceOp", None), "op", None)
        reduces = call.kind in ("all_reduce", "reduce", "reduce_scatter") and op is not None
        name = f"{call.kind}({str(op).rsplit('.', 1)[-1].lower()})" if reduces else call.kind
        if root >= 0:
            name += f" root {self.members[root]}"
        if call is ALL_TO_ALL:
            name += f" {describe(args[1]).partition(' ')[0]}"  # the sizes may differ
        if call.agree is not None:
            name += f" {describe(args[call.agree])}"
        what = purpose()
        return f"{name} of {what[-LONGEST_NAME:]}" if what else name

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int) -> TrackedWork:
        """Send to the group's rank `dst`.

        Raises: MeshError for a rank that is not in the group, or this rank itself
        """
        return self._message("send", tensors, self._member(dst, "send"), dst, tag)

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int) -> TrackedWork:
        """Receive from the group's rank `src`.

        Raises: MeshError for a rank that is not in the group, or this rank itself
        """
        return self._message("recv", tensors, self._member(src, "recv"), src, tag)

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int) -> TrackedWork:
        """Receive from whichever rank sends first; there is no call to compare it with."""
        own = self.tracer.rank
        post = self.tracer.post(
            "recv", self.members, f"{_message_words(tensors)} from anyone",
            channel=(self.key, "any", own, tag), num_bytes=num_bytes_of(tensors),
        )  # fmt: skip
        work = self.inner.recv_anysource(tensors, tag)
        return FromAnyone(work, post, self.tracer, partial(self._count_from, tag))

    def _count_from(self, tag: int, source: int) -> None:
        """Count a message from this rank of the group, so that the next one has another number."""
        sender = self.members[source]
        self.tracer.count(channel_of(self.key, sender, self.tracer.rank, tag))

    def _message(
        self, kind: str, tensors: list[torch.Tensor], peer: int, peer_in_group: int, tag: int
    ) -> TrackedWork:
        own = self.tracer.rank
        sender, receiver = (own, peer) if kind == "send" else (peer, own)
        post = self.tracer.post(
            kind, tuple(sorted((own, peer))), f"{_message_words(tensors)} {sender}->{receiver}",
            channel=(self.key, sender, receiver, tag), num_bytes=num_bytes_of(tensors), peer=peer,
        )  # fmt: skip
        if self._passes_host(tensors[0]):
            return StagedMessage(self.inner, tensors, (peer_in_group, tag), post, self.tracer)
        work = getattr(self.inner, kind)(tensors, peer_in_group, tag)
        on_gloo = not tensors[0].is_cuda
        return TrackedWork(work, post, self.tracer, watch_end=False, ends_once=on_gloo)

    def _passes_host(self, tensor: torch.Tensor) -> bool:
        """Return whether a message has to pass host memory: gloo sends no CUDA tensors."""
        return tensor.is_cuda and self.inner._get_backend(tensor.device).name() == "gloo"

    def _member(self, rank_in_group: int, kind: str) -> int:
        if not 0 <= rank_in_group < len(self.members):
            raise MeshError(
                f"rank {self.tracer.rank}, {kind}: need a rank from 0 to {len(self.members) - 1}; "
                f"got {rank_in_group}. Try (rank + 1) % world_size for the neighbour."
            )
        if self.members[rank_in_group] == self.tracer.rank:
            raise MeshError(
                f"rank {self.tracer.rank}, {kind}: need another rank; got itself. "
                "Try to keep your own tensor; with 1 rank there is no other to communicate with."
            )
        return self.members[rank_in_group]


def _forwarding(method: str) -> Callable[..., TrackedWork]:
    def call(self: TracedGroup, *args: Any, **kwargs: Any) -> TrackedWork:
        return self.collective(method, args, kwargs)

    return call


for _method in COLLECTIVES:
    setattr(TracedGroup, _method, _forwarding(_method))


def num_bytes_of(tensors: Any) -> int:
    """Return the bytes of a tensor, or of all tensors in nested lists."""
    if isinstance(tensors, torch.Tensor):
        return tensors.numel() * tensors.element_size()
    return sum(map(num_bytes_of, tensors))


def describe(tensors: Any) -> str:
    """Return `float32 [4, 2]`; for a list, its first tensor and their number."""
    if isinstance(tensors, torch.Tensor):
        return f"{str(tensors.dtype).removeprefix('torch.')} {list(tensors.shape)}"
    many = f" x{len(tensors)}" if len(tensors) > 1 else ""
    return describe(tensors[0]) + many if len(tensors) else "nothing"


def _even_split(rows: int, p: int) -> list[int]:
    return [rows // p + (rank < rows % p) for rank in range(p)]


def _message_words(tensors: list[torch.Tensor]) -> str:
    """Return `float32 [4]`: sender and receiver agree on the size; their shapes may differ."""
    return f"{str(tensors[0].dtype).removeprefix('torch.')} [{tensors[0].numel()}]"
