"""Memory on the GPU: the formulas of lesson 01 compared with PyTorch's allocator."""

from collections.abc import Iterator
from dataclasses import replace

import torch

from course_lib.core.presets import find_model
from course_lib.core.specs import ModelSpec
from course_lib.core.units import GIB
from course_lib.cost.params import count_params
from course_lib.memory.formulas import model_states, step_ledger
from course_lib.memory.layer_bytes import TORCH_CPU
from course_lib.models import GPT, token_loss
from tests.gpu.findings import Finding

STEPS = 2
ROOM = 1.15  # temporaries, rounding to 512 bytes, and what cuBLAS keeps


def prove_memory(rehearsal: bool) -> Iterator[Finding]:
    """Train larger and larger models in fp32 with AdamW, as long as the formula says they fit."""
    free, total = torch.cuda.mem_get_info()
    yield Finding(what=f"free memory of {total / GIB:.4g} GiB", measured=free / GIB, unit="GiB")
    base, num_sizes = find_model("gpt2"), 0
    for num_layers in (2, 6, 12, 24, 48, 96):
        spec = replace(base, num_layers=num_layers, name=f"gpt2, {num_layers} layers")
        ledger = step_ledger(spec, 4, 512, recipe="fp32", kernels=TORCH_CPU, num_steps=STEPS)
        if ledger.peak_bytes() * ROOM > free:
            break
        num_sizes += 1
        yield _peak(spec, ledger.peak_bytes())
        states = sum(model_states(count_params(spec), "fp32").values())
        held = torch.cuda.memory_allocated()
        yield Finding(what=f"{spec.name}: still allocated afterwards, divided by its model states",
                      measured=held / states, high=0.01)  # fmt: skip
    yield Finding(what="sizes measured", measured=num_sizes, low=1)


def _peak(spec: ModelSpec, predicted_bytes: int) -> Finding:
    """Measure the peak of two steps of a model."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model = GPT(spec).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    tokens, targets = torch.randint(0, spec.vocab, (2, 4, 512), device="cuda")
    for _ in range(STEPS):
        token_loss(model(tokens), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    peak = torch.cuda.max_memory_allocated() - before
    return Finding(
        what=f"peak of {spec.name}",
        measured=peak / GIB,
        predicted=predicted_bytes / GIB,
        unit="GiB",
        low=0.9 * predicted_bytes / GIB,
        high=ROOM * predicted_bytes / GIB,
    )
