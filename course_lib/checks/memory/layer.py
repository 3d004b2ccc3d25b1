"""Exercise 4 of 01_memory: derive the 34, the bytes that one layer saves for backward."""

from dataclasses import replace
from random import Random
from typing import Any

from course_lib.checks.cases import Case, Cases, whole
from course_lib.checks.edits import Edit
from course_lib.checks.exercise import Cause, Exercise, failed
from course_lib.core import MODELS, ModelSpec

PARTS = ("norms", "attention", "scores", "mlp", "masks")

# no two of its numbers are equal, and ffn_hidden is not 4 * hidden
ODD = ModelSpec(hidden=12, num_layers=2, num_heads=3, ffn_hidden=50, vocab=17, max_seq=64)

KEYS = Cause(f"Return a dict with these keys: {', '.join(PARTS)}.")


def _cases() -> list[Case]:
    shared = replace(ODD, num_heads=6, num_kv_heads=2)
    odd_heads = replace(ODD, hidden=15, num_heads=3, num_kv_heads=1)
    return _described(
        (replace(ODD, num_heads=1), 1, 1, 2),
        (replace(ODD, num_heads=1), 1, 5, 2),
        (ODD, 1, 7, 2),
        (ODD, 2, 7, 2),
        (ODD, 2, 7, 4),
        (ODD, 3, 8, 1),
        (shared, 2, 10, 2),
        (shared, 5, 11, 4),
        (odd_heads, 2, 9, 2),
        (MODELS["gpt2"], 8, 1024, 2),
    )


def _described(*several: tuple[ModelSpec, int, int, int]) -> list[Case]:
    return [
        (
            f"batch {batch}, seq {seq}, hidden {spec.hidden}, ffn_hidden {spec.ffn_hidden}, "
            f"{spec.num_heads} heads, {spec.kv_heads} of keys, {number_bytes} bytes a number",
            (spec, batch, seq, number_bytes),
        )
        for spec, batch, seq, number_bytes in several
    ]


def _drawn(random: Random) -> list[Case]:
    def one() -> tuple[ModelSpec, int, int, int]:
        heads, head_dim = random.randint(2, 9), random.randint(3, 20)
        spec = replace(
            ODD, hidden=heads * head_dim, num_heads=heads, ffn_hidden=random.randint(30, 300)
        )
        return spec, random.randint(2, 6), random.randint(5, 60), random.choice((2, 4, 8))

    return _described(*(one() for _ in range(3)))


def _parts(result: Any, *_arguments: Any) -> dict[str, Any]:
    if not isinstance(result, dict) or set(result) != set(PARTS):
        got = ", ".join(map(str, result)) if isinstance(result, dict) else type(result).__name__
        raise failed(f"got {got}", KEYS)
    return {part: whole(result[part]) for part in PARTS}


MASK = Cause("A dropout mask takes one byte a number, whatever number_bytes is.")
NO_MASK = Cause("Dropout on the attention weights saves its mask: one byte for each score.")
EACH_STORAGE = Cause("q, k and v are three products of one input: autograd keeps its storage once.")
AFTER_DROPOUT = Cause("The weights after dropout are saved, too: the product with v needs them.")
TWO_MASKS = Cause("There are two masks: after attention, and after the MLP.")
ALL_SEQUENCES = Cause("Every sequence of the batch has its own numbers.")
PAIRS = Cause("A score belongs to a pair of tokens: seq * seq of them.")
ALL_HEADS = Cause("Each head has scores of its own.")
BOTH = Cause("Keys and values are both inputs of a product: each is saved.")
KV_HIDDEN = Cause("Keys and values have kv_hidden numbers a token: less where heads share them.")
MLP_INPUT = Cause("The MLP's first product saves its input, too: the output of the norm.")
GELU = Cause("GELU saves its input, and the product after it saves GELU's output.")
TWO_NORMS = Cause("A layer has two norms.")
NOT_BYTES = Cause("Those are numbers, not bytes: each takes number_bytes.")
SCORES = "batch * spec.num_heads * seq * seq * (2 * number_bytes + 1)"
BYTES = "2 * number_bytes + 1)"

LAYER = Exercise(
    key="memory-4",
    title="derive the 34",
    library=("course_lib.memory.layer_bytes:Pass",),
    check=Cases(
        cases=_cases,
        drawn=_drawn,
        show=_parts,
        rtol=0.0,
        unit=" bytes",
        look="Go through the operations of that part, and write down the shape of what each saves.",
        success="In bf16, with an MLP of 4h: 4 + 10 + 18 + 2 = 34 sbh, and 5 as²b of scores.",
    ),
    wrong=(
        Edit("tokens = batch * seq", "tokens = seq", ALL_SEQUENCES),
        Edit(SCORES, SCORES.replace("seq * seq", "seq"), PAIRS),
        Edit(SCORES, SCORES.replace("spec.num_heads * ", ""), ALL_HEADS),
        Edit(BYTES, "2 * number_bytes)", NO_MASK),
        Edit(BYTES, "number_bytes + 1)", AFTER_DROPOUT),
        Edit("2 * tokens * spec.hidden,", "2 * tokens * spec.hidden * number_bytes,", MASK),
        Edit('"masks": 2 *', '"masks":', TWO_MASKS),
        Edit("3 * hidden + 2 * keys", "5 * hidden + 2 * keys", EACH_STORAGE),
        Edit("3 * hidden + 2 * keys", "3 * hidden + keys", BOTH),
        Edit("3 * hidden + 2 * keys", "5 * hidden", KV_HIDDEN),
        Edit("hidden + 2 * wide", "2 * wide", MLP_INPUT),
        Edit("hidden + 2 * wide", "hidden + wide", GELU),
        Edit('"norms": 2 * hidden', '"norms": hidden', TWO_NORMS),
        Edit("tokens = batch * seq", "number_bytes = 1\ntokens = batch * seq", NOT_BYTES),
    ),
)
