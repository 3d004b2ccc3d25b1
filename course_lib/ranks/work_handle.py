"""Handle of an asynchronous call: `wait()` blocks until it completes, and records the event."""

import contextlib
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.futures import Future

from course_lib.core.errors import CourseError
from course_lib.ranks.call_board import Flag, Post

if TYPE_CHECKING:
    from course_lib.ranks.tracer import CallTracer

TRANSPORTS = ("gloo/transport", "NCCL")  # their errors mean that the other end is gone
WORTH_SHOWING_S = 20e-6  # a shorter wait is the overhead of the call itself


class ConnectionLostError(CourseError):
    """The rank at the other end of a call is gone."""


class TrackedWork(dist.Work):
    """Handle that an asynchronous call returns, with the interface of PyTorch's own `Work`."""

    def __init__(
        self,
        inner: Any,
        post: Post,
        tracer: "CallTracer",
        watch_end: bool,
        *,
        ends_once: bool = False,  # gloo's messages: a second wait() there would never return
    ) -> None:
        super().__init__()
        self._ends_once = ends_once
        self._inner, self._post, self._tracer = inner, post, tracer
        self._failed = False
        self._arrived_s = 0.0
        self._watched = watch_end and self._watch()

    def __del__(self) -> None:
        if self._post.kind in ("send", "recv"):
            self._tracer.drop(self)  # may keep this object; Python calls __del__ only once

    @property
    def post(self) -> Post:
        """Announcement of the call on the call board."""
        return self._post

    @property
    def failed(self) -> bool:
        """Whether waiting for the call has raised an error."""
        return self._failed

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the call has completed and an emulated link has delivered it; return True.

        Raises: ConnectionLostError if the rank at the other end is gone
        """
        start_s = time.perf_counter()
        if self._post.number in self._tracer.outstanding:
            with self._tracer.blocked(self._post):
                self._wait_for_inner()
                self._tracer.call_board.mark(self._tracer.rank, self._post, Flag.ARRIVED)
                self._note_end(self._deliver())
            self._tracer.settle(self._post)
        else:
            if not self._ends_once:
                self._wait_for_inner()
            with self._tracer.noting:  # gloo's thread saw the end first: it has recorded it now
                pass
        end_s = time.perf_counter()
        if end_s - start_s > WORTH_SHOWING_S:
            self._tracer.recorder.add("wait", start_s, end_s, label=self._post.kind)
        return True

    def settle(self) -> None:
        """Record a receive whose message has arrived, but whose handle was not kept.

        It raises no error, as nothing waits for this call.
        """
        link_emulator = self._tracer.link_emulator
        with contextlib.suppress(ConnectionLostError, RuntimeError):
            self._wait_for_inner()
            due_s = link_emulator.delivery_s(self._post) if link_emulator else None
            self._note_end(due_s or time.perf_counter())

    def is_completed(self) -> bool:
        """Return whether the call has completed, without blocking."""
        if not self._inner.is_completed():
            return False
        link_emulator = self._tracer.link_emulator
        if link_emulator is None and self._watched:
            self._on_arrival()
        if link_emulator is None or self._post.number not in self._tracer.outstanding:
            return True
        due_s = link_emulator.delivery_s(self._post)
        return due_s is not None and due_s <= time.perf_counter()

    def get_future(self) -> Future:
        """Return a future that completes once the call has completed and is recorded.

        With an emulated link, a separate thread completes it.
        """
        if self._tracer.link_emulator is None:
            return self._inner.get_future().then(self._on_arrival)
        future: Future = Future()

        def complete() -> None:
            try:
                self.wait()
                future.set_result(self._inner.get_future().value())
            except Exception as error:  # raised where the future is waited for
                future.set_exception(error)

        threading.Thread(target=complete, daemon=True).start()
        return future

    def is_success(self) -> bool:
        """Return whether the call has completed without an error."""
        return self.is_completed() and not self._failed

    def result(self) -> Any:
        """Return the output tensors of the call."""
        return self._inner.result()

    def _source_rank(self) -> int:
        """Return the sender of a receive from any source; `dist.recv` without a source needs it."""
        return self._inner._source_rank()

    def synchronize(self) -> None:
        """Make the current CUDA stream wait for the call; without streams, wait for it."""
        self._inner.synchronize()

    def _wait_for_inner(self) -> None:
        try:
            self._inner.wait()
        except RuntimeError as error:
            self._failed = True
            if not any(transport in str(error) for transport in TRANSPORTS):
                raise  # the call itself failed: autograd tracks its tensor, for example
            raise ConnectionLostError(
                f"rank {self._tracer.rank}, {self._post.kind}: need the rank at the other end; it "
                "has gone, and the connection with it."
            ) from error

    def _deliver(self) -> float:
        """Sleep until an emulated link has delivered; return when the call ended, in seconds."""
        link_emulator = self._tracer.link_emulator
        if link_emulator is None:
            return time.perf_counter()
        return max(link_emulator.deliver(self._post), self._arrived_s)

    def _watch(self) -> bool:
        """Ask to be notified of the end; return False where gloo cannot, as for reduce_scatter."""
        try:
            self._inner.get_future().add_done_callback(self._on_arrival)
        except RuntimeError:
            return False
        return True

    def _on_arrival(self, arrived: Future | None = None) -> Any:
        self._arrived_s = self._arrived_s or time.perf_counter()
        if self._tracer.link_emulator is None:
            self._note_end(self._arrived_s)
        return arrived.value() if arrived else None

    def _has_ended(self) -> None:
        """Run once, when the call has completed; subclasses override it."""

    def _note_end(self, end_s: float) -> None:
        post = self._post
        with self._tracer.noting:  # gloo's thread and the waiting one may both have noticed it
            if self._tracer.finish(post):
                self._has_ended()
                self._tracer.recorder.add(
                    post.kind,
                    post.post_s,
                    end_s,
                    num_bytes=post.num_bytes,
                    label=post.call,
                    peer=None if post.peer < 0 else post.peer,
                    group=post.members,
                )
