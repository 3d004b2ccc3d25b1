"""The law of every method: the numbers of one process.

A `Law` says what is trained, and how. One process trains it as it is (`Alone`), the ranks train it
with a method, a subclass that says only what the method does otherwise. Both report, step by step,
the losses, outputs, gradients and the state; `assert_laws` compares them by name. All laws of a
method run in one job of a pool.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib.core import CourseError
from course_lib.models import IGNORED
from course_lib.ranks import Ranks
from tests.law.exceptions import EXCEPTIONS, Refused
from tests.law.modules import HARD, build, tokens

nightly = pytest.mark.nightly
# 3 is uneven and no power of two; the others run nightly, and hide mistakes
WORLDS = (3, *(pytest.param(p, marks=nightly) for p in (1, 2, 4)))

# the language models take long: all but one, whose weights are tied, wait for CI
LENGTHS = ("short", pytest.param("long", marks=pytest.mark.ci))
LONG = {name for name, hard in HARD.items() if hard.batch is tokens} - {"GPT"}

Found = dict[tuple[int, str, str], Tensor | None]  # by step, kind and name


def by_dims(params: Sequence[nn.Parameter]) -> list[dict[str, Any]]:
    """Matrices decay; what has fewer dims has a learning rate of its own."""
    flat = [param for param in params if param.dim() < 2]
    return [
        {"params": [param for param in params if param.dim() >= 2]},
        {"params": flat, "weight_decay": 0.0, "lr": 0.02},
    ]


def together(params: Sequence[nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": list(params)}]


OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}, together),
    "plain sgd": (torch.optim.SGD, {"lr": 0.1}, together),
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}, by_dims),
}


@dataclass(frozen=True)
class Law:
    """What is trained and how; `options` are the method's own, and change no number."""

    module: str
    optimizer: str = "sgd"
    items: int = 12
    parts: int = 1  # micro-batches
    clip: float | None = None
    dtype: torch.dtype = torch.float64
    options: dict[str, Any] = field(default_factory=dict, compare=False)

    def __str__(self) -> str:
        usual = Law(self.module)
        fields = ("optimizer", "items", "parts", "clip", "dtype")
        told = {name: getattr(self, name) for name in fields} | self.options
        told = {name: x for name, x in told.items() if getattr(usual, name, None) != x}
        return ", ".join([self.module, *(f"{name}={x}" for name, x in told.items())])


class Alone:
    """One process: the module itself, on the whole batch. A method overrides what it changes."""

    name = "one process"
    reports = ("loss", "output", "gradient", "state", "optimizer")
    same_seed = False  # do all ranks have to begin alike?

    def __init__(self, law: Law, rank: int = 0, p: int = 1) -> None:
        self.law, self.rank, self.p, self.hard = law, rank, p, HARD[law.module]
        self.module = build(law.module, 0 if self.same_seed else rank, law.dtype)
        self.model: Any = self.wrap(self.module)
        cls, settings, groups = OPTIMIZERS[law.optimizer]
        trained = [param for param in self.module.parameters() if param.requires_grad]
        self.optimizer = self.optimize(cls, groups(trained), settings)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.7)

    def wrap(self, module: nn.Module) -> Any:
        return module

    def optimize(self, cls: Any, groups: Any, settings: dict[str, Any]) -> Any:
        return cls(groups, **settings)

    def mine(self, whole: Tensor) -> Tensor:
        """This rank's part of the batch."""
        return whole

    def without_sync(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def finish(self) -> None:
        """What a method does between backward and the step."""

    def clip(self, most: float) -> Tensor:
        return nn.utils.clip_grad_norm_(self.module.parameters(), most)

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def step(self) -> None:
        self.optimizer.step()

    def gradients(self) -> dict[str, Tensor | None]:
        return {n: p.grad for n, p in self.module.named_parameters(remove_duplicate=False)}

    def state(self) -> dict[str, Tensor]:
        return self.module.state_dict()

    def moments(self) -> dict[str, Tensor]:
        return named_moments(self.optimizer.state_dict())

    def outputs(self, x: Tensor) -> Tensor:
        """What the model computes without gradients."""
        with torch.no_grad():
            return self.model(self.mine(x))

    def backward(self, x: Tensor, y: Tensor) -> Tensor:
        """Backward of the mean over all items that count, in micro-batches; the loss."""
        total, num_items, parts = torch.zeros(()), count(y), self.law.parts
        pairs = zip(self.mine(x).tensor_split(parts), self.mine(y).tensor_split(parts), strict=True)
        for number, (part, targets) in enumerate(pairs, start=1):
            loss = self.hard.loss(self.model(part), targets)
            weight = count(targets) * self.p / num_items
            loss = loss * weight if weight else loss.nan_to_num() * 0
            with nullcontext() if number == parts else self.without_sync():
                loss.backward()
            total = total + loss.detach()
        return total

    def train(self) -> Iterator[tuple[int, str, dict[str, Tensor | None]]]:
        """Yield what is seen: step, kind, and tensors by name."""
        for step in range(self.hard.steps):
            x, y = self.hard.batch(self.law.items, step)
            x, y = (t.to(self.law.dtype) if t.is_floating_point() else t for t in (x, y))
            if "output" in self.reports:
                yield step, "output", {"": self.outputs(x)}
            self.zero_grad()
            torch.manual_seed(step if self.same_seed else step + 100 * self.rank)  # masks
            yield step, "loss", {"": self.backward(x, y)}
            self.finish()
            norm = self.clip(self.law.clip) if self.law.clip else None
            assert norm is None or norm > 1.2 * self.law.clip, "it does not clip"
            if "gradient" in self.reports:
                yield step, "gradient", self.gradients()
            self.step()
            self.schedule.step()
            yield step, "state", self.state()
            if "optimizer" in self.reports:
                yield step, "optimizer", self.moments()

    def run(self) -> Found:
        return {
            (step, kind, name): None if x is None else x.detach().clone()
            for step, kind, named in self.train()
            for name, x in named.items()
            if kind in self.reports
        }


class Replicas(Alone):
    """Ranks that train on their parts of each batch, and begin with weights of their own."""

    reports = ("output", "gradient", "state", "optimizer")

    def mine(self, whole: Tensor) -> Tensor:
        return whole.tensor_split(self.p)[self.rank]

    def without_sync(self) -> AbstractContextManager[Any]:
        return self.model.no_sync() if self.law.options.get("no_sync") else nullcontext()

    def finish(self) -> None:
        self.model.finish()

    @property
    def options(self) -> dict[str, Any]:
        return {name: x for name, x in self.law.options.items() if name != "no_sync"}


def count(targets: Tensor) -> int:
    return len(targets) if targets.is_floating_point() else int((targets != IGNORED).sum())


def named_moments(state: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors of an optimizer's state dict, by the number of the parameter and their name."""
    numbered = ((n, kind, x) for n, kinds in state["state"].items() for kind, x in kinds.items())
    return {f"{n}.{kind}": x for n, kind, x in numbered if isinstance(x, Tensor)}


# --- the comparison


@cache
def alone(law: Law) -> Found:
    return Alone(law).run()


def differences(name: str, parts: Sequence[Tensor | None], wanted: Tensor | None, most: float):
    """Yield how what the ranks report differs: the whole, equal on all of them, or rows of it."""
    shapes = [None if part is None else tuple(part.shape) for part in parts]
    if wanted is None or None in shapes:
        if wanted is not None or set(shapes) != {None}:
            yield f"{name}: need {'one' if wanted is not None else 'none'}; got shapes {shapes}"
        return
    whole = parts[0]
    if set(shapes) == {tuple(wanted.shape)}:
        if not all(torch.equal(part, whole) for part in parts):
            yield f"{name}: differs between ranks"
    else:
        whole = torch.cat(parts).reshape(-1 if not wanted.dim() else torch.cat(parts).shape)
        whole = whole.squeeze() if not wanted.dim() else whole
    if (whole.shape, whole.dtype) != (wanted.shape, wanted.dtype):
        yield f"{name}: need {wanted.dtype} {[*wanted.shape]}; got {whole.dtype} {shapes}"
        return
    off = (whole - wanted).abs().max().item() if wanted.numel() else 0.0
    scale = wanted.abs().max().item() if wanted.numel() else 0.0
    least = 1e-3 if most < 1e-6 else 1e-2  # float32: a small sum of large numbers
    if not off <= most * max(scale, least):
        yield f"{name}: off by {off:.3g} where the largest is {scale:.3g}"


def breaches(law: Law, by_rank: Sequence[Found], wanted: Found, reports: Sequence[str]):
    """Yield every difference between what the ranks report together and one process."""
    wanted = {key: x for key, x in wanted.items() if key[1] in reports}
    most = HARD[law.module].tolerance if law.dtype is torch.float64 else 1e-5
    for key in dict.fromkeys([*wanted, *(key for found in by_rank for key in found)]):
        if key not in wanted:
            yield f"{key}: one process has nothing of this name"
        elif silent := [rank for rank, found in enumerate(by_rank) if key not in found]:
            yield f"{key}: ranks {silent} report nothing of this name"
        else:
            step, kind, name = key
            parts = [found[key] for found in by_rank]
            yield from differences(f"step {step}, {kind} {name}", parts, wanted[key], most)


# --- all laws of a method in one job


def on_rank(rank: int, method: type[Alone], laws: Sequence[Law]) -> list[Found | str]:
    """What this rank finds, law by law; or the sentence that refuses it."""
    p, found = dist.get_world_size(), []
    for law in laws:
        try:
            found.append(method(law, rank, p).run())
        except CourseError as error:
            found.append(str(error))
        except Exception as error:
            raise RuntimeError(f"{method.name}, the law of {law}: {error}") from error
    return found


def allowed(method: str, laws: Sequence[Law]) -> list[Law]:
    """Those that the table of exceptions does not leave out with a reason."""
    return [x for x in laws if isinstance(EXCEPTIONS.get((method, x.module), Refused("")), Refused)]


def assert_laws(run: Callable[..., list[Any]], method: type[Alone], laws: Sequence[Law]) -> None:
    """Every law holds on these ranks, but for the refusals that are named; else say which fail.

    run   `Ranks.run`, or what calls a function alike
    """
    laws, failures = allowed(method.name, laws), []
    assert laws, f"{method.name}: every law is left out"
    for law, *by_rank in zip(laws, *run(on_rank, method, laws), strict=True):
        refusal = EXCEPTIONS.get((method.name, law.module))
        told = [found for found in by_rank if isinstance(found, str)]
        if told or refusal:
            right = [x for x in told if refusal and re.search(refusal.words, x)]
            if len(right) < len(by_rank):
                failures.append(f"{law}: need {refusal or 'no error'}; got {told[:1]}")
            continue
        if found := [*breaches(law, by_rank, alone(law), method.reports)]:
            failures.append(f"{law}: {found[0]} (and {len(found) - 1} more)")
    assert not failures, f"{method.name} on {len(by_rank)} ranks:\n" + "\n".join(failures)


def assert_laws_in_groups(ranks: Ranks, method: type[Alone], laws: Sequence[Law]) -> None:
    """Ranks 0 and 2 train by the first of two laws, 1 and 3 by the other: nobody else's numbers."""

    def in_groups(rank: int, *_: Any) -> list[Found]:
        groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        law = laws[rank % 2]
        law.options["group"] = groups[rank % 2]
        return [method(law, rank // 2, 2).run()]

    by_rank = ranks.run(in_groups)
    for number, law in enumerate(laws):
        assert_laws(lambda *_, number=number: by_rank[number::2], method, [law])


def every_module(**options: Any) -> list[Law]:
    """One law for each hard module; the law's own fields may be among the options."""
    return ways(tuple(HARD), [options])


def lasting(length: str, laws: Sequence[Law]) -> list[Law]:
    """Those of the laws that are short, or long."""
    return [law for law in laws if (law.module in LONG) == (length == "long")]


def ways(modules: Sequence[str], options: Sequence[dict[str, Any]], **usual: Any) -> list[Law]:
    """Laws of some modules under each of these options, in which the law's own fields may be."""
    laws = []
    for one in options:
        own = {name: x for name, x in one.items() if name in Law.__dataclass_fields__}
        rest = {name: x for name, x in (usual | one).items() if name not in own}
        laws += [Law(name, options=rest, **own) for name in modules]
    return laws


def assert_broken(ranks: Ranks, method: type[Alone], law: Law, fault: Callable[[], Any]) -> None:
    """The law holds as it is, and has wrong numbers with the fault, a context of the ranks."""

    def with_fault(rank: int, *args: Any) -> list[Found | str]:
        with fault():
            return on_rank(rank, *args)

    assert_laws(ranks.run, method, [law])
    with pytest.raises(AssertionError, match=r"off by|differs between ranks"):
        assert_laws(lambda _, *args: ranks.run(with_fault, *args), method, [law])
