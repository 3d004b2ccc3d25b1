"""The patients of the clinic: training runs with one fault each, of which the loss tells nothing.

Each mirrors a fault that was found in a public code base. A faulty function stands in the place of
one small function of the training path while the run lasts. Notebook 17_clinic.
"""

import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from course_lib.clinic import faults
from course_lib.core.specs import Experts

USUAL = {"steps": 50, "seq": 16, "global_batch": 4, "lr": 1e-4, "dtype": "float64", "every": 0}


@dataclass(frozen=True)
class FaultyRun:
    """A training run with a fault.

    symptoms   what the one who brings the run knows
    place      the function that is replaced, "module:name" or "module:class.name"
    faulty     what stands there instead
    source     where the fault was found in public
    ranks      that train it
    settings   of the `TrainConfig`, besides the model and what is `USUAL`
    model      fields of the `ModelSpec` that differ from `tiny`
    circumstances  functions that are replaced in right runs, too
    """

    symptoms: str
    place: str
    faulty: Callable[..., Any]
    source: str
    ranks: int
    settings: Mapping[str, Any]
    model: Mapping[str, Any] = field(default_factory=dict)
    circumstances: Mapping[str, Callable[..., Any]] = field(default_factory=dict)

    @property
    def code(self) -> str:
        """The text of the faulty function, to mend."""
        return textwrap.dedent(inspect.getsource(self.faulty))


def function_at(place: str) -> Callable[..., Any]:
    """Return the function at a place."""
    owner, name = _find(place)
    found: Callable[..., Any] = vars(owner)[name]
    return found


@contextmanager
def replaced(place: str, function: Callable[..., Any]) -> Iterator[None]:
    """Put a function in the place of another one, in this process, while the context lasts."""
    owner, name = _find(place)
    before = vars(owner)[name]
    setattr(owner, name, function)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _find(place: str) -> tuple[Any, str]:
    """Return the module or class of a place, and the function's name in it."""
    module, _, path = place.partition(":")
    owner: Any = import_module(module)
    *classes, name = path.split(".")
    for part in classes:
        owner = getattr(owner, part)
    return owner, name


TRAINER = "course_lib.train.trainer"

CASES = {
    "unequal micro-batches": FaultyRun(
        "A BERT with dynamic padding, accumulated over two micro-batches on two ranks. It learns a "
        "little worse than the run with one large batch; nobody can say why.",
        f"{TRAINER}:by_tokens",
        faults.share,
        "transformers #34191",
        2,
        {"strategy": "ddp", "micro_batch": 1},
        circumstances={"course_lib.train.data:Examples.batch": faults.padded_batch},
    ),
    "one loader for all": FaultyRun(
        "Throughput scales with the ranks, the loss falls as before; with four times the ranks it "
        "does not fall any faster.",
        "course_lib.train.mesh:TrainMesh.part_of",
        faults.part,
        "loaders in the style of nanoGPT; accelerate #4233",
        2,
        {"strategy": "ddp", "lr": 5e-5},
    ),
    "every rank shuffles": FaultyRun(
        "An epoch takes as many steps as it should. The count of tokens is right.",
        "course_lib.train.mesh:TrainMesh.part_of",
        faults.shuffled_part,
        "samplers without a common seed; accelerate #4233",
        2,
        {"strategy": "zero1"},
    ),
    "a bias too many": FaultyRun(
        "A model that was trained on one GPU goes on with tensor parallelism.",
        "course_lib.tensor_parallel.layers:RowParallelLinear.forward",
        faults.row_parallel,
        "several inference codes",
        2,
        {"strategy": "ddp", "tp": 2},
        {"bias": True},
    ),
    "norms apart": FaultyRun(
        "Sequence parallelism was switched on to save memory. Losses look the same.",
        "course_lib.mesh.clip:finish_gradients",
        faults.finish_gradients,
        "Megatron-LM #1446, gpt-neox #1259",
        2,
        {"strategy": "ddp", "tp": 2, "sequence_parallel": True, "optimizer": "sgd", "lr": 0.02},
    ),
    "norm of norms": FaultyRun(
        "With tensor parallelism the gradient norm in the log is larger than it was, and clipping "
        "sets in more often.",
        "course_lib.mesh.clip:counted_here",
        faults.counted_here,
        "torchtitan #596, torchtune #2420",
        2,
        {"strategy": "ddp", "tp": 2, "clip_norm": 0.5},
    ),
    "two ends of a pipeline": FaultyRun(
        "Embedding and output projection are tied. After a day the checkpoint's two copies are "
        "no longer the same.",
        "course_lib.pipeline.engine:tied_summed",
        faults.tied_summed,
        "Megatron-LM #844 and others",
        2,
        {"strategy": "ddp", "pp": 2},
    ),
    "the first and the last": FaultyRun(
        "Four micro-batches per step on PyTorch's DDP. Every rank's loss falls.",
        "course_lib.train.forward_backward:_one_by_one",
        faults.one_by_one,
        "FunASR #3472",
        2,
        {"strategy": "torch-ddp", "micro_batch": 1},
    ),
    "sharded too soon": FaultyRun(
        "ZeRO-2 was added to a pipeline.",
        "course_lib.train.optimizers:finish_over_axes",
        faults.finish_over_axes,
        "Megatron-LM #844",
        4,
        {"strategy": "zero2", "pp": 2},
    ),
    "pages from one": FaultyRun(
        "Long sequences, split over two ranks. The loss of both falls.",
        "course_lib.context_parallel.model:ShardPositions.__call__",
        faults.positions_of,
        "context parallelism added to loops that make positions themselves",
        2,
        {"strategy": "ddp", "cp": 2},
    ),
    "the experts' share": FaultyRun(
        "A mixture of experts, divided over two ranks. The load is balanced, the loss falls.",
        "course_lib.expert_parallel.model:_scale_grad",
        faults.scale_grad,
        "Megatron-LM #7452 and the groups of several MoE codes",
        2,
        {"strategy": "ddp", "ep": 2, "optimizer": "sgd", "lr": 0.02},
        {"experts": Experts(count=4, active=2, ffn_hidden=64)},
    ),
    "its own ruler": FaultyRun(
        "A run with FSDP and clipping. One process with the same batch ends elsewhere.",
        "course_lib.train.optimizers:clip_grad_norm_across",
        faults.clip,
        "clip_grad_norm_ of PyTorch called on shards",
        2,
        {"strategy": "fsdp", "clip_norm": 0.5},
    ),
    "two masks": FaultyRun(
        "Dropout and tensor parallelism; without dropout all is well.",
        f"{TRAINER}:Trainer._draws",
        faults.draws,
        "Megatron-LM keeps two generators for this reason",
        2,
        {"strategy": "ddp", "tp": 2, "dropout": 0.1},
    ),
    "a resume": FaultyRun(
        "The job was preempted at step 25 and resumed. The loss went on where it had been.",
        "course_lib.train.checkpoint:RunCheckpoints.load",
        faults.load,
        "DCP into a fresh optimizer",
        2,
        {"strategy": "ddp", "save_every": 25},
    ),
    "a fast clock": FaultyRun(
        "Warm-up and cosine. On more ranks the run levels off earlier.",
        "course_lib.train.config:TrainConfig.lr_at",
        faults.lr_at,
        "accelerate #963",
        2,
        {"strategy": "ddp", "warmup": 10, "lr_decay": "cosine", "lr": 5e-5},
    ),
}
