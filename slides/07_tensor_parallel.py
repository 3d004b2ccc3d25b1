"""The pictures of the deck 07_tensor_parallel, drawn by the functions that the notebook calls."""

from functools import partial

from course_lib.core import MODELS, Parallelism
from course_lib.core.records import Event
from course_lib.display import Voices, compare, timelines
from course_lib.memory import activations, params_on_rank
from course_lib.tensor_parallel.cost import h100_scaling
from course_lib.tensor_parallel.explorer import by_degree
from course_lib.tensor_parallel.pictures import (
    f_and_g,
    h100_picture,
    sequence_region,
    split_mlp,
    width_picture,
)


def mlp():
    """The cuts of an MLP on four ranks."""
    return split_mlp(4)[0]


def passes():
    """One rank's forward and backward pass through f and g."""
    return f_and_g()[0]


def memory():
    """Draw the bytes that a rank of Llama-8B holds, by degree."""
    spec, degrees = MODELS["llama-8b"], [1, 2, 4, 8]

    def kept(p, sequence_parallel):
        one = Parallelism(tp=p, sequence_parallel=sequence_parallel)
        return sum(activations(spec, 1, 8192, parallelism=one).values()) / 2**30

    def params(p):
        return params_on_rank(spec, Parallelism(tp=p)) * 2 / 2**30

    def curve(amount):  # a + b/p, through the amounts on 1 rank and on 8
        b = (amount(1) - amount(8)) * 8 / 7
        assert all(abs(amount(1) - b + b / p - amount(p)) < 1e-3 for p in degrees)
        return Voices(formula=lambda p: amount(1) - b + b / p)

    voices = {
        "parameters, bf16": curve(params),
        "activations": curve(partial(kept, sequence_parallel=False)),
        "activations, sequence parallel": curve(partial(kept, sequence_parallel=True)),
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
    draws = (mlp, passes, memory, widths, overlap, published, batch, region)
    return {draw.__name__: draw() for draw in draws}
