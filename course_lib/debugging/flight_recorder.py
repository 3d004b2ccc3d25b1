"""Read the dumps of PyTorch's flight recorder: which rank is behind, in which collective.

PyTorch keeps the last calls of every process group in a ring buffer, TORCH_FR_BUFFER_SIZE of them
(earlier TORCH_NCCL_TRACE_BUFFER_SIZE), and writes them where a collective times out
(TORCH_NCCL_DUMP_ON_TIMEOUT=1) to one file a rank, TORCH_FR_DUMP_TEMP_FILE plus the rank. The nth
call of a group has the number n on each of its ranks, so the ranks that have not made the nth call
are the ones that the others wait for. NCCL's dumps are pickles; gloo's ranks give the same by
`torch._C._distributed_c10d._dump_fr_trace()`, where this torch has it, and say less.

Source:  PyTorch 2.13, torch/distributed/flight_recorder/components/types.py, class Op
"""

import io
import json
import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from os import PathLike
from pathlib import Path
from typing import Any, NoReturn

from course_lib.core.errors import CourseError
from course_lib.ranks.source_lines import Line, owner

MOST_BYTES = 1 << 30
P2P = re.compile(r"(?P<kind>send|recv) (?P<own>\d+)(->|<-)(?P<peer>\d+)")


@dataclass(frozen=True)
class DumpedCall:
    """A call of one rank in a process group; `number` counts the calls of its group.

    peer   of a send or recv: the other rank, as the group counts
    since_ns   when it was made, in ns since 1970
    """

    rank: int
    group: str
    number: int
    kind: str
    sizes: str
    is_done: bool
    since_ns: int
    line: Line
    peer: int | None = None

    @property
    def what(self) -> str:
        """The call in words: `all_reduce [4]`."""
        return f"{self.kind} {self.sizes}".rstrip()


@dataclass(frozen=True)
class Dump:
    """The dump of one rank: its calls in order, and the ranks of its groups where it names them."""

    rank: int
    calls: Sequence[DumpedCall]
    members: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


def read_dumps(folder: str | PathLike[str]) -> list[Dump]:
    """Return the dumps in a folder by rank; the last number in a file's name is the rank.

    Raises: CourseError for a folder without dumps, and for a file that is none
    """
    place = Path(folder)
    paths = [path for path in place.glob("*") if path.is_file()] if place.is_dir() else [place]
    named = {path: re.findall(r"\d+", path.stem) for path in paths if path.is_file()}
    found = sorted((int(numbers[-1]), path) for path, numbers in named.items() if numbers)
    if not found:
        raise CourseError(
            f"{folder}: need the dumps of a flight recorder, a file for each rank whose name ends "
            "in its number, such as nccl_trace_rank_0; there are none. docs/debugging.md says how "
            "to get them."
        )
    twice = [path.name for (rank, path), (other, _) in pairwise(found) if rank == other]
    if twice:
        raise CourseError(
            f"{folder}: need one dump for each rank; got two of the rank of {twice[0]}. Try one "
            "folder for each job."
        )
    return [_read(rank, path) for rank, path in found]


class _PlainUnpickler(pickle.Unpickler):
    """Reads dictionaries, lists, texts and numbers: a file can make it run nothing."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")


def _read(rank: int, path: Path) -> Dump:
    try:
        if path.stat().st_size > MOST_BYTES:
            raise ValueError("it is larger than 1 GiB")
        raw = path.read_bytes()
        is_json = raw.lstrip()[:1] == b"{"
        plain = json.loads(raw) if is_json else _PlainUnpickler(io.BytesIO(raw)).load()
        calls = [_call(rank, one) for one in plain["entries"]]
        return Dump(rank, calls, dict(_members(plain.get("pg_config") or {})))
    except (OSError, ValueError, TypeError, KeyError, AttributeError, IndexError) as problem:
        why = f"{type(problem).__name__}: {problem}"
    except (pickle.UnpicklingError, EOFError, RecursionError, ImportError, MemoryError) as problem:
        why = str(problem)
    raise CourseError(
        f"{path.name}: need a dump of PyTorch's flight recorder, with its entries; got another "
        f"file ({why[:120]}). Try a folder with dumps only."
    )


def _call(rank: int, entry: Mapping[str, Any]) -> DumpedCall:
    name, desc = entry["process_group"]
    kind = str(entry["profiling_name"]).partition(":")[2] or str(entry["profiling_name"])
    pair = P2P.match(kind)
    is_p2p = bool(entry["is_p2p"])
    sizes = entry.get("output_sizes" if "gather" in kind else "input_sizes") or []
    return DumpedCall(
        rank=rank,
        group=f"{desc} ({name})" if desc and desc != "undefined" else str(name),
        number=int(entry["p2p_seq_id" if is_p2p else "collective_seq_id"]),
        kind=pair["kind"] if pair else kind.lstrip("_").removesuffix("_base"),
        sizes=" ".join(str(list(one)) for one in sizes[:3]),
        is_done=entry["state"] == "completed" or bool(entry.get("retired")),
        since_ns=int(entry["time_created_ns"]),
        line=_line(entry.get("frames") or []),
        peer=int(pair["peer"]) if pair and is_p2p else None,
    )


def _line(frames: Sequence[Mapping[str, Any]]) -> Line:
    """Return the user's innermost line: the frames begin with the call itself."""
    lines = [Line(str(one["filename"]), int(one["line"]), str(one["name"])) for one in frames]
    return next((one for one in lines if owner(one.file) == "learner"), (*lines[:1], Line())[0])


def _members(config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    for name, one in config.items():
        ranks = one.get("ranks") or "[]"
        numbers = tuple(json.loads(ranks) if isinstance(ranks, str) else ranks)
        if numbers:
            desc = one.get("desc")
            yield f"{desc} ({name})" if desc and desc != "undefined" else str(name), numbers
