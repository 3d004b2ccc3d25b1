"""Training strategies: a function each, which wraps the model and says how a backward pass ends.

The group holds the ranks whose gradients are averaged: those with the same part of the model, of dp
and cp together. How attention sees the other tokens over cp is `over_tokens`.
A new strategy is one more function and one more line in `STRATEGIES`. Every one of them must give
the losses and the weights of `single` on the whole batch: tests/train/test_train.py proves it for
copies of the model, tests/train/test_sharded.py for shards and frameworks.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakSet

from course_lib.core.units import MIB
from course_lib.train.config import CP_FORMS, TrainConfig

if TYPE_CHECKING:  # imported where it is used: `--help` should not wait for torch
    import torch.distributed as dist
    from torch import Tensor, nn

    from course_lib.frameworks import Engine, MegatronEngine
    from course_lib.mesh.model_part import ModelPart
    from course_lib.mesh.rank_mesh import RankMesh
    from course_lib.models import GPT
    from course_lib.train.optimizers import PartAdapter

    MicroBatches = Sequence[tuple[Tensor, Tensor]]  # inputs and targets


_MEGATRON_ENGINES: "WeakSet[MegatronEngine]" = WeakSet()  # of the runs in this process


def plain_backward(loss: "Tensor") -> None:
    """Run autograd's own backward."""
    loss.backward()


@dataclass(frozen=True)
class Wrapped:
    """A model wrapped by a strategy.

    model     what is called in the forward pass
    adapter   makes what has the optimizer and its state; None: `PartAdapter`
    backward  of a micro-batch's loss
    finish    called after the step's last backward: then every gradient is the ranks' mean
    no_sync   a context for the forward and backward of all micro-batches but the last; of all where
              they go through a pipeline, if there is no `in_schedule`
    in_schedule  a context for the micro-batches of a pipeline
    reduces_in_backward  no whole gradient is left after a backward: other stages' come later
    gradients the whole gradient pass, as `Passes` has it, where a framework runs it
    """

    model: Callable[..., Any]
    adapter: "Callable[[ModelPart[Any], RankMesh, TrainConfig], PartAdapter] | None" = None
    backward: Callable[["Tensor"], object] = plain_backward
    finish: Callable[[], None] = lambda: None
    no_sync: Callable[[], AbstractContextManager[None]] = nullcontext
    in_schedule: Callable[[], AbstractContextManager[object]] | None = None
    reduces_in_backward: bool = False
    gradients: "Callable[[MicroBatches, Sequence[float]], Tensor] | None" = None


def single(model: "nn.Module", config: TrainConfig, group: "dist.ProcessGroup") -> Wrapped:
    """One copy of the model on the whole batch: the reference for all others."""
    return Wrapped(model)


def naive_dp(model: "nn.Module", config: TrainConfig, group: "dist.ProcessGroup") -> Wrapped:
    """Data parallel: one all-reduce per parameter after backward. Notebook 05_data_parallel."""
    from course_lib.data_parallel.naive_ddp import NaiveDDP

    wrapped = NaiveDDP(model, group)
    return Wrapped(wrapped, finish=wrapped.finish, no_sync=wrapped.no_sync)


def ddp(model: "nn.Module", config: TrainConfig, group: "dist.ProcessGroup") -> Wrapped:
    """Data parallel: buckets are all-reduced while backward still runs. Notebook 06_ddp."""
    from course_lib.ddp.ddp import DDP

    wrapped = DDP(model, bucket_bytes=int(config.bucket_mib * MIB), group=group)
    return Wrapped(wrapped, finish=wrapped.finish, no_sync=wrapped.no_sync)


def torch_ddp(model: "nn.Module", config: TrainConfig, group: "dist.ProcessGroup") -> Wrapped:
    """PyTorch's DDP: its backward waits for the last bucket, so there is nothing to finish."""
    from torch.nn.parallel import DistributedDataParallel

    wrapped = DistributedDataParallel(model, process_group=group, bucket_cap_mb=config.bucket_mib)
    return Wrapped(wrapped, no_sync=wrapped.no_sync)


def zero(
    model: "nn.Module",
    config: TrainConfig,
    group: "dist.ProcessGroup",
    *,
    stage: int,
    offload: bool = False,
) -> Wrapped:
    """ZeRO of a stage; every micro-batch's gradients are reduced. Notebook 09_zero.

    A parameter that is tied to another stage's is in shards of its own, which are the same there.
    """
    from course_lib.pipeline.stage import Stage
    from course_lib.train.optimizers import OPTIMIZERS, ZeROAdapter, settings_of
    from course_lib.zero.zero import ZeRO1, ZeRO2, ZeRO3

    engine = (ZeRO1, ZeRO2, ZeRO3)[stage - 1](
        model,
        OPTIMIZERS[config.optimizer],
        group,
        bucket_bytes=config.bucket_mib * MIB,
        offload=offload,
        apart={one.param for one in model.tied} if isinstance(model, Stage) else (),
        **settings_of(config),
    )
    adapter = partial(ZeROAdapter, engine=engine)
    return Wrapped(engine, adapter, finish=engine.finish, reduces_in_backward=stage > 1)


def fsdp(model: "nn.Module", config: TrainConfig, group: "dist.ProcessGroup") -> Wrapped:
    """FSDP: everything is sharded, one block at a time is gathered. Notebook 10_fsdp.

    In a pipeline each model chunk is wrapped. What is gathered is freed after each pass of a
    micro-batch: a rank holds shards and one block, and sends as much as for so many steps. Without
    resharding it stays, with whole gradients, for all micro-batches, which send as much as one.
    """
    import torch

    from course_lib.fsdp.fsdp import FSDP
    from course_lib.pipeline.stage import Stage
    from course_lib.train.optimizers import FSDPAdapter

    dtype = getattr(torch, config.compute_dtype) if config.compute_dtype else None
    wrap = partial(FSDP, compute_dtype=dtype, reshard_after_forward=config.reshard, group=group)
    if not isinstance(model, Stage):
        found = [wrap(model)]
    else:
        found = [wrap(chunk) for chunk in model.chunks]
        for number, wrapped in enumerate(found):
            model.chunks[number] = wrapped

    @contextmanager
    def stay_whole() -> Iterator[None]:
        with ExitStack() as stack:
            for wrapped in found:
                stack.enter_context(wrapped.stays_whole())
            yield

    return Wrapped(
        found[0],
        partial(FSDPAdapter, models=found),
        in_schedule=nullcontext if config.reshard else stay_whole,
        reduces_in_backward=True,
    )


def torch_fsdp(model: "nn.Module", config: TrainConfig, group: "dist.ProcessGroup") -> Wrapped:
    """PyTorch's FSDP: `fully_shard` on every block."""
    from course_lib.frameworks import fully_sharded
    from course_lib.models.gpt import Block
    from course_lib.train.optimizers import TorchFSDPAdapter, optimizer_of

    make, how = partial(optimizer_of, config), {"reshard_after_forward": config.reshard}
    return Wrapped(fully_sharded(model, make, unit=Block, **how).model, TorchFSDPAdapter)


def deepspeed(
    model: "nn.Module",
    config: TrainConfig,
    group: "dist.ProcessGroup",
    *,
    stage: int,
    offload: bool = False,
) -> Wrapped:
    """DeepSpeed, which counts micro-batches itself and averages over them."""
    from course_lib.frameworks import deepspeed_engine

    count = config.num_micro_batches(group.size())
    make = partial(
        deepspeed_engine,
        stage=stage,
        offload=offload,
        num_micro_batches=count,
        clip_norm=config.clip_norm or 0.0,
    )
    return _framework(make, model, config, count)


def framework(
    model: "nn.Module",
    config: TrainConfig,
    group: "dist.ProcessGroup",
    *,
    engine: str,
    shards_blocks: bool = False,
    **options: Any,
) -> Wrapped:
    """An engine of `course_lib.frameworks`, by its name; Accelerate's DeepSpeed steps in backward.

    shards_blocks   every block is gathered by itself
    """
    from course_lib import frameworks
    from course_lib.models.gpt import Block

    if shards_blocks:
        options["unit"] = _kind(model, Block)
    if engine == "accelerate_deepspeed":
        options["clip_norm"] = config.clip_norm or 0.0
    return _framework(partial(getattr(frameworks, engine), **options), model, config)


def megatron(model: "nn.Module", config: TrainConfig, group: "dist.ProcessGroup") -> Wrapped:
    """Megatron-Core, which splits the model itself; its schedules take all micro-batches.

    The engine of an earlier run in this process is closed: Megatron-Core serves one at a time.
    """
    import torch

    from course_lib.frameworks import MegatronEngine, alive_storages
    from course_lib.train.optimizers import FrameworkAdapter, optimizer_of

    for engine in list(_MEGATRON_ENGINES):
        engine.close()
    earlier, make = alive_storages(), partial(optimizer_of, config)
    engine = MegatronEngine(
        cast("GPT", model),  # the settings allow no other model
        make,
        tp=config.tp,
        pp=config.pp,
        model_chunks=config.model_chunks or 1,
        sequence_parallel=config.sequence_parallel,
    )
    _MEGATRON_ENGINES.add(engine)
    for param in model.parameters():  # the engine trains its own copy of this rank's shards
        param.data = param.new_empty(0)

    def gradients(micro_batches: "MicroBatches", shares: Sequence[float]) -> "Tensor":
        inputs, targets = (torch.cat(parts) for parts in zip(*micro_batches, strict=True))
        loss_sum, count = engine.forward_backward(inputs, targets, len(shares))
        found = torch.zeros(3, device=inputs.device, dtype=torch.float64)
        found[0] = loss_sum / count * sum(shares) if count else 0
        return found

    return Wrapped(model, lambda *_: FrameworkAdapter(engine, earlier), gradients=gradients)


def scheduler_note(config: TrainConfig, num_ranks: int) -> str | None:
    """Say where a framework would step a scheduler by other rules than once a step; else None."""
    name = config.strategy
    rules = {
        "accelerate": f"accelerator.prepare(scheduler) steps it {num_ranks} times a step, once for "
        "each rank",
        "deepspeed": "a scheduler given to DeepSpeed is stepped by its own step(), not by you",
        "megatron": "Megatron-Core's scheduler counts sequences, not steps",
    }
    if not (config.warmup or config.lr_decay):
        return None
    found = [rule for word, rule in rules.items() if word in name]
    return f"{name}: {found[-1]}; here the learning rate is set by the step." if found else None


def _kind(model: "nn.Module", kind: "type[nn.Module]") -> "type[nn.Module]":
    """Return the model's own class of such modules: some frameworks compare classes by name."""
    return next(type(module) for module in model.modules() if isinstance(module, kind))


def _framework(
    make: "Callable[..., Engine]", model: "nn.Module", config: TrainConfig, count: int = 1
) -> Wrapped:
    """Wrap an engine whose gradient is the mean over `count` backward calls; ours is their sum."""
    from torch.multiprocessing.reductions import StorageWeakRef

    from course_lib.frameworks import alive_storages
    from course_lib.train.optimizers import FrameworkAdapter, optimizer_of

    own = {StorageWeakRef(param.untyped_storage()) for param in model.parameters()}
    earlier = alive_storages() - own
    engine = make(model, partial(optimizer_of, config))

    @contextmanager
    def no_sync() -> Iterator[None]:
        yield
        if count > 1:  # an update in the middle of a step only counts
            engine.update()

    return Wrapped(
        engine.model,
        lambda *_: FrameworkAdapter(engine, earlier),
        backward=lambda loss: engine.backward(loss * count),
        no_sync=no_sync,
    )


def over_tokens(model: "GPT", group: "dist.ProcessGroup", config: TrainConfig) -> None:
    """Let attention see the tokens of all ranks of cp. Notebook 15_context_parallel."""
    from course_lib import context_parallel as cp

    forms = (cp.ring_attention, cp.ulysses_attention, cp.all_gather_attention)
    form = dict(zip(CP_FORMS, forms, strict=True))[str(config.cp_form)]
    cp.parallelize_context(model, group, form, str(config.cp_layout), config.seq)


Strategy = Callable[["nn.Module", TrainConfig, "dist.ProcessGroup"], Wrapped]
COPIES: dict[str, Strategy] = {
    "single": single,
    "naive-dp": naive_dp,
    "ddp": ddp,
    "torch-ddp": torch_ddp,
}
SHARDS: dict[str, Strategy] = {
    **{f"zero{stage}": partial(zero, stage=stage) for stage in (1, 2, 3)},
    **{f"zero{stage}-offload": partial(zero, stage=stage, offload=True) for stage in (1, 2, 3)},
    "fsdp": fsdp,
    "torch-fsdp": torch_fsdp,
}
FRAMEWORKS: dict[str, Strategy] = {
    **{f"deepspeed-{stage}": partial(deepspeed, stage=stage) for stage in range(4)},
    **{f"deepspeed-{n}-offload": partial(deepspeed, stage=n, offload=True) for n in (1, 2, 3)},
    "accelerate-ddp": partial(framework, engine="accelerate_ddp"),
    "accelerate-fsdp": partial(framework, engine="accelerate_fsdp", shards_blocks=True),
    "accelerate-deepspeed": partial(framework, engine="accelerate_deepspeed", stage=3),
    "lightning-ddp": partial(framework, engine="lightning_ddp"),
    "lightning-fsdp": partial(framework, engine="lightning_fsdp", shards_blocks=True),
    "megatron": megatron,
}
STRATEGIES = {**COPIES, **SHARDS, **FRAMEWORKS}
