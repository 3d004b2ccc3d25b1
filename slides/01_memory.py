"""The pictures of the deck 01_memory, drawn by the functions that the notebook calls."""

from dataclasses import replace

import torch

from course_lib.core import MODELS
from course_lib.core.units import GIB
from course_lib.display import memory
from course_lib.memory import activations, count_params, step_ledger
from course_lib.memory import pictures as drawn
from course_lib.memory.layer_bytes import TORCH_CPU
from course_lib.memory.saved_tensors import measure_saved
from course_lib.models import GPT, token_loss

LLAMA, SMALL = MODELS["llama-8b"], MODELS["small"]
SEQS = [128, 256, 512, 1024, 1536, 2048, 3072, 4096]


def states():
    """Draw the states of 8B parameters under each recipe."""
    return drawn.states_by_recipe(count_params(LLAMA))[0]


def layer():
    """Draw a layer of GPT-2 with the tensors that its operations save."""
    return drawn.layer_tensors(MODELS["gpt2"], batch=8, seq=1024)[0]


def measured_bytes(seq, flash):
    """Return the bytes that autograd saves of a real model."""
    model = GPT(replace(SMALL, max_seq=seq), flash=flash)
    tokens = torch.zeros(2, seq, dtype=torch.long)
    given = [*model.parameters(), tokens]
    kept = measure_saved(lambda: token_loss(model(tokens), tokens), given=given)
    return sum(one.num_bytes for one in kept)


def formula_bytes(seq, flash):
    """Return the bytes that the formula gives for it."""
    how = {"flash": flash, "number_bytes": 4, "kernels": TORCH_CPU}
    return sum(activations(SMALL, 2, seq, **how).values())


def sequence():
    """Draw saved bytes against the sequence, formula and measurement."""
    saved = {
        name: {
            "formula": [formula_bytes(seq, flash) for seq in SEQS],
            "measurement": [measured_bytes(seq, flash) for seq in SEQS[:3]],
        }
        for name, flash in (("unfused", False), ("flash", True))
    }
    return drawn.saved_by_sequence(SEQS, saved)[0]


def four_steps():
    """Draw the first four steps of llama-1b, by the formula."""
    ledger = step_ledger(MODELS["llama-1b"], 2, 4096, recipe="bf16")
    return memory(
        ledger, "The first four steps of llama-1b, 2 x 4,096 tokens", limit_bytes=80 * GIB
    )


def ways_to_fit():
    """Draw one model, split and recomputed in several ways."""
    return drawn.ways_to_fit()[0]


def pictures():
    """Return all pictures by the names that the deck uses."""
    drawn = (states, layer, sequence, four_steps, ways_to_fit)
    return {draw.__name__: draw() for draw in drawn}
