"""A queue between threads that `multiprocessing.connection.wait` can wait on, beside pipes."""

import select
import socket
from collections import deque
from contextlib import suppress
from typing import Any


class Inbox:
    """Items in the order in which they were put; never full, so that nobody who puts has to wait.

    An item None ends it: from there on `recv` raises EOFError.
    """

    def __init__(self) -> None:
        self._items: deque[Any] = deque()
        self._here, self._there = socket.socketpair()

    def put(self, item: Any) -> None:
        """Add an item, and wake whoever waits."""
        self._items.append(item)
        with suppress(OSError):  # closed: nobody waits any more
            self._there.send(b"x")

    def fileno(self) -> int:
        """Return the file descriptor that is readable while there is an item."""
        return self._here.fileno()

    def poll(self, timeout_s: float = 0.0) -> bool:
        """Wait for an item; return whether there is one."""
        return bool(select.select([self._here], [], [], timeout_s)[0])

    def recv(self) -> Any:
        """Return the next item, and wait for it.

        Raises: EOFError at the end
        """
        select.select([self._here], [], [])
        if self._items[0] is None:
            raise EOFError
        self._here.recv(1)
        return self._items.popleft()

    def close(self) -> None:
        """Close it."""
        self._here.close()
        self._there.close()
