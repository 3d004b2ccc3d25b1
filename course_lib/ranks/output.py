"""The ranks' printed output: shown rank by rank, and folded where it is too long.

Only the head and the tail of a long output are read, so a rank that prints in a loop costs the
notebook neither time nor memory.
"""

import os
from collections.abc import Callable
from typing import BinaryIO

HEAD_LINES, TAIL_LINES = 40, 10
LINE_BYTES = 2**13  # a longer line is shown as several
READ_BYTES = 2**20
MAX_OUTPUT_BYTES = 50 * 2**20


class Output:
    """Output of one rank: a file that the rank appends to and the notebook reads."""

    def __init__(self, path: str, rank: int) -> None:
        self.path, self.rank = path, rank
        self._end = self._shown = 0  # bytes and lines that have been shown
        os.truncate(path, 0)  # a new job; the rank only ever appends

    def text(self) -> str:
        """Return everything that was printed since this job began."""
        with open(self.path, "rb") as file:
            return file.read().decode("utf-8", "replace")

    def num_bytes(self) -> int:
        """Return the number of bytes that were printed since this job began."""
        return os.path.getsize(self.path)

    def follow(self, write: Callable[[str], object] = print) -> None:
        """Show the new complete lines, up to the fold."""
        with open(self.path, "rb") as file:
            self._show_head(file, write, whole=True)

    def finish(self, write: Callable[[str], object] = print) -> None:
        """Show the rest: an incomplete line, then the fold and the last lines."""
        with open(self.path, "rb") as file:
            self._show_head(file, write, whole=False)
            size = os.fstat(file.fileno()).st_size  # what comes later belongs to no job
            num_lines, last = self._count_lines(file, size), self._last_lines(file, size)
        if num_lines > len(last):
            write(
                f"[{self.rank}] ... {num_lines - len(last):,} more lines: "
                f"ranks.output({self.rank}) has them all"
            )
        for line in last:
            self._show(line, write)

    def _show_head(self, file: BinaryIO, write: Callable[[str], object], *, whole: bool) -> None:
        file.seek(self._end)
        while self._shown < HEAD_LINES and (line := file.readline(LINE_BYTES)):
            if whole and len(line) < LINE_BYTES and not line.endswith(b"\n"):
                return
            self._end += len(line)
            self._shown += 1
            self._show(line, write)

    def _count_lines(self, file: BinaryIO, size: int) -> int:
        """Return the number of lines from the fold up to `size` bytes."""
        file.seek(self._end)
        num_lines, piece = 0, b""
        for start in range(self._end, size, READ_BYTES):
            piece = file.read(min(READ_BYTES, size - start))
            num_lines += piece.count(b"\n")
        return num_lines + (piece[-1:] not in (b"", b"\n"))

    def _last_lines(self, file: BinaryIO, size: int) -> list[bytes]:
        file.seek(max(self._end, size - TAIL_LINES * LINE_BYTES))
        rest = file.read(size - file.tell())
        return rest.removesuffix(b"\n").split(b"\n")[-TAIL_LINES:] if rest else []

    def _show(self, raw: bytes, write: Callable[[str], object]) -> None:
        text = raw.removesuffix(b"\n").decode("utf-8", "replace").rsplit("\r", 1)[-1]
        write(f"[{self.rank}] {text}")
