"""DDP in this course and in PyTorch: the same model and batch, in turns, on one rank.

Notebook 06_ddp.
"""

from copy import deepcopy

import torch
from torch import Tensor, nn

from course_lib.core.records import Event
from course_lib.core.specs import ModelSpec
from course_lib.core.units import MIB
from course_lib.ddp.ddp import DDP
from course_lib.models import GPT, next_tokens, token_batch, token_loss
from course_lib.ranks import record, span
from course_lib.ranks.progress import in_turns

Steps = list[list[Event]]


def backward_in_turns(
    rank: int, spec: ModelSpec, bucket_mib: int = 2, turns: int = 9
) -> tuple[list[list[Tensor | None]], tuple[Steps, Steps]]:
    """On a rank: return the gradients of ours and PyTorch's, and the events of each backward.

    The event of kind compute is a whole backward, until all gradients are reduced.
    """
    torch.manual_seed(0)
    gpt = GPT(spec)
    theirs = nn.parallel.DistributedDataParallel(deepcopy(gpt), bucket_cap_mb=bucket_mib)
    ours = DDP(gpt, bucket_mib * MIB)
    seen: tuple[Steps, Steps] = ([], [])
    inputs, targets = next_tokens(token_batch(rank, batch=1, seq=64, vocab=spec.vocab))
    for model, events in in_turns(zip((ours, theirs), seen, strict=True), turns):
        model.zero_grad()
        with record() as log, span("compute"):
            token_loss(model(inputs), targets).backward()
            if model is ours:
                ours.finish()
        events.append(log.events)
    return [[param.grad for param in model.parameters()] for model in (ours, theirs)], seen
