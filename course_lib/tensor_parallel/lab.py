"""Measurement of split layers on real ranks: the bytes they save, and what overlap saves.

`split_layer_bytes` counts what autograd saves for one layer of a split GPT. `measure_overlap` times
the same stack of split MLPs in turns, plain and with `overlap=True`. Notebook 07_tensor_parallel.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from course_lib.core.records import Event
from course_lib.core.specs import ModelSpec
from course_lib.cost.network import collective_s
from course_lib.memory.saved_tensors import measure_saved, tensors_of
from course_lib.models.gpt import GPT
from course_lib.ranks import Ranks
from course_lib.ranks.timing import record_interleaved
from course_lib.tensor_parallel.cost import overlap_saves_s
from course_lib.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from course_lib.tensor_parallel.tensor_parallel import parallelize

HALVES = ("backward_input", "backward_weight")


def split_layer_bytes(rank: int, spec: ModelSpec, batch: int, seq: int, **how: bool) -> int:
    """Return the bytes that one layer of a split GPT saves on this rank: bf16, dropout, no flash.

    It is what a model of two layers saves more than one of one layer, as for `measure_layer`.
    `how` goes to `parallelize`: sequence_parallel, overlap.
    """
    mesh, saved = init_device_mesh("cpu", (dist.get_world_size(),)), []
    tokens = torch.zeros(batch, seq, dtype=torch.long)
    for num_layers in (1, 2):
        torch.manual_seed(0)
        model = GPT(replace(spec, num_layers=num_layers), flash=False, dropout=0.1).bfloat16()
        parallelize(model, mesh, **how)
        kept = measure_saved(partial(model, tokens), given=[*tensors_of(model), tokens])
        saved.append(sum(storage.num_bytes for storage in kept))
    return saved[1] - saved[0]


@dataclass(frozen=True, kw_only=True)
class MLPStack:
    """Sizes of the split MLPs that are measured, and of their input."""

    num_layers: int = 2
    tokens: int = 512
    hidden: int = 512
    ffn_hidden: int = 2048

    def build(self, overlap: bool) -> nn.Sequential:
        """Return the same layers on every rank, split over all ranks."""
        torch.manual_seed(0)
        layers = list[nn.Module]()
        for _ in range(self.num_layers):
            layers.append(ColumnParallelLinear(self.hidden, self.ffn_hidden, overlap=overlap))
            layers += [nn.GELU(), RowParallelLinear(self.ffn_hidden, self.hidden)]
        return nn.Sequential(*layers)

    def loss(self, model: nn.Module, rank: int) -> Tensor:
        """Return the loss of one batch, the same on every rank."""
        x = torch.linspace(-1, 1, self.tokens * self.hidden).view(1, self.tokens, self.hidden)
        out: Tensor = model(x.requires_grad_())
        return out.square().mean()

    @property
    def input_bytes(self) -> int:
        """Bytes of the tensor that each all_reduce sums, in fp32."""
        return 4 * self.tokens * self.hidden


@dataclass(frozen=True)
class OverlapRuns:
    """Measured steps by name, "plain" and "overlapped", and the predicted seconds saved.

    fastest   all ranks' events of the turn with the fastest backward pass: the least disturbed one
    """

    fastest: dict[str, list[Event]]
    predicted_s: float

    @property
    def saved_s(self) -> float:
        """Seconds of the plain backward pass minus those of the overlapped one."""
        return _backward_s(self.fastest["plain"]) - _backward_s(self.fastest["overlapped"])

    def timelines(self) -> dict[str, list[Event]]:
        """Return all ranks' backward pass by name, on a clock that starts with it."""
        return {name: _backward_only(events) for name, events in self.fastest.items()}


def measure_overlap(ranks: Ranks, stack: MLPStack | None = None, turns: int = 5) -> OverlapRuns:
    """Time a step with and without overlap; predict the difference from W and the link.

    W, the seconds of a weight gradient, is measured in the overlapped runs; the seconds of an
    all_reduce are those of the emulated link. Without one there is no prediction: nan.
    """
    stack = stack or MLPStack()
    by_rank = ranks.run(_steps, stack, turns)
    names = ("plain", "overlapped")
    fastest = {name: _fastest_backward([found[name] for found in by_rank]) for name in names}
    spans = [event for event in fastest["overlapped"] if event.kind == "backward_weight"]
    weight_s = median(event.duration_s for event in spans)
    predicted_s, link = math.nan, ranks.link
    if link:
        reduce_s = collective_s("all_reduce", stack.input_bytes, ranks.world_size, link)
        predicted_s = stack.num_layers * overlap_saves_s(weight_s, reduce_s)
    return OverlapRuns(fastest, predicted_s)


def _steps(rank: int, stack: MLPStack, turns: int) -> dict[str, list[list[Event]]]:
    models = {name: stack.build(name == "overlapped") for name in ("plain", "overlapped")}
    return record_interleaved(rank, models, partial(_loss_of, stack), turns)


def _loss_of(stack: MLPStack, model: nn.Module, rank: int) -> Tensor:
    return stack.loss(model, rank)


def _fastest_backward(by_rank: Sequence[Sequence[list[Event]]]) -> list[Event]:
    """Return all ranks' events of the turn whose backward pass was fastest."""
    turns = [
        [event for events in ranks for event in events] for ranks in zip(*by_rank, strict=True)
    ]
    return min(turns, key=_backward_s)


def _backward_s(events: Sequence[Event]) -> float:
    """Return the seconds of a backward pass, from the last rank's start to the last end."""
    passes = [event for event in events if event.kind == "backward"]
    return max(event.end_s for event in passes) - max(event.start_s for event in passes)


def _backward_only(events: Sequence[Event]) -> list[Event]:
    """Keep the backward pass: its calls and halves, and what it computes in between."""
    start_s = min(event.start_s for event in events if event.kind == "backward")
    kept = [event.since(start_s) for event in events if event.start_s >= start_s]
    found = [event for event in kept if event.kind in ("all_reduce", *HALVES)]
    for whole in (event for event in kept if event.kind == "backward"):
        busy = [e for e in kept if e.rank == whole.rank and e.kind in ("wait", *HALVES)]
        if not any(e.kind in HALVES for e in busy):  # plain: every call blocks
            busy = [e for e in found if e.rank == whole.rank]
        found += _between(whole, sorted(busy, key=lambda event: event.start_s))
    return found


def _between(whole: Event, busy: Sequence[Event]) -> Iterator[Event]:
    """Yield the pieces of a span in which none of the sorted events is under way."""
    at_s = whole.start_s
    for event in busy:
        if event.start_s > at_s:
            yield replace(whole, start_s=at_s, end_s=event.start_s)
        at_s = max(at_s, event.end_s)
    if whole.end_s > at_s:
        yield replace(whole, start_s=at_s)
