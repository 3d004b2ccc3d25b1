"""The pictures of the deck 07_tensor_parallel, drawn by the functions that the notebook calls."""

import torch

from course_lib.core import MODELS, Parallelism
from course_lib.core.records import Event
from course_lib.display import Voices, compare, timelines
from course_lib.memory import activations, params_on_rank
from course_lib.models import GPT, next_tokens, token_batch, token_loss
from course_lib.tensor_parallel.cost import h100_scaling
from course_lib.tensor_parallel.explorer import by_degree
from course_lib.tensor_parallel.pictures import (
    h100_picture,
    losses_apart,
    sequence_region,
    split_mlp,
    width_picture,
)


def mlp():
    """The cuts of an MLP on four ranks."""
    return split_mlp(4)[0]


class TwoParts(torch.nn.Module):
    """An MLP computed in two parts, as two ranks would."""

    def __init__(self, whole):
        super().__init__()
        self.whole = whole

    def forward(self, x):
        up, out = self.whole.up, self.whole.out
        halves = zip(up.weight.chunk(2), up.bias.chunk(2), out.weight.chunk(2, dim=1), strict=True)
        parts = [torch.nn.functional.gelu(x @ a.T + bias) @ b.T for a, bias, b in halves]
        return sum(parts) + out.bias


def losses(split, steps=100):
    """The loss of a small GPT in each step."""
    torch.manual_seed(0)
    model, found = GPT(MODELS["tiny"]).double(), []
    for block in model.blocks if split else ():
        block.mlp = TwoParts(block.mlp)
    sgd = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    for n in range(steps):
        inputs, targets = next_tokens(token_batch(n, batch=8, seq=16, vocab=256))
        sgd.zero_grad()
        loss = token_loss(model(inputs), targets)
        loss.backward()
        sgd.step()
        found.append(loss.item())
    return found


def curves():
    """The difference of the losses of one process and of one that adds up two parts."""
    return losses_apart(losses(split=False), losses(split=True))[0]


def memory():
    """Draw the bytes that a rank of Llama-8B holds, by degree."""
    spec, degrees = MODELS["llama-8b"], [1, 2, 4, 8]

    def kept(p, sequence_parallel):
        one = Parallelism(tp=p, sequence_parallel=sequence_parallel)
        return sum(activations(spec, 1, 8192, parallelism=one).values()) / 2**30

    params = [params_on_rank(spec, Parallelism(tp=p)) * 2 / 2**30 for p in degrees]
    voices = {
        "parameters, bf16": Voices(formula=params),
        "activations": Voices(formula=[kept(p, False) for p in degrees]),
        "activations, sequence parallel": Voices(formula=[kept(p, True) for p in degrees]),
    }
    title = f"{kept(1, False):.0f} GiB of activations become {kept(8, False):.0f} on 8 ranks, "
    title += f"and {kept(8, True):.0f} with the tokens split"
    labels = {"x_label": "ranks p", "y_label": "on a rank (GiB)"}
    return compare(degrees, voices, title, note="Llama-8B, 8192 tokens, bf16", **labels)


def widths():
    """The width from which a layer computes longer than it communicates, by link."""
    return width_picture()[0]


def region():
    """A parallel region between tokens that are split."""
    return sequence_region(4)[0]


def overlap():
    """The backward of one column-parallel matrix, without and with overlap."""

    def events(starts):
        kinds = {"backward_input": 1.0, "backward_weight": 1.0, "all_reduce": 0.8}
        return [
            Event(rank=rank, kind=kind, start_s=starts[kind], end_s=starts[kind] + kinds[kind])
            for rank in range(2)
            for kind in kinds
        ]

    runs = {
        "plain": events({"backward_input": 0.0, "backward_weight": 1.0, "all_reduce": 2.0}),
        "overlapped": events({"backward_input": 0.0, "backward_weight": 1.0, "all_reduce": 1.0}),
    }
    return timelines(runs, "The all-reduce runs beside the weight gradient", unit="F")


def published():
    """Tokens/s per GPU, published and by formula."""
    return h100_picture(h100_scaling())[0]


def batch():
    """The part of a step that computes, for one sequence and for one per rank."""
    return by_degree("llama-8b", 2048, 8)


def pictures():
    """All pictures by the names the deck calls them."""
    draws = (mlp, curves, memory, widths, overlap, published, batch, region)
    return {draw.__name__: draw() for draw in draws}
