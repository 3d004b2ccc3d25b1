"""Exercises 4 to 6 of 01_memory: a layer's bytes, what fits, MFU."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from course_lib.checks.exercise import CheckFailed, Exercise, Mistake
from course_lib.checks.expect import Cause, expect_equal, on_ranks
from course_lib.checks.memory import formulas_answers as planted
from course_lib.core import ModelSpec
from course_lib.core.units import GIB
from course_lib.memory.formulas import activations


def check_layer(answer: Callable[..., int]) -> str:
    """Check a layer of unfused attention with dropout in bf16, at several sizes."""
    for heads, batch, seq, h in ((1, 1, 2, 6), (3, 1, 4, 6), (3, 3, 4, 6), (3, 2, 8, 9)):
        spec = ModelSpec(
            hidden=h, num_layers=2, num_heads=heads, ffn_hidden=4 * h, vocab=17, max_seq=8
        )
        right = _layer(spec, batch, seq)
        sbh, square = seq * batch * h, heads * seq * seq * batch
        causes: list[Cause] = [
            (34 * sbh + 5 * heads * seq * batch, "Scores grow with the square of the sequence."),
            (34 * sbh + 5 * square // batch, "Every sequence of the batch has its own scores."),
            (right // batch, "A batch has as many of each as it has sequences: batch is missing."),
            (34 * sbh + 5 * square // heads, "Every head has its own scores."),
            (36 * sbh + 6 * square, "A dropout mask takes one byte a number, not two."),
            (right // 2, "Those are numbers, not bytes."),
            (float(right), "The value is right, but bytes are whole: an int. Avoid /."),
            (sbh * (34 + 5 * heads * seq // h), "5as/h need not be whole: multiply first."),
            (34 * sbh, "The scores are missing: softmax, its mask, what dropout makes of it."),
            (34 * sbh + 2 * square, "Dropout keeps its mask and its output too: 2 + 1 + 2."),
        ]
        where = f"batch {batch}, seq {seq}, hidden {h}, {heads} heads"
        look = "Which of batch, seq, hidden and num_heads is not in it?"
        expect_equal(answer(batch, seq, h, heads), right, where=where, causes=causes, look=look)
    return "34 sbh + 5 as²b."


def _layer(spec: ModelSpec, batch: int, seq: int) -> int:
    one, two = (
        activations(replace(spec, num_layers=n), batch, seq, flash=False, dropout=True)
        for n in (1, 2)
    )
    return sum(two.values()) - sum(one.values())


def check_fit(answer: Callable[..., int]) -> str:
    """Check a GPU that is large, exact, and too small."""
    for states, each, card_gib in (
        (10 * GIB, 2 * GIB, 80),
        (112 * 10**9, GIB, 80),
        (16 * GIB, 3 * GIB, 24),
        (70 * GIB, 5 * GIB, 80),
        (79 * GIB, 1_050_000_000, 80),
        (79 * GIB, GIB, 80),
    ):
        left = card_gib * GIB - states
        right = max(0, left // each)
        causes: list[Cause] = [
            (
                lambda got, last=left == each: last and got == 0,
                "One fits: exactly full is not too full.",
            ),
            (max(0, (card_gib - states) // each), "The card is in GiB, the rest in bytes."),
            (max(0, (card_gib * 10**9 - states) // each), "The card's GiB are 2**30 bytes."),
            (right + 1, "Rounded up: the last sequence does not fit any more."),
            (card_gib * GIB // each, "The states need their place first."),
            (lambda got: got < 0, "No batch is negative: 0 when nothing fits."),
            (lambda got: isinstance(got, float), "A batch is a whole number: divide with //."),
        ]
        where = f"states {states}, a sequence {each}, a card of {card_gib} GiB"
        expect_equal(answer(states, each, card_gib), right, where=where, causes=causes)
    return "In bytes, rounded down, never below 0."


def check_mfu(answer: Callable[..., float]) -> str:
    """Check runs whose MFU is known, from the number on the data sheet's first page."""
    for num_params, tokens_per_s, sheet, ranks in (
        (10**9, 50_000.0, 1979e12, 1),
        (8 * 10**9, 50_000.0, 1979e12, 8),
        (8 * 10**9, 16_000.0, 624e12, 4),
    ):
        right = 6 * num_params * tokens_per_s / (ranks * sheet / 2)
        causes = [
            (right / 2, "The sheet's number is with sparsity: training reaches half of it."),
            (right / 4, "Half of the sheet's number stands below the line: / (sheet / 2)."),
            (right * ranks * ranks, "More ranks have a higher peak: divide by world_size."),
            (right * ranks, "Every rank has a peak of its own: world_size of them."),
            (right / 3, "Backward is twice forward: 6 FLOP a parameter a token, not 2."),
            (right * 4 / 3, "MFU counts what the model needs, not what is recomputed: 6, not 8."),
            (right * 100, "MFU is a share from 0 to 1 here, not percent."),
        ]
        got = answer(num_params, tokens_per_s, sheet, ranks)
        _expect_share(got, right, f"{num_params:.0e} parameters {on_ranks(ranks)}", causes)
    return "6ND over the dense peak of all ranks."


def _expect_share(got: Any, right: float, where: str, causes: list[tuple[float, str]]) -> None:
    if isinstance(got, int):
        raise CheckFailed(f"{where}: need {right:.4g}; got {got}. A share has decimals: use /.")
    if not isinstance(got, float):
        raise CheckFailed(f"{where}: need a number; got {got!r}. Does your function return it?")
    if not abs(got - right) <= 1e-9 * right:  # nan is no share either
        says = next((says for wrong, says in causes if abs(got - wrong) < 1e-9 * wrong), "")
        raise CheckFailed(f"{where}: need {right:.4g}; got {got:.4g}. {says}".rstrip())


def _mistakes(*wrong: tuple[str, Any, str]) -> tuple[Mistake, ...]:
    return tuple(Mistake(name, answer, says) for name, answer, says in wrong)


EXERCISES = (
    Exercise(
        key="memory-4",
        title="bytes of a layer",
        check=check_layer,
        reference=planted.layer_bytes,
        mistakes=_mistakes(*planted.LAYER),
    ),
    Exercise(
        key="memory-5",
        title="the largest batch that fits",
        check=check_fit,
        reference=planted.largest_batch,
        mistakes=_mistakes(*planted.FIT),
    ),
    Exercise(
        key="memory-6",
        title="MFU",
        check=check_mfu,
        reference=planted.mfu_of,
        mistakes=_mistakes(*planted.MFU),
    ),
)
