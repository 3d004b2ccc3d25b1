"""Exercise 6 of 01_memory: the FLOP of a step, under either convention for a causal mask."""

from collections.abc import Iterable
from dataclasses import replace
from random import Random

from course_lib.checks.cases import A_FLOAT, TOO_NARROW, Case, Cases, whole
from course_lib.checks.edits import Edit
from course_lib.checks.exercise import Cause, Exercise
from course_lib.core import MODELS, ModelSpec

# no two of its numbers are equal, and ffn_hidden is not 4 * hidden
ODD = ModelSpec(hidden=12, num_layers=5, num_heads=6, ffn_hidden=50, vocab=17, max_seq=64)
Sizes = tuple[ModelSpec, int, int, bool]


def _cases() -> list[Case]:
    shared, gated = replace(ODD, num_kv_heads=2), replace(ODD, gated=True, tied=False)
    plain = ((ODD, 1, 1), (ODD, 1, 7), (ODD, 3, 7), (replace(shared, num_layers=1), 2, 9))
    large = replace(MODELS["llama-8b"], vocab=128_255)  # float32 does not hold its last digits
    odd = replace(ODD, hidden=9, num_heads=3)
    others = ((odd, 2, 5), (gated, 2, 8), (replace(gated, num_kv_heads=3), 3, 10), (large, 3, 8191))
    pairs = [(*sizes, causal) for sizes in (*plain, *others) for causal in (False, True)]
    return _described(pairs)


def _described(several: Iterable[Sizes]) -> list[Case]:
    return [
        (
            f"batch {batch}, seq {seq}, hidden {spec.hidden}, {spec.num_layers} layers, "
            f"{spec.num_heads} heads, {spec.kv_heads} of keys, an MLP of "
            f"{'three' if spec.gated else 'two'} matrices, {'half' if causal else 'all'} scores",
            (spec, batch, seq, causal),
        )
        for spec, batch, seq, causal in several
    ]


def _drawn(random: Random) -> list[Case]:
    def one(causal: bool) -> Sizes:
        heads = random.randint(2, 9)
        spec = replace(
            ODD,
            hidden=heads * random.randint(3, 20),
            num_heads=heads,
            num_layers=random.randint(2, 20),
            ffn_hidden=random.randint(30, 300),
            vocab=random.randint(20, 3000),
            gated=random.random() < 0.5,
        )
        return spec, random.randint(2, 6), random.randint(5, 60), causal

    return _described(one(causal) for causal in (False, True, False))


HALF = "// (2 if causal else 1)"
TOTAL = "6 * tokens * (spec.num_layers * (attention + mlp + scores) + h * spec.vocab)"
BACKWARD = Cause(
    "Each product of forward has two in backward, one for the gradient of each factor: three times "
    "forward in all."
)

FLOP = Exercise(
    key="memory-6",
    title="the FLOP of a step",
    library=(
        "course_lib.cost.flops:forward_flop",
        "course_lib.cost.flops:train_step_flop",
    ),
    check=Cases(
        cases=_cases,
        drawn=_drawn,
        show=whole,
        rtol=0.0,
        unit=" FLOP",
        look="Print your parts beside forward_flop(spec, batch, seq, causal=causal).",
        success="Every product, forward and backward, with all scores and with half of them.",
    ),
    wrong=(
        Edit("6 * tokens", "3 * tokens",
             Cause("A multiply-add is two FLOP: a multiplication and an addition.")),
        Edit("6 * tokens", "2 * tokens", BACKWARD),
        Edit("6 * tokens", "4 * tokens", BACKWARD),
        Edit("6 * tokens", "8 * tokens",
             Cause("That is with full recomputation: here forward runs once.")),
        Edit(HALF, "",
             Cause("With causal=True, count half of the scores: those that no mask hides.")),
        Edit(HALF, "// 2",
             Cause("With causal=False, count all scores, also those that the mask hides.")),
        Edit("return 6", "return (1 if causal else 2) * 3",
             Cause("A causal mask halves the scores alone: no other product changes."),
             also=((HALF, ""),)),
        Edit("2 * seq * h //", "seq * h //",
             Cause("Attention has two products of scores: queries times keys, and weights times "
                   "values.")),
        Edit("2 * seq * h //", "2 * seq * h * spec.num_heads //",
             Cause("All heads together have h numbers a token: do not count heads again.")),
        Edit("2 * seq * h //", "2 * seq * (h // 2 * 2) //",
             Cause("Sizes may be odd: halve the sum of the scores, not one of their sizes.")),
        Edit("2 * seq * h //", "2 * h //",
             Cause("A token meets all seq tokens of its sequence: the scores grow with seq.")),
        Edit("2 * seq * h //", "2 * tokens * h //",
             Cause("A token meets those of its own sequence, not those of the whole batch.")),
        Edit("2 * seq * h //", "2 * seq * spec.kv_hidden //",
             Cause("Heads that share a key compute scores of their own: use h, not kv_hidden.")),
        Edit(" + scores", "",
             Cause("The scores are products, too: they multiply no weight, so 6ND forgets them.")),
        Edit("2 * h * h + 2 * h * spec.kv_hidden", "4 * h * h",
             Cause("With grouped-query attention, k and v have kv_hidden columns, not hidden.")),
        Edit("2 * h * h + 2 * h * spec.kv_hidden", "h * h + 2 * h * spec.kv_hidden",
             Cause("Attention has four matrices: q, k, v and the one after.")),
        Edit("(3 if spec.gated else 2)", "2",
             Cause("An MLP with a gate (SwiGLU) has three matrices: look at spec.gated.")),
        Edit("(3 if spec.gated else 2)", "3",
             Cause("An MLP without a gate has two matrices: look at spec.gated.")),
        Edit(" + h * spec.vocab", "",
             Cause("The logits are a product of [tokens, hidden] and [hidden, vocab].")),
        Edit(" + h * spec.vocab", " + 2 * h * spec.vocab",
             Cause("The embedding looks a row up: it multiplies nothing. Only the head does.")),
        Edit(" + h * spec.vocab", " + (0 if spec.tied else h * spec.vocab)",
             Cause("A tied head has no matrix of its own, but it still multiplies.")),
        Edit("spec.num_layers * (", "(", Cause("There are num_layers layers.")),
        Edit("tokens = spec.hidden, batch * seq", "tokens = spec.hidden, seq",
             Cause("Every sequence of the batch is computed: batch is missing.")),
        Edit(TOTAL, f"{TOTAL} / 1", A_FLOAT),
        Edit(TOTAL, f"int(torch.tensor([{TOTAL}], dtype=torch.float32).sum())", TOO_NARROW),
    ),
)  # fmt: skip
