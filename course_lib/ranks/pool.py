"""A pool of real ranks for notebooks: processes that run job after job and restart after a failure.

`Ranks(4)` starts four processes that form one torch.distributed world; `run` sends them a function.
Whether they return, raise, die or hang, the notebook's own process only reads from pipes, files and
the call board, so it cannot hang with them.
"""

import os
import shutil
import tempfile
import threading
import time
import weakref
from collections.abc import Callable
from importlib import import_module
from numbers import Integral
from typing import Any

import cloudpickle

from course_lib.core.default_place import resolve
from course_lib.core.errors import CourseError, MachineError, MeshError
from course_lib.core.links import Link, TwoLevelLink
from course_lib.core.records import Event
from course_lib.ranks.call_board import MAX_RANKS, CallBoard
from course_lib.ranks.job import RankJob
from course_lib.ranks.output import Output
from course_lib.ranks.place import LocalPlace, Place
from course_lib.ranks.rank_process import WorkerConfig
from course_lib.ranks.scratch import ScratchFolder, make_folder

START_TIMEOUT_S = 60.0


class Ranks:
    """A world of `world_size` ranks, started at once and restarted after a failure.

    `link` emulates a link between them (`Link` or `TwoLevelLink`); without one they communicate as
    fast as this machine can. They start on this machine, or where COURSE_RANKS says; here in any
    case with cluster="laptop". Calls from several threads take turns: each waits for the others.

    With `cluster` they live on `nodes` nodes: of an allocation ("slurm"), or on `hosts` that are
    reached by ssh ("ssh"). `wanted` are then `minutes`, `profile` and `hosts`, as
    `course_lib.cluster_ranks.place_of` takes them.

    Raises: MeshError for a world size that is no whole number from 1 to 64; MachineError where the
            temporary folder has no room, or the nodes do not start
    """

    def __init__(
        self,
        world_size: int = 4,
        *,
        link: Link | TwoLevelLink | None = None,
        cluster: str | None = None,
        nodes: int = 1,
        **wanted: Any,
    ) -> None:
        whole = isinstance(world_size, Integral) and not isinstance(world_size, bool)
        if not whole or not 1 <= world_size <= MAX_RANKS:
            raise MeshError(
                f"Ranks: need a whole number of ranks from 1 to {MAX_RANKS}; got {world_size!r}. "
                "Try Ranks(4)."
            )
        link, where = resolve(int(world_size), link, cluster)
        self.world_size, self.link = int(world_size), link
        self._where = f", cluster={where!r}, nodes={nodes}" if isinstance(where, str) else ""
        self._place = _place_for(self.world_size, link, where, nodes, wanted)
        self._turn = getattr(self._place, "turn", None) or threading.RLock()
        self._outputs: list[Output] = []
        self._open()

    # -- what a learner calls ---------------------------------------------------------------

    def run(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Call `fn(rank, *args, **kwargs)` on every rank; return the results in rank order.

        Raises: RankError with a readable report if a rank raises, dies, hangs or is stopped;
                CourseError if the function or its arguments cannot be sent; MachineError if the
                ranks do not start in time
        """
        try:
            blob = cloudpickle.dumps((fn, args, kwargs))
        except Exception as error:
            raise CourseError(
                f"Ranks.run: need a function and arguments that can be sent to other processes; "
                f"got {error}. Try to create such objects inside the function."
            ) from error
        return self._do("call", blob)

    def cell(self, source: str, name: str) -> None:
        """Run the source of a cell on every rank; its names stay for the next cell."""
        self._do("cell", cloudpickle.dumps((source, name)))

    def push(self, **names: Any) -> None:
        """Give the ranks' cells a copy of these objects: `ranks.push(batch=batch)`."""
        self._do("push", cloudpickle.dumps(names))

    @property
    def events(self) -> list[Event]:
        """Events of the last job, sorted by start: calls, spans, waits; the first starts at 0 s."""
        with self._turn:
            if not self._ready or not self._all_alive():
                return []
            self._place.send(("events", b""))
            events = [event for member in self._place.members for event in member.jobs.recv()[1]]
        zero_s = min((event.start_s for event in events), default=0.0)
        return [event.since(zero_s) for event in sorted(events, key=lambda e: e.start_s)]

    def output(self, rank: int) -> str:
        """Return everything that one rank printed in the last job, folded lines included.

        Raises: MeshError for a rank that is not in the world
        """
        if not 0 <= rank < self.world_size:
            raise MeshError(
                f"Ranks.output: need a rank from 0 to {self.world_size - 1}; got {rank}."
            )
        return self._outputs[rank].text() if self._outputs else ""

    def restart(self) -> None:
        """Start new processes; everything that the ranks held is lost."""
        with self._turn:
            if not self._end.alive:
                return self._open()
            self._place.stop()
            shutil.rmtree(self._folder, ignore_errors=True)
            self._start()

    def close(self) -> None:
        """End all ranks and all that they have started; the next job starts new ranks."""
        with self._turn:
            self._end()
            self._ready = False

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        over = f", link={self.link}" if self.link else ""
        return f"Ranks({self.world_size}{over}{self._where})"

    def __reduce__(self) -> Any:
        raise TypeError("Ranks live in the notebook and cannot be sent to a rank")

    # -- starting and stopping --------------------------------------------------------------

    def _open(self) -> None:
        """Make a folder for files; it and the ranks end with this object, or with the kernel."""
        scratch = make_folder()
        self._home = scratch.path
        self._end = weakref.finalize(self, _end_everything, self._place, scratch)
        self._start()

    def _start(self) -> None:
        self._ready = False
        try:
            self._start_ranks()
        except BaseException:
            self._end()
            raise

    def _start_ranks(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="world-", dir=self._home)
        self._call_board = CallBoard(os.path.join(self._folder, "board"), self.world_size)
        configs = [
            WorkerConfig(rank, self.world_size, self._folder, self._output_file(rank), self.link)
            for rank in range(self.world_size)
        ]
        self._place.start(configs, self._call_board)

    def _wait_until_ready(self) -> None:
        if not self._all_alive():
            self.restart()
        if self._ready:
            return
        deadline = time.monotonic() + START_TIMEOUT_S
        try:
            for member in self._place.members:
                if not member.jobs.poll(max(0.0, deadline - time.monotonic())):
                    raise EOFError
                _, backend = member.jobs.recv()
                getattr(self._place, "backends", set()).add(backend)
        except EOFError:
            raise MachineError(_did_not_start(self._output_file(member.rank))) from None
        except KeyboardInterrupt:
            self.restart()
            raise
        self._ready = True

    def _all_alive(self) -> bool:
        members = self._place.members
        return bool(members) and all(member.is_alive() for member in members)

    def _output_file(self, rank: int) -> str:
        return os.path.join(self._home, f"output{rank}")

    # -- one job ----------------------------------------------------------------------------

    def _do(self, kind: str, blob: bytes) -> list[Any]:
        with self._turn:
            self._wait_until_ready()
            self._outputs = [Output(self._output_file(r), r) for r in range(self.world_size)]
            self._place.before_job()
            job = RankJob(self._call_board, self._place, self._outputs)
            try:
                return job.run(kind, blob)
            finally:
                if job.lost and not self._place.over:  # else the next job asks for it again
                    self.restart()


def _end_everything(place: Place, scratch: ScratchFolder) -> None:
    place.end()
    scratch.remove()


def _place_for(
    world_size: int,
    link: Link | TwoLevelLink | None,
    where: Any,
    nodes: int,
    wanted: dict[str, Any],
) -> Place:
    if isinstance(where, str):
        if link:
            raise CourseError(
                "Ranks: need real links on a cluster; got an emulated one too. Leave out link=."
            )
        cluster_ranks = import_module("course_lib.cluster_ranks")  # stands above: it asks Slurm
        place: Place = cluster_ranks.place_of(where, world_size, nodes=nodes, **wanted)
        return place
    if wanted or nodes != 1:
        raise CourseError(
            f"Ranks: need cluster=... with {', '.join(wanted) or 'nodes'}; got none. "
            'Try cluster="slurm".'
        )
    if where is None:
        return LocalPlace()
    in_turn: Place = where.place_for_pool()
    return in_turn


def _did_not_start(output_file: str) -> str:
    said = "nothing"
    if os.path.exists(output_file):
        with open(output_file, encoding="utf-8", errors="replace") as file:
            said = file.read()[-500:].strip() or said
    return (
        f"Ranks: need ranks that start within {START_TIMEOUT_S:.0f} s; one did not, and said: "
        f"{said}. Try `course doctor`, which shows what this machine has."
    )
