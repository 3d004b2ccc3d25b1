"""The ranks' printed output: shown rank by rank, and folded where it is too long."""

import os
from collections.abc import Callable

HEAD_LINES, TAIL_LINES = 40, 10
MAX_OUTPUT_BYTES = 50 * 2**20


class Output:
    """Output of one rank: a file that the rank appends to and the notebook reads."""

    def __init__(self, path: str, rank: int) -> None:
        self.path, self.rank = path, rank
        self._end = self._shown = self._num_folded = 0
        self._rest, self._tail = b"", list[str]()
        os.truncate(path, 0)  # a new job; the rank only ever appends

    def text(self) -> str:
        """Return everything that was printed since this job began."""
        return self._read(0).decode("utf-8", "replace")

    def num_bytes(self) -> int:
        """Return the number of bytes that were printed since this job began."""
        return os.path.getsize(self.path)

    def follow(self, write: Callable[[str], object] = print) -> None:
        """Show the new complete lines, up to the fold."""
        new = self._read(self._end)
        self._end += len(new)
        *lines, self._rest = (self._rest + new).split(b"\n")
        for line in lines:
            self._show(line, write)

    def finish(self, write: Callable[[str], object] = print) -> None:
        """Show the rest: an incomplete line, then the fold and the last lines."""
        self.follow(write)
        if self._rest:
            self._show(self._rest, write)
            self._rest = b""
        hidden = self._num_folded - len(self._tail)
        if hidden > 0:
            write(
                f"[{self.rank}] ... {hidden:,} more lines: ranks.output({self.rank}) has them all"
            )
        for line in self._tail:
            write(line)

    def _read(self, start: int) -> bytes:
        with open(self.path, "rb") as file:
            file.seek(start)
            return file.read()

    def _show(self, raw: bytes, write: Callable[[str], object]) -> None:
        text = raw.decode("utf-8", "replace").rsplit("\r", 1)[-1]
        line = f"[{self.rank}] {text}"
        if self._shown < HEAD_LINES:
            self._shown += 1
            write(line)
        else:
            self._num_folded += 1
            self._tail = [*self._tail, line][-TAIL_LINES:]
