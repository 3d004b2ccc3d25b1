"""Exercise 2 of 15_context_parallel: the forward pass of a ring."""

import re
from collections.abc import Callable, Iterable
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.checks.edits import Edit, Own
from course_lib.checks.exercise import Cause, Exercise
from course_lib.checks.judge import ByExample
from course_lib.checks.properties import CALLERS, SEEDS
from course_lib.checks.watch import ALWAYS, ORDER, UNWAITED, Watch
from course_lib.context_parallel.partial import attend_block, merge

OUTPUT, ROUNDS, KINDS = "the output", "messages and attend", "what is returned"
SOURCES = "whose values attend gets"
ATTEND, MESSAGES, WAITS = "attend", "messages", "wait"
CALLS = (
    # label, batch, heads, tokens of a rank, head_dim
    ("2 heads of 3 tokens", 1, 2, 3, 4),
    ("the same shape, other numbers", 1, 2, 3, 4),
    ("one token, batch 2", 2, 1, 1, 2),
)

ONE_BLOCK = Cause("Only some blocks are in it: merge the part of every step into what there is.")
WEIGHTS = Cause("Outputs do not add up: use merge, which weighs each part by its lse.")
SAME_BLOCK = Cause(
    "Each step computes with the block that has just arrived, and sends this one on. Receive into "
    "a new tensor: the old one is still being sent."
)
EACH_STEP = Cause("In each step but the last: start one message each way, attend, wait for both.")
EARLY = Cause("The block is read before it has arrived: wait for both handles after attend.")
NO_OVERLAP = Cause("Nothing overlaps: start both messages before attend, and wait after it.")
HANGS = Cause(
    "Each of the p - 1 messages needs its partner: on every rank start isend and irecv of a step, "
    "and wait for both only then."
)
TOO_MANY = Cause("p - 1 messages are enough: in the last step nobody needs another block.")
ONE_MESSAGE = Cause("Keys and values travel together: torch.stack([k, v]) is one message a step.")
LEFT = Cause("A block goes to the right neighbor, rank + 1, and comes from the left one.")
ALL_KEYS = Cause("That holds the keys of all ranks. A ring holds two blocks: the next one arrives.")
THE_OUTPUT = Cause("Return the output alone; its lse was needed for merging only.")


def _observe(rank: int, answer: Callable[..., Any]) -> dict[str, Any]:
    """Return the facets of three calls; keys differ by rank, those of the last one score high."""
    watch, p = Watch(), dist.get_world_size()

    sources = list[int]()

    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        watch.mark(ATTEND)
        sources.append(round(v.mean().item() / 10))
        return attend_block(q, k, v)

    for number, (label, batch, heads, n, head_dim) in enumerate(CALLS):
        first = 5 * number + 3 * rank
        q, k, v = (_numbers(first + 4 * which, batch, n, heads, head_dim) for which in range(3))
        q, k, v = (x.transpose(1, 2) for x in (q, k * (1 + rank), v + 10.0 * rank))
        sources.clear()
        with watch.step(label, q=q, k=k, v=v) as step:
            found = answer(q, k, v, attend)
        step.show(**{OUTPUT: found, KINDS: type(found).__name__, SOURCES: [*sources]})
        step.show(**{ROUNDS: list(_rounds(step.shown[ORDER]))})
        if p == 1:  # there may be messages to itself
            step.show(**{UNWAITED: []})
    return watch.seen


def _numbers(first: int, *shape: int) -> Tensor:
    """Return numbers from -1.25 to 1.25, in a row that repeats late: the same on any machine."""
    count = torch.arange(torch.Size(shape).numel())
    return (((count + first) ** 2 + 3 * count) % 11 - 5).double().view(shape) / 4


def _rounds(order: Iterable[str]) -> Iterable[str]:
    """Yield the order of a step without what is free: which message starts first, late waits."""
    lines = [re.sub(r"^(\d+) x ", "", line) for line in order for _ in range(_times(line))]
    while lines and lines[-1] == WAITS:
        lines.pop()
    for is_wait, run in groupby(lines, lambda line: line == WAITS):
        if is_wait:
            yield WAITS
            continue
        for _, part in groupby(run, lambda line: line == ATTEND):
            yield from sorted(part)


def _times(line: str) -> int:
    found = re.match(r"(\d+) x ", line)
    return int(found[1]) if found else 1


def _gathered(q: Tensor, k: Tensor, v: Tensor, attend: Callable[..., Any]) -> Tensor:
    blocks = [torch.empty_like(torch.stack([k, v])) for _ in range(dist.get_world_size())]
    dist.all_gather(blocks, torch.stack([k, v]))
    o, lse = attend(q, *blocks[0])
    for block in blocks[1:]:
        o, lse = merge(o, lse, *attend(q, *block))
    return o


WORKS = "works = [dist.isend(block, (rank + 1) % p), dist.irecv(coming, (rank - 1) % p)]"
APART = (
    "works = [dist.isend(x, (rank + 1) % p) for x in block]\n"
    "works += [dist.irecv(x, (rank - 1) % p) for x in coming]"
)
MERGES, PART = "merge(*total, *part) if total else part", "part = attend(q, *block)"

RING = Exercise(
    key="context_parallel-2",
    title="the ring's forward",
    library=("course_lib.context_parallel.ring:ring_attention",),
    check=ByExample(
        observe_on_rank=_observe,
        facets=(KINDS, UNWAITED, SOURCES, OUTPUT, ROUNDS, *ALWAYS),
        looks=(
            ("hang", HANGS),
            (SOURCES, SAME_BLOCK),
            (OUTPUT, WEIGHTS),
            (ROUNDS, EACH_STEP),
            (KINDS, THE_OUTPUT),
        ),
        rtol=1e-9,  # parts may be merged in another order
        success="The keys of all ranks on 1 to 4 ranks, one message per step, while it computes.",
    ),
    wrong=(
        Edit(MERGES, "part", ONE_BLOCK),
        Edit(MERGES, "total or part", ONE_BLOCK),
        Edit(MERGES, "(total[0] + part[0] / p, None) if total else (part[0] / p, None)", WEIGHTS),
        Edit("block = coming", "pass", SAME_BLOCK),
        Edit("for work in works:", "for work in works[:1]:", EARLY),
        Edit(PART, f"for work in works:\n    work.wait()\n{PART}", NO_OVERLAP),
        Edit("if step < p - 1:", "if p > 1:", TOO_MANY),
        Edit(WORKS, APART, ONE_MESSAGE),
        Edit(WORKS, WORKS.replace("+", "*").replace("-", "+").replace("*", "-"), LEFT),
        Edit("return total[0]", "return total", THE_OUTPUT),
        Edit("return total[0]", "q.zero_()\nreturn total[0]", CALLERS),
        Own(_gathered, ALL_KEYS),
        SEEDS,
    ),
)
