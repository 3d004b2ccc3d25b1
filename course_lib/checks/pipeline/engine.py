"""Exercise 3 of 08_pipeline: one rank of an engine that runs any schedule.

The batch holds its input on the first rank only, its targets on the last one only: whoever looks
elsewhere computes NaN. The stage notes its actions, and what is alive when they start.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib.checks.accumulation.effects import LiveStorages
from course_lib.checks.edits import Edit
from course_lib.checks.exercise import Cause, Exercise
from course_lib.checks.judge import ByExample
from course_lib.checks.pipeline.parts import NO_HANDLE, UNDER_WAY
from course_lib.checks.properties import CALLERS, TRAINS
from course_lib.checks.watch import ALWAYS, OVERWRITTEN, UNWAITED, WAIT, Step, Watch
from course_lib.pipeline.actions import Action, Schedule, in_flight
from course_lib.pipeline.schedules import gpipe, naive, one_f_one_b

ITEMS, WIDTH, VOCAB = 2, 3, 5
SPARE = 2  # graphs: the names of the last forward and of the last backward may still hold theirs
ACTIONS, LOST, ALIVE, MEMORY = "actions", "inputs lost", "activations alive", "memory"
MODES, CONSTANT = "train or eval mode", "does not grow with m"

DIVIDED = Cause("Divide each loss once, on the last stage, by the number of micro-batches.")
PARAM_DIVIDED = Cause(
    "What was in param.grad before the step is divided by m, too: divide the loss, not param.grad."
)
BY_ITEMS = Cause(
    "Each loss was weighted by its number of items: take the plain mean of the m losses, also "
    "where a micro-batch is smaller."
)
GOES_BACK = Cause("What goes back to rank - 1 is the gradient of the stage's input: x.grad.")
ADD_UP = Cause(
    "Gradients add up in param.grad, as backward() does it. Only the caller clears them."
)
NUMBERED = Cause(
    "Is every gradient used with the activations of its own micro-batch? Store x and y under i, "
    "and look them up by it."
)
ELSEWHERE = Cause(
    "x holds numbers on the first stage only, target on the last one only; elsewhere they are NaN. "
    "The other stages get what they need by recv."
)
NO_GRAD = Cause(
    "x.grad is None: a received tensor needs no gradient by default. Call x.requires_grad_() on it "
    "before the stage computes."
)
NO_GRAPH = Cause(
    "y has no graph: keep the y that the stage returned, not y.detach(), and compute it with "
    "autograd on."
)
TOKENS = Cause(
    "Tokens are integers: they have no gradient, and none is needed on the first rank. Call "
    "x.requires_grad_() only on what was received."
)
BATCH = Cause(
    "The batch belongs to the caller: receive into a new tensor, torch.empty_like(x), and call "
    "requires_grad_() only on what was received."
)
ONCE = Cause("One forward for each micro-batch: keep its x and y for the backward.")
NOT_ARRIVED = Cause(
    "It was used before it had arrived. Receive with recv, or call wait() on what irecv returns "
    "before you use the tensor."
)
IN_ORDER = Cause("Run the actions one by one, in the order of the list, those that are in it.")
OWN_BUFFER = Cause("A micro-batch in flight lost its x: receive each one into a tensor of its own.")
GRAPHS = Cause("Remove x and y at their backward (pop), keep no list of them, and send y.detach().")
GROWS = Cause(
    "Something is kept for every micro-batch. Keep no list of what was sent or received. A handle "
    "holds its message, even after wait(): drop old handles during the step."
)
MESSAGES = Cause("Between neighbors, one message per micro-batch and direction, and nothing else.")
HANDLES = Cause(
    "Keep every handle that isend or irecv returns, and call wait() on each: that of irecv before "
    "you use the tensor, that of isend before you return."
)
NEIGHBORS = Cause(
    "Every message needs both its ends: y goes to rank + 1 and x.grad to rank - 1, if there is "
    "such a rank, and that one receives. Use isend, keep its handle, and wait() before you return: "
    "send waits until the other rank receives."
)
SAME_SHAPE = Cause(
    "A message and the tensor for it need the same dtype and shape, those of its own micro-batch: "
    "torch.empty_like(x) for an activation, torch.empty_like(y) for a gradient."
)


# --- what is run


@dataclass(frozen=True)
class EngineRun:
    """One step: its schedule, and what is special about its batch and its gradients."""

    make: Callable[[int, int], Schedule]
    m: int
    last_items: int = ITEMS
    tokens: bool = False
    dtype: torch.dtype = torch.float64
    earlier: bool = False
    nan: bool = False


def _newest_first(p: int, m: int) -> Schedule:
    """Return GPipe with its backwards in the other order: a schedule that needs the numbers."""
    return [actions[:m] + actions[m:][::-1] for actions in gpipe(p, m)]


SHORT, LONG = "1F1B, 12 micro-batches, on top of earlier gradients", "1F1B, 32 micro-batches"
SETUPS = {
    "1F1B, 4 micro-batches": EngineRun(one_f_one_b, 4),
    "GPipe, 3 micro-batches, the last one smaller": EngineRun(gpipe, 3, last_items=1),
    "1F1B, 1 micro-batch": EngineRun(one_f_one_b, 1),
    SHORT: EngineRun(one_f_one_b, 12, earlier=True),
    LONG: EngineRun(one_f_one_b, 32),
    "GPipe, 9 micro-batches": EngineRun(gpipe, 9),
    "naive, 2 micro-batches of tokens, float32": EngineRun(
        naive, 2, tokens=True, dtype=torch.float32
    ),
    "GPipe, 5 micro-batches, backwards from the newest on": EngineRun(_newest_first, 5),
    "1F1B, 3 micro-batches, a target of nan": EngineRun(one_f_one_b, 3, nan=True),
}
MAY_GROW = 10 * ITEMS * WIDTH * 8  # a message for half of the additional micro-batches


def _runs(_p: int) -> list[Mapping[str, Any]]:
    """Run the setups with tokens, with another order and with nan once the others are right."""
    return [{"labels": [*SETUPS][:-3]}, {"labels": [*SETUPS][-3:]}]


def _run_steps(rank: int, answer: Callable[..., Any], labels: Sequence[str]) -> dict[str, Any]:
    """Run the answer with each of these setups."""
    watch, p, peaks = Watch(), dist.get_world_size(), dict[str, int]()
    for label in labels:
        setup, live = SETUPS[label], LiveStorages() if label in (SHORT, LONG) else None
        actions, stage = setup.make(p, setup.m)[rank], SampleStage(rank, setup)
        batch = _batch(setup, first=rank == 0, last=rank == p - 1)
        given = {"stage": stage, "actions": [*actions], "micro_batches": batch}
        with watch.step(label, **given) as step, live or nullcontext():
            stage.alive_bytes = partial(_alive_bytes, step, live) if live else int
            answer(given["actions"], stage, batch, _loss)
        calls = (line for line in step.order if line != WAIT and not line.startswith("recv"))
        peaks[label] = stage.peak_bytes
        grows = peaks[label] - peaks[SHORT] if label == LONG else 0
        more = f"{grows} bytes more than with {SETUPS[SHORT].m} micro-batches"
        step.show(
            gradients={name: param.grad for name, param in stage.named_parameters()},
            messages=sorted(f"{count} x {line}" for line, count in Counter(calls).items()),
            **{ACTIONS: stage.actions, MODES: stage.other_modes, LOST: stage.lost},
            **{ALIVE: _too_many(stage, actions), MEMORY: more if grows > MAY_GROW else CONSTANT},
        )
    return watch.seen


def _alive_bytes(step: Step, live: LiveStorages) -> int:
    """Return the bytes alive, but for calls that were waited for: only the watch holds those."""
    step.calls = {key: call for key, call in step.calls.items() if not call.waited}
    return live.num_bytes()


def _batch(setup: EngineRun, *, first: bool, last: bool) -> list[tuple[Tensor, Tensor]]:
    """Return the micro-batches, each with other numbers, as a first or last rank gets them."""
    random, batch = torch.Generator().manual_seed(setup.m), []
    for i in range(setup.m):
        shape = (setup.last_items if i == setup.m - 1 else ITEMS, WIDTH)
        x, target = torch.randn(2, *shape, generator=random, dtype=setup.dtype).clone()
        tokens = torch.randint(VOCAB, shape, generator=random)
        empty = torch.full(shape, torch.nan, dtype=setup.dtype)
        target = empty.clone() if setup.nan and i == 1 else target.clone()
        x = tokens if setup.tokens else x.clone()
        batch.append((x if first else empty, target if last else empty.clone()))
    return batch


def _loss(y: Tensor, target: Tensor) -> Tensor:
    """Return the mean over one micro-batch; its gradients are too large for who clips them."""
    return 1000 * ((y - target) ** 2).mean()


def _too_many(stage: "SampleStage", actions: list[Action]) -> list[str]:
    """Return before which forwards more graphs were alive than micro-batches in flight."""
    counts = [0, *in_flight(actions)]
    may_be = [before for before, now in pairwise(counts) if now > before]
    pairs = enumerate(zip(stage.graphs, may_be, strict=False))
    return [f"{n} before F{i} ({most} in flight)" for i, (n, most) in pairs if n > most + SPARE]


class SampleStage(nn.Module):
    """A stage, tanh of a linear layer, with a table for tokens on the first rank.

    It notes its `actions`, the `graphs` that are alive before each forward, the most bytes at the
    start of an action, in which forwards it is in other modes, and which inputs were `lost`: held
    other numbers in backward.
    """

    def __init__(self, rank: int, setup: EngineRun) -> None:
        super().__init__()
        random, dtype = torch.Generator().manual_seed(rank), setup.dtype
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, generator=random, dtype=dtype))
        self.bias = nn.Parameter(torch.randn(WIDTH, generator=random, dtype=dtype))
        self.table: nn.Parameter | None = None
        if rank == 0 and setup.tokens:
            self.table = nn.Parameter(torch.randn(VOCAB, generator=random, dtype=dtype))
        if rank < 2:  # a frozen parameter in a stage that has another one
            (self.bias if rank == 0 else self.weight).requires_grad_(False)
        for param in self.parameters():
            if setup.earlier and param.requires_grad:
                param.grad = torch.full_like(param, 3.0)
        self.part = nn.Identity()
        self.train(not setup.tokens)
        self.part.eval()
        self.modes, self.peak_bytes = self._modes(), 0
        self.alive_bytes: Callable[[], int] = int
        self.actions, self.lost, self.other_modes = list[str](), list[str](), list[str]()
        self.graphs = list[int]()
        self.alive: weakref.WeakSet[_Token] = weakref.WeakSet()

    def forward(self, x: Tensor) -> Tensor:
        """Compute one micro-batch."""
        number = len(self.graphs)
        self.graphs.append(len(self.alive))
        self.note(f"F{number}")
        if self._modes() != self.modes:
            self.other_modes.append(f"another one in F{number}")
        x = x if self.table is None else self.table[x]
        y: Tensor = _Watched.apply((x @ self.weight + self.bias).tanh(), x.detach(), self, number)
        return y

    def note(self, action: str) -> None:
        """Note the start of an action."""
        self.actions.append(action)
        self.peak_bytes = max(self.peak_bytes, self.alive_bytes())

    def _modes(self) -> list[bool]:
        return [part.training for part in self.modules()]


class _Token:
    """An object that lives as long as the graph of one forward."""


class _Watched(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, x: Tensor, stage: SampleStage, number: int) -> Tensor:
        ctx.token, ctx.stage, ctx.number = _Token(), stage, number
        ctx.x, ctx.numbers = x, x.tolist()
        stage.alive.add(ctx.token)
        return y.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.stage.note(f"B{ctx.number}")
        if ctx.x.tolist() != ctx.numbers:
            ctx.stage.lost.append(f"x of micro-batch {ctx.number} at its backward")
        return grad, None, None, None


# --- mistakes

AHEAD, BACK = "dist.isend(y.detach(), rank + 1)", "dist.isend(x.grad, rank - 1)"
RECEIVES, MAKES, ASKS = "dist.recv(x, rank - 1)", "x = torch.empty_like(x)", "x.requires_grad_()"
COMPUTES, KEEPS, TAKES = "y = stage(x)", "kept[i] = x, y", "x, y = kept.pop(i)"
STARTS, FINISH = "kept, sent = {}, []", "for work in sent:"
DIVIDE_GRADS = "for w in filter(lambda w: w.requires_grad, stage.parameters()):\n    w.grad /= m"


def _sent(ahead: str, back: str) -> Edit:
    """Return the right answer with other sends."""
    return Edit(f"sent.append({AHEAD})", ahead, NEIGHBORS, ((f"sent.append({BACK})", back),))


ENGINE = Exercise(
    key="pipeline-3",
    title="run a schedule",
    check=ByExample(
        observe_on_rank=_run_steps,
        runs=_runs,
        facets=(*ALWAYS, MODES, ACTIONS, LOST, "gradients", "messages", ALIVE, MEMORY),
        looks=(
            ("hang", NEIGHBORS),
            ("mismatch", SAME_SHAPE),
            (UNWAITED, HANDLES),
            (OVERWRITTEN, UNDER_WAY),
            (MODES, CALLERS),
            (ACTIONS, IN_ORDER),
            (LOST, OWN_BUFFER),
            ("gradients", NUMBERED),
            ("messages", MESSAGES),
            (ALIVE, GRAPHS),
            (MEMORY, GROWS),
        ),
        success=(
            "The gradients of one process on 1 to 4 ranks; no message and no activation too many."
        ),
    ),
    wrong=(
        Edit(" / m)", ")", DIVIDED),
        Edit(" / m)", " / p)", DIVIDED),
        Edit("y.backward(grad)", "y.backward(grad / m)", DIVIDED),
        Edit(" / m)", ")", PARAM_DIVIDED, ((FINISH, f"{DIVIDE_GRADS}\n{FINISH}"),)),
        Edit(" / m)", " * len(target) / sum(len(each) for _, each in micro_batches))", BY_ITEMS),
        Edit("isend(x.grad,", "isend(x.detach(),", GOES_BACK),
        Edit("isend(x.grad,", "isend(y.detach(),", GOES_BACK),
        Edit("isend(x.grad,", "isend(x.grad if rank == p - 1 else grad,", GOES_BACK),
        Edit(TAKES, f"stage.zero_grad()\n{TAKES}", ADD_UP),
        Edit(STARTS, f"{STARTS}\nstage.zero_grad()", ADD_UP),
        Edit("(y, target)", "(y, micro_batches[0][1])", NUMBERED),
        Edit("kept.pop(i)", "kept.popitem()[1]", NUMBERED),
        Edit(KEEPS, "kept[0] = x, y", NUMBERED, ((TAKES, "x, y = kept[0]"),)),
        Edit("kept.pop(i)", "kept.pop(next(iter(kept)))", NUMBERED),
        Edit(ASKS, "x = micro_batches[i][0].clone().requires_grad_()", ELSEWHERE),
        Edit(ASKS, "pass", NO_GRAD),
        Edit(KEEPS, "kept[i] = x, y.detach()", NO_GRAPH),
        Edit(COMPUTES, f"with torch.no_grad():\n    {COMPUTES}", NO_GRAPH),
        Edit(COMPUTES, f"x = x.detach().requires_grad_()\n{COMPUTES}", TOKENS),
        Edit(COMPUTES, f"{ASKS}\n{COMPUTES}", BATCH),
        Edit(MAKES, "pass", BATCH),
        Edit("in actions:", "in iter(lambda: actions.pop(0) if actions else 0, 0):", CALLERS),
        Edit(TAKES, f"{TAKES}\ny = stage(x)", ONCE),
        Edit("in actions:", 'in sorted(actions, key=lambda a: a.kind == "backward"):', IN_ORDER),
        Edit("dist.recv(x,", "dist.irecv(x,", HANDLES),
        Edit(RECEIVES, "sent.append(dist.irecv(x, rank - 1))", NOT_ARRIVED),
        Edit(MAKES, f"x = kept.setdefault((x.shape, i % p), {MAKES[4:]}).detach()", OWN_BUFFER),
        Edit("kept.pop(i)", "kept[i]", GRAPHS),
        Edit("y.detach()", "y", GRAPHS),
        Edit("if len(sent) > 2 * p:", "if False:", GROWS),
        Edit(KEEPS, f"{KEEPS}\nkept.setdefault(-1, []).append(y.detach())", GROWS),
        Edit("sent.pop(0).wait()", "sent.pop(0)", NEIGHBORS, (("    work.wait()", "    pass"),)),
        _sent(AHEAD.replace("isend", "send"), BACK.replace("isend", "send")),
        _sent(f"{AHEAD}.wait()", f"{BACK}.wait()"),
        Edit("if rank < p - 1:", "if True:", NEIGHBORS, (("rank + 1))", "(rank + 1) % p))"),)),
        Edit(BACK, BACK.replace("isend", "send"), NO_HANDLE),
        Edit("empty_like(x)", "empty_like(micro_batches[0][0])", SAME_SHAPE),
        Edit("torch.empty_like(y)", "torch.empty_like(x)", SAME_SHAPE),
        Edit(
            RECEIVES,
            "for row in x:\n    dist.recv(row, rank - 1)",
            MESSAGES,
            ((f"sent.append({AHEAD})", f"sent += [{AHEAD} for y in y.split(1)]"),),
        ),
        *TRAINS,
    ),
)
