"""Exercise 1 of 01b_speed: the FLOP of a step, under either convention for a causal mask."""

from collections.abc import Iterable
from dataclasses import replace
from random import Random

from course_lib.checks.cases import TOO_NARROW, Case, Cases, whole
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


HALF, SCORES = "// (2 if causal else 1)", "2 * seq * h //"
KEYS, GATED = "2 * h * h + 2 * h * spec.kv_hidden", "(3 if spec.gated else 2)"
TOTAL = "6 * tokens * (spec.num_layers * (attention + mlp + scores) + h * spec.vocab)"
TWO_FLOP = Cause("A multiply-add is two FLOP: a multiplication and an addition.")
BACKWARD = Cause("Each product of forward has two in backward: three times forward in all.")
CAUSAL = Cause("With causal=True, count half of the scores: those that no mask hides.")
NOT_CAUSAL = Cause("With causal=False, count all scores, also those that the mask hides.")
TWO_PRODUCTS = Cause("Attention has two products of scores: q times k, and weights times v.")
PER_TOKEN = Cause("A token meets all seq tokens of its sequence: the scores grow with seq.")
OWN_SEQUENCE = Cause("A token meets those of its own sequence, not those of the whole batch.")
NO_SCORES = Cause("The scores are products, too: they multiply no weight, so 6ND forgets them.")
GROUPED = Cause("With grouped-query attention, k and v have kv_hidden columns, not hidden.")
FOUR = Cause("Attention has four matrices: q, k, v and the one after.")
WITH_GATE = Cause("An MLP with a gate (SwiGLU) has three matrices: look at spec.gated.")
LOGITS = Cause("The logits are a product of [tokens, hidden] and [hidden, vocab].")
TIED = Cause("A tied head has no matrix of its own, but it still multiplies.")

FLOP = Exercise(
    key="speed-1",
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
        Edit("6 * tokens", "3 * tokens", TWO_FLOP),
        Edit("6 * tokens", "2 * tokens", BACKWARD),
        Edit(HALF, "", CAUSAL),
        Edit(HALF, "// 2", NOT_CAUSAL),
        Edit(SCORES, "seq * h //", TWO_PRODUCTS),
        Edit(SCORES, "2 * h //", PER_TOKEN),
        Edit(SCORES, "2 * tokens * h //", OWN_SEQUENCE),
        Edit(" + scores", "", NO_SCORES),
        Edit(KEYS, "4 * h * h", GROUPED),
        Edit(KEYS, "h * h + 2 * h * spec.kv_hidden", FOUR),
        Edit(GATED, "2", WITH_GATE),
        Edit(" + h * spec.vocab", "", LOGITS),
        Edit(" + h * spec.vocab", " + (0 if spec.tied else h * spec.vocab)", TIED),
        Edit(TOTAL, f"int(torch.tensor([{TOTAL}], dtype=torch.float32).sum())", TOO_NARROW),
    ),
)
