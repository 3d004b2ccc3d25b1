"""The pictures of the deck 01b_speed, drawn by the functions that the notebook calls."""

from course_lib.core import MODELS
from course_lib.cost.flops import six_n_d, train_step_flop
from course_lib.display import Voices, compare
from course_lib.memory import count_params
from course_lib.speed import pictures as drawn

LLAMA = MODELS["llama-8b"]


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


def real_runs():
    """Draw the MFU of published runs."""
    return drawn.mfu_of_real_runs()[0]


def convention():
    """Draw the MFU of published runs by three counts."""
    return drawn.mfu_by_convention()[0]


def operations():
    """Draw common operations on the roof of an H100."""
    return drawn.operations_on_roof()[0]


def experts():
    """Draw the bytes of dense models and of those with experts against their FLOP."""
    return drawn.bytes_against_flop()[0]


def pictures():
    """Return all pictures by the names that the deck uses."""
    drawings = rule_of_thumb, real_runs, convention, operations, experts
    return {draw.__name__: draw() for draw in drawings}
