"""Names for collectives: what a call is for, so that ranks can tell calls of equal sizes apart.

A wrapper names its call, and the tracer of `course_lib.ranks` compares the names of all ranks.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_PURPOSE = ContextVar("purpose", default="")


@contextmanager
def call_for(what: str) -> Iterator[None]:
    """Name the collectives that the block starts, for example after the unit that they gather."""
    before = _PURPOSE.set(what)
    try:
        yield
    finally:
        _PURPOSE.reset(before)


def purpose() -> str:
    """Return what the present call is for; empty if nobody has said it."""
    return _PURPOSE.get()
