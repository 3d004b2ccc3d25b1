"""One allocation under several pools of ranks, which take turns on its nodes.

A lesson has pools of 1, 2 and 4 ranks. Each world is spread over all nodes, and only one of them
has processes there at a time: a pool that has a job starts its ranks anew after another one had
its turn, and what cells had left on them is gone.
"""

import threading
import weakref
from collections.abc import Sequence
from math import ceil
from typing import Any

from course_lib.cluster_ranks import place_of
from course_lib.cluster_ranks.cluster_place import ClusterPlace
from course_lib.jobs.job import CPU_RANKS
from course_lib.jobs.site_commands import pick_profile
from course_lib.ranks.call_board import CallBoard
from course_lib.ranks.rank_process import WorkerConfig

USUAL_RANKS = 4  # of the largest world that most lessons have


def allocate(kind: str, *, nodes: int | None, hosts: Sequence[str] = ()) -> "SharedNodes":
    """Return nodes for all pools of a kernel, asked for when the first ranks start.

    nodes  None: as few as hold 4 ranks by the site's profile, and at most what it allows
    """
    nodes = nodes or fewest_nodes()
    ranks = nodes * ceil(USUAL_RANKS / nodes)
    return SharedNodes(place_of(kind, ranks, nodes=nodes, hosts=hosts))


def fewest_nodes() -> int:
    """Return how many nodes of the site hold the ranks of most lessons."""
    profile = pick_profile(None)
    return min(ceil(USUAL_RANKS / (profile.gpus_per_node or CPU_RANKS)), profile.max_nodes)


class SharedNodes:
    """Nodes that pools share.

    nodes     how many
    backends  over which the ranks of all pools so far communicate
    turn      is held by the pool that runs a job, starts or stops
    """

    def __init__(self, place: ClusterPlace) -> None:
        self.place, self.nodes = place, place.nodes.num_nodes
        self.backends: set[str] = set()
        self.turn = threading.RLock()
        self.holder: PlaceInTurn | None = None
        self.close = weakref.finalize(self, place.end)

    def place_for_pool(self) -> "PlaceInTurn":
        """Return the place of one more pool."""
        return PlaceInTurn(self)


class PlaceInTurn:
    """The place of one of the pools: it has ranks while it holds the nodes."""

    def __init__(self, shared: SharedNodes) -> None:
        self.shared, self.backends, self.turn = shared, shared.backends, shared.turn

    def __getattr__(self, name: str) -> Any:
        return getattr(self.shared.place, name)  # before_job, send, is_current, after_loss, ...

    @property
    def holds(self) -> bool:
        """Whether the ranks that run are those of this pool."""
        return self.shared.holder is self

    @property
    def members(self) -> Sequence[Any]:
        """The ranks of this pool; none while another one has its turn."""
        return self.shared.place.members if self.holds else []

    def start(self, configs: Sequence[WorkerConfig], call_board: CallBoard) -> None:
        """Stop the ranks of the pool whose turn it was, and start these."""
        with self.turn:
            if self.shared.holder is not None and not self.shared.place.over:
                self.shared.place.stop()
            self.shared.holder = self
            self.shared.place.start(configs, call_board)

    def kill(self) -> None:
        """Kill the ranks of this pool."""
        if self.holds:
            self.shared.place.kill()

    def stop(self) -> None:
        """Kill the ranks of this pool and let go of them; the nodes stay."""
        if self.holds:
            self.shared.place.stop()
            self.shared.holder = None

    end = stop
