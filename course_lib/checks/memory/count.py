"""Exercise 1 of 01_memory: the parameters of a GPT."""

from collections.abc import Iterable
from dataclasses import replace
from random import Random

from course_lib.checks.cases import TOO_NARROW, Case, Cases, whole
from course_lib.checks.edits import Edit
from course_lib.checks.exercise import Cause, Exercise
from course_lib.core import MODELS, ModelSpec

# no two of its numbers are equal, and ffn_hidden is not 4 * hidden
WIDE = ModelSpec(hidden=12, num_layers=3, num_heads=3, ffn_hidden=50, vocab=17, max_seq=5)


def _cases() -> list[Case]:
    narrow = replace(WIDE, hidden=6, num_layers=2, ffn_hidden=10)
    specs = (
        WIDE,
        replace(narrow, num_layers=1),
        replace(WIDE, hidden=9, ffn_hidden=5),
        narrow,
        replace(narrow, tied=False),
        replace(narrow, num_heads=2, vocab=19, max_seq=23, tied=False),
        MODELS["gpt2"],
        MODELS["megatron-175b"],
    )
    return _described(specs)


def _described(specs: Iterable[ModelSpec]) -> list[Case]:
    return [
        (f"hidden {s.hidden}, {s.num_layers} layers, {'tied' if s.tied else 'untied'}", (s,))
        for s in specs
    ]


def _drawn(random: Random) -> list[Case]:
    def one() -> ModelSpec:
        hidden, ffn_hidden, layers = (random.randint(3, 90) for _ in range(3))
        return replace(WIDE, hidden=hidden, ffn_hidden=ffn_hidden, num_layers=layers, num_heads=1)

    return _described(one() for _ in range(3))


TIED = Cause("The tied head is the embedding's own matrix: count it once.")
UNTIED = Cause("An untied head has a matrix of its own: look at spec.tied.")
BIASES = Cause("A linear layer has a bias for each number that comes out: 4h, f and h in a layer.")
ATTENTION = Cause("Attention has four matrices: q, k, v and the one after.")
MLP = Cause("The MLP has two matrices: one to ffn_hidden, one back to hidden.")
LAST_NORM = Cause("The last norm, after all layers, is missing.")
NORMS = Cause("The norms are missing: a weight and a bias each.")
TWO_NORMS = Cause("A layer has two norms: one before attention, one before the MLP.")
POSITIONS = Cause("The table of positions is missing: max_seq * hidden.")
RULE_OF_THUMB = Cause("That is the rule of thumb: here biases, norms and positions count, too.")
FOUR_TIMES = Cause("ffn_hidden is a size of its own: 4 * hidden is only usual.")
NOT_BYTES = Cause("Those are bytes in fp32: parameters are counted in numbers.")
LAYER, HEAD = "(attention + mlp + 4 * h)", "(0 if spec.tied else spec.vocab * h)"
TOTAL = f"spec.num_layers * {LAYER} + 2 * h + tables"
IN_ATTENTION, IN_MLP = "4 * h * h + 4 * h", "2 * h * f + f + h"

COUNT = Exercise(
    key="memory-1",
    title="count parameters",
    library=(
        "course_lib.cost.params:count_params",
        "course_lib.cost.params:params_on_rank",
    ),
    check=Cases(
        cases=_cases,
        drawn=_drawn,
        show=whole,
        rtol=0.0,
        unit=" parameters",
        look="Print your parts beside those of param_parts(spec).",
        success="Tied and untied, every matrix, bias and norm once.",
    ),
    wrong=(
        Edit(HEAD, "spec.vocab * h", TIED),
        Edit(HEAD, "0", UNTIED),
        Edit(IN_ATTENTION, "4 * h * h", BIASES, also=((IN_MLP, "2 * h * f"),)),
        Edit(IN_ATTENTION, "4 * h * h", BIASES),
        Edit(IN_ATTENTION, "3 * h * h + 3 * h", ATTENTION),
        Edit(IN_MLP, "h * f + f", MLP),
        Edit(" + 2 * h + tables", " + tables", LAST_NORM),
        Edit(TOTAL, "spec.num_layers * (attention + mlp) + tables", NORMS),
        Edit(LAYER, "(attention + mlp + 2 * h)", TWO_NORMS),
        Edit("(spec.vocab + spec.max_seq)", "spec.vocab", POSITIONS),
        Edit(TOTAL, "12 * spec.num_layers * h * h + spec.vocab * h", RULE_OF_THUMB),
        Edit("spec.ffn_hidden", "4 * spec.hidden", FOUR_TIMES),
        Edit(TOTAL, f"4 * ({TOTAL})", NOT_BYTES),
        Edit(TOTAL, f"int(torch.tensor([{TOTAL}], dtype=torch.float32).sum())", TOO_NARROW),
    ),
)
