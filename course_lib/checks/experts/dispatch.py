"""Exercise 2 of 16_experts: dispatch and combine by uneven all-to-alls."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.checks.edits import Edit
from course_lib.checks.exercise import Cause, Exercise
from course_lib.checks.judge import ByExample
from course_lib.checks.properties import CALLERS, SEEDS
from course_lib.checks.watch import ALWAYS, UNWAITED, Watch

GETS, OUTPUT, SENT = "what this rank's experts get", "the output", "the calls"
CALLS = (
    # label, tokens of rank 0 (one more on each next rank), hidden, top_k, experts per rank, chosen
    ("top_k 1, 2 experts per rank", 3, 2, 1, 2, "mixed"),
    ("top_k 2", 2, 2, 2, 2, "mixed"),
    ("top_k 2, the same shape, other numbers", 2, 2, 2, 2, "other"),
    ("all tokens to the last two experts", 2, 2, 2, 3, "last"),
    ("no tokens on rank 0", 0, 2, 1, 1, "mixed"),
    ("top_k 3, hidden 5", 2, 5, 3, 4, "next"),
)

NOT_SORTED = Cause(
    "all_to_all_single cuts its input into consecutive parts, one per rank: so sort the copies by "
    "expert first."
)
WHOSE = Cause(
    "Those are rows of other tokens: copy n belongs to token n // top_k, so order // top_k lists "
    "the tokens in the order of their experts."
)
WHICH = Cause(
    "Rows are for another expert: they arrive rank by rank, and from each rank expert by expert. "
    "`which` counts this rank's experts from 0."
)
COUNTS = Cause(
    "Ranks disagree on what is sent: exchange the counts first, and sum them by rank. Each rank "
    "takes part in all three exchanges, also without tokens."
)
BACK = Cause("On the way back the split sizes are swapped: what was received is sent.")
PLACES = Cause(
    "Results come back in the order in which copies were sent: add them to their tokens, with "
    "index_add and order // top_k."
)
WEIGHTS = Cause("Weights are in the order of tokens, results in that of experts: use order here.")
NO_WEIGHTS = Cause("Each result is multiplied by the weight that its token gives this expert.")
DTYPE = Cause("Digits are lost on the way: keep the dtype of the tokens everywhere.")
ADD = Cause("A token's results add up: with top_k of 2, assigning keeps only one of them.")
BUDGET = Cause("Three all_to_all_single: the counts, the copies, the results.")
AFTER = Cause(
    "The experts got the right rows. Their results come back in the order in which copies were "
    "sent; each is multiplied by its weight and added to its token, and nothing else is."
)
LOOK = Cause("Follow one token: its copies go to its experts' ranks, and its results come back.")


def _observe(rank: int, answer: Callable[..., Any]) -> dict[str, Any]:
    """Return the facets of several calls; a row says its token, a result its expert too."""
    watch, p = Watch(), dist.get_world_size()
    for number, (label, first, hidden, top_k, held, how) in enumerate(CALLS):
        num_tokens, num_experts, got = first + rank, held * p, list[list[float]]()
        tokens = _rows(rank, num_tokens, hidden, number)
        experts = _chosen(rank, num_tokens, top_k, num_experts, how)
        weights = (1 + torch.arange(num_tokens * top_k)).double().view(-1, top_k) / 3

        def run(inputs: Tensor, which: Tensor, got: Any = got, held: int = held) -> Tensor:
            """Add up to the output of this rank's expert, and note whose rows it was given."""
            own = torch.as_tensor(which).to(inputs.dtype)
            if own.shape != inputs.shape[:1]:
                raise ValueError(
                    f"run: need an expert for each of {len(inputs)} rows; got {[*own.shape]}"
                )
            got += [
                [expert, *row] for expert, row in zip(own.tolist(), inputs.tolist(), strict=True)
            ]
            return inputs * (1 + rank * held + own)[:, None]

        with watch.step(label, tokens=tokens, experts=experts, weights=weights) as step:
            out = answer(tokens, experts, weights, run, num_experts)
        counts, *later = [line for line in step.order if line != "wait"] or [""]
        step.show(**{GETS: sorted(got), OUTPUT: out, SENT: [counts.split(" of ")[0], *later]})
        if p == 1:  # then it may do without any call
            step.show(**{UNWAITED: [], SENT: []})
    return watch.seen


def _rows(rank: int, num_tokens: int, hidden: int, number: int) -> Tensor:
    """Return different values that have more digits than float32 keeps: 100.1, 101.1, ..."""
    at = torch.arange(num_tokens * hidden).double().view(-1, hidden)
    return (1001 + 1000 * rank + 400 * number + 10 * at) / 10


def _chosen(rank: int, num_tokens: int, top_k: int, num_experts: int, how: str) -> Tensor:
    """Return different experts for each token; "last": all tokens go to the last ones."""
    at = torch.arange(num_tokens)
    mixed, last = 5 * at + 3 * rank + 1, torch.full((num_tokens,), num_experts - 1)
    first = {"mixed": mixed, "other": 3 * at + rank, "last": last, "next": mixed}[how]
    step = 1 + (at % (num_experts - 1) if how in ("mixed", "other") and num_experts > 1 else 0 * at)
    return (first[:, None] - step[:, None] * torch.arange(top_k)) % num_experts


COPIES, WEIGHTED = "tokens[order // top_k]", "weights.flatten()[order, None]"
GO, WAY_BACK = "received, sent)", "sent, received)"
WHICH_CODE = "which = local_experts(arriving, p)"
INDEX_ADD = "torch.zeros_like(tokens).index_add(0, order // top_k, weighted)"
CODE = "dist.all_to_all_single(arriving, counts)"
GATHER_COUNTS = (
    "everyones = [torch.empty_like(counts) for _ in range(p)]\n"
    "dist.all_gather(everyones, counts)\n"
    "arriving = torch.cat([one.view(p, -1)[dist.get_rank()] for one in everyones])"
)

DISPATCH = Exercise(
    key="experts-2",
    title="dispatch and combine",
    library=("course_lib.expert_parallel.exchange:dispatch",),
    check=ByExample(
        observe_on_rank=_observe,
        facets=(GETS, OUTPUT, *ALWAYS, SENT),
        looks=((GETS, LOOK), (OUTPUT, AFTER), (SENT, BUDGET), ("mismatch", COUNTS)),
        rtol=1e-12,  # results of a token may be added in another order
        success="There and back on 1 to 4 ranks, whatever the tokens choose; three all-to-alls.",
    ),
    wrong=(
        Edit("experts.flatten().argsort(stable=True)", "torch.arange(experts.numel())", NOT_SORTED),
        Edit(COPIES, "tokens.repeat_interleave(top_k, 0)", NOT_SORTED),
        Edit(COPIES, "tokens.repeat(top_k, 1)[order]", WHOSE),
        Edit(COPIES, f"{COPIES}.float().to(tokens.dtype)", DTYPE),
        Edit(
            WHICH_CODE,
            "which = torch.arange(num_experts // p).repeat_interleave(arriving.view(p, -1).sum(0))",
            WHICH,
        ),
        Edit(WHICH_CODE, "which = torch.arange(num_experts).repeat_interleave(arriving)", WHICH),
        Edit(WHICH_CODE, "which = torch.zeros(len(inputs), dtype=torch.int64)", WHICH),
        Edit(CODE, "arriving = counts", COUNTS),
        Edit("for c in (counts, arriving))", "for c in (counts, counts))", COUNTS),
        Edit(WAY_BACK, "received, sent)", BACK),
        Edit(INDEX_ADD, "weighted.view(-1, top_k, tokens.shape[1]).sum(1)", PLACES),
        Edit(INDEX_ADD, "torch.zeros_like(tokens).index_copy(0, order // top_k, weighted)", ADD),
        Edit(WEIGHTED, "weights.flatten()[:, None]", WEIGHTS),
        Edit(f"results * {WEIGHTED}", "results", NO_WEIGHTS),
        Edit(CODE, GATHER_COUNTS, BUDGET),
        Edit("sent, received = ", "tokens.mul_(1.0)\nweights.zero_()\nsent, received = ", CALLERS),
        SEEDS,
    ),
)
