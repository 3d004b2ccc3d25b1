"""Memory estimates of other tools for the same training run, to compare with this course's.

Accelerate and DeepSpeed need not be installed: for a missing tool one line says so. PyTorch's
MemTracker follows every tensor of real steps, here on fake tensors. Notebook 01_memory.
"""

import logging
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch.distributed._tools.mem_tracker import MemTracker

from course_lib.core.errors import CourseError
from course_lib.core.specs import ModelSpec
from course_lib.core.units import format_bytes
from course_lib.cost.params import count_params
from course_lib.memory.formulas import model_states, step_ledger
from course_lib.memory.layer_bytes import TORCH_CPU
from course_lib.memory.saved_tensors import fake_tensors
from course_lib.models import GPT, token_loss


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Estimate of one tool for one rank; `counts` and `why` explain in words what it includes.

    states_bytes        parameters, gradients, optimizer state; None if the tool has no such number
    activations_bytes   None if the tool leaves them out
    """

    who: str
    total_bytes: int
    states_bytes: int | None = None
    activations_bytes: int | None = None
    counts: str = ""
    why: str = ""


def ours(spec: ModelSpec, batch: int, seq: int, recipe: str = "fp32") -> Estimate:
    """Return this course's peak of the second step, exact to the byte for PyTorch on a CPU."""
    ledger = step_ledger(spec, batch, seq, recipe=recipe, kernels=TORCH_CPU, num_steps=2)
    at = ledger.totals().index(ledger.peak_bytes())
    activations = ledger.bytes_by_kind["activations"][at]
    return Estimate(
        who=f"this course, {recipe}",
        total_bytes=ledger.peak_bytes(),
        states_bytes=ledger.peak_bytes() - activations,
        activations_bytes=activations,
        counts="what is held at the peak of the second step",
        why="states, activations, and the gradients of that time; temporaries are left out",
    )


def sum_of_states(spec: ModelSpec, recipe: str = "fp32") -> Estimate:
    """Return the sum of the model states: the rule of 16 bytes per parameter."""
    total_bytes = sum(model_states(count_params(spec), recipe).values())
    return Estimate(
        who=f"states added up, {recipe}",
        total_bytes=total_bytes,
        states_bytes=total_bytes,
        counts="model states",
        why="no activations",
    )


def pytorch_tracker(spec: ModelSpec, batch: int, seq: int) -> Estimate:
    """Return the peak that PyTorch's MemTracker sees in the second of two fp32 steps with AdamW.

    Source:  torch.distributed._tools.mem_tracker, an internal module of PyTorch
    """
    with fake_tensors():
        model = GPT(spec)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        tokens, targets = torch.randint(0, spec.vocab, (2, batch, seq))
        tracker = MemTracker()
        tracker.track_external(model, optimizer, tokens, targets)
        with tracker:
            for _ in range(2):
                tracker.reset_mod_stats()
                token_loss(model(tokens), targets).backward()
                optimizer.step()
                optimizer.zero_grad()
            peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
    kinds = {getattr(kind, "value", kind): size for kind, size in peak.items()}
    states = kinds["Parameter"] + kinds["Gradient"] + kinds["Optstate"]
    return Estimate(
        who="PyTorch's tracker, fp32",
        total_bytes=kinds["Total"],
        states_bytes=states,
        activations_bytes=kinds["Activation"],
        counts="every tensor that is alive",
        why=f"{kinds['Temp']:,} bytes of temporaries (gradients of the logits); and the batch",
    )


def accelerate_estimate(spec: ModelSpec, dtype: str = "float32") -> Estimate:
    """Return what `accelerate estimate-memory` prints under "Training using Adam".

    Raises:  CourseError if Accelerate is not installed
    Source:  accelerate.commands.estimate, estimate_training_usage and estimate_command
    """
    try:
        from accelerate.commands.estimate import estimate_training_usage
        from accelerate.utils import calculate_maximum_sizes
    except ImportError as problem:
        raise _missing("accelerate") from problem
    with torch.device("meta"):
        model_bytes, _ = calculate_maximum_sizes(GPT(spec))
    return Estimate(
        who=f"Accelerate, {dtype}",
        total_bytes=max(estimate_training_usage(model_bytes, dtype).values()),
        counts="the largest of model, gradients, optimizer, step",
        why="a maximum, not a sum: 16 bytes a parameter in float32, 8 in bfloat16; no activations",
    )


def deepspeed_estimate(spec: ModelSpec, zero: int = 2, ranks: int = 1) -> Estimate:
    """Return the estimate of DeepSpeed for the model states of one GPU, without offload.

    Raises:  CourseError if DeepSpeed is not installed
    Source:  deepspeed.runtime.zero, estimate_zero2_model_states_mem_needs and stage3's
    """
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    try:
        from deepspeed.runtime.zero import stage3, stage_1_and_2
    except ImportError as problem:
        raise _missing("deepspeed") from problem
    num_params, how = count_params(spec), {"num_gpus_per_node": ranks, "cpu_offload": False}
    if zero == 3:
        largest = max(spec.padded_vocab, spec.ffn_hidden) * spec.hidden
        told = stage3.estimate_zero3_model_states_mem_needs(num_params, largest, **how)
    else:
        told = stage_1_and_2.estimate_zero2_model_states_mem_needs(num_params, **how)
    return Estimate(
        who=f"DeepSpeed, ZeRO-{zero} on {ranks}",
        total_bytes=told[1],
        states_bytes=told[1],
        counts="bf16 and an fp32 copy of the gradients",
        why="2 + 18 bytes a parameter: 4 more than bf16's 16, for fp32 gradients; no activations",
    )


def estimates_text(found: Iterable[Estimate]) -> str:
    """Return the estimates as a table in text, with what each tool counts."""
    lines = [f"{'who':<26}{'total':>10}{'states':>10}{'activ.':>10}  counts"]
    for one in found:
        sizes = (one.total_bytes, one.states_bytes, one.activations_bytes)
        cells = "".join(f"{'-' if size is None else format_bytes(size):>10}" for size in sizes)
        lines += [f"{one.who:<26}{cells}  {one.counts}", f"    {one.why}"]
    return "\n".join(lines)


def all_estimates(spec: ModelSpec, batch: int, seq: int) -> tuple[list[Estimate], list[str]]:
    """Return all tools' estimates of one model, and a sentence for each tool not installed."""
    tools: list[Callable[[], Estimate]] = [
        lambda: ours(spec, batch, seq),
        lambda: pytorch_tracker(spec, batch, seq),
        lambda: sum_of_states(spec),
        lambda: accelerate_estimate(spec),
        lambda: accelerate_estimate(spec, "bfloat16"),
        lambda: sum_of_states(spec, "bf16"),
        lambda: deepspeed_estimate(spec),
    ]
    found, missing = [], []
    for tool in tools:
        try:
            found.append(tool())
        except CourseError as problem:
            missing.append(str(problem))
    return found, list(dict.fromkeys(missing))


def _missing(name: str) -> CourseError:
    return CourseError(f"{name} is not installed here, so its estimate is left out.")


def tracker_gap(spec: ModelSpec, batch: int, seq: int) -> dict[str, int]:
    """Return the bytes that PyTorch's tracker counts and the ledger leaves out, by name.

    They are the loss, the batch (tokens and targets), and the gradients of log-softmax and logits;
    together they explain every byte of the difference.
    """
    return {
        "the loss": 4,
        "the batch": 2 * batch * seq * 8,
        "gradients of the logits": 2 * batch * seq * spec.vocab * 4,
    }
