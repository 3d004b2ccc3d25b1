"""Exercise 1 of 03_recompute: the backward half of recompute."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from course_lib.checks.accumulation import effects
from course_lib.checks.accumulation.effects import EffectCase, Effects, LiveStorages, watched
from course_lib.checks.edits import Edit
from course_lib.checks.exercise import Cause, Exercise
from course_lib.checks.on_ranks import copied
from course_lib.checks.properties import CALLERS

RUNS, BEFORE_X = "runs of fn", "what came before x"
GRAPHS, LEFT = "gradients that have a graph", "bytes left in memory"
OF_X, OF_PARAMETERS = "gradient of x", "what it adds to the parameters' gradients"

NOT_RECORDED = Cause(
    "There is no graph back to x. Inside backward autograd is off: what it should record has to "
    "run under torch.enable_grad(), on an x that requires_grad_()."
)
DETACH = Cause(
    "backward went on to what came before x. Detach the saved x and let it require a gradient: "
    "only a leaf has a .grad, and autograd itself goes on to what came before."
)
MASKS = Cause("The masks differ from those of the first run: restore the random state.")
ONLY_X = Cause("The parameters of fn need gradients, too: torch.autograd.backward reaches all.")
MOVED_ON = Cause("backward has changed the random state. Use fork_rng, and set no seed.")
FROM_GRAD = Cause("Go back from grad, the gradient of what fn returned, not from ones.")
ONCE = Cause("Run fn once, and where it is recorded: each run costs a whole forward.")
WITH_GRAPH = Cause("A gradient that has a graph keeps all of it alive: no create_graph here.")
LEFT_ON = Cause("Autograd stays on: use `with torch.enable_grad():`, whose end turns it off again.")
ZEROED = Cause("What was in the parameters' gradients before is gone: backward has to add to it.")
CALLERS_MODE = Cause("fn's training mode is the caller's choice: call neither train() nor eval().")
LEFT_ALIVE = Cause("Some tensor of the second run stays in memory: keep only the gradients.")
LOOK = Cause(
    "Go back from grad, through what fn made of x; return the gradient of x. Is it right without "
    "dropout? Then restore the random state before fn runs."
)


def _redo(
    answer: Callable[..., Any], layer: Callable[[], nn.Module], as_module: bool = False
) -> dict[str, Any]:
    """Let the answer redo a layer, as a function or `as_module`; return what it did."""
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of asking for the .grad of what is no leaf
        torch.manual_seed(0)
        module = effects.with_old_grads(layer())
        dtype = next((param.dtype for param in module.parameters()), torch.float32)
        grad, runs = torch.arange(8.0, dtype=dtype).view(2, 4), list[int]()
        state = torch.manual_seed(3).get_state()
        torch.manual_seed(7)
        with torch.enable_grad():
            earlier = torch.ones(2, 4, dtype=dtype, requires_grad=True)
            x = earlier * 1  # came out of something, as in a model

        def fn(tensor: Tensor) -> Tensor:
            return module(tensor)

        module.register_forward_pre_hook(lambda *_: runs.append(1))
        callers = {"fn": module, "x": x, "grad": grad, "random_state": state}
        with watched(**callers) as seen, LiveStorages() as live:
            of_x = answer(module if as_module else fn, x, state, grad)
        grads = (of_x, *(param.grad for param in module.parameters()))
        graphs = sum(isinstance(each, Tensor) and each.requires_grad for each in grads)
        done = {
            BEFORE_X: "untouched" if earlier.grad is None else "got a gradient",
            OF_X: copied(of_x),
            OF_PARAMETERS: effects.flat_grads(module) - effects.OLD,
            **seen,
            RUNS: len(runs),
            GRAPHS: graphs,
        }
        del of_x, grads
        module.zero_grad()
        return {**done, LEFT: live.num_bytes()}


def _cases() -> list[EffectCase]:
    both = lambda: nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 4), nn.Dropout(0.5))  # noqa: E731

    def half() -> nn.Module:
        layer = both()
        layer[0].eval()
        return layer

    layers: tuple[tuple[str, Callable[[], nn.Module]], ...] = (
        ("a linear layer", lambda: nn.Linear(4, 4)),
        ("a linear layer of float64", lambda: nn.Linear(4, 4).double()),
        ("dropout", lambda: nn.Dropout(0.5)),
        ("dropout, a linear layer, dropout", both),
    )
    return [
        *((what, partial(_redo, layer=layer)) for what, layer in layers),
        ("fn is a module", partial(_redo, layer=both, as_module=True)),
        ("fn is a module, half of it in eval mode", partial(_redo, layer=half, as_module=True)),
    ]


LEAF, RUN = "x.detach().requires_grad_()", "y = fn(x)"
WITH, RESTORE = "torch.random.fork_rng(), torch.enable_grad()", "torch.set_rng_state(random_state)"
BACK = "torch.autograd.backward(y, grad)"

REDO = Exercise(
    key="recompute-1",
    title="run again in backward",
    library=("course_lib.recompute.activations:recompute",),
    check=Effects(
        cases=_cases,
        looks={**effects.LOOKS, BEFORE_X: DETACH, RUNS: ONCE, GRAPHS: WITH_GRAPH, LEFT: LEFT_ALIVE},
        look=LOOK,
        success="The same gradients, the same masks, and the random state is as it was before.",
    ),
    wrong=(
        Edit(RESTORE, "pass", MASKS),
        Edit(WITH, "torch.random.fork_rng()", NOT_RECORDED),
        Edit(LEAF, "x.detach()", NOT_RECORDED),
        Edit(
            "return x.grad",
            "return of_x",
            ONLY_X,
            also=((BACK, "(of_x,) = torch.autograd.grad(y, x, grad)"),),
        ),
        Edit(WITH, "torch.enable_grad()", MOVED_ON),
        Edit(LEAF, "x", DETACH),
        Edit(BACK, "torch.autograd.backward(y, torch.ones_like(y))", FROM_GRAD),
        Edit(RUN, f"fn(x)\n{RESTORE}\n{RUN}", ONCE),
        Edit("return x.grad", "grad.zero_()\nreturn x.grad", CALLERS),
        Edit(f"    {BACK}", f"        {BACK[:-1]}, create_graph=True)", WITH_GRAPH),
        Edit(f"    {BACK}", f"    torch.set_grad_enabled(True)\n{BACK}", LEFT_ON),
        Edit(RUN, f"getattr(fn, 'train', int)()\n{RUN}", CALLERS_MODE),
        Edit(f"    {BACK}", f"    getattr(fn, 'zero_grad', lambda: None)()\n{BACK}", ZEROED),
    ),
)
