"""The place of ranks that is several nodes: with the members, jobs and reports of one machine."""

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Protocol

from course_lib.cluster_ranks.channel import ChannelError
from course_lib.cluster_ranks.door import Door
from course_lib.cluster_ranks.facts import check_facts
from course_lib.cluster_ranks.node_link import NodeLink, RemoteMember
from course_lib.ranks.call_board import CallBoard
from course_lib.ranks.place import RESTARTED
from course_lib.ranks.rank_process import WorkerConfig

BEAT_S = 1.0
CURRENT_S = 0.4  # no older may be what the call board shows of a node


class Nodes(Protocol):
    """Nodes that can be had: of an allocation, or reached by ssh.

    id            a number that other nodes of the same kind do not have at this time
    idle_minutes  after which they are given back when no job runs; 0: never
    """

    id: int
    num_nodes: int
    idle_minutes: float

    def open(self) -> Door:
        """Get the nodes and start their servers; return the door through which all have come.

        Raises: CourseError where they cannot be had; KeyboardInterrupt: then they are given back
        """

    def warning(self) -> str:
        """Return the sentence on nodes that end soon; empty where they do not."""

    def fate(self) -> str:
        """Return what became of the nodes, in words that follow `its node is gone`."""

    def release(self) -> None:
        """Give the nodes back, however far it has come with them."""


class ClusterPlace:
    """Ranks on nodes; these are asked for with the first ranks, and again once they are gone."""

    sees_at_once = False

    def __init__(self, nodes: Nodes, world_size: int) -> None:
        self.nodes, self.over = nodes, True
        self.links: list[NodeLink] = []
        self.members: list[RemoteMember] = []
        self._busy_s = time.monotonic()
        self._lock = threading.Lock()
        self._said = ""

    def start(self, configs: Sequence[WorkerConfig], call_board: CallBoard) -> None:
        """Start these ranks, as many on each node; first get the nodes, if there are none.

        Raises: CourseError where the nodes cannot be had, or differ from this machine
        """
        if self.over:
            self._open()
        per_node = -(-len(configs) // len(self.links))  # rounded up: the last nodes have fewer
        (store,) = self.links[0].ask("meet", self.nodes.id)
        for number, link in enumerate(self.links):
            mine = configs[number * per_node : (number + 1) * per_node]
            there = [
                replace(config, local_rank=i, local_world_size=len(mine), store=store)
                for i, config in enumerate(mine)
            ]
            if there:
                link.start(there, call_board)
        self.members[:] = [member for link in self.links for member in link.members.values()]
        self._busy_s = time.monotonic()  # warming up was no idling

    def _open(self) -> None:
        self.links.clear()
        door = None
        try:
            door = self.nodes.open()
            door.shut()
            pairs = [door.nodes[number] for number in range(self.nodes.num_nodes)]
            check_facts(facts for _, facts in pairs)
        except BaseException:
            if door is not None:
                door.turn_away()
            self.nodes.release()
            raise
        self.over, self._busy_s = False, time.monotonic()
        self.links += [
            NodeLink(channel, facts["node"], self._forward, self._on_gone)
            for channel, facts in pairs
        ]
        threading.Thread(target=self._keep, args=(list(self.links),), daemon=True).start()

    def before_job(self) -> None:
        """Say that the nodes end soon."""
        said = self.nodes.warning()
        if said != self._said:
            print(said)
        self._said = said

    def send(self, job: tuple[str, bytes]) -> None:
        """Send a job to every rank, once to each node.

        Raises: BrokenPipeError where a node is gone
        """
        self._busy_s = time.monotonic()
        for link in self.links:
            link.send_job(list(link.members), job)

    def is_current(self) -> bool:
        """Return whether the call board shows what all ranks do now; a job that runs asks often."""
        self._busy_s = time.monotonic()
        return all(time.perf_counter() - link.seen_s < CURRENT_S for link in self.links)

    def kill(self) -> None:
        """Kill the ranks and every process they started."""
        _on_each([link.kill for link in self.links])

    def stop(self) -> None:
        """Kill the ranks and let go of them; the nodes stay."""
        _on_each([link.stop for link in self.links])
        self.members.clear()

    def end(self) -> None:
        """End the ranks and give the nodes back."""
        self._give_back()
        self.stop()

    def after_loss(self) -> str:
        """Return the sentence on what becomes of the ranks after a failure that cost them."""
        if self.over:
            return (
                "The nodes are given back; what the ranks held is gone. The next cell asks again."
            )
        return RESTARTED

    # -- keeping the nodes, and giving them back --------------------------------------------

    def _keep(self, links: list[NodeLink]) -> None:
        """Tell the nodes that this notebook is there; give them back when nothing has run."""
        while not self.over and links == self.links:
            for link in links:
                with suppress(ChannelError):
                    link.channel.send("beat")
            idle_s = time.monotonic() - self._busy_s
            if self.members and 0 < self.nodes.idle_minutes * 60 < idle_s:
                self._said = ""
                return self._give_back()
            time.sleep(BEAT_S)

    def _forward(self, source: NodeLink, pieces: list[Any]) -> None:
        """Send the calls of one node to the others, whose ranks compare theirs with them."""
        for link in self.links:
            if link is not source:
                with suppress(ChannelError):
                    link.channel.send("rows", pieces)

    def _on_gone(self, link: NodeLink) -> None:
        """End all nodes when one is gone: a world with a hole in it is none."""
        with self._lock:
            if not self.over:
                fate = self.nodes.fate()
                for one in self.links:
                    one.fate = one.fate or fate
        self._give_back()

    def _give_back(self) -> None:
        with self._lock:
            if self.over:
                return
            self.over = True
        for link in self.links:
            with suppress(ChannelError):
                link.channel.send("end")
        self.nodes.release()


def _on_each(calls: list[Any]) -> None:
    """Run these beside each other: each waits for the answer of a node."""
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
