"""The ways to train: a function each, which wraps the model and says what ends a backward pass.

The group holds the ranks whose gradients are averaged: those with the same part of the model.
A new strategy is one more function and one more line in `STRATEGIES`. Every one of them must give
the losses and the weights of `single` on the whole batch: tests/test_train.py proves it.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from course_lib.core.units import MIB
from course_lib.training.config import TrainConfig

if TYPE_CHECKING:  # imported where it is used: `--help` should not wait for torch
    import torch.distributed as dist
    from torch import nn


@dataclass(frozen=True)
class Wrapped:
    """A model as a strategy trains it.

    model     what is called in the forward pass
    finish    called after the step's last backward: then every `param.grad` is the ranks' mean
    no_sync   a context for the forward and backward of all micro-batches but the last
    """

    model: "nn.Module"
    finish: Callable[[], None] = lambda: None
    no_sync: Callable[[], AbstractContextManager[None]] = nullcontext


def single(model: "nn.Module", config: TrainConfig, group: "dist.ProcessGroup") -> Wrapped:
    """One copy of the model, the whole batch: what all others must agree with."""
    return Wrapped(model)


def naive_dp(model: "nn.Module", config: TrainConfig, group: "dist.ProcessGroup") -> Wrapped:
    """Data parallel: one all-reduce a parameter, after backward. Notebook 05_data_parallel."""
    from course_lib.data_parallel import NaiveDDP

    wrapped = NaiveDDP(model, group)
    return Wrapped(wrapped, wrapped.finish, wrapped.no_sync)


def ddp(model: "nn.Module", config: TrainConfig, group: "dist.ProcessGroup") -> Wrapped:
    """Data parallel: buckets that leave while backward still runs. Notebook 06_ddp."""
    from course_lib.ddp import DDP

    wrapped = DDP(model, bucket_bytes=int(config.bucket_mib * MIB), group=group)
    return Wrapped(wrapped, wrapped.finish, wrapped.no_sync)


def torch_ddp(model: "nn.Module", config: TrainConfig, group: "dist.ProcessGroup") -> Wrapped:
    """PyTorch's own: its backward waits for the last bucket, so there is nothing to finish."""
    from torch.nn.parallel import DistributedDataParallel

    wrapped = DistributedDataParallel(model, process_group=group, bucket_cap_mb=config.bucket_mib)
    return Wrapped(wrapped, no_sync=wrapped.no_sync)


STRATEGIES = {"single": single, "naive-dp": naive_dp, "ddp": ddp, "torch-ddp": torch_ddp}
