"""Exercises 2 and 3 of 03_recompute: the best segment, and blocks in segments."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from course_lib.checks.accumulation import effects
from course_lib.checks.accumulation.effects import EffectCase, Effects, LiveStorages, watched
from course_lib.checks.cases import Case, Cases, whole
from course_lib.checks.edits import Edit
from course_lib.checks.exercise import Cause, Exercise
from course_lib.checks.on_ranks import copied
from course_lib.checks.properties import CALLERS, SEEDS
from course_lib.memory.saved_tensors import activation_ledger

# --- recompute-2

# (24, 1, 1) has three best k; in (24, 6, 6) and (24, 4, 24) an input is more than one byte; below,
# the ratio is no whole number, many layers fit into a segment, and real bytes have 9 digits
SIZES = (
    (1, 1, 1), (16, 1, 1), (64, 1, 1), (24, 1, 6), (24, 1, 17), (24, 1, 1), (24, 6, 6), (24, 4, 24),
    (7, 2, 3), (2, 1, 1), (9, 12, 1),
    (25, 2, 3), (97, 7, 3), (200, 1000, 1), (125, 2**26, 2**26), (48, 2**26 + 1, 2**26)
)  # fmt: skip

ROOT = Cause("The root of the layers is best only if a block keeps as much as its input.")
BYTES_NOT_BLOCKS = Cause("Those are the bytes: return the number of blocks.")
ALL_AT_ONCE = Cause("One segment needs everything at once: nothing is saved.")
FORMULA = Cause("The formula knows neither ties nor that segments are rounded up: try every k.")
ROUND_UP = Cause("Round up: the last segment may be shorter, and has an input too.")
FROM_0 = Cause("An index starts at 0, the size of a segment at 1.")
OF_INPUTS = Cause("An input is not 1 byte: times input_bytes.")
SMALLEST = Cause("Its peak is as low, but where several k are best, return the smallest.")
UP_TO_ALL = Cause("range stops before its end: one segment of all layers is possible, too.")
SWAPPED = Cause("Swapped: forward keeps the inputs, backward needs k whole blocks.")


def _cases() -> list[Case]:
    names = "num_layers {}, input_bytes {}, block_bytes {}"
    return [(names.format(*sizes), sizes) for sizes in SIZES]


BEST, BYTES = "ks[peaks.index(min(peaks))]", "-(-num_layers // k) * input_bytes + k * block_bytes"
BY_FORMULA = "max(1, round((num_layers * input_bytes / block_bytes) ** 0.5 + 0.1))"

BEST_SEGMENT = Exercise(
    key="recompute-2",
    title="the best segment",
    check=Cases(
        cases=_cases,
        show=whole,
        look="Try every k from 1 to num_layers, and keep the first one with the lowest peak.",
        success="8 for 64 thin layers, 1 for 24 transformer blocks that keep 17 times their input.",
    ),
    wrong=(
        Edit(BEST, "max(1, round(num_layers ** 0.5))", ROOT),
        Edit(BEST, "min(peaks)", BYTES_NOT_BLOCKS),
        Edit(BEST, "num_layers", ALL_AT_ONCE),
        Edit(BEST, BY_FORMULA, FORMULA),
        Edit("-(-num_layers // k)", "num_layers // k", ROUND_UP),
        Edit("-(-num_layers // k)", "num_layers / k", ROUND_UP),
        Edit(BEST, "peaks.index(min(peaks))", FROM_0),
        Edit("* input_bytes", "* 1", OF_INPUTS),
        Edit(BEST, "len(ks) - peaks[::-1].index(min(peaks))", SMALLEST),
        Edit("num_layers + 1", "num_layers", UP_TO_ALL),
        Edit(BYTES, "-(-num_layers // k) * block_bytes + k * input_bytes", SWAPPED),
    ),
)

# --- recompute-3

FORWARD, BACKWARD = "blocks run in forward", "blocks run in backward"
OUTPUT, HELD, GRADIENTS = "output", "tensors held after forward", "gradients"
GRAPH, X_LEARNS, ALIVE = "graph of the output", "gradient of x", "tensors alive after forward"

EACH_ONCE = Cause("Run each block once, in order, k at a time; the last segment may be shorter.")
WHOLE_SEGMENTS = Cause("Keep the input of each segment, and nothing else.")
EACH_BLOCK = Cause("Every block is a segment of its own here: recompute k blocks together.")
ONE_SEGMENT = Cause("All blocks are one segment here: recompute them k by k.")
LATE_NAMES = Cause("A lambda looks up names when it runs, in backward: pass blocks as an argument.")
SEGMENT_BY_SEGMENT = Cause("Backward runs each segment once, its k blocks, the last segment first.")
CHAIN = Cause("Each segment's output is the next one's input.")
DETACHED = Cause("x got no gradient: do not detach it; the layers before x have to learn, too.")
NO_X_GRADIENT = Cause("Where x needs no gradient, use_reentrant=True cuts the parameters off.")
OTHER_MASKS = Cause("Other masks in backward: leave preserve_rng_state on, as recompute does.")
MORE_ALIVE = Cause("More than its input is kept of a segment: no outputs, no copies.")
CUT = Cause("The output has no graph, so no gradient can flow back through it.")
NOT_RECOMPUTED = Cause("Nothing is recomputed: call recompute(run_all, ...) for each segment.")


def _run(
    answer: Callable[..., Any], num_layers: int, k: int, drop: float = 0.0, learns: bool = True
) -> dict[str, Any]:
    """Run blocks with dropout; where x `learns`, it needs a gradient."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of an x that became no leaf, and of use_reentrant=True
        torch.manual_seed(0)
        blocks = [_block(drop) for _ in range(num_layers)]
        params = [param for block in blocks for param in block.parameters()]
        x, calls, outputs = torch.ones(4, 8, requires_grad=learns), list[int](), list[Tensor]()
        for index, block in enumerate(blocks):
            block.register_forward_pre_hook(lambda *_, index=index: calls.append(index))
        with watched(x=x, blocks=blocks) as seen, LiveStorages() as live:
            ledger = activation_ledger(lambda: outputs.append(answer(blocks, k, x)), given=params)
        forward, output, num_segments = calls.copy(), outputs[0], -(-num_layers // k)
        done = {FORWARD: forward, OUTPUT: copied(output), **seen}
        if not isinstance(output, Tensor):
            return done
        done[GRAPH] = "there" if output.requires_grad else "missing"
        if not output.requires_grad:
            return done
        held, alive = ledger.totals()[-1] // x.nbytes, live.num_bytes() // x.nbytes
        output.sum().backward()
        learns_now = "none" if x.grad is None else "there"
        grads = [torch.zeros(1) if each.grad is None else each.grad for each in (x, *params)]
    return {
        **done,
        X_LEARNS: learns_now,
        BACKWARD: calls[len(forward) :],
        HELD: held,
        ALIVE: "one a segment" if alive <= num_segments else f"{alive} in {num_segments} segments",
        GRADIENTS: effects.flat(grads),
    }


def _block(drop: float) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Dropout(drop), nn.Tanh())


def _run_cases() -> list[EffectCase]:
    sizes = ((1, 1), (4, 2), (6, 3), (5, 2), (4, 1), (7, 3), (3, 5), (0, 2))
    return [
        *((f"num_layers {n}, k {k}", partial(_run, num_layers=n, k=k)) for n, k in sizes),
        ("dropout", partial(_run, num_layers=5, k=2, drop=0.5)),
        ("x needs no gradient", partial(_run, num_layers=5, k=2, learns=False)),
    ]


STEPS, RECOMPUTE = "range(0, len(blocks), k)", "recompute(run_all, blocks[start : start + k], x)"
RUN = "run_all(blocks[start : start + k], x)"
ONE_BY_ONE, BY_LAMBDA = (STEPS, "range(len(blocks))"), f"recompute(lambda x: {RUN}, x)"


def _by_checkpoint(options: str, cause: Cause) -> Edit:
    """Return the answer that calls PyTorch's own function with these options."""
    call = f"checkpoint(run_all, blocks[start : start + k], x, {options})"
    imported = "from torch.utils.checkpoint import checkpoint\nfor start"
    return Edit(RECOMPUTE, call, cause, also=(("for start", imported),))


SEGMENTS = Exercise(
    key="recompute-3",
    title="every k-th input",
    check=Effects(
        cases=_run_cases,
        looks={
            **effects.LOOKS,
            FORWARD: EACH_ONCE,
            HELD: WHOLE_SEGMENTS,
            BACKWARD: SEGMENT_BY_SEGMENT,
            OUTPUT: CHAIN,
            GRAPH: CUT,
            X_LEARNS: DETACHED,
            ALIVE: MORE_ALIVE,
        },
        look=Cause("Compare with run_all(blocks, x)."),
        success="One tensor kept per segment, and every block runs twice, with the same masks.",
    ),
    wrong=(
        Edit(RECOMPUTE, "recompute(blocks[start], x)", EACH_BLOCK, also=(ONE_BY_ONE,)),
        Edit(RECOMPUTE, BY_LAMBDA, LATE_NAMES),
        Edit(
            RECOMPUTE, "recompute(run_all, blocks, x)", ONE_SEGMENT, also=((STEPS, "blocks[:1]"),)
        ),
        Edit("len(blocks), k", "len(blocks) // k * k, k", EACH_ONCE),
        Edit(RECOMPUTE, RUN, NOT_RECOMPUTED),
        Edit(
            f"x = {RECOMPUTE}",
            f"y = {RECOMPUTE}",
            CHAIN,
            also=(("for start", "y = x\nfor start"), ("return x", "return y")),
        ),
        Edit(RECOMPUTE, RECOMPUTE.replace("x)", "x.detach())"), DETACHED),
        Edit("for start", "x.requires_grad_()\nfor start", CALLERS),
        Edit("for start", "x = x.clone()\nfor start", MORE_ALIVE),
        _by_checkpoint("use_reentrant=True", NO_X_GRADIENT),
        _by_checkpoint("use_reentrant=False, preserve_rng_state=False", OTHER_MASKS),
        Edit("return x", "x = x.detach()\nreturn x", CUT),
        SEEDS,
    ),
)
