"""Exercise 1 of 05_data_parallel: rank 0's parameters and buffers on every rank."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib.checks.data_parallel.parts import (
    BUDGET,
    beyond,
    grads_of,
    module_of,
    properties,
    state_of,
)
from course_lib.checks.edits import Edit, Own
from course_lib.checks.exercise import Cause, Exercise
from course_lib.checks.judge import ByExample
from course_lib.checks.properties import CALLERS
from course_lib.checks.watch import ALWAYS, UNWAITED, Watch
from course_lib.ranks import record

LABELS = "the first module", "a second module"
STATE, GRADIENTS, BACKWARD = "state", "gradients", "the next backward"
OBJECTS, MEMORY = "another object than before", "in other memory than before"

NOTHING_CAME = Cause("Nothing was received: every rank starts from weights of its own.")
NO_BUFFERS = Cause("The buffers are forgotten: batch norm's statistics are state.")
NO_FROZEN = Cause(
    "Frozen parameters differ too, and no gradient ever mends them: send them like the others."
)
STATE_DICT = Cause(
    "state_dict() leaves out buffers that are not saved (persistent=False), and lists a tied "
    "tensor under each of its names: take module.parameters() and module.buffers()."
)
NO_SINGLE = Cause(
    "This buffer was not sent; it is a single integer. Buffers of every dtype and shape belong to "
    "the module."
)
CLEANED = Cause(
    "An -inf in a mask is right where it stands (so may a nan be): send what is there, as it is."
)
COPY_SENT = Cause(
    "contiguous(), flatten() and reshape() copy a transposed tensor, and the copy was sent: write "
    "what came back into the tensor, or send tensor.data itself."
)
OVER_RANKS = Cause("That is a sum or a mean over the ranks: take rank 0's numbers.")
FROM_LAST = Cause("Let rank 0 send, not another one: src=0 on every rank.")
LOOK = Cause(
    "Print the names of what you send: module.parameters() and module.buffers() go into every "
    "submodule. Bring them in the same order on every rank (a set has none), from rank 0."
)
AUTOGRAD = Cause(
    "Autograd records it, and PyTorch warns in the next backward. Broadcast tensor.data, which is "
    "the same memory."
)
LEAF = Cause(
    "Autograd forbids writing to a parameter: write to tensor.data, or inside torch.no_grad()."
)
NEW_OBJECTS = Cause(
    "An optimizer made before holds the old ones, and so does a tied layer: write into the "
    "parameters and buffers that are there."
)
NEW_MEMORY = Cause(
    "Not in place: what looks into the old memory, such as a view or a bucket, does not see it. "
    "Copy into the tensor that is there."
)
EVERY_RANK = Cause(
    "Every rank has to make the same calls: rank 0 sends in them, the others receive."
)
ONE_SOURCE = Cause("All name the same source, and bring their tensors in one order.")
FIRST_ONLY = Cause(
    "The first module was made equal, and this one is not: something is left over from the first "
    "call, such as a list that is a default. Every call gets a module of its own."
)
ONCE = Cause(
    "One broadcast per tensor, in its own dtype, and no other call; what is tied is one tensor."
)


def _observe(rank: int, answer: Callable[[nn.Module], Any]) -> dict[str, Any]:
    """Run the answer on two modules of this rank's numbers."""
    watch = Watch()
    for label in LABELS:
        module = module_of(rank)
        for param in module.parameters():
            param.grad = torch.ones_like(param) if param.requires_grad else None
        before, sizes = _named(module), [tensor.nbytes for tensor in state_of(module).values()]
        memory = {name: tensor.data_ptr() for name, tensor in before.items()}
        with record() as log, watch.step(label, module=module) as step:
            answer(module)
        after = _named(module)
        kept = [name for name in before if after.get(name) is before[name]]
        step.show(
            **{STATE: state_of(module), GRADIENTS: grads_of(module)},
            **{OBJECTS: [name for name in before if name not in kept]},
            **{MEMORY: [name for name in kept if before[name].data_ptr() != memory[name]]},
            **{BUDGET: beyond(log.events, "broadcast", sizes), BACKWARD: _backward(rank, answer)},
        )
    return watch.seen


def _named(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers by all of their names."""
    params = module.named_parameters(remove_duplicate=False)
    return dict([*params, *module.named_buffers(remove_duplicate=False)])


def _backward(rank: int, answer: Callable[[nn.Module], Any]) -> str:
    """Run a backward, which tells if autograd has seen what the answer did: a watch hides that."""
    module = module_of(rank)
    answer(module)
    trained = [param.double().sum() for param in module.parameters() if param.requires_grad]
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        if trained:
            torch.stack(trained).sum().backward()
    return "warns" if any("c10d" in str(each.message) for each in warned) else "is silent"


def _new_parameters(module: nn.Module) -> None:
    for tensor in [*module.parameters(), *module.buffers()]:
        dist.broadcast(tensor.data, 0)
    for part in module.modules():
        for name, param in list(part.named_parameters(recurse=False)):
            setattr(part, name, nn.Parameter(param.data, param.requires_grad))


TENSORS = "[*module.parameters(), *module.buffers()]"
SENDS = "dist.broadcast(tensor.data, src=0)"
MEANS = "dist.all_reduce(tensor.data)\ntensor.data.copy_(tensor.data / dist.get_world_size())"

EQUAL = Exercise(
    key="data_parallel-1",
    title="equal start",
    library=("course_lib.data_parallel.naive_ddp:broadcast_state",),
    check=ByExample(
        observe_on_rank=_observe,
        facets=(UNWAITED, OBJECTS, STATE, BACKWARD, MEMORY, *ALWAYS, GRADIENTS, BUDGET),
        looks=(
            *(("hang", EVERY_RANK), ("mismatch", ONE_SOURCE), (STATE, LOOK), (BACKWARD, AUTOGRAD)),
            *((OBJECTS, NEW_OBJECTS), (MEMORY, NEW_MEMORY), (GRADIENTS, CALLERS), (BUDGET, ONCE)),
        ),
        success="Rank 0's parameters and buffers on 1 to 4 ranks, each sent once.",
    ),
    wrong=(
        Edit(SENDS, "pass", NOTHING_CAME),
        Edit(TENSORS, "module.parameters()", NO_BUFFERS),
        Edit(
            TENSORS,
            f"[t for t in {TENSORS} if t.requires_grad or not isinstance(t, nn.Parameter)]",
            NO_FROZEN,
        ),
        Edit(TENSORS, "module.state_dict().values()", STATE_DICT),
        Edit("tensor.data, ", "tensor.data.contiguous(), ", COPY_SENT),
        Edit(SENDS, "dist.all_reduce(tensor.data)", OVER_RANKS),
        Edit(SENDS, MEANS, OVER_RANKS),
        Edit("src=0", "src=dist.get_world_size() - 1", FROM_LAST),
        Edit("src=0", "src=dist.get_rank()", ONE_SOURCE),
        Edit(SENDS, f"if dist.get_rank() == 0:\n    {SENDS}", EVERY_RANK),
        Edit("tensor.data", "tensor", AUTOGRAD),
        Edit(SENDS, "new = tensor.clone()\ndist.broadcast(new.data, 0)\ntensor.copy_(new)", LEAF),
        Edit(
            SENDS,
            "new = tensor.data.clone()\ndist.broadcast(new, 0)\ntensor.data = new",
            NEW_MEMORY,
        ),
        Own(_new_parameters, NEW_OBJECTS),
        Edit("dist.b", "tensor.requires_grad_(False)\ndist.b", CALLERS),
        Edit(TENSORS, f"[t for t in {TENSORS} if t.is_floating_point()]", NO_SINGLE),
        Edit("tensor.data, ", "tensor.data.nan_to_num_(), ", CLEANED),
        Edit(
            TENSORS,
            "[*module.parameters(), *dict(module.named_buffers(remove_duplicate=False)).values()]",
            ONCE,
        ),
        Edit(
            "(module):",
            "(module, done=[]):",
            FIRST_ONLY,
            also=((SENDS, f"if len(done) < 15:\n    {SENDS}\n    done.append(1)"),),
        ),
        Edit(SENDS, f"{SENDS}\nmodule.zero_grad()", CALLERS),
        *properties("eval mode", "train mode", "unfreezes", "leaves a hook", "seeds"),
    ),
)
