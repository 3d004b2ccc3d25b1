"""Exercise 3 of 08_pipeline: one rank of an engine that runs any schedule.

The planted mistakes are in `engine_answers.py`. The batch holds numbers on the first rank
only, the targets on the last one only: whoever looks elsewhere computes NaN.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from course_lib.checks.exercise import CheckFailed, Exercise, Mistake
from course_lib.checks.expect import told
from course_lib.checks.pipeline import engine_answers as planted
from course_lib.core import COMMUNICATION_KINDS, Event
from course_lib.pipeline.actions import Schedule, in_flight
from course_lib.pipeline.schedules import gpipe, naive, one_f_one_b
from course_lib.ranks import RankError, Ranks, record

WORLD_SIZES = (3, 2, 4, 1)
CASES: tuple[tuple[str, Callable[[int, int], Schedule], int], ...] = (
    ("1F1B", one_f_one_b, 4),
    ("1F1B", one_f_one_b, 8),
    ("GPipe", gpipe, 3),
    ("naive", naive, 2),
    ("1F1B", one_f_one_b, 1),
)
# the micro-batch before may still have its name; whoever watches a rank looks at its names, too
SPARE = 3
HANDLE = "Keep what isend returns in a list, and call wait() on each before you return."
ITEMS, WIDTH = 2, 3
Grads = list[Tensor]
NOT_NUMBERED = (
    "Is every gradient used with the activations of its own micro-batch? Keep x and y under the "
    "number i, and take them out by it."
)


# --- on the ranks


@dataclass
class Seen:
    """The results of one step on one rank."""

    grads: Grads
    order: str
    most_alive: int
    changed: bool
    events: list[Event] = field(default_factory=list)


def _steps(rank: int, answer: Callable[..., Any], p: int) -> list[Seen]:
    found = []
    for _, make, m in CASES:
        stage, batch = SampleStage(rank), batch_of(m)
        for x, target in batch:
            x.mul_(1 if rank == 0 else torch.nan)
            target.mul_(1 if rank == p - 1 else torch.nan)
        before = [(x.clone(), target.clone()) for x, target in batch]
        with record() as log:
            answer(make(p, m)[rank], stage, batch, loss_fn)
        changed = not all(
            torch.equal(x.nan_to_num(9.0), y.nan_to_num(9.0))
            for now, then in zip(batch, before, strict=True)
            for x, y in zip(now, then, strict=True)
        )
        grads, order = stage.grads(), stage.order
        events = [event for event in log.events if event.kind in COMMUNICATION_KINDS]
        found.append(Seen(grads, order, stage.most_alive, changed, events))
    return found


def check_engine(answer: Callable[..., Any]) -> str:
    """Check 1 to 4 ranks, three schedules: gradients, messages, what is kept alive."""
    for p in WORLD_SIZES:
        with Ranks(p) as ranks:
            try:
                by_rank = ranks.run(_steps, answer, p)
            except RankError as error:
                raise told(error, p, _why_stuck(error, p)) from None
        for at, (name, make, m) in enumerate(CASES):
            seen = [steps[at] for steps in by_rank]
            _judge(f"{name} on {p} rank{'s' * (p > 1)}, {m} micro-batches", seen, make(p, m))
    return "The gradients of one process on 1 to 4 ranks; no message and no activation too many."


def _judge(where: str, seen: Sequence[Seen], schedule: Schedule) -> None:
    p, m = len(schedule), len(schedule[0]) // 2
    for rank, one in enumerate(seen):
        if one.changed:
            raise CheckFailed(
                f"{where}: the batch of rank {rank} has changed. Receive into a tensor of its "
                "own: torch.empty_like(x)."
            )
    _expect_gradients(where, [one.grads for one in seen], p, m)
    for rank, (one, actions) in enumerate(zip(seen, schedule, strict=True)):
        wanted = "".join(action.label[0] for action in actions)
        if one.order != wanted:
            raise CheckFailed(
                f"{where}: rank {rank} has to run {wanted}; it ran {one.order}. Go through the "
                "list of actions in its order."
            )
        held = max(in_flight(actions))
        if one.most_alive > held + SPARE:
            raise CheckFailed(
                f"{where}: rank {rank} keeps the activations of {one.most_alive} micro-batches "
                f"alive; the schedule needs {held}. Take them out when they go backward (pop), "
                "and send y.detach()."
            )
        _expect_messages(where, one.events, rank, p, m)


def _expect_gradients(where: str, got: Sequence[Grads], p: int, m: int) -> None:
    right = gradients(p, m)
    for rank in range(p):
        if not _same(got[rank : rank + 1], right[rank : rank + 1]):
            need, is_now = (grads[0].flatten()[0].item() for grads in (right[rank], got[rank]))
            raise CheckFailed(
                f"{where}: rank {rank} needs a gradient that begins with {need:.4g}; "
                f"got {is_now:.4g}. {_why(got, right, p, m)}"
            )


def _why(got: Sequence[Grads], right: Sequence[Grads], p: int, m: int) -> str:
    """Return the misconception behind wrong gradients."""
    if any(bool(grad.isnan().any()) for grads in got for grad in grads):
        return (
            "NaN: x holds numbers on the first stage only, target on the last one only. The "
            "other stages get what they need by recv."
        )
    if not all(any(bool(grad.any()) for grad in grads) for grads in got):
        return "There a gradient is missing: who calls backward, on every rank?"
    for change, says in causes(p, m):
        if _same(got, gradients(p, m, **change)):
            return says
    times = [_times(grads, others) for grads, others in zip(got, right, strict=True)]
    if all(times):
        each = ", ".join(f"{number:.4g}" for number in times if number)
        return f"By rank, the gradients are {each} times what they should be. Who divides the loss?"
    return NOT_NUMBERED


def _times(got: Grads, right: Grads) -> float | None:
    """Return the factor between the two, if there is one."""
    number = (got[0].flatten()[0] / right[0].flatten()[0]).item()
    return number if _same([got], [[number * grad for grad in right]]) else None


def _same(got: Sequence[Grads], wanted: Sequence[Grads]) -> bool:
    return all(
        torch.allclose(one, other, rtol=1e-10, atol=1e-14)
        for grads, others in zip(got, wanted, strict=True)
        for one, other in zip(grads, others, strict=True)
    )


def _expect_messages(where: str, events: Sequence[Event], rank: int, p: int, m: int) -> None:
    other = [event for event in events if event.kind not in ("send", "recv")]
    if other:
        raise CheckFailed(f"{where}: rank {rank} calls {other[0].kind}; use sends and receives.")
    for kind in ("recv", "send"):
        ahead, behind = ((rank > 0), (rank < p - 1)) if kind == "recv" else (rank < p - 1, rank > 0)
        need, sizes = (ahead + behind) * m, [e.num_bytes for e in events if e.kind == kind]
        if len(sizes) < need:
            raise CheckFailed(
                f"{where}: rank {rank} returns without knowing whether {need - len(sizes)} of its "
                f"messages have arrived. {HANDLE}"
            )
        if len(sizes) > need or any(size != ITEMS * WIDTH * 8 for size in sizes):
            raise CheckFailed(
                f"{where}: rank {rank} has {len(sizes)} {kind}s of {sum(sizes)} bytes; need {need} "
                f"of {need * ITEMS * WIDTH * 8}. One message a micro-batch and direction."
            )


def _why_stuck(error: RankError, p: int) -> str:
    raised = " ".join(message for _, message in error.failures.values())
    if "NoneType" in raised or "does not require grad" in raised:
        return (
            "x.grad is None: what was received is a plain tensor. Call x.requires_grad_() on it "
            "before the stage computes."
        )
    if "second time" in raised:
        return f"The same graph went backward twice. {NOT_NUMBERED}"
    if error.kind == "mismatch":
        return "A message and the tensor for it need the same dtype and shape: torch.empty_like."
    if error.kind != "hang":
        return ""
    if error.report.dropped:
        return HANDLE
    for wait in error.waits:
        if wait.kind == "send" and any(abs(wait.rank - to) != 1 for to in wait.waits_for):
            return (
                "The last stage sends its output to nobody, and the first one its gradient to "
                "nobody: look at rank > 0 and rank < p - 1."
            )
    if any(wait.kind == "send" for wait in error.waits):
        return (
            "Two neighbours are in a send, and a send waits until somebody receives. isend "
            "returns at once: wait() for it at the end of the step."
        )
    return "Who sends what they wait for? A forward's output goes to rank + 1, x.grad to rank - 1."


def _does_nothing(*_given: Any) -> None:
    pass


ENGINE = Exercise(
    key="pipeline-3",
    title="run a schedule",
    check=check_engine,
    reference=planted.run_actions,
    mistakes=(
        Mistake("loss not divided", planted.answer(planted.NotDivided), "times too large"),
        Mistake("divided by ranks", planted.answer(planted.DividedByRanks), "number of ranks"),
        Mistake("divided by each stage", planted.answer(planted.DividedByEach), "every stage anew"),
        Mistake("divided at the end", planted.answer(planted.DividedAtTheEnd), "Who divides"),
        Mistake("does nothing", _does_nothing, "who calls backward"),
        Mistake("sends that block", planted.answer(planted.SendBlocks), "isend"),
        Mistake("waits at once", planted.answer(planted.WaitsAtOnce), "at the end of the step"),
        Mistake("no requires_grad", planted.answer(planted.NoRequiresGrad), "requires_grad_()"),
        Mistake("kept for ever", planted.answer(planted.KeptForEver), "Take them out"),
        Mistake("graphs kept", planted.answer(planted.GraphsKept), "send y.detach()"),
        Mistake("sends the input", planted.answer(planted.SendsInput), "is the activation x"),
        Mistake("sends the output", planted.answer(planted.SendsOutput), "is the output y"),
        Mistake("passes on", planted.answer(planted.PassesOn), "hands on the gradient it got"),
        Mistake("never waits", planted.answer(planted.NeverWaits), "call wait() on each"),
        Mistake("keeps one", planted.answer(planted.KeepsOne), "under the number i"),
        Mistake("newest first", planted.answer(planted.NewestFirst), "under the number i"),
        Mistake("from the batch", planted.answer(planted.FromTheBatch), "by recv"),
        Mistake("into the batch", planted.answer(planted.IntoTheBatch), "torch.empty_like(x)"),
        Mistake("the first target", planted.answer(planted.FirstTarget), "first one's target"),
        Mistake("the last one only", planted.answer(planted.LastOnly), "have to add up"),
        Mistake("an order of its own", planted.answer(planted.OwnOrder), "in its order"),
        Mistake("a circle", planted.answer(planted.Circle), "to nobody"),
        Mistake("the first sends back", planted.answer(planted.FirstSendsBack), "to nobody"),
        Mistake("half of the digits", planted.answer(planted.HalfPrecision), "same dtype"),
    ),
)


class SampleStage(nn.Module):
    """A stage, tanh of a linear layer, that logs its calls and how many of its graphs are alive."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(rank)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, generator=random).double())
        self.bias = nn.Parameter(torch.randn(WIDTH, generator=random).double())
        if rank < 2:  # a frozen parameter in a stage that has another one
            (self.bias if rank == 0 else self.weight).requires_grad_(False)
        self.order, self.most_alive = "", 0
        self.alive: weakref.WeakSet[_Token] = weakref.WeakSet()

    def forward(self, x: Tensor) -> Tensor:
        return _Watched.apply((x @ self.weight + self.bias).tanh(), self)

    def grads(self) -> Grads:
        """Return param.grad; zeros where it is None."""
        trained = [param for param in self.parameters() if param.requires_grad]
        return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in trained]


class _Token:
    """An object that lives as long as the graph of one forward."""


class _Watched(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, stage: SampleStage) -> Tensor:
        ctx.token, ctx.stage = _Token(), stage
        stage.alive.add(ctx.token)
        stage.order += "F"
        stage.most_alive = max(stage.most_alive, len(stage.alive))
        return y.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.stage.order += "B"
        return grad, None


def loss_fn(y: Tensor, target: Tensor) -> Tensor:
    """Return the mean over one micro-batch."""
    return ((y - target) ** 2).mean()


def batch_of(m: int) -> list[tuple[Tensor, Tensor]]:
    """Return m micro-batches with different numbers."""
    random = torch.Generator().manual_seed(m)
    made = torch.randn(m, 2, ITEMS, WIDTH, generator=random).double()
    return [(x.clone(), target.clone()) for x, target in made]


# --- on one process: the right gradients, and wrong ones to compare with


def gradients(
    p: int,
    m: int,
    *,
    loss_scale: float = 1.0,
    passed_on: Callable[[Tensor, Tensor, Tensor | None], Any] = lambda x, y, grad: x.grad,
    scaled: float = 1.0,
    target_of: Callable[[int], int] = lambda i: i,
    last_only: bool = False,
) -> list[Grads]:
    """Return the gradients of each stage, in an engine that may be wrong."""
    stages, batch = [SampleStage(rank) for rank in range(p)], batch_of(m)
    for i, (x, _) in enumerate(batch):
        kept, grad = list[tuple[Tensor, Tensor]](), None
        for stage in stages:
            x = x.detach().requires_grad_()
            kept.append((x, stage(x)))
            x = kept[-1][1]
        for stage, (x, y) in reversed(list(zip(stages, kept, strict=True))):
            if last_only:
                stage.zero_grad()
            if stage is stages[-1]:
                (loss_fn(y, batch[target_of(i)][1]) / m * loss_scale).backward()
            elif grad is not None:
                y.backward(grad * scaled)
            grad = passed_on(x, y, grad)
    return [stage.grads() for stage in stages]


def causes(p: int, m: int) -> list[tuple[Mapping[str, Any], str]]:
    return [
        (
            {"loss_scale": m},
            f"{m} times too large: divide each loss by the number of micro-batches.",
        ),
        (
            {"loss_scale": m / p},
            "Divided by the number of ranks: it is the number of micro-batches.",
        ),
        ({"loss_scale": 1 / m}, "Divided by the number of micro-batches twice."),
        (
            {"scaled": 1 / m},
            "Divided on every stage anew: only the last stage divides, the others hand on.",
        ),
        (
            {"passed_on": lambda x, y, grad: x.detach()},
            "What goes back is the activation x: send its gradient, x.grad.",
        ),
        (
            {"passed_on": lambda x, y, grad: y.detach()},
            "What goes back is the output y: send the gradient of the input, x.grad.",
        ),
        (
            {"passed_on": lambda x, y, grad: x.grad if grad is None else grad},
            "A stage hands on the gradient it got: it was for y; send the one for x, x.grad.",
        ),
        (
            {"target_of": lambda i: 0},
            "All micro-batches have the first one's target: use number i.",
        ),
        ({"last_only": True}, "Only the last micro-batch is in it: gradients have to add up."),
    ]
