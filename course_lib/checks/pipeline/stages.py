"""The stage, the batch and the gradients that the check of exercise 3 of 08_pipeline works with.

The batch holds its input on the first rank only, its targets on the last one only: whoever looks
elsewhere computes NaN. A stage notes when its actions run, and what is alive then.
"""

import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from course_lib.checks.ddp.parts import modes_of
from course_lib.pipeline.actions import Schedule
from course_lib.pipeline.schedules import gpipe, naive, one_f_one_b

ITEMS, WIDTH, VOCAB = 2, 3, 5
EARLIER = 3.0
MicroBatches = list[tuple[Tensor, Tensor]]
Grads = list[Tensor | None]


@dataclass(frozen=True)
class StepSetup:
    """One step: its schedule, and what is special about its batch and its gradients."""

    make: Callable[[int, int], Schedule]
    m: int
    last_items: int = ITEMS
    tokens: bool = False
    dtype: torch.dtype = torch.float64
    earlier: bool = False
    nan: bool = False

    def items(self, i: int) -> int:
        """Return how many rows micro-batch `i` has."""
        return self.last_items if i == self.m - 1 else ITEMS

    def num_bytes(self, i: int) -> int:
        """Return the bytes of a message of micro-batch `i`."""
        return self.items(i) * WIDTH * self.dtype.itemsize


def gpipe_newest_first(p: int, m: int) -> Schedule:
    """Return GPipe with its backwards in the other order: a schedule that needs the numbers."""
    return [actions[:m] + actions[m:][::-1] for actions in gpipe(p, m)]


SHORT, LONG = "1F1B, 12 micro-batches, on top of earlier gradients", "1F1B, 32 micro-batches"
NAN = "1F1B, 3 micro-batches, a target of nan"
SETUPS = {
    "1F1B, 4 micro-batches": StepSetup(one_f_one_b, 4),
    "GPipe, 3 micro-batches, the last one smaller": StepSetup(gpipe, 3, last_items=1),
    "naive, 2 micro-batches of tokens, float32": StepSetup(
        naive, 2, tokens=True, dtype=torch.float32
    ),
    "1F1B, 1 micro-batch": StepSetup(one_f_one_b, 1),
    SHORT: StepSetup(one_f_one_b, 12, earlier=True),
    LONG: StepSetup(one_f_one_b, 32),
    "GPipe, 9 micro-batches": StepSetup(gpipe, 9),
    "GPipe, 5 micro-batches, backwards from the newest on": StepSetup(gpipe_newest_first, 5),
    NAN: StepSetup(one_f_one_b, 3, nan=True),
}


def batch_of(setup: StepSetup, *, first: bool = True, last: bool = True) -> MicroBatches:
    """Return the micro-batches, each with other numbers, as a first or last rank gets them."""
    random, batch = torch.Generator().manual_seed(setup.m), []
    for i in range(setup.m):
        shape = (setup.items(i), WIDTH)
        x, target = torch.randn(2, *shape, generator=random, dtype=setup.dtype)
        tokens = torch.randint(VOCAB, shape, generator=random)
        empty = torch.full(shape, torch.nan, dtype=setup.dtype)
        x = tokens if setup.tokens else x.clone()
        if setup.nan and i == 1:
            target.fill_(torch.nan)
        batch.append((x if first else empty, target.clone() if last else empty.clone()))
    return batch


def loss_fn(y: Tensor, target: Tensor) -> Tensor:
    """Return the mean over one micro-batch."""
    return ((y - target) ** 2).mean()


class SampleStage(nn.Module):
    """A stage, tanh of a linear layer, with a table for tokens on the first rank.

    order     its actions, as letters
    starts_s  when each action started to compute
    graphs    how many of its graphs were alive before each forward
    memory    what the block around the step has made, if it is noted
    peak      most bytes of it alive at the start of an action
    backwards the micro-batch of each backward, by the order of the forwards
    lost      how many inputs held other numbers in backward than in forward
    modes     of each part whether it is in train mode; one of them never is
    other_modes  how many forwards found other modes
    """

    def __init__(self, rank: int, setup: StepSetup) -> None:
        super().__init__()
        random, dtype = torch.Generator().manual_seed(rank), setup.dtype
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, generator=random, dtype=dtype))
        self.bias = nn.Parameter(torch.randn(WIDTH, generator=random, dtype=dtype))
        self.table: nn.Parameter | None = None
        if rank == 0 and setup.tokens:
            self.table = nn.Parameter(torch.randn(VOCAB, generator=random, dtype=dtype))
        if rank < 2:  # a frozen parameter in a stage that has another one
            (self.bias if rank == 0 else self.weight).requires_grad_(False)
        if setup.earlier:
            for param in self.trained:
                param.grad = torch.full_like(param, EARLIER)
        self.order, self.starts_s, self.graphs = "", list[float](), list[int]()
        self.alive: weakref.WeakSet[_Token] = weakref.WeakSet()
        self.memory: Memory | None = None
        self.peak = self.lost = 0
        self.backwards = list[int]()
        self.part = nn.Identity()
        self.train(not setup.tokens)
        self.part.eval()
        self.modes, self.other_modes = modes_of(self), 0

    def forward(self, x: Tensor) -> Tensor:
        """Compute one micro-batch."""
        self.graphs.append(len(self.alive))
        self.note("F")
        self.other_modes += modes_of(self) != self.modes
        x = x if self.table is None else self.table[x]
        y: Tensor = _Watched.apply((x @ self.weight + self.bias).tanh(), x.detach(), self)
        return y

    def note(self, letter: str) -> None:
        """Note the start of an action."""
        self.order += letter
        self.starts_s.append(time.perf_counter())
        if self.memory:
            self.peak = max(self.peak, self.memory.alive_bytes())

    @property
    def trained(self) -> list[nn.Parameter]:
        """Return the parameters that get a gradient."""
        return [param for param in self.parameters() if param.requires_grad]

    @property
    def names(self) -> list[str]:
        """Return their names."""
        return [name for name, param in self.named_parameters() if param.requires_grad]

    def grads(self) -> Grads:
        """Return copies of param.grad."""
        return [None if param.grad is None else param.grad.clone() for param in self.trained]


class _Token:
    """An object that lives as long as the graph of one forward."""


class _Watched(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, x: Tensor, stage: SampleStage) -> Tensor:
        ctx.token, ctx.stage = _Token(), stage
        ctx.x, ctx.numbers, ctx.i = x, x.tolist(), len(stage.graphs) - 1
        stage.alive.add(ctx.token)
        return y.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.stage.note("B")
        ctx.stage.backwards.append(ctx.i)
        ctx.stage.lost += ctx.x.tolist() != ctx.numbers
        return grad, None, None


class Memory(TorchDispatchMode):
    """Note the memory of every tensor that an operation makes in the block, except of `known`."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self._known = {StorageWeakRef(tensor.untyped_storage()) for tensor in known}
        self._made = dict[StorageWeakRef, int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and note what it returns."""
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor):
                memory = StorageWeakRef(tensor.untyped_storage())
                if memory not in self._known:
                    self._made[memory] = tensor.untyped_storage().nbytes()
        return made

    def alive_bytes(self) -> int:
        """Return the bytes that something still refers to."""
        return sum(size for memory, size in self._made.items() if not memory.expired())
