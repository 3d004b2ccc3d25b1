"""Exercise 1 of 05_data_parallel: rank 0's parameters and buffers on every rank."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib.checks.data_parallel.parts import around, budget, module_of, pattern, state_of
from course_lib.checks.ddp.parts import digits, watched_handles
from course_lib.checks.edits import Edit, Own
from course_lib.checks.exercise import Cause, Exercise
from course_lib.checks.expectations import DIGITS_LOST, Demand, Numbers
from course_lib.checks.on_ranks import At, OnRanks, calls_of
from course_lib.core import Event
from course_lib.ranks import record

RIGHT = state_of(module_of(0))
NAMES = list(RIGHT)
PARAMS = [name for name, _ in module_of(0).named_parameters()]
SECOND = "a second module"
STATE_DICT_SIZES = sorted(tensor.nbytes for tensor in module_of(0).state_dict().values())
SINGLE = [name for name, tensor in RIGHT.items() if not tensor.dim()]
FROZEN = [name for name in NAMES if name.startswith("frozen.")]

NOTHING_CAME = Cause("Nothing was received: every rank starts from weights of its own.")
NO_BUFFERS = Cause("The buffers are forgotten: batch norm's statistics are state.")
NO_PARAMS = Cause("Only the buffers were sent: the parameters are forgotten.")
NO_FROZEN = Cause(
    "Frozen parameters differ too, and no gradient ever mends them: send them like the others."
)
NO_UNSAVED = Cause(
    "state_dict() leaves out buffers that are not saved (persistent=False); module.buffers() has "
    "them."
)
NO_SINGLE = Cause(
    "This buffer was not sent; it is a single integer. Buffers of every dtype and shape belong to "
    "the module."
)
STATE_DICT = Cause(
    "A tied tensor was sent twice, and a buffer not at all: state_dict() lists a tied tensor under "
    "each name, and leaves out buffers that are not saved."
)
CLEANED = Cause(
    "An -inf in a mask is right where it stands (so may a nan be): send what is there, as it is."
)
COPY_SENT = Cause(
    "contiguous(), flatten() and reshape() copy a transposed tensor, and the copy was sent: write "
    "what came back into the tensor, or send tensor.data itself."
)
MEAN = Cause("That is a mean over the ranks: take rank 0's numbers.")
SUM = Cause("That is a sum over the ranks: take rank 0's numbers.")
FROM_LAST = Cause("Let rank 0 send, not another one: src=0 on every rank.")
ROOT_CHANGED = Cause("Rank 0's own state has changed: it is the one that sends.")
OTHER_TENSOR = Cause(
    "That is another tensor of rank 0's: bring them in the same order on every rank (a set has "
    "none)."
)
GONE = Cause("Write into the tensors of the module; do not take any out of it.")
LOOK = Cause(
    "Print the names of what you send: module.parameters() and module.buffers() go into every "
    "submodule."
)
NOT_WAITED = Cause("With async_op=True a broadcast has only begun: call wait() on what it returns.")
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
SWITCHED = Cause(
    "What was trained has to be trained afterwards, and what was frozen stays frozen: broadcast "
    "tensor.data, and leave requires_grad alone."
)
EVERY_RANK = Cause(
    "Every rank has to make the same calls: rank 0 sends in them, the others receive."
)
ONE_SOURCE = Cause("All name the same source, and bring their tensors in one order.")
FIRST_ONLY = Cause(
    "The first module was made equal, and this one is not: something is left over from the first "
    "call, such as a list that is a default. Every call gets a module of its own."
)
DISTURBED = Cause(
    "Only the numbers of parameters and buffers come from rank 0: leave the rest as it is (train "
    "and eval mode, gradients, the global random state)."
)
ONCE = Cause("One broadcast per tensor, in its own dtype; what is tied is one tensor.")


@dataclass
class Start:
    """Effects of an answer on the module of one rank."""

    state: list[Any]
    calls: list[Event]
    never_waited: int
    recorded: bool
    replaced: list[str]
    moved: list[str]
    switched: list[str]
    disturbed: list[str]


def _start(rank: int, answer: Callable[[nn.Module], Any]) -> dict[str, Start]:
    """Run the answer on two modules."""
    return {label: _one(rank, answer) for label in ("", SECOND)}


def _one(rank: int, answer: Callable[[nn.Module], Any]) -> Start:
    """Run the answer on a module of this rank's numbers; a backward tells if autograd saw it."""
    module = module_of(rank)
    for param in module.parameters():
        param.grad = torch.ones_like(param) if param.requires_grad else None
    before, outside = _named(module), _outside(module)
    memory = {name: tensor.data_ptr() for name, tensor in before.items()}
    trained = {name: tensor.requires_grad for name, tensor in before.items()}
    with record() as log, watched_handles("broadcast") as open_ones:
        answer(module)
    after, state, outside_after = _named(module), state_of(module), _outside(module)
    kept = [name for name in before if after.get(name) is before[name]]
    return Start(
        state=[state[name].clone() if name in state else None for name in NAMES],
        calls=calls_of(log.events),
        never_waited=len(open_ones),
        recorded=_warns_in_backward(module),
        replaced=[name for name in before if name not in kept],
        moved=[name for name in kept if before[name].data_ptr() != memory[name]],
        switched=[name for name in kept if before[name].requires_grad != trained[name]],
        disturbed=[what for what in outside if outside_after[what] != outside[what]],
    )


def _outside(module: nn.Module) -> dict[str, Any]:
    """Return the gradients, and what is around the numbers of a module, as plain data."""
    grads = [param.grad for param in module.parameters()]
    return {"a gradient": [None if grad is None else grad.tolist() for grad in grads]} | around(
        module
    )


def _named(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers by all of their names."""
    params = module.named_parameters(remove_duplicate=False)
    return dict([*params, *module.named_buffers(remove_duplicate=False)])


def _warns_in_backward(module: nn.Module) -> bool:
    trained = [param.double().sum() for param in module.parameters() if param.requires_grad]
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        if trained:
            torch.stack(trained).sum().backward()
    return any("c10d" in str(warning.message) for warning in warned)


def _times(factor: Callable[[At], float]) -> Callable[[At], list[Tensor]]:
    """Return what the state would be if it were a multiple of rank 0's."""
    return lambda at: [
        (pattern(i, tensor) * factor(at)).to(tensor.dtype)
        for i, tensor in enumerate(RIGHT.values())
    ]


def _left_alone(names: list[str]) -> Callable[..., bool]:
    """Return a predicate: whether exactly these tensors still hold what the rank began with."""

    def fits(at: At, _got: Any, _item: int) -> bool:
        own = _times(lambda at: 10**at.rank)(at)
        same = zip(NAMES, at.seen.state, own, strict=True)
        return at.rank > 0 and [n for n, got, mine in same if torch.equal(got, mine)] == names

    return fits


def _cleaned(_at: At, got: Tensor, item: int) -> bool:
    return bool((got.isfinite() & ~RIGHT[NAMES[item]].isfinite()).any())


def _of_another(_at: At, got: Tensor, _item: int) -> bool:
    return any(other.equal(got) for other in RIGHT.values())


def _few(names: list[str]) -> str:
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def _new_parameters(module: nn.Module) -> None:
    for tensor in [*module.parameters(), *module.buffers()]:
        dist.broadcast(tensor.data, 0)
    for part in module.modules():
        for name, param in list(part.named_parameters(recurse=False)):
            setattr(part, name, nn.Parameter(param.data, param.requires_grad))


TENSORS = "[*module.parameters(), *module.buffers()]"
SENDS = "dist.broadcast(tensor.data, src=0)"

EQUAL = Exercise(
    key="data_parallel-1",
    title="equal start",
    library=("course_lib.data_parallel.naive_ddp:broadcast_state",),
    check=OnRanks(
        observe_on_rank=_start,
        trouble=(
            ("hang", "", EVERY_RANK),
            ("mismatch", "", ONE_SOURCE),
            ("raised", "leaf Variable", LEAF),
        ),
        expect=(
            Demand(
                lambda at: not at.seen.never_waited, "a broadcast was not waited for", NOT_WAITED
            ),
            Numbers(
                "state",
                lambda _at: list(RIGHT.values()),
                names=lambda _at: NAMES,
                predicates=(
                    (lambda _at, got, _item: got is None, GONE),
                    (
                        lambda at, *item: at.label == SECOND and _left_alone(NAMES)(at, *item),
                        FIRST_ONLY,
                    ),
                    (_left_alone(NAMES), NOTHING_CAME),
                    (_left_alone([n for n in NAMES if n not in PARAMS]), NO_BUFFERS),
                    (_left_alone(PARAMS), NO_PARAMS),
                    (_left_alone(FROZEN), NO_FROZEN),
                    (_left_alone(SINGLE), NO_SINGLE),
                    (_left_alone(["mask"]), NO_UNSAVED),
                    (_cleaned, CLEANED),
                    (_left_alone(["transposed.weight"]), COPY_SENT),
                ),
                causes=(
                    (MEAN, _times(lambda at: digits(at.world_size) / at.world_size)),
                    (SUM, _times(lambda at: digits(at.world_size))),
                    (FROM_LAST, _times(lambda at: 10 ** (at.world_size - 1))),
                ),
                otherwise=(
                    (_of_another, OTHER_TENSOR),
                    (lambda at, _got, _item: at.rank == 0, ROOT_CHANGED),
                ),
                look=LOOK,
            ),
            Demand(lambda at: not at.seen.recorded, "autograd has recorded the call", AUTOGRAD),
            Demand(
                lambda at: not at.seen.replaced,
                lambda at: f"{_few(at.seen.replaced)}: another object than before",
                NEW_OBJECTS,
            ),
            Demand(
                lambda at: not at.seen.moved,
                lambda at: f"{_few(at.seen.moved)}: in other memory than before",
                NEW_MEMORY,
            ),
            Demand(
                lambda at: not at.seen.switched,
                lambda at: f"{_few(at.seen.switched)}: requires_grad has changed",
                SWITCHED,
            ),
            Demand(
                lambda at: not at.seen.disturbed,
                lambda at: f"{at.seen.disturbed[0]} has changed",
                DISTURBED,
            ),
            Demand(
                lambda at: sorted(c.num_bytes for c in at.seen.calls) != STATE_DICT_SIZES,
                "sends what state_dict() lists",
                STATE_DICT,
            ),
            *budget("broadcast", [x.nbytes for x in RIGHT.values()], ONCE),
        ),
        success="Rank 0's parameters and buffers on 1 to 4 ranks, each sent once.",
    ),
    wrong=(
        Edit(SENDS, "pass", NOTHING_CAME),
        Edit(TENSORS, "module.parameters()", NO_BUFFERS),
        Edit(TENSORS, "module.buffers()", NO_PARAMS),
        Edit(
            TENSORS,
            f"[t for t in {TENSORS} if t.requires_grad or not isinstance(t, nn.Parameter)]",
            NO_FROZEN,
        ),
        Edit(
            TENSORS, "{t.data_ptr(): t for t in module.state_dict().values()}.values()", NO_UNSAVED
        ),
        Edit("tensor.data, ", "tensor.data.contiguous(), ", COPY_SENT),
        Edit(SENDS, "dist.all_reduce(tensor.data)", SUM),
        Edit(
            SENDS,
            "dist.all_reduce(tensor.data)\ntensor.data.copy_(tensor.data / dist.get_world_size())",
            MEAN,
        ),
        Edit("src=0", "src=dist.get_world_size() - 1", FROM_LAST),
        Edit("src=0", "src=1", ROOT_CHANGED),
        Edit("src=0", "src=dist.get_rank()", ONE_SOURCE),
        Edit(SENDS, f"if dist.get_rank() == 0:\n    {SENDS}", EVERY_RANK),
        Edit("src=0)", "src=0, async_op=True)", NOT_WAITED),
        Edit(
            TENSORS,
            f"sorted({TENSORS}, key=lambda t: (t.shape, t.sum() * (-1) ** dist.get_rank()))",
            OTHER_TENSOR,
        ),
        Edit(
            TENSORS,
            "[t for part in module.children() for t in "
            "[*part._parameters.values(), *part._buffers.values()] if t is not None]",
            LOOK,
        ),
        Edit("tensor.data", "tensor", AUTOGRAD),
        Edit(SENDS, "new = tensor.clone()\ndist.broadcast(new.data, 0)\ntensor.copy_(new)", LEAF),
        Edit(
            SENDS,
            "new = tensor.data.clone()\ndist.broadcast(new, 0)\ntensor.data = new",
            NEW_MEMORY,
        ),
        Own(_new_parameters, NEW_OBJECTS),
        Edit("dist.b", "tensor.requires_grad_(False)\ndist.b", SWITCHED),
        Edit("src=0)", "src=0)\ntensor.requires_grad_(tensor.is_floating_point())", SWITCHED),
        Edit(TENSORS, "module.state_dict().values()", STATE_DICT),
        Edit(TENSORS, f"[t for t in {TENSORS} if t.is_floating_point()]", NO_SINGLE),
        Edit(TENSORS, f"[t for t in {TENSORS} if t.dim()]", NO_SINGLE),
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
            also=((SENDS, f"if len(done) < {len(NAMES)}:\n    {SENDS}\n    done.append(1)"),),
        ),
        Edit(SENDS, f"{SENDS}\nmodule.eval()", DISTURBED),
        Edit(SENDS, f"{SENDS}\nmodule.train()", DISTURBED),
        Edit(SENDS, f"{SENDS}\nmodule.zero_grad()", DISTURBED),
        Edit(SENDS, f"{SENDS}\ntorch.manual_seed(0)", DISTURBED),
        Edit(
            SENDS,
            "small = tensor.data.float()\ndist.broadcast(small, 0)\ntensor.data.copy_(small)",
            DIGITS_LOST,
        ),
    ),
)
