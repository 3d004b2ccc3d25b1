"""Compare our FSDP with those of PyTorch and three frameworks, on two small tasks.

The tasks are those of Jin, Zhang and Huang 2023, a course project at Case Western Reserve
University: they trained a GPT-2 on characters and a BERT on dialogues, on one GPU and on two.
(Their abstract announces an FSDP; their published code uses PyTorch's DDP.) `run_framework` runs a
task under one of the frameworks; `train_alike` trains one under our FSDP, to compare its losses
with those of one process. Notebook 10_fsdp.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
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
from course_lib.fsdp.mixed_precision import MixedPrecisionPolicy
from course_lib.models import BERT, GPT, IGNORED, mask_tokens, next_tokens, token_loss
from course_lib.models.bert import EncoderBlock
from course_lib.models.dialogues import MASK, SPECIAL, Dialogues, generated_dialogues
from course_lib.models.gpt import Block
from course_lib.models.text import Text, generated_text
from course_lib.ranks import record
from course_lib.zero.beside_frameworks import take_steps

if TYPE_CHECKING:
    from course_lib.frameworks import Engine

# Jin, Zhang and Huang 2023: parameters in millions, seconds of an epoch on one GPU and on two
STUDY = {"GPT-2": (27.32, 55.7, 31.2), "BERT": (46.7, 318.0, 246.0)}
TOGETHER, SEQ = 16, 32  # sequences in a batch, tokens in a sequence
ADAMW = partial(torch.optim.AdamW, lr=3e-3)
_BF16 = partial(MixedPrecisionPolicy, param_dtype=torch.bfloat16, output_dtype=torch.float32)
POLICIES = {
    "fp32": MixedPrecisionPolicy(),
    "bf16, reduced in fp32": _BF16(),
    "bf16, reduced in bf16": _BF16(reduce_dtype=torch.bfloat16),
    "fp32, reduced in bf16": MixedPrecisionPolicy(reduce_dtype=torch.bfloat16),
}
FRAMEWORKS = ("ours", "PyTorch", "Accelerate", "Lightning", "DeepSpeed")


@dataclass(frozen=True)
class Task:
    """A model, the batches it trains on by number, and the module that is a unit."""

    build: Callable[[], nn.Module]
    batch: Callable[[int], tuple[Tensor, Tensor]]
    unit: type[nn.Module]


@cache
def characters() -> Task:
    """Return the task of a small GPT: predict the next character of generated speeches."""
    text = Text.of(generated_text())
    spec = replace(MODELS["tiny"], vocab=text.vocab, num_layers=4)
    return Task(
        partial(GPT, spec), lambda n: next_tokens(text.batch(n, batch=TOGETHER, seq=SEQ)), Block
    )


@cache
def dialogues() -> Task:
    """Return the task of a small BERT: predict masked words of generated dialogues."""
    spec = ENCODERS["bert-tiny"]
    words = Dialogues.of(generated_dialogues(), "generated", spec.vocab)

    def batch(n: int) -> tuple[Tensor, Tensor]:
        tokens, random = words.batch(n, batch=TOGETHER, seq=SEQ), torch.Generator().manual_seed(n)
        return mask_tokens(tokens, random, vocab=words.vocab, mask=MASK, num_special=len(SPECIAL))

    return Task(partial(BERT, spec), batch, EncoderBlock)


TASKS = {"GPT-2": characters, "BERT": dialogues}


@dataclass(frozen=True)
class FrameworkRun:
    """A few steps under a framework, measured on one rank."""

    losses: list[float]
    step_ms: float  # the median
    kept: float  # bytes between two steps, per parameter of the model
    sent: float  # bytes of a step, per parameter
    calls: int  # collectives of a step
    weights: Tensor  # all of them, sorted by name


def run_framework(rank: int, name: str, task: str = "GPT-2", steps: int = 5) -> FrameworkRun:
    """On a rank: take the same few steps under one of FRAMEWORKS.

    Raises:  CourseError where it is not installed
    """
    from course_lib.frameworks import alive_bytes  # slow to import

    p, job = dist.get_world_size(), TASKS[task]()
    before = alive_bytes()
    torch.manual_seed(0)
    model = job.build()
    numel = sum(param.numel() for param in model.parameters())
    engine = _engine(name, model, job.unit)
    taken = take_steps(engine, (job.batch(n) for n in range(steps)))
    kept = (alive_bytes() - before) / numel
    calls = [event for event in taken.last_events if event.kind in COMMUNICATION_KINDS]
    sent = sum(bus_factor(call.kind, p) * call.num_bytes for call in calls) / numel
    weights = engine.weights()
    flat = torch.cat([weights[key].detach().flatten() for key in sorted(weights)])
    return FrameworkRun(taken.losses, taken.median_ms, kept, sent, len(calls), flat)


def _engine(name: str, model: nn.Module, unit: type[nn.Module]) -> "Engine":
    """Return the engine of a framework by its name."""
    from course_lib import frameworks

    if name == "ours":
        return _ours(model, unit)
    if name == "PyTorch":
        return frameworks.fully_sharded(model, ADAMW, unit=unit)
    if name == "Accelerate":
        return frameworks.accelerate_fsdp(model, ADAMW, unit=unit)
    if name == "Lightning":
        return frameworks.lightning_fsdp(model, ADAMW, unit=unit)
    if name == "DeepSpeed":
        paper: dict[str, Any] = {**frameworks.AS_IN_THE_PAPER, "reduce_bucket_size": 2**16}
        return frameworks.deepspeed_engine(model, ADAMW, stage=3, **paper)
    raise CourseError(f"run_framework: need one of {', '.join(FRAMEWORKS)}; got {name!r}.")


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
    """On a rank: return the losses of whole batches under our FSDP, and the seconds of all steps.

    A batch is split over the ranks, so that any number of them computes the same.
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
        count = int((targets != IGNORED).sum())  # targets on this rank
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
    """On a rank: return the collectives of a GPT's second step under PyTorch's `fully_shard`."""
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
    """On a rank: return its shards of the first gradient under FSDP(**options), and its losses."""
    torch.manual_seed(0)
    model, p, losses = FSDP(GPT(spec), **options), dist.get_world_size(), list[float]()
    optimizer, grads = ADAMW(model.parameters()), torch.empty(0)
    for n in range(steps):
        optimizer.zero_grad()
        loss = token_loss(model(batch[0][rank::p]), batch[1][rank::p])
        loss.backward()
        if n == 0:
            grads = torch.cat(
                [shard.grad.flatten() for shard in model.parameters() if shard.grad is not None]
            )
        optimizer.step()
        losses.append(loss.item())
    return grads, losses
