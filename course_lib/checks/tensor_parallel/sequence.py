"""Exercise 6 of 07_tensor_parallel: all-gather in front of a region, reduce-scatter behind it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from course_lib.checks.edits import Edit
from course_lib.checks.exercise import Cause, Exercise
from course_lib.checks.expectations import DTYPE, Calls, Demand, Numbers, Untouched
from course_lib.checks.on_ranks import At, OnRanks
from course_lib.checks.tensor_parallel.parts import (
    NEARLY,
    NOT_A_NAME,
    NOT_TRAINING,
    NOT_WAITED,
    ROUNDING,
    nearly,
)
from course_lib.checks.tensor_parallel.seen_sequence import observe_sequence
from course_lib.checks.tensor_parallel.whole_sequence import (
    grad_of,
    own_matrix,
    own_tokens_of,
    parts_of,
    sequence_use,
    sum_of,
    total_matrix,
    whole_bytes,
)

ORDER = Cause("All tokens are there, in another order: those of rank 0 come first, then rank 1's.")
EACH_ONCE = Cause(
    "Are each rank's tokens there once, gathered into a tensor of their own, rank 0's first?"
)
OTHER_DIM = Cause(
    "Tokens are dim 1 of [batch, seq, hidden], and every rank has its part of each sequence: "
    "concatenate and cut along dim 1. (What collectives write one after the other is dim 0.)"
)
PADDING_STAYS = Cause(
    "The padding is still there: the part gets seq tokens, and the gradient of the padding is not "
    "the gradient of a token."
)
PARTS = Cause(
    "The sum is cut into p parts of ceil(seq / p) tokens, along dim 1: where p does not divide "
    "seq, pad it with zeros first."
)
OWN_SUM = Cause("That is this rank's own partial sum: sum over the ranks, then keep own tokens.")
OTHERS = Cause("Those are tokens of another rank: rank r keeps part r of the sum.")
NOT_SCATTERED = Cause("Those are all tokens: behind the region each rank keeps its own only.")
MEAN = Cause("That is the mean. The parts are terms of one sum, so do not divide.")
BY_FOUR = Cause("Divided by 4. The parts are terms of one sum, on any number of ranks.")
SLICED = Cause(
    "That is this rank's own term of the gradient: the other ranks used these tokens, too. "
    "Backward of an all-gather sums over the ranks before it keeps the own tokens: a "
    "reduce-scatter."
)
MEAN_BACK = Cause("That is the mean: these tokens were used {p} times, and the gradients add up.")
ONLY_OWN = Cause(
    "Only the own tokens have a gradient: this rank's part has contributed to the sums of all "
    "tokens, and the other ranks hold their gradients. Backward of a reduce-scatter gathers them."
)
TIMES_P = Cause(
    "{p} times too large: each token's gradient is on one rank, and needs to be gathered, not "
    "summed."
)
DIVIDED_BACK = Cause("A term of a sum has the gradient of the sum: there is nothing to divide by.")
NO_GRADIENT = Cause("Did detach or no_grad cut the graph? The gradient is what backward returns.")
KEEPS = Cause(
    "Other code may still need this tensor: write into a new one each time, and keep no buffer."
)
TWO_USES = Cause("x was used twice: backward needs a new tensor each time.")
RUNS_ONCE = Cause("Call part once, with all tokens: its matrices are split, not the tokens.")
CONTIGUOUS = Cause(
    "x may be a transposed tensor, and a part along dim 1 is not contiguous: call .contiguous()."
)
PAIR = Cause(
    "Forward and backward have one all_gather and one reduce_scatter each. An all_reduce of which "
    "you keep a part has the right numbers for twice the bytes, and so has gathering what you then "
    "add up."
)
SOME_RANKS = Cause("Every rank makes each call, with the same shape, also with padding only.")
ADJOINT = Cause(
    "Backward returns what has the shape of forward's input: a gather's backward is the "
    "reduce-scatter, and the reverse."
)
DIGITS = Cause("Each rank contributes its own digit: which one is missing, or counted twice?")


def _rounding(at: At) -> float:
    return 1e-5 if sequence_use(at).x.dtype == torch.float32 else ROUNDING


def _close(value: str, right: Callable[[At], Any], **more: Any) -> Numbers:
    """Demand numbers up to the rounding of their dtype, along dim 1, from calls that have ended."""
    more["predicates"] = (*_DIMS, *more.get("predicates", ()))
    return Numbers(value, right, rtol=_rounding, otherwise=((nearly(right), NEARLY),), **more)


def _sizes(at: At, got: Any) -> tuple[int, int, int]:
    """Return what was got of dim 1, the number of tokens, and that of a rank."""
    seq = sequence_use(at).x.shape[1]
    return (got.shape[1] if got.dim() == 3 else 0), seq, -(-seq // at.world_size)


def _has_padding(at: At, got: Any, _: int | None) -> bool:
    size, seq, own = _sizes(at, got)
    return size == own * at.world_size != seq


def _is_short(at: At, got: Any, _: int | None) -> bool:
    size, seq, own = _sizes(at, got)
    floor = seq // at.world_size
    return own != floor and size in (floor, floor * at.world_size)


def _other_dim(at: At, got: Any, _: int | None) -> bool:
    use, (size, *right) = sequence_use(at), _sizes(at, got)
    widths = use.x.shape[2], use.up.shape[2]
    return len(got) != len(use.x) or got.shape[2] not in widths or size not in right


def _all_tokens(at: At, got: Any, _: int | None) -> bool:
    size, seq, own = _sizes(at, got)
    return size == seq != own


_DIMS = ((_has_padding, PADDING_STAYS), (_is_short, PARTS), (_other_dim, OTHER_DIM))


def _inside(mixed: Callable[[At, list[Tensor]], Tensor]) -> Callable[[At], Tensor]:
    """Return a function of At: what part gets, if the ranks' tokens are mixed like this."""

    def wrong(at: At) -> Tensor:
        x = sequence_use(at).x
        return mixed(at, parts_of(at, x)).reshape(len(x), -1, x.shape[2])[:, : x.shape[1]]

    return wrong


def _from_above(times: Callable[[At], float]) -> Callable[[At], Tensor | None]:
    return lambda at: None if sequence_use(at).no_grad else sequence_use(at).up * times(at)


def _only_own(at: At) -> Tensor | None:
    """Return the gradient from above with zeros for the other ranks' tokens."""
    up = sequence_use(at).up
    size = -(-up.shape[1] // at.world_size)
    here = torch.arange(up.shape[1]) // size == at.rank
    return None if sequence_use(at).no_grad else up * here[:, None]


def _twice(at: At) -> Tensor | None:
    use = sequence_use(at)
    ones = torch.full_like(use.x, 4.0 * at.world_size)
    return None if use.frozen else own_tokens_of(ones, at.world_size, at.rank)


def _same_everywhere(at: At) -> bool:
    """Return whether all ranks' parts get the same; each rank is asked for its own elsewhere."""
    return all(torch.equal(at.seen.inside, other.seen.inside) for other in at.everyone)


def _arrives(at: At) -> bool:
    """Return whether the gradients that are needed are there."""
    at_part = at.seen.part_grad is not None or sequence_use(at).no_grad
    return at_part and (at.seen.x_grad is not None or sequence_use(at).frozen)


def _forward(at: At) -> list[tuple[str, int]]:
    use = sequence_use(at)
    calls = ("all_gather", use.x), ("reduce_scatter", use.up)
    return _needed(at, at.seen.forward, calls)


def _backward(at: At) -> list[tuple[str, int]]:
    use = sequence_use(at)
    calls = ("all_gather", use.up), ("reduce_scatter", use.x)
    return _needed(at, at.seen.backward, [] if use.no_grad else calls[: 1 + (not use.frozen)])


def _needed(at: At, made: Any, calls: Any) -> list[tuple[str, int]]:
    """Return kind and bytes of the calls; on one rank, none does as well."""
    alone = at.world_size == 1 and not made
    return [] if alone else [(kind, whole_bytes(at, tensor)) for kind, tensor in calls]


GATHER = "dist.all_gather(parts, x)"
SCATTER = "dist.reduce_scatter(own, [part.contiguous() for part in parts])"
CAT = "torch.cat(parts, dim=1)"
PADDED = "F.pad(x, (0, 0, 0, -x.shape[1] % p))"
OWN = "own = torch.empty_like(parts[0])"
ENTER = "Boundary.apply(x, gather, scatter_sum)"
LEAVE = "Boundary.apply(out, scatter_sum, gather)"
P, RANK = "dist.get_world_size()", "dist.get_rank()"
SLICE = f"lambda whole: F.pad(whole, (0, 0, 0, -seq % {P})).chunk({P}, 1)[{RANK}].clone()"
BUFFER = "in_region.__dict__.setdefault(str({0}.shape), torch.empty_like({0}).contiguous())"


def _enter_back(backward: str) -> str:
    """Return the edit that has another backward in front of the region."""
    return ENTER.replace("scatter_sum", f"lambda grad: {backward}")


def _leave_back(backward: str) -> str:
    return LEAVE.replace("gather)", f"lambda grad: {backward})")


SEQUENCE = Exercise(
    key="tensor_parallel-6",
    title="the pair of sequence parallelism",
    check=OnRanks(
        observe_on_rank=observe_sequence,
        trouble=(
            ("hang", "", SOME_RANKS),
            ("mismatch", "", SOME_RANKS),
            ("raised", "contiguous|view size", CONTIGUOUS),
            ("raised", "invalid gradient", ADJOINT),
            ("raised", f"{NOT_A_NAME}(size|shape|chunk|index|split|equal|match)", PARTS),
        ),
        expect=(
            Demand(lambda at: not at.seen.never_waited, "a call was not waited for", NOT_WAITED),
            Demand(
                lambda at: at.seen.num_runs == 1,
                lambda at: f"part ran {at.seen.num_runs} times",
                RUNS_ONCE,
            ),
            _close(
                "inside",
                lambda at: sequence_use(at).x,
                what="what part gets",
                causes=(
                    (ORDER, _inside(lambda _, parts: torch.cat(parts[::-1], 1))),
                    (ORDER, _inside(lambda at, p: torch.cat(p[at.rank :] + p[: at.rank], 1))),
                    (OTHER_DIM, _inside(lambda _, parts: torch.cat(parts))),
                    (OTHER_DIM, _inside(lambda _, parts: torch.cat(parts, 2))),
                ),
                look=EACH_ONCE,
            ),
            Demand(_same_everywhere, "part gets the tokens in another order on each rank", ORDER),
            _close(
                "out",
                sum_of(total_matrix),
                what="the own tokens of the sum",
                predicates=(
                    (_all_tokens, NOT_SCATTERED),
                    (lambda at, *_: sequence_use(at).frozen, NOT_TRAINING),
                ),
                causes=(
                    (OWN_SUM, sum_of(own_matrix)),
                    (MEAN, sum_of(lambda at: total_matrix(at) / at.world_size)),
                    (BY_FOUR, sum_of(lambda at: total_matrix(at) / 4)),
                    (OTHERS, sum_of(total_matrix, shift=1)),
                ),
                look=DIGITS,
            ),
            Untouched(KEEPS),
            Calls(_forward, PAIR, look=PAIR, value="forward"),
            Demand(_arrives, "no gradient arrives", NO_GRADIENT),
            _close(
                "part_grad",
                _from_above(lambda _at: 1.0),
                what="the gradient that part gets",
                causes=(
                    (ONLY_OWN, _only_own),
                    (TIMES_P, _from_above(lambda at: at.world_size)),
                    (DIVIDED_BACK, _from_above(lambda at: 1 / at.world_size)),
                ),
                look=ONLY_OWN,
            ),
            _close(
                "x_grad",
                grad_of(total_matrix),
                what="the gradient of x",
                causes=(
                    (SLICED, grad_of(own_matrix)),
                    (MEAN_BACK, grad_of(lambda at: total_matrix(at) / at.world_size)),
                ),
                look=DIGITS,
            ),
            Calls(_backward, PAIR, look=PAIR, value="backward"),
            _close("twice", _twice, what="the gradient of two uses of x", look=TWO_USES),
        ),
        success="Sums and gradients on 1 to 4 ranks; a gather and a reduce-scatter in each pass.",
    ),
    wrong=(
        Edit(ENTER, _enter_back(f"({SLICE})(grad)"), SLICED),
        Edit(ENTER, _enter_back(f"scatter_sum(grad / {P})"), MEAN_BACK),
        Edit(LEAVE, _leave_back(f"gather(grad) * {P}"), TIMES_P),
        Edit(LEAVE, _leave_back(f"gather(grad) / {P}"), DIVIDED_BACK),
        Edit(
            LEAVE,
            _leave_back(f"torch.cat([grad * (r == {RANK}) for r in range({P})], 1)[:, :seq]"),
            ONLY_OWN,
        ),
        Edit("out, scatter_sum", f"out / {P}, scatter_sum", MEAN),
        Edit("out, scatter_sum", "out / 4, scatter_sum", BY_FOUR),
        Edit("out, scatter_sum", f"out, {SLICE}", OWN_SUM),
        Edit("parts])", "parts[1:] + parts[:1]])", OTHERS),
        Edit(CAT, "torch.cat(parts[::-1], dim=1)", ORDER),
        Edit(CAT, f"torch.cat(parts[{RANK}:] + parts[:{RANK}], dim=1)", ORDER),
        Edit("_like(x) for _ in range(dist.get_world_size())]", f"_like(x)] * {P}", EACH_ONCE),
        Edit(CAT, "torch.cat(parts)", OTHER_DIM),
        Edit(CAT, "torch.cat(parts, dim=2)", OTHER_DIM),
        Edit(CAT, "torch.cat(parts).reshape(len(x), -1, x.shape[2])", OTHER_DIM),
        Edit("chunk(p, dim=1)", "chunk(p, dim=2)", PARTS),
        Edit("[:, :seq]", "", PADDING_STAYS),
        Edit(PADDED, "x", PARTS),
        Edit(PADDED, "x[:, : x.shape[1] // p * p]", PARTS),
        Edit("x = x.contiguous()", "x = x.view(-1).view(x.shape)", CONTIGUOUS),
        Edit(
            SCATTER,
            "total = torch.cat(parts, 1)\ndist.all_reduce(total)\n"
            f"own.copy_(total.chunk(p, 1)[{RANK}])",
            PAIR,
        ),
        Edit(
            SCATTER,
            "wholes = [torch.cat(parts, 1) for _ in parts]\n"
            "dist.all_gather(wholes, torch.cat(parts, 1))\n"
            f"own.copy_(torch.stack(wholes).sum(0).chunk(p, 1)[{RANK}])",
            PAIR,
        ),
        Edit(
            GATHER,
            f"total = torch.zeros({P}, *x.shape, dtype=x.dtype)\ntotal[{RANK}] = x\n"
            "dist.all_reduce(total)\nparts = list(total)",
            PAIR,
        ),
        Edit(
            ENTER,
            _enter_back(f"({SLICE})(reduced(grad))"),
            PAIR,
            also=(
                (
                    "gather = partial(gather_tokens, seq=seq)",
                    "gather = partial(gather_tokens, seq=seq)\n"
                    "def reduced(grad):\n"
                    "    total = grad.clone()\n    dist.all_reduce(total)\n    return total",
                ),
            ),
        ),
        Edit(OWN, f"own = {BUFFER.format('parts[0]')}", KEEPS),
        Edit(ENTER, _enter_back(f"{BUFFER.format('x')}.copy_(scatter_sum(grad))"), TWO_USES),
        Edit(SCATTER, f"{SCATTER}\nx.zero_()", KEEPS),
        Edit(SCATTER, SCATTER.replace("parts])", "parts], async_op=True)"), NOT_WAITED),
        Edit(GATHER, GATHER.replace("x)", "x, async_op=True)"), NOT_WAITED),
        Edit(SCATTER, f"if x.any():\n    {SCATTER}", SOME_RANKS),
        Edit(PADDED, PADDED.replace("x,", "x.float(),"), DTYPE),
        Edit("out = part(", "part(x)\nout = part(", RUNS_ONCE),
        Edit(ENTER, "gather(x)", NO_GRADIENT),
        Edit(ENTER, ENTER.replace("scatter_sum", "gather"), ADJOINT),
        Edit(LEAVE, LEAVE.replace("gather", "scatter_sum"), ADJOINT),
        Edit(LEAVE, "scatter_sum(out)", ONLY_OWN),
        Edit(
            f"return {LEAVE}",
            f"return {LEAVE} if torch.is_grad_enabled() else ({SLICE})(out)",
            NOT_TRAINING,
        ),
    ),
)
