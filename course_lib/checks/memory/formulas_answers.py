"""Right and wrong answers to the exercises of 01_memory, with which a test proves the checks.

Each tuple holds (name, answer, words that the check must say).
"""

from dataclasses import replace

from course_lib.core import ModelSpec
from course_lib.core.recipes import Recipe


def count_gpt(spec: ModelSpec) -> int:
    """Return the parameters of a GPT-2: biases everywhere, learned positions, tied or not."""
    h, f = spec.hidden, spec.ffn_hidden
    attention = 4 * h * h + 4 * h
    mlp = 2 * h * f + f + h
    tables = (spec.vocab + spec.max_seq) * h + (0 if spec.tied else spec.vocab * h)
    return spec.num_layers * (attention + mlp + 4 * h) + 2 * h + tables


def _tied_twice(spec: ModelSpec) -> int:
    return count_gpt(replace(spec, tied=False))


def _always_tied(spec: ModelSpec) -> int:
    return count_gpt(replace(spec, tied=True))


def _no_biases(spec: ModelSpec) -> int:
    return count_gpt(spec) - spec.num_layers * (5 * spec.hidden + spec.ffn_hidden)


def _no_last_norm(spec: ModelSpec) -> int:
    return count_gpt(spec) - 2 * spec.hidden


def _no_positions(spec: ModelSpec) -> int:
    return count_gpt(spec) - spec.max_seq * spec.hidden


def _four_hidden(spec: ModelSpec) -> int:
    return count_gpt(replace(spec, ffn_hidden=4 * spec.hidden))


def _one_norm(spec: ModelSpec) -> int:
    return count_gpt(spec) - spec.num_layers * 2 * spec.hidden


def _head_bias(spec: ModelSpec) -> int:
    return count_gpt(spec) + (0 if spec.tied else spec.vocab)


def _rule_of_thumb(spec: ModelSpec) -> int:
    return 12 * spec.num_layers * spec.hidden**2 + spec.vocab * spec.hidden


def _fp32_bytes(spec: ModelSpec) -> int:
    return 4 * count_gpt(spec)


COUNT = (
    ("tied embedding counted twice", _tied_twice, "count it once"),
    ("head always tied", _always_tied, "look at spec.tied"),
    ("biases forgotten", _no_biases, "have biases"),
    ("last norm forgotten", _no_last_norm, "last norm"),
    ("positions forgotten", _no_positions, "table of positions"),
    ("ffn is 4 hidden", _four_hidden, "only usual"),
    ("bytes for numbers", _fp32_bytes, "counted in numbers"),
    ("one norm a layer", _one_norm, "two norms"),
    ("a bias of the head", _head_bias, "The head has no bias"),
    ("the rule of thumb", _rule_of_thumb, "rule of thumb"),
)


def states_bytes(num_params: int, recipe: Recipe) -> int:
    """Return the bytes of parameters, gradients and optimizer state."""
    weights_and_grads = recipe.weight_bytes + recipe.grad_bytes + recipe.accumulator_bytes
    adam = recipe.master_bytes + recipe.num_moments * recipe.moment_bytes
    return num_params * (weights_and_grads + adam)


def _one_moment(num_params: int, recipe: Recipe) -> int:
    return states_bytes(num_params, replace(recipe, num_moments=1))


def _no_accumulator(num_params: int, recipe: Recipe) -> int:
    return states_bytes(num_params, replace(recipe, accumulator_bytes=0))


def _no_master(num_params: int, recipe: Recipe) -> int:
    return states_bytes(num_params, replace(recipe, master_bytes=0))


def _numbers(num_params: int, recipe: Recipe) -> int:
    return 4 * num_params


def _no_grads(num_params: int, recipe: Recipe) -> int:
    return states_bytes(num_params, replace(recipe, grad_bytes=0))


def _two_moments(num_params: int, recipe: Recipe) -> int:
    return states_bytes(num_params, replace(recipe, num_moments=2))


STATES = (
    ("second moment forgotten", _one_moment, "second moment"),
    ("gradient accumulator forgotten", _no_accumulator, "gradient accumulator"),
    ("master copy forgotten", _no_master, "master copy"),
    ("numbers for bytes", _numbers, "not bytes"),
    ("gradients forgotten", _no_grads, "gradients are missing"),
    ("always two moments", _two_moments, "look at num_moments"),
)


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


def _divides_early(batch: int, seq: int, hidden: int, num_heads: int) -> int:
    return seq * batch * hidden * (34 + 5 * num_heads * seq // hidden)


LAYER = (
    ("sequence term linear", _linear_scores, "square of the sequence"),
    ("batch forgotten", _no_batch, "Every sequence"),
    ("heads forgotten", _no_heads, "Every head"),
    ("masks of two bytes", _wide_masks, "one byte a number"),
    ("numbers for bytes", _layer_numbers, "not bytes"),
    ("a float", _layer_float, "bytes are whole"),
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


MFU = (
    ("the sparse peak", _sparse, "with sparsity"),
    ("ranks forgotten", _one_rank, "world_size of them"),
    ("forward only", _forward_only, "not 2"),
    ("recompute counted", _with_recompute, "not 8"),
    ("a whole number", _whole, "has decimals"),
)
