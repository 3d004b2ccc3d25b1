"""The pictures of the deck 09_zero, drawn by the functions that the notebook calls."""

from dataclasses import replace

import torch

from course_lib.core import MODELS
from course_lib.models import GPT, next_tokens, token_batch, token_loss
from course_lib.ranks import Ranks
from course_lib.zero import ZeRO2, ZeRO3
from course_lib.zero import pictures as lesson_pictures
from course_lib.zero.explorer import draw_stages
from course_lib.zero.lab import owned_over_time


def table():
    """GB on a rank by stage, on paper and as published."""
    return lesson_pictures.states_on_paper()[0]


def gpus():
    """Published peaks without ZeRO and with stage 1."""
    return lesson_pictures.stage_1_on_gpus()[0]


def row():
    """Draw a flat parameter of four tensors, cut for four ranks."""
    return lesson_pictures.four_tensors(4)[0]


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


def owned(stage):
    """A ledger of one of four real ranks."""
    with Ranks(4) as ranks:
        return ranks.run(over_time, stage)[0]


def stage2():
    """Gradients come and go."""
    return lesson_pictures.grads_over_time(owned(ZeRO2), 2)[0]


def stage3():
    """Parameters come and go."""
    return lesson_pictures.params_over_time(owned(ZeRO3))[0]


def traffic():
    """Bytes sent by micro-batches, as a multiple of DDP's."""
    return lesson_pictures.sent_by_stage([1, 2, 4, 8])[0]


def choose():
    """The bars of the explorer."""
    return draw_stages("llama-8b", "bf16", 8, "NVLink", 1)


def pictures():
    """All pictures by the names the deck calls them."""
    draws = (table, gpus, row, stage2, stage3, traffic, choose)
    return {draw.__name__: draw() for draw in draws}
