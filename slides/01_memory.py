"""The pictures of the deck 01_memory, drawn by the functions that the notebook calls."""

import torch

from course_lib.core import MODELS, Ledger
from course_lib.core.recipes import RECIPES
from course_lib.core.units import GIB
from course_lib.cost.flops import six_n_d, train_step_flop
from course_lib.display import Voices, compare, memory
from course_lib.memory import activations, count_params, model_states, step_ledger
from course_lib.memory.calculator import read_setup
from course_lib.memory.layer_bytes import TORCH_CPU
from course_lib.memory.pictures import gpu_roofs, mfu_by_convention
from course_lib.memory.saved_tensors import measure_saved
from course_lib.models import GPT, token_loss

LLAMA, SMALL = MODELS["llama-8b"], MODELS["small"]
SEQS = [32, 64, 128, 192, 256]


def states():
    """Draw the states of 8B parameters under each recipe."""
    bars = {}
    for name in RECIPES:
        bars[name] = Ledger()
        bars[name].add(0.0, **model_states(count_params(LLAMA), name))
    return memory(bars, "Model states of llama-8b, by recipe", limit_bytes=80 * GIB)


def measured_bytes(seq, flash):
    """Return the MiB that autograd keeps of a real model."""
    model, tokens = GPT(SMALL, flash=flash), torch.zeros(2, seq, dtype=torch.long)
    given = [*model.parameters(), tokens]
    kept = measure_saved(lambda: token_loss(model(tokens), tokens), given=given)
    return sum(one.num_bytes for one in kept) / 2**20


def formula_bytes(seq, flash):
    """Return the MiB that the formula gives for it."""
    held = activations(SMALL, 2, seq, flash=flash, number_bytes=4, kernels=TORCH_CPU)
    return sum(held.values()) / 2**20


def sequence():
    """Draw kept bytes against the sequence, formula and measurement."""
    curves = {
        name: Voices(
            formula=[formula_bytes(seq, flash) for seq in SEQS],
            measurement=[measured_bytes(seq, flash) for seq in SEQS],
        )
        for name, flash in (("written out", False), ("flash", True))
    }
    title = "Written out, memory grows with the square of the sequence; with flash, linearly"
    return compare(SEQS, curves, title, x_label="tokens in a sequence", y_label="kept (MiB)")


def four_steps():
    """Draw the first four steps of llama-1b, by the formula."""
    ledger = step_ledger(MODELS["llama-1b"], 2, 4096, recipe="bf16")
    return memory(
        ledger, "The first four steps of llama-1b, 2 x 4,096 tokens", limit_bytes=80 * GIB
    )


def ways_to_fit():
    """Draw one model, split and recomputed in several ways."""
    lines = {
        "as it is": "--model llama-8b",
        "full recompute": "--model llama-8b --recompute full",
        "8 ranks, ZeRO-1": "--model llama-8b --dp 8 --zero 1",
        "8 ranks, ZeRO-3": "--model llama-8b --dp 8 --zero 3",
        "8 ranks, tensor and\nsequence parallel": "--model llama-8b --tp 8 --sequence-parallel",
    }
    ledgers = {name: read_setup(line).fullest for name, line in lines.items()}
    return memory(
        ledgers, "Peak of llama-8b per rank, for one sequence of 4,096 tokens", limit_bytes=80 * GIB
    )


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
    return mfu_by_convention()[0]


def gpus():
    """Draw the rooflines of four GPUs."""
    return gpu_roofs()[0]


def pictures():
    """Return all pictures by the names that the deck uses."""
    drawn = (states, sequence, four_steps, ways_to_fit, rule_of_thumb, convention, gpus)
    return {draw.__name__: draw() for draw in drawn}
