"""The pictures of the deck 09_zero, drawn by the functions that the notebook calls."""

from dataclasses import replace

import torch

from course_lib.core import MODELS, Parallelism
from course_lib.cost.traffic import sent_bytes
from course_lib.display import Voices, compare
from course_lib.display import memory as draw_memory
from course_lib.memory import model_states
from course_lib.models import GPT, next_tokens, token_batch, token_loss
from course_lib.ranks import Ranks
from course_lib.zero import FlatLayout, ZeRO2, ZeRO3
from course_lib.zero.cost import ParamTraffic, zero_traffic
from course_lib.zero.explorer import draw_stages
from course_lib.zero.lab import TABLE_1_GB, TABLE_1_SOURCE, owned_over_time
from course_lib.zero.pictures import flat_param_shards, stage_1_on_gpus

RANKS = [1, 4, 16, 64, 256, 1024]


def table():
    """GB on a rank by stage, on paper and as published."""
    curves = {}
    for zero, printed in TABLE_1_GB.items():
        states = [
            model_states(7_500_000_000, "bf16", parallelism=Parallelism(dp=p, zero=zero))
            for p in RANKS
        ]
        paper = [sum(one.values()) / 1e9 for one in states]
        curves[f"stage {zero}"] = Voices(formula=paper, published=(RANKS, printed))
    labels = {"x_label": "ranks p", "y_label": "GB on a rank", "log": True}
    labels |= {"names": {"published": "the paper's arithmetic"}, "source": TABLE_1_SOURCE}
    return compare(
        RANKS, curves, "On 64 ranks, stages 1, 2, 3 keep 31.4, 16.6 and 1.88 of 120 GB", **labels
    )


def gpus():
    """Published peaks without ZeRO and with stage 1."""
    return stage_1_on_gpus()[0]


def row():
    """Draw a flat parameter of four tensors, cut for four ranks."""
    layout = FlatLayout(((3, 4), (4,), (1,), (6,)), 4)
    names = ("weight", "bias", "scale", "shift")
    return flat_param_shards(layout, names, "23 numbers on 4 ranks: 6 each, 1 of padding")


def over_time(rank, stage):
    """Record what rank 0 owns in the second step."""
    tiny = replace(MODELS["tiny"], vocab=320)  # the notebook's
    engine = stage(GPT(tiny), torch.optim.AdamW, lr=1e-3, bucket_bytes=2**16)
    inputs, targets = next_tokens(token_batch(rank, batch=2, seq=16, vocab=256))
    for _ in range(2):
        engine.zero_grad()
        with owned_over_time(engine) as ledger:
            token_loss(engine(inputs), targets).backward()
            engine.step()
    return ledger


def owned(stage, kind):
    """A ledger of four real ranks, and the most of one kind in it, in KiB."""
    with Ranks(4) as ranks:
        ledger = ranks.run(over_time, stage)[0]
    return ledger, max(ledger.bytes_by_kind[kind]) / 2**10


def stage2():
    """Gradients come and go."""
    ledger, most = owned(ZeRO2, "grads")
    return draw_memory(
        ledger, f"Stage 2 on 4 ranks: at most {most:.0f} KiB of gradients in the engine"
    )


def stage3():
    """Parameters come and go."""
    ledger, most = owned(ZeRO3, "params")
    least = min(ledger.bytes_by_kind["params"]) / 2**10
    return draw_memory(ledger, f"Stage 3: {least:.0f} KiB of parameters, at the peak {most:.0f}")


def traffic():
    """Bytes sent by micro-batches, as a multiple of DDP's."""
    counts, flat = [1, 2, 4, 8], [ParamTraffic(num_bytes=2**20)]
    ddp = sent_bytes(zero_traffic(0, flat), 4)
    voices = {
        f"stage {zero}": Voices(
            formula=[sent_bytes(zero_traffic(zero, flat, m), 4) / ddp for m in counts]
        )
        for zero in (1, 2, 3)
    }
    title = "With 4 micro-batches, stages 1, 2, 3 send 1, 2.5 and 6 times DDP's bytes"
    labels = {"x_label": "micro-batches in a step", "y_label": "bytes sent / bytes that DDP sends"}
    return compare(counts, voices, title, **labels)


def choose():
    """The bars of the explorer."""
    return draw_stages("llama-8b", "bf16", 8, "NVLink", 1)


def pictures():
    """All pictures by the names the deck calls them."""
    draws = (table, gpus, row, stage2, stage3, traffic, choose)
    return {draw.__name__: draw() for draw in draws}
