"""The notebook's end of one node: its ranks as members, and the thread that hears its server."""

import pickle
import queue
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from course_lib.cluster_ranks.channel import Channel, ChannelError
from course_lib.cluster_ranks.inbox import Inbox
from course_lib.core.errors import MachineError
from course_lib.ranks.call_board import CallBoard
from course_lib.ranks.rank_process import RankFailure, WorkerConfig

ANSWER_S = 15.0
WARM_S = 90.0  # in which a node has imported PyTorch
SILENCE_S = 10.0  # after which a node is taken for gone
NUM_PINGS = 10
FATE_S = 10.0  # in which what became of the node is found out


class JobPipe(Inbox):
    """The pipe of jobs of a rank on another node."""

    def __init__(self, node: "NodeLink", rank: int) -> None:
        super().__init__()
        self._node, self._rank = node, rank

    def send(self, job: tuple[str, bytes]) -> None:
        """Send a job to the rank.

        Raises: BrokenPipeError where its node is gone
        """
        self._node.send_job([self._rank], job)

    def recv(self) -> Any:
        """Return the next answer.

        Raises: EOFError where the rank has ended
        """
        return pickle.loads(super().recv())


class RemoteMember:
    """A rank on another node."""

    def __init__(self, node: "NodeLink", rank: int) -> None:
        self.rank, self.node = rank, node
        self.jobs = JobPipe(node, rank)
        self._failure: RankFailure | None = None

    @property
    def signals(self) -> list[Any]:
        """Its answers; the end of the rank is the last."""
        return [self.jobs]

    def is_alive(self) -> bool:
        """Return whether the rank runs, as far as its server has told."""
        return self._failure is None

    def is_stopped(self) -> bool:
        """Return whether a signal such as SIGSTOP has halted the rank."""
        return self.rank in self.node.stopped

    def death(self) -> RankFailure:
        """Return how the rank, or else its node, ended."""
        failure = self._failure or RankFailure("RankDied", "died")
        by_order = "SIGTERM" in failure.message  # as Slurm ends all of a job, the server too
        if self.node.is_gone.wait(FATE_S if by_order else 0.2):
            self.node.fate_known.wait(FATE_S)
            return RankFailure(
                "RankDied", f"died: its node {self.node.name} is gone{self.node.fate}"
            )
        return failure

    def end(self, failure: RankFailure) -> None:
        """Note that the rank has ended."""
        if self._failure is None:
            self._failure = failure
            self.jobs.put(None)


class NodeLink:
    """One node: `members` are its ranks, `name` its host name.

    seen_s     until when the call board shows what its ranks did, on this machine's clock
    on_gone    is called, in the thread of this node, when its server is gone
    """

    def __init__(
        self,
        channel: Channel,
        name: str,
        forward: Callable[["NodeLink", list[Any]], None],
        on_gone: Callable[["NodeLink"], None],
    ) -> None:
        self.channel, self.name = channel, name
        self.members: dict[int, RemoteMember] = {}
        self.stopped: set[int] = set()
        self.seen_s = self.ahead_s = 0.0
        self.is_gone, self.fate_known = threading.Event(), threading.Event()
        self.fate = ""
        self._replies: queue.SimpleQueue[tuple[Any, ...] | None] = queue.SimpleQueue()
        self._outputs: dict[int, str] = {}
        self._call_board: CallBoard | None = None
        self._forward, self._on_gone = forward, on_gone
        channel.sock.settimeout(WARM_S)
        threading.Thread(target=self._hear, daemon=True).start()

    # -- what is asked of its server --------------------------------------------------------

    def start(self, configs: list[WorkerConfig], call_board: CallBoard) -> None:
        """Let the node start these ranks.

        Raises: MachineError where it does not
        """
        self._measure_clock()
        self._call_board = call_board
        self._outputs = {config.rank: config.output_file for config in configs}
        for path in self._outputs.values():
            open(path, "a").close()
        self.members = {config.rank: RemoteMember(self, config.rank) for config in configs}
        (problem,) = self.ask("start", configs, self.ahead_s)
        if problem:
            raise MachineError(f"Ranks, node {self.name}: {problem}")

    def stop(self) -> None:
        """Let the node kill its ranks and let go of them."""
        if not self.is_gone.is_set():
            with suppress(ChannelError, MachineError):
                self.ask("stop")
        self._call_board = None
        for member in self.members.values():
            member.jobs.close()
        self.members = {}

    def kill(self) -> None:
        """Let the node kill its ranks."""
        with suppress(ChannelError, MachineError):
            self.ask("kill")

    def send_job(self, ranks: list[int], job: tuple[str, bytes]) -> None:
        """Send a job to some ranks of the node.

        Raises: BrokenPipeError where it is gone
        """
        try:
            self.channel.send("job", ranks, job)
        except ChannelError as error:
            raise BrokenPipeError from error

    def ask(self, *message: Any) -> tuple[Any, ...]:
        """Send a message and return the reply.

        Raises: MachineError where none comes
        """
        self.channel.send(*message)
        reply = None
        with suppress(queue.Empty):
            reply = self._replies.get(timeout=ANSWER_S if self.seen_s else WARM_S)
        if reply is None:
            raise MachineError(f"Ranks, node {self.name}: need an answer; it is gone{self.fate}.")
        return reply

    def _measure_clock(self) -> None:
        """Find by how much this machine's clock is ahead: from the quickest of some answers.

        Source:  Cristian (1989), Probabilistic clock synchronization
        """
        found = []
        for _ in range(NUM_PINGS):
            there_s, start_s, end_s = self.ask("clock", time.perf_counter())
            found.append((end_s - start_s, (start_s + end_s) / 2 - there_s))
        self.ahead_s = min(found)[1]

    # -- what its server says ---------------------------------------------------------------

    def _hear(self) -> None:
        try:
            while True:
                kind, *rest = self.channel.receive()
                getattr(self, f"_on_{kind}")(*rest)
        except Exception as problem:  # also a message that makes no sense: the node is lost
            self.fate = f" ({problem})" if not isinstance(problem, ChannelError) else ""
        self.channel.close()
        self.is_gone.set()
        self._replies.put(None)
        self._end_all(self.members.values())
        self._on_gone(self)
        self.fate_known.set()

    def _end_all(self, members: Iterable[RemoteMember]) -> None:
        for member in list(members):
            member.end(RankFailure("RankDied", "died: its node is gone"))

    def _on_clock(self, start_s: float, there_s: float) -> None:
        self._replies.put((there_s, start_s, time.perf_counter()))

    def _on_reply(self, *values: Any) -> None:
        self._replies.put(values)

    def _on_rows(self, there_s: float, pieces: list[tuple[int, bytes]], stopped: list[int]) -> None:
        self.stopped = set(stopped)
        if pieces and self._call_board:
            self._call_board.write_pieces(pieces)
            self._forward(self, pieces)
        self.channel.sock.settimeout(SILENCE_S)
        self.seen_s = there_s + self.ahead_s

    def _on_output(self, rank: int, data: bytes) -> None:
        with open(self._outputs[rank], "ab") as file:
            file.write(data)

    def _on_answer(self, rank: int, answer: bytes) -> None:
        if rank in self.members:
            self.members[rank].jobs.put(answer)

    def _on_died(self, rank: int, failure: RankFailure) -> None:
        if rank in self.members:
            self.members[rank].end(failure)
