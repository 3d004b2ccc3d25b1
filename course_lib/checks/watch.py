"""Watch what an answer does on a rank, step by step; each step yields facets, which are plain data.

    watch = Watch()
    with watch.step("step 1", model=model) as step:
        loss.backward()
        watch.mark("backward ends")
        step.show(grads=grads_of(model))
    return watch.seen    # {"step 1": {"changed": [...], "never waited for": [...], "order": [...],

The *order* has calls, waits and marks in their order, so that it tells what came too early, too
late, twice or never. In a watched step, what a call receives is delivered by the wait for it: who
reads it before reads old numbers, for certain (of a message, UNREAD), and writing to it before is
noted.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from itertools import groupby
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future

from course_lib.checks.on_ranks import IN_STEP, copied
from course_lib.ranks.process_group import TracedGroup
from course_lib.ranks.work_handle import TrackedWork

WAIT = "wait"
UNREAD = 7.0  # in what a message is received into, until the wait
# the facets of every step
CHANGED, UNWAITED, OVERWRITTEN = "changed", "never waited for", "written to before the wait"
ORDER = "order"
ALWAYS = (CHANGED, UNWAITED, OVERWRITTEN)
HOOKS = (
    *("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"),
    "_post_accumulate_grad_hooks",
)


@dataclass
class Call:
    """A call that a watched step has started: its handle, and what delivers its result."""

    work: TrackedWork
    name: str
    deliver: Callable[[], bool]  # returns whether nobody has written to its tensors
    delivered: bool = False
    waited: bool = False


@dataclass
class Step:
    """One step under way: its calls by the id of their handles, its order, and what it shows."""

    world_size: int
    calls: dict[int, Call] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)
    overwritten: list[str] = field(default_factory=list)
    shown: dict[str, Any] = field(default_factory=dict)

    def show(self, **facets: Any) -> None:
        """Add facets: copies of tensors, in lists and dicts if there are several."""
        self.shown |= copied(facets)

    def start(self, work: TrackedWork, deliver: Callable[[], bool] = lambda: True) -> TrackedWork:
        """Note a call that has started."""
        post = work.post
        if post.kind in ("send", "recv"):
            peer = "anyone" if post.peer < 0 else f"rank {post.peer}"
            where = f" {'to' if post.kind == 'send' else 'from'} {peer}"
        else:
            world = len(post.members) == self.world_size
            where = "" if world else f" in the group {', '.join(map(str, post.members))}"
        name = f"{post.kind} of {post.num_bytes} bytes{where}"
        self.calls[id(work)] = Call(work, name, deliver)
        self.order.append(name)
        return work

    def deliver(self, work: TrackedWork) -> None:
        """Deliver the result of a call that has completed; once."""
        call = self.calls.get(id(work))
        if call and not call.delivered:
            call.delivered = True
            if not call.deliver():
                self.overwritten.append(call.name)

    def wait(self, work: TrackedWork) -> None:
        """Note that somebody has waited for a call, and deliver its result."""
        self.deliver(work)
        call = self.calls.get(id(work))
        if call and not call.waited:
            call.waited = True
            self.order.append(WAIT)

    @property
    def unwaited(self) -> list[str]:
        """The calls that nobody has waited for."""
        return [call.name for call in self.calls.values() if not call.waited]


class Watch:
    """Steps of an answer on one rank; `seen` has the facets of each, by its label."""

    def __init__(self) -> None:
        self.seen: dict[str, dict[str, Any]] = {}
        self._step: Step | None = None
        self._world_size = dist.get_world_size()  # asked now: an answer may replace the function

    def mark(self, text: str) -> None:
        """Add a line to the order of the step under way, if there is one."""
        if self._step:
            self._step.order.append(text)

    @contextmanager
    def step(self, label: str, **given: Any) -> Iterator[Step]:
        """Watch the block; `given` are the caller's modules, tensors and lists, by name."""
        step = self._step = Step(self._world_size)
        torch.rand(1)  # else who seeds twice changes nothing
        before = state_of(given)
        try:
            with _noting(step):
                yield step
        except Exception as error:
            error.add_note(f"{IN_STEP}{label}")
            raise
        finally:
            self._step = None
        after = state_of(given)
        changed = changes(before, after)
        told = [(line, len([*same])) for line, same in groupby(step.order)]
        lines = [f"{n} x {line}" if n > 1 else line for line, n in told]
        step.shown |= {CHANGED: changed, UNWAITED: step.unwaited, ORDER: lines}
        step.shown[OVERWRITTEN] = step.overwritten
        self.seen[label] = step.shown


class WaitedFuture(Future[Any]):
    """Future of a call: delivers its result, and tells when somebody waits for it.

    Who asks for its value in a callback does not wait: that runs whenever the result is there.
    """

    def __init__(
        self, inner: Future[Any], deliver: Callable[[], None], waited: Callable[[], None]
    ) -> None:
        super().__init__()
        self._waited = waited

        def complete(done: Future[Any]) -> None:
            try:
                deliver()
                self.set_result(done.value())
            except Exception as error:  # raised where the future is waited for
                self.set_exception(error)

        inner.add_done_callback(complete)

    def wait(self) -> Any:
        """Block until the result is there; return it."""
        result = super().wait()
        self._waited()
        return result

    def then(self, callback: Callable[..., Any]) -> "WaitedFuture":
        """Return the future of what a function makes of the result."""
        return WaitedFuture(super().then(callback), lambda: None, self._waited)

    def done(self) -> bool:
        """Return whether the result is there; who sees that has waited."""
        is_done = super().done()
        if is_done:
            self._waited()
        return is_done

    @classmethod
    def of_all(cls, collect: Callable[..., Any], futures: list[Future[Any]]) -> Future[Any]:
        """Return the future of several ones, which is what `wait_all` waits for."""

        def waited() -> None:
            for one in futures:
                one.wait()

        return cls(collect(futures), lambda: None, waited)


@contextmanager
def _noting(step: Step) -> Iterator[None]:
    """Tell a step of the calls that this process makes, and of the waits for them."""
    collective, message = TracedGroup.collective, TracedGroup._message
    from_anyone = TracedGroup.recv_anysource
    finishes = {name: getattr(TrackedWork, name) for name in ("wait", "synchronize")}
    is_completed, get_future = TrackedWork.is_completed, TrackedWork.get_future

    def start(group: TracedGroup, method: str, args: tuple[Any, ...], kwargs: Any) -> TrackedWork:
        if method == "barrier":
            return step.start(collective(group, method, args, kwargs))
        hidden, deliver = _held_back(args[0], args[1:2])
        given = (_swapped(args[0], hidden), *args[1:])
        return step.start(collective(group, method, given, kwargs), deliver)

    def send(group: TracedGroup, kind: str, tensors: list[Tensor], *to: int) -> TrackedWork:
        for tensor in tensors if kind == "recv" else []:
            tensor.data.fill_(UNREAD)
        hidden, deliver = _held_back(tensors if kind == "recv" else [], tensors)
        return step.start(message(group, kind, _swapped(tensors, hidden), *to), deliver)

    def receive(group: TracedGroup, tensors: list[Tensor], tag: int) -> TrackedWork:
        hidden, deliver = _held_back(tensors, [])
        return step.start(from_anyone(group, _swapped(tensors, hidden), tag), deliver)

    def finishing(finish: Callable[..., Any]) -> Callable[..., Any]:
        def finished(work: TrackedWork, *args: Any) -> Any:
            result = finish(work, *args)
            step.wait(work)
            return result

        return finished

    def completed(work: TrackedWork) -> bool:
        if is_completed(work):
            step.wait(work)
            return True
        return False

    def future(work: TrackedWork) -> WaitedFuture:
        return WaitedFuture(get_future(work), partial(step.deliver, work), partial(step.wait, work))

    replaced: dict[str, Any] = {name: finishing(finish) for name, finish in finishes.items()}
    replaced |= {"is_completed": completed, "get_future": future}
    with ExitStack() as stack:
        calls: dict[str, Any] = {"collective": start, "_message": send, "recv_anysource": receive}
        stack.enter_context(patch.multiple(TracedGroup, **calls))
        stack.enter_context(patch.multiple(TrackedWork, **replaced))
        collect = partial(WaitedFuture.of_all, torch._C._collect_all)
        stack.enter_context(patch.object(torch._C, "_collect_all", collect))
        yield


def _held_back(received: Any, sent: Any) -> tuple[dict[int, Tensor], Callable[[], bool]]:
    """Return other tensors to receive into, by the ids of the real ones, and what delivers them."""
    before = [(tensor, tensor.detach().clone()) for tensor in _tensors([received, sent])]
    hidden = {id(tensor): tensor.detach().clone() for tensor in _tensors(received)}

    def deliver() -> bool:
        is_untouched = all(_same(tensor.detach(), old) for tensor, old in before)
        for tensor in _tensors(received):
            tensor.data.copy_(hidden[id(tensor)])
        return is_untouched

    return hidden, deliver


def _tensors(thing: Any) -> Iterator[Tensor]:
    """Yield the tensors in lists of lists."""
    if isinstance(thing, Tensor):
        yield thing
    elif isinstance(thing, list | tuple):
        for one in thing:
            yield from _tensors(one)


def _swapped(thing: Any, by: dict[int, Tensor]) -> Any:
    if isinstance(thing, list | tuple):
        return [_swapped(one, by) for one in thing]
    return by.get(id(thing), thing)


# --- what belongs to the caller


def state_of(given: dict[str, Any]) -> dict[str, Any]:
    """Return what an answer has to leave as it was: of what it was given, and of this process."""
    state: dict[str, Any] = {"the random state": torch.get_rng_state()}
    state["autograd"] = torch.is_grad_enabled()
    for name, thing in given.items():
        state |= dict(_state(name, thing))
    return state


def changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Return the names of what two states do not have in common."""
    return [name for name in before | after if not _same(before.get(name), after.get(name))]


def _state(name: str, thing: Any) -> Iterable[tuple[str, Any]]:
    if isinstance(thing, Tensor):
        yield name, thing.detach().clone()
        yield f"requires_grad of {name}", thing.requires_grad
        yield f"the hooks of {name}", num_hooks(thing)
    elif isinstance(thing, nn.Module):
        for part, module in thing.named_modules(prefix=name):
            yield f"train or eval mode of {part}", module.training
            yield f"the hooks of {part}", num_hooks(module)
        for part, tensor in [*thing.named_parameters(name), *thing.named_buffers(name)]:
            yield from _state(part, tensor)
    elif isinstance(thing, list | tuple):
        yield f"the list {name}", list(map(id, thing))
        for number, one in enumerate(thing):
            yield from _state(f"{name}[{number}]", one)


def num_hooks(holder: Any) -> int:
    """Return the number of hooks on a module or a parameter."""
    return sum(len(getattr(holder, name, None) or ()) for name in HOOKS)


def _same(one: Any, other: Any) -> bool:
    """Return whether two states are equal; nan is nan."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        alike = one.shape == other.shape and one.dtype == other.dtype
        return alike and torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)
    return bool(type(one) is type(other) and one == other)


def bits_of(*tensors: Tensor) -> str:
    """Return a text that is the same for tensors of the same bits."""
    return sha256(b"".join(x.detach().contiguous().numpy().tobytes() for x in tensors)).hexdigest()


def kept_bytes(holder: Any) -> int:
    """Return the bytes of all tensors in an object's attributes, except parameters and modules."""
    stack, sizes = list(vars(holder).values()), dict[int, int]()
    while stack:
        thing = stack.pop()
        if isinstance(thing, Tensor) and not isinstance(thing, nn.Parameter):
            sizes[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
        elif isinstance(thing, dict):
            stack += thing.values()
        elif isinstance(thing, list | tuple | set):
            stack += thing
    return sum(sizes.values())
