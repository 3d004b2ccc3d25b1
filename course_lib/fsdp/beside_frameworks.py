"""Our FSDP beside the real ones, and the two models of a study of FSDP in a size for notebooks.

The study trained a GPT-2 of characters and a BERT on dialogues, on one card and on two.
`some_steps` runs a task under one of the frameworks; `train_alike` trains one under our FSDP, to
hold its losses against one process. Notebook 10_fsdp.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib.core import COMMUNICATION_KINDS, Event, ModelSpec
from course_lib.core.errors import CourseError
from course_lib.core.presets import ENCODERS, MODELS
from course_lib.cost.bandwidth import bus_factor
from course_lib.data_parallel.naive_ddp import weighted_loss
from course_lib.fsdp.fsdp import FSDP
from course_lib.models import BERT, GPT, IGNORED, mask_tokens, next_tokens, token_loss
from course_lib.models.bert import EncoderBlock
from course_lib.models.dialogues import MASK, SPECIAL, Dialogues, generated_dialogues
from course_lib.models.gpt import Block
from course_lib.models.text import Text, generated_text
from course_lib.ranks import record

if TYPE_CHECKING:
    from course_lib.frameworks import Engine

# the study: parameters in millions, seconds of an epoch on one card and on two
STUDY = {"GPT-2": (27.32, 55.7, 31.2), "BERT": (46.7, 318.0, 246.0)}
TOGETHER, SEQ = 16, 32  # sequences in a batch, tokens in a sequence
ADAMW = partial(torch.optim.AdamW, lr=3e-3)
FRAMEWORKS = ("ours", "PyTorch", "Accelerate", "DeepSpeed")


@dataclass(frozen=True)
class Task:
    """A model and its data: batch n, on one rank or all."""

    build: Callable[[], nn.Module]
    batch: Callable[[int], tuple[Tensor, Tensor]]
    unit: type[nn.Module]


@cache
def characters() -> Task:
    """The next character of generated speeches, for a small GPT."""
    text = Text.of(generated_text())
    spec = replace(MODELS["tiny"], vocab=text.vocab, num_layers=4)
    return Task(
        partial(GPT, spec), lambda n: next_tokens(text.batch(n, batch=TOGETHER, seq=SEQ)), Block
    )


@cache
def dialogues() -> Task:
    """The hidden words of generated dialogues, for a small BERT."""
    spec = ENCODERS["bert-tiny"]
    words = Dialogues.of(generated_dialogues(), "generated", spec.vocab)

    def batch(n: int) -> tuple[Tensor, Tensor]:
        tokens, random = words.batch(n, batch=TOGETHER, seq=SEQ), torch.Generator().manual_seed(n)
        return mask_tokens(tokens, random, vocab=words.vocab, mask=MASK, num_special=len(SPECIAL))

    return Task(partial(BERT, spec), batch, EncoderBlock)


TASKS = {"GPT-2": characters, "BERT": dialogues}


@dataclass(frozen=True)
class Beside:
    """What a framework did on one rank."""

    losses: list[float]
    step_ms: float  # the median
    kept: float  # bytes between two steps, for each parameter of the model
    sent: float  # bytes of a step, for each parameter
    weights: Tensor  # all of them, by name


def some_steps(rank: int, name: str, task: str = "GPT-2", steps: int = 5) -> Beside:
    """On a rank: the same few steps under one of FRAMEWORKS.

    Raises: CourseError where it is not installed
    """
    from course_lib.frameworks import alive_bytes  # slow to import

    p, job = dist.get_world_size(), TASKS[task]()
    before = alive_bytes()
    torch.manual_seed(0)
    model = job.build()
    numel = sum(param.numel() for param in model.parameters())
    engine = _engine(name, model, job.unit)
    losses, times_s = [], []
    for n in range(steps):
        inputs, targets = (whole[rank::p] for whole in job.batch(n))
        start_s = time.perf_counter()
        with record() as log:
            losses.append(engine.step(token_loss(engine.model(inputs), targets)))
        times_s.append(time.perf_counter() - start_s)
    kept = (alive_bytes() - before) / numel
    calls = [event for event in log.events if event.kind in COMMUNICATION_KINDS]
    sent = sum(bus_factor(call.kind, p) * call.num_bytes for call in calls) / numel
    weights = engine.weights()
    flat = torch.cat([weights[key].detach().flatten() for key in sorted(weights)])
    return Beside(losses, 1e3 * median(times_s), kept, sent, flat)


def _engine(name: str, model: nn.Module, unit: type[nn.Module]) -> "Engine":
    """A framework by its name."""
    from course_lib import frameworks

    if name == "ours":
        return _ours(model, unit)
    if name == "PyTorch":
        return frameworks.fully_sharded(model, ADAMW, unit=unit)
    if name == "Accelerate":
        return frameworks.accelerate_fsdp(model, ADAMW, unit=unit)
    if name == "DeepSpeed":
        paper: dict[str, Any] = {**frameworks.AS_IN_THE_PAPER, "reduce_bucket_size": 2**16}
        return frameworks.deepspeed_engine(model, ADAMW, stage=3, **paper)
    raise CourseError(f"some_steps: need one of {', '.join(FRAMEWORKS)}; got {name!r}.")


def _ours(model: nn.Module, unit: type[nn.Module]) -> "Engine":
    from course_lib.frameworks import Engine

    fsdp = FSDP(model, units=lambda module: isinstance(module, unit))
    optimizer = ADAMW(fsdp.parameters())

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    def weights() -> dict[str, Tensor]:
        state = fsdp.full_state_dict()
        return {name: state[name] for name, _ in fsdp.module.named_parameters()}

    return Engine(name="ours", model=fsdp, backward=Tensor.backward, update=update, weights=weights)


def train_alike(rank: int, task: str, steps: int = 60) -> tuple[list[float], float]:
    """On a rank: the losses of whole batches under our FSDP, and the seconds of all steps.

    A batch is dealt over the ranks, so that any number of them computes the same.
    """
    p, job = dist.get_world_size(), TASKS[task]()
    torch.manual_seed(0)
    model = FSDP(job.build())
    optimizer, losses = ADAMW(model.parameters()), list[Any]()
    dist.barrier()
    start_s = time.perf_counter()
    for n in range(steps):
        inputs, targets = (whole[rank::p] for whole in job.batch(n))
        optimizer.zero_grad()
        count = int((targets != IGNORED).sum())  # of what is to be guessed on this rank
        loss = weighted_loss(token_loss(model(inputs), targets), count)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    total = torch.stack(losses)
    dist.all_reduce(total)
    return (total / p).tolist(), time.perf_counter() - start_s


def torchs_calls(
    rank: int, spec: ModelSpec, batch: tuple[Tensor, Tensor], reshard_after_forward: bool
) -> list[Event]:
    """On a rank: the messages of the second step of a GPT under PyTorch's `fully_shard`."""
    from torch.distributed.fsdp import fully_shard  # slow to import

    model, p = GPT(spec), dist.get_world_size()
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=reshard_after_forward)
    fully_shard(model)  # the root is never freed in between
    for _ in range(2):
        with record() as log:
            token_loss(model(batch[0][rank::p]), batch[1][rank::p]).backward()
    return [event for event in log.events if event.kind in COMMUNICATION_KINDS]


def in_precision(
    rank: int,
    spec: ModelSpec,
    batch: tuple[Tensor, Tensor],
    options: Mapping[str, Any],
    steps: int = 30,
) -> tuple[Tensor, list[float]]:
    """On a rank: its part of the first gradient under FSDP(**options), and its losses."""
    torch.manual_seed(0)
    model, p, losses = FSDP(GPT(spec), **options), dist.get_world_size(), list[float]()
    optimizer, grads = ADAMW(model.parameters()), torch.empty(0)
    for n in range(steps):
        optimizer.zero_grad()
        loss = token_loss(model(batch[0][rank::p]), batch[1][rank::p])
        loss.backward()
        if n == 0:
            grads = torch.cat(
                [g.shard.grad for g in model.param_groups if g.shard.grad is not None]
            )
        optimizer.step()
        losses.append(loss.item())
    return grads, losses
