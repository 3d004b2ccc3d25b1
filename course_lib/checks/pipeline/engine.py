"""Exercise 3 of 08_pipeline: one rank of an engine that runs any schedule."""

from itertools import pairwise
from typing import Any

import torch

from course_lib.checks.edits import Edit, Own
from course_lib.checks.exercise import Cause, Exercise
from course_lib.checks.expectations import Demand, OnlyKinds
from course_lib.checks.on_ranks import At, OnRanks, Trouble
from course_lib.checks.pipeline import callers, gradients
from course_lib.checks.pipeline.sends import NO_HANDLE, NOT_CHANGED_UNDER_WAY
from course_lib.checks.pipeline.stages import LONG, SETUPS, SHORT, StepSetup
from course_lib.checks.pipeline.steps import run_steps, runs_of
from course_lib.pipeline.actions import LETTERS, Action, in_flight

SPARE = 2  # graphs: the names of the last forward and of the last backward may still hold theirs

TOKENS = Cause(
    "Tokens are integers: they have no gradient, and none is needed on the first rank. Call "
    "x.requires_grad_() only on what was received."
)
NO_GRAD = Cause(
    "x.grad is None: a received tensor needs no gradient by default. Call x.requires_grad_() on it "
    "before the stage computes."
)
SAME_SHAPE = Cause(
    "A message and the tensor for it need the same dtype and shape, those of its own micro-batch: "
    "torch.empty_like(x) for an activation, torch.empty_like(y) for a gradient."
)
HANDLES = Cause(
    "Keep every handle that isend or irecv returns, and call wait() on each before you return: "
    "until then the message may not have been sent, or received."
)
NOBODY = Cause(
    "The last stage sends its output to no rank, and the first one its gradient to no rank: check "
    "rank > 0 and rank < p - 1."
)
BLOCKING = Cause(
    "A send waits until the other rank receives: use isend, wait() for it at the end of the step, "
    "and receive every message."
)
WHO_SENDS = Cause(
    "No rank sends what these wait for. A forward's output goes to rank + 1, x.grad to rank - 1; "
    "receive a message in the action that needs it, not before."
)
NOT_ARRIVED = Cause(
    "The message may not have arrived: irecv returns at once, so wait() for its handle before the "
    "stage computes (or use recv)."
)
ORDER = Cause("Go through the list of actions in its order.")
LOST = Cause(
    "Backward needs what the stage computed with. A buffer may take the next message only after "
    "the backward of its own micro-batch: receive each into a new torch.empty_like(x)."
)
ONCE = Cause("Call it once for each, and keep x and y for the backward.")
GRAPHS = Cause("Remove x and y at their backward (pop), keep no list of them, and send y.detach().")
GROWS = Cause(
    "Something is kept for every micro-batch. Keep no list of what was sent or received. A handle "
    "holds its message, even after wait(): drop old handles during the step."
)
ONE_MESSAGE = Cause("Send one message per micro-batch and direction.")
SENDS_ONLY = Cause("Use sends and receives between neighbors.")


# --- what is expected


def _setup(at: At) -> StepSetup:
    return SETUPS[at.label]


def _actions(at: At) -> list[Action]:
    return _setup(at).make(at.world_size, _setup(at).m)[at.rank]


def _order(at: At) -> str:
    return "".join(LETTERS[action.kind] for action in _actions(at))


def _backwards(at: At) -> list[int]:
    return [action.micro_batch for action in _actions(at) if action.kind == "backward"]


def _too_early(at: At) -> list[str]:
    """Return the actions, on any rank, that computed before their receive had ended."""
    return [
        f"{kind} number {number} of rank {one.rank}"
        for one in at.everyone
        for kind, peer in (("forward", one.rank - 1), ("backward", one.rank + 1))
        if 0 <= peer < at.world_size and one.seen.order == _order(one)
        for number, start_s in enumerate(_starts_s(one, kind), 1)
        if sum(end_s <= start_s for end_s in _received_s(one, peer)) < number
    ]


def _starts_s(at: At, kind: str) -> list[float]:
    pairs = zip(at.seen.order, at.seen.starts_s, strict=True)
    return [start_s for letter, start_s in pairs if letter == LETTERS[kind]]


def _received_s(at: At, peer: int) -> list[float]:
    """Return when each receive from a rank had ended; one that was not waited for is missing."""
    calls = (call for call in at.seen.calls if call.kind == "recv" and call.peer == peer)
    return [call.end_s for call in calls]


def _too_many_graphs(at: At) -> list[tuple[int, int]]:
    """Return how many graphs were alive before a forward, and how many may be, where it is more."""
    counts = [0, *in_flight(_actions(at))]
    may_be = [before for before, now in pairwise(counts) if now > before]
    return [
        (alive, most)
        for alive, most in zip(at.seen.graphs, may_be, strict=True)
        if alive > most + SPARE
    ]


def _growth_bytes(at: At) -> int:
    """Return how much more is alive at most with more micro-batches."""
    if at.label != LONG:
        return 0
    return at.seen.peak_bytes - at.run.by_rank[at.rank][SHORT].peak_bytes


def _may_grow_bytes(at: At) -> int:
    """Return the bytes of a message for half of the additional micro-batches."""
    return (SETUPS[LONG].m - SETUPS[SHORT].m) // 2 * SETUPS[LONG].num_bytes(0)


def _sizes(at: At, kind: str) -> list[int]:
    return [call.num_bytes for call in at.seen.calls if call.kind == kind]


def _needed_sizes(at: At) -> list[int]:
    """Return the bytes of the messages that a rank sends, and as many that it receives."""
    setup, neighbors = _setup(at), (at.rank > 0) + (at.rank < at.world_size - 1)
    return [setup.num_bytes(i) for i in range(setup.m)] * neighbors


def _unknown(at: At) -> int:
    needed = len(_needed_sizes(at))
    return sum(max(0, needed - len(_sizes(at, kind))) for kind in ("send", "recv"))


def _messages(kind: str) -> Demand:
    """Demand one message of this kind for each micro-batch and neighbor, of its bytes."""
    return Demand(
        lambda at: sorted(_sizes(at, kind)) == sorted(_needed_sizes(at)),
        lambda at: (
            f"{len(_sizes(at, kind))} {kind}s of {sum(_sizes(at, kind))} bytes; need "
            f"{len(_needed_sizes(at))} of {sum(_needed_sizes(at))}"
        ),
        ONE_MESSAGE,
    )


def _sends_afar(trouble: Trouble) -> bool:
    return any(
        wait.kind == "send" and any(abs(wait.rank - to) != 1 for to in wait.waits_for)
        for wait in trouble.waits
    )


def _does_nothing(*_given: Any) -> None:
    pass


AHEAD, BACK = "dist.isend(y.detach(), rank + 1)", "dist.isend(x.grad, rank - 1)"
RECEIVES, MAKES, ASKS = "dist.recv(x, rank - 1)", "x = torch.empty_like(x)", "x.requires_grad_()"
COMPUTES, KEEPS, TAKES = "y = stage(x)", "kept[i] = x, y", "x, y = kept.pop(i)"
EMPTY = "torch.empty_like(x)"
STARTS, LOOP = "kept, sent = {}, []", "for kind, _, i, _ in actions:"
FINISH, WINDOW = "for work in sent:", "if len(sent) > 2 * p:"


def _keeps(what: str) -> str:
    """Return code that keeps a list."""
    return f'kept.setdefault("list", []).append({what})'


def _both(ahead: str, back: str, cause: Cause) -> Edit:
    """Return the right answer with other sends."""
    return Edit(f"sent.append({AHEAD})", ahead, cause, also=((f"sent.append({BACK})", back),))


def _divides_at_the_end(who: str, cause: Cause) -> Edit:
    """Return the right answer with param.grad divided in place of the loss."""
    params = f"[param for param in stage.parameters() if param.grad is not None and {who}]"
    divides = f"for param in {params}:\n    param.grad /= m\n{FINISH}"
    return Edit(" / m)", ")", cause, also=((FINISH, divides),))


def _received_before(how: str, then: str, cause: Cause) -> Edit:
    """Return the right answer with all inputs received before the first action."""
    ahead = "inputs = [torch.empty_like(x) for x, _ in micro_batches]\nfor x in inputs[: m * rank]:"
    before = f"{ahead}\n    {how}\n{LOOP}"
    return Edit(RECEIVES, then, cause, also=((MAKES, "x = inputs[i]"), (LOOP, before)))


ENGINE = Exercise(
    key="pipeline-3",
    title="run a schedule",
    check=OnRanks(
        observe_on_rank=run_steps,
        runs=runs_of,
        trouble=(
            ("raised", "floating point dtype|used as indices", TOKENS),
            ("raised", "'(NoneType|int)'.*'wait'", NO_HANDLE),
            ("raised", "class 'NoneType'|NoneType.*'(clone|detach|contiguous|data)'", NO_GRAD),
            ("raised", "does not require grad", gradients.NO_GRAPH),
            ("raised", "second time", gradients.NOT_NUMBERED),
            ("mismatch", "", SAME_SHAPE),
            ("hang", lambda trouble: bool(trouble.dropped), HANDLES),
            ("hang", _sends_afar, NOBODY),
            ("hang", lambda trouble: any(w.kind == "send" for w in trouble.waits), BLOCKING),
            ("hang", "", WHO_SENDS),
        ),
        expect=(
            callers.untouched,
            OnlyKinds(("send", "recv"), SENDS_ONLY),
            Demand(
                lambda at: not _too_early(at),
                lambda at: f"{_too_early(at)[0]} began before its receive had ended",
                NOT_ARRIVED,
            ),
            NOT_CHANGED_UNDER_WAY,
            Demand(
                lambda at: not at.seen.lost,
                lambda at: (
                    f"the inputs of {at.seen.lost} micro-batches hold other numbers in backward "
                    "than in forward"
                ),
                LOST,
            ),
            gradients.demanded(torch.float64, 1e-10),
            gradients.demanded(torch.float32, 1e-4),
            Demand(
                lambda at: at.seen.order.count("F") <= _setup(at).m,
                lambda at: (
                    f"the stage computed {at.seen.order.count('F')} forwards for {_setup(at).m} "
                    f"micro-batch{'es' if _setup(at).m > 1 else ''}"
                ),
                ONCE,
            ),
            Demand(
                lambda at: at.seen.order == _order(at),
                lambda at: f"need {_order(at)}; it ran {at.seen.order}",
                ORDER,
            ),
            Demand(
                lambda at: at.seen.backwards == _backwards(at),
                lambda at: (
                    f"need the backwards of micro-batches {_backwards(at)}; "
                    f"it ran those of {at.seen.backwards}"
                ),
                gradients.NOT_NUMBERED,
            ),
            Demand(
                lambda at: not _too_many_graphs(at),
                lambda at: (
                    "before a forward, the activations of {} micro-batches are alive; "
                    "{} are in flight".format(*_too_many_graphs(at)[0])
                ),
                GRAPHS,
            ),
            Demand(
                lambda at: _growth_bytes(at) <= _may_grow_bytes(at),
                lambda at: (
                    f"{at.seen.peak_bytes} bytes are alive, {_growth_bytes(at)} more than with "
                    f"{SETUPS[SHORT].m}"
                ),
                GROWS,
            ),
            Demand(
                lambda at: not _unknown(at),
                lambda at: (
                    f"it returns without knowing whether {_unknown(at)} of its messages have "
                    "arrived"
                ),
                HANDLES,
            ),
            _messages("recv"),
            _messages("send"),
        ),
        success=(
            "The gradients of one process on 1 to 4 ranks; no message and no activation too many."
        ),
    ),
    wrong=(
        Edit(" / m)", ")", gradients.NOT_DIVIDED),
        Edit(" / m)", " / p)", gradients.BY_RANKS),
        Edit(" / m)", " / m / m)", gradients.DIVIDED_TWICE),
        Edit(" / m)", " / 4)", gradients.WHO_DIVIDES),
        Edit(
            " / m)",
            " * len(target) / sum(len(each) for _, each in micro_batches))",
            gradients.BY_ITEMS,
        ),
        Edit("y.backward(grad)", "y.backward(grad / m)", gradients.ON_EACH),
        _divides_at_the_end("rank == p - 1", gradients.NOT_HANDED_ON),
        _divides_at_the_end("True", gradients.PARAM_DIVIDED),
        Own(_does_nothing, gradients.MISSING),
        _both(AHEAD.replace("isend", "send"), BACK.replace("isend", "send"), BLOCKING),
        _both(f"{AHEAD}.wait()", f"{BACK}.wait()", BLOCKING),
        Edit("dist.recv(grad, rank + 1)", "pass", BLOCKING),
        Edit(BACK, BACK.replace("isend", "send"), NO_HANDLE),
        Edit(ASKS, "pass", NO_GRAD),
        Edit(KEEPS, "kept[i] = x, y.detach()", gradients.NO_GRAPH),
        Edit(COMPUTES, f"with torch.no_grad():\n    {COMPUTES}", gradients.NO_GRAPH),
        Edit(COMPUTES, f"{ASKS}\n{COMPUTES}", TOKENS),
        Edit(COMPUTES, f"x = x.detach().requires_grad_()\n{COMPUTES}", TOKENS),
        Edit(COMPUTES, f"x = x if rank else x.double().requires_grad_()\n{COMPUTES}", TOKENS),
        Edit(COMPUTES, f"if x.is_floating_point():\n    {ASKS}\n{COMPUTES}", callers.BATCH),
        Edit(MAKES, "pass", callers.BATCH),
        Edit(LOOP, "while actions:\n    kind, _, i, _ = actions.pop(0)", callers.ACTIONS),
        Edit(FINISH, f"for w in stage.parameters():\n    w.data -= 0.1\n{FINISH}", callers.WEIGHTS),
        Edit("kept.pop(i)", "kept[i]", GRAPHS),
        Edit(KEEPS, f"{KEEPS}\nkept[-1 - i] = y", GRAPHS),
        Edit("y.detach()", "y", GRAPHS),
        Edit("kept.pop(i)", "kept[i]\nkept.pop(i - p, None)", GRAPHS),
        Edit(KEEPS, f"{KEEPS}\n{_keeps('y.detach()')}", GROWS),
        Edit(KEEPS, f"{KEEPS}\n{_keeps('x.detach()')}", GROWS),
        Edit(f"sent.append({BACK})", f"sent.append({BACK})\n{_keeps('x.grad')}", GROWS),
        Edit(WINDOW, "if False:", GROWS),
        Edit("isend(x.grad,", "isend(x.detach(),", gradients.SENDS_X),
        Edit("isend(x.grad,", "isend(y.detach(),", gradients.SENDS_Y),
        Edit("isend(x.grad,", "isend(x.grad if rank == p - 1 else grad,", gradients.PASSES_ON),
        Edit("sent.pop(0).wait()", "sent.pop(0)", HANDLES, also=(("    work.wait()", "    pass"),)),
        Edit(KEEPS, "kept[0] = x, y", gradients.NOT_NUMBERED, also=((TAKES, "x, y = kept[0]"),)),
        Edit("kept.pop(i)", "kept.popitem()[1]", gradients.NOT_NUMBERED),
        Edit(ASKS, "x = micro_batches[i][0].clone().requires_grad_()", gradients.ELSEWHERE),
        Edit("(y, target)", "(y, micro_batches[0][1])", gradients.FIRST_TARGET),
        Edit(TAKES, f"stage.zero_grad()\n{TAKES}", gradients.LAST_ONLY),
        Edit(STARTS, f"{STARTS}\nstage.zero_grad()", gradients.REPLACED),
        Edit(TAKES, f"{TAKES}\ny = stage(x)", ONCE),
        *(
            Edit(MAKES, f"x = kept.setdefault((x.shape, i % ({n})), {EMPTY}).detach()", LOST)
            for n in ("p", "p - rank + 1", "2 * p")
        ),
        Edit("kept.pop(i)", "kept.pop(next(iter(kept)))", gradients.NOT_NUMBERED),
        Edit(
            TAKES,
            f"i = min(kept)\ntarget = micro_batches[i][1]\n{TAKES}",
            gradients.NOT_NUMBERED,
        ),
        Edit(FINISH, f"stage.train()\n{FINISH}", callers.MODE),
        Edit(STARTS, f"{STARTS}\nstage.eval()", callers.MODE),
        Edit(STARTS, f"{STARTS}\nstage.train(stage.training)", callers.MODE),
        Edit(
            STARTS,
            f"{STARTS}\nwas = stage.training\nstage.eval()",
            callers.MODE,
            also=((FINISH, f"stage.train(was)\nstage.part.eval()\n{FINISH}"),),
        ),
        Edit(STARTS, f"{STARTS}\nstage.requires_grad_()", callers.FROZEN),
        Edit(
            FINISH,
            "for w in stage.parameters():\n"
            f"    w.grad = torch.zeros_like(w) if w.grad is None else w.grad\n{FINISH}",
            callers.FROZEN,
        ),
        Edit(STARTS, f"{STARTS}\nstage.register_forward_hook(lambda *_: None)", callers.HOOKED),
        Edit(TAKES, f"{TAKES}\nmicro_batches[i] = None", callers.PAIRS),
        Edit("y.backward(grad)", "y.backward(grad.nan_to_num())", gradients.HIDDEN),
        Edit(STARTS, f"{STARTS}\ntorch.manual_seed(0)", callers.RANDOM),
        Edit("in actions:", 'in sorted(actions, key=lambda a: a.kind == "backward"):', ORDER),
        Edit("if rank < p - 1:", "if True:", NOBODY, also=(("rank + 1))", "(rank + 1) % p))"),)),
        Edit(
            f"if rank > 0:\n                sent.append({BACK})",
            "if True:\n"
            "                back = x.grad if rank > 0 else y.detach()\n"
            "                sent.append(dist.isend(back, (rank - 1) % p))",
            NOBODY,
        ),
        Edit(
            "y.detach()", "y.detach().float()", SAME_SHAPE, also=(("x.grad,", "x.grad.float(),"),)
        ),
        Edit("empty_like(x)", "empty_like(micro_batches[0][0])", SAME_SHAPE),
        Edit("torch.empty_like(x)", "torch.empty(x.shape, dtype=torch.float64)", SAME_SHAPE),
        Edit("torch.empty_like(y)", "torch.empty_like(x)", SAME_SHAPE),
        Edit("dist.recv(x,", "dist.irecv(x,", NOT_ARRIVED),
        Edit("dist.recv(grad,", "work = dist.irecv(grad,", NOT_ARRIVED),
        Edit(RECEIVES, "sent.append(dist.irecv(x, rank - 1))", NOT_ARRIVED),
        _received_before(RECEIVES, "pass", WHO_SENDS),
        Edit(FINISH, f"dist.barrier()\n{FINISH}", SENDS_ONLY),
        Edit(
            RECEIVES,
            "for row in x:\n    dist.recv(row, rank - 1)",
            ONE_MESSAGE,
            also=((f"sent.append({AHEAD})", f"sent += [{AHEAD} for y in y.split(1)]"),),
        ),
        _received_before(f"work = dist.i{RECEIVES[5:]}", "work.wait()", HANDLES),
    ),
)
