"""Right and wrong answers to exercises 4 to 6 of 01_memory, with which a test proves the checks.

Each tuple holds (name, answer, words that the check must say).
"""

import math


def layer_bytes(batch: int, seq: int, hidden: int, num_heads: int) -> int:
    """Return the bytes one layer keeps in bf16: unfused attention, dropout, MLP of 4 * hidden."""
    sbh, square = seq * batch * hidden, num_heads * seq * seq * batch
    return 34 * sbh + 5 * square


def _linear_scores(batch: int, seq: int, hidden: int, num_heads: int) -> int:
    return 34 * seq * batch * hidden + 5 * num_heads * seq * batch


def _no_batch(batch: int, seq: int, hidden: int, num_heads: int) -> int:
    return 34 * seq * batch * hidden + 5 * num_heads * seq * seq


def _no_heads(batch: int, seq: int, hidden: int, num_heads: int) -> int:
    return 34 * seq * batch * hidden + 5 * seq * seq * batch


def _wide_masks(batch: int, seq: int, hidden: int, num_heads: int) -> int:
    return 36 * seq * batch * hidden + 6 * num_heads * seq * seq * batch


def _layer_numbers(batch: int, seq: int, hidden: int, num_heads: int) -> int:
    return layer_bytes(batch, seq, hidden, num_heads) // 2


def _layer_float(batch: int, seq: int, hidden: int, num_heads: int) -> float:
    return float(layer_bytes(batch, seq, hidden, num_heads))


def _hidden_of_6(batch: int, seq: int, hidden: int, num_heads: int) -> int:
    return layer_bytes(batch, seq, 6, num_heads)


def _divides_early(batch: int, seq: int, hidden: int, num_heads: int) -> int:
    return seq * batch * hidden * (34 + 5 * num_heads * seq // hidden)


LAYER = (
    ("sequence term linear", _linear_scores, "square of the sequence"),
    ("batch forgotten", _no_batch, "Every sequence"),
    ("heads forgotten", _no_heads, "Every head"),
    ("masks of two bytes", _wide_masks, "one byte a number"),
    ("numbers for bytes", _layer_numbers, "not bytes"),
    ("a float", _layer_float, "bytes are whole"),
    ("hidden is 6", _hidden_of_6, "is not in it"),
    ("divided early", _divides_early, "multiply first"),
)


def largest_batch(states: int, each: int, card_gib: int) -> int:
    """Return the sequences that fit beside the states on a GPU of card_gib GiB."""
    return max(0, (card_gib * 2**30 - states) // each)


def _decimal(states: int, each: int, card_gib: int) -> int:
    return max(0, (card_gib * 10**9 - states) // each)


def _rounded_up(states: int, each: int, card_gib: int) -> int:
    return max(0, -((states - card_gib * 2**30) // each))


def _no_states(states: int, each: int, card_gib: int) -> int:
    return card_gib * 2**30 // each


def _negative(states: int, each: int, card_gib: int) -> int:
    return (card_gib * 2**30 - states) // each


def _strict(states: int, each: int, card_gib: int) -> int:
    return largest_batch(states, each, card_gib) if states + each < card_gib * 2**30 else 0


FIT = (
    ("GB for GiB", _decimal, "2**30"),
    ("rounded up", _rounded_up, "Rounded up"),
    ("states forgotten", _no_states, "their place first"),
    ("below zero", _negative, "No batch is negative"),
    ("exactly full is too full", _strict, "exactly full"),
)


def mfu_of(num_params: int, tokens_per_s: float, sheet_flop_per_s: float, world_size: int) -> float:
    """Return the share of the dense peak that training uses; the sheet's peak is with sparsity."""
    return 6 * num_params * tokens_per_s / (world_size * sheet_flop_per_s / 2)


def _sparse(num_params: int, tokens_per_s: float, sheet: float, world_size: int) -> float:
    return mfu_of(num_params, tokens_per_s, 2 * sheet, world_size)


def _one_rank(num_params: int, tokens_per_s: float, sheet: float, world_size: int) -> float:
    return mfu_of(num_params, tokens_per_s, sheet, 1)


def _forward_only(num_params: int, tokens_per_s: float, sheet: float, world_size: int) -> float:
    return mfu_of(num_params, tokens_per_s, sheet, world_size) / 3


def _with_recompute(num_params: int, tokens_per_s: float, sheet: float, world_size: int) -> float:
    return mfu_of(num_params, tokens_per_s, sheet, world_size) * 4 / 3


def _whole(num_params: int, tokens_per_s: float, sheet: float, world_size: int) -> int:
    return int(mfu_of(num_params, tokens_per_s, sheet, world_size))


def _no_number(num_params: int, tokens_per_s: float, sheet: float, world_size: int) -> float:
    return math.nan


MFU = (
    ("the sparse peak", _sparse, "with sparsity"),
    ("ranks forgotten", _one_rank, "world_size of them"),
    ("forward only", _forward_only, "not 2"),
    ("recompute counted", _with_recompute, "not 8"),
    ("a whole number", _whole, "has decimals"),
    ("not a number", _no_number, "got nan"),
)
