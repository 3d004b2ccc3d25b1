"""The pictures of the deck 01_memory, drawn by the functions that the notebook calls."""

import torch

from course_lib.core import MODELS
from course_lib.core.units import GIB
from course_lib.cost.flops import six_n_d, train_step_flop
from course_lib.display import Voices, compare, memory
from course_lib.memory import activations, count_params, step_ledger
from course_lib.memory import pictures as drawn
from course_lib.memory.layer_bytes import TORCH_CPU
from course_lib.memory.saved_tensors import measure_saved
from course_lib.models import GPT, token_loss

LLAMA, SMALL = MODELS["llama-8b"], MODELS["small"]
SEQS = [32, 64, 128, 192, 256]


def states():
    """Draw the states of 8B parameters under each recipe."""
    return drawn.states_by_recipe(count_params(LLAMA))[0]


def measured_bytes(seq, flash):
    """Return the bytes that autograd saves of a real model."""
    model, tokens = GPT(SMALL, flash=flash), torch.zeros(2, seq, dtype=torch.long)
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
            "measurement": [measured_bytes(seq, flash) for seq in SEQS],
        }
        for name, flash in (("written out", False), ("flash", True))
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


def rule_of_thumb():
    """Draw 6ND beside the counts of every product, with all scores and with half of them."""
    seqs = [2**k for k in range(10, 18)]
    counts = {
        name: [train_step_flop(LLAMA, 1, seq, causal=causal) / seq / 1e9 for seq in seqs]
        for name, causal in (("all scores", False), ("half of the scores", True))
    }
    curves = {name: Voices(formula=count) for name, count in counts.items()} | {
        "6ND": Voices(formula=[six_n_d(count_params(LLAMA), seq) / seq / 1e9 for seq in seqs]),
    }
    title = "llama-8b: FLOP per token"
    labels = {"x_label": "tokens in a sequence", "y_label": "GFLOP per token"}
    return compare(seqs, curves, title, log=True, **labels)


def convention():
    """Draw the MFU of published runs by three counts."""
    return drawn.mfu_by_convention()[0]


def gpus():
    """Draw the rooflines of four GPUs."""
    return drawn.gpu_roofs()[0]


def pictures():
    """Return all pictures by the names that the deck uses."""
    drawn = (states, sequence, four_steps, ways_to_fit, rule_of_thumb, convention, gpus)
    return {draw.__name__: draw() for draw in drawn}
