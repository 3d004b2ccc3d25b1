"""The server of a node: forks the node's ranks, and relays between them and the notebook.

python -m course_lib.cluster_ranks.node_server [DOOR_FILE]

It reads where the notebook's door is, and the token, from a file that only its owner can read, or
from stdin. It ends its ranks and itself as soon as the channel breaks, or the notebook is silent
for 10 s: nothing is left on a node whose notebook is gone.
"""

import importlib
import json
import os
import pickle
import signal
import socket
import sys
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import replace
from multiprocessing import connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import psutil

from course_lib.cluster_ranks.channel import LONGEST_BYTES, Channel, ChannelError, greet_notebook
from course_lib.cluster_ranks.door import FIRST_PORT, NUM_PORTS
from course_lib.cluster_ranks.facts import own_facts
from course_lib.cluster_ranks.inbox import Inbox
from course_lib.core.units import format_bytes

if TYPE_CHECKING:  # imported once the channel is there: PyTorch takes a second or two
    from course_lib.cluster_ranks.rows import Rows
    from course_lib.ranks.call_board import CallBoard
    from course_lib.ranks.place import LocalMember
    from course_lib.ranks.rank_process import WorkerConfig

SILENCE_S = 10.0  # after which the other end is taken for gone
CONNECT_S = 20.0  # in which the notebook's door has to open
BUSY_TICK_S, IDLE_TICK_S = 0.02, 0.2
STOPPED_EVERY_S = 0.5


class NodeServer:
    """The ranks of this node, and the channel to the notebook."""

    def __init__(self, channel: Channel) -> None:
        from course_lib.ranks.fork_server import PRELOAD
        from course_lib.ranks.place import LocalPlace
        from course_lib.ranks.process_tree import adopt_orphans
        from course_lib.ranks.scratch import make_folder

        for name in PRELOAD:  # once for all ranks
            importlib.import_module(name)
        adopt_orphans()
        self.channel, self.inbox = channel, Inbox()
        self.place = LocalPlace(forks=True, apart=(channel.sock, self.inbox))
        self.scratch = make_folder()
        self.alive: dict[int, LocalMember] = {}
        self.busy: set[int] = set()
        self.outputs: dict[int, RankOutput] = {}
        self.call_board: CallBoard | None = None
        self.rows: Rows | None = None
        self._stopped: list[int] = []
        self._looked_s = 0.0
        self._leaving = threading.Lock()

    def read(self) -> None:
        """Take messages of the notebook as they come; leave when it is gone."""
        try:
            while True:
                kind, *rest = self.channel.receive()
                if kind == "clock":
                    self.channel.send("clock", *rest, time.perf_counter())
                elif kind == "rows" and self.call_board:
                    self.call_board.write_pieces(rest[0])
                elif kind not in ("beat", "rows"):
                    self.inbox.put((kind, *rest))
        finally:
            self.leave()

    def serve(self) -> NoReturn:
        """Do what the notebook asks for, and relay what the ranks say, until it is gone."""
        threading.Thread(target=self.read, daemon=True).start()
        try:
            while True:
                signals = [one for member in self.alive.values() for one in member.signals]
                tick_s = BUSY_TICK_S if self.busy else IDLE_TICK_S
                connection.wait([self.inbox.fileno(), *signals], tick_s)
                while self.inbox.poll():
                    kind, *rest = self.inbox.recv()
                    getattr(self, f"on_{kind}")(*rest)
                self.relay()
        finally:
            self.leave()

    # -- what the notebook asks for ---------------------------------------------------------

    def on_meet(self, number: int) -> None:
        """Choose where the ranks meet: a free port of this node, on the notebook's network."""
        address = self.channel.sock.getsockname()[0]
        self.channel.send("reply", f"tcp://{address}:{_free_port(address, number)}")

    def on_start(self, configs: "list[WorkerConfig]", ahead_s: float) -> None:
        """Start ranks; the answer is empty, or why they cannot be started."""
        from course_lib.cluster_ranks.rows import Rows
        from course_lib.ranks.call_board import CallBoard

        folder = tempfile.mkdtemp(prefix="world-", dir=self.scratch.path)
        interface = _interface_of(self.channel.sock.getsockname()[0])
        here = [
            replace(
                config,
                folder=folder,
                output_file=os.path.join(folder, f"output{config.rank}"),
                interface=interface,
                ahead_s=ahead_s,
            )
            for config in configs
        ]
        try:
            board = CallBoard(os.path.join(folder, "board"), here[0].world_size)
            self.place.start(here, board)
        except Exception as error:
            self.channel.send("reply", str(error))
            return
        self.call_board = board
        self.rows = Rows(board, [config.rank for config in here], ahead_s)
        self.outputs = {config.rank: RankOutput(config.output_file) for config in here}
        self.alive = {member.rank: member for member in self.place.members}
        self.busy = set(self.alive)  # until they have said that they are ready
        self.channel.send("reply", "")

    def on_job(self, ranks: list[int], job: tuple[str, bytes]) -> None:
        """Send a job to some ranks."""
        for rank in ranks:
            self.busy.add(rank)
            if job[0] != "events":
                self.outputs[rank].clear()
            if rank in self.alive:
                with suppress(OSError):  # it has died, which `relay` tells
                    self.alive[rank].jobs.send(job)

    def on_kill(self) -> None:
        """Kill the ranks, and tell what they have said until then."""
        self.place.kill()
        self.relay()
        self.channel.send("reply", "")

    def on_stop(self) -> None:
        """Let go of the ranks: others may be started."""
        self.alive, self.busy, self.rows, self.call_board = {}, set(), None, None
        self.place.stop()
        self.channel.send("reply", "")

    def on_end(self) -> None:
        """End the ranks and this server."""
        self.leave()

    # -- what the ranks say -----------------------------------------------------------------

    def relay(self) -> None:
        """Send what is new: calls and output first, then the answers that came after them."""
        answers = [found for rank in list(self.alive) for found in self._answers(rank)]
        pieces = self.rows.changes() if self.rows else []
        now_s = time.perf_counter()
        self.channel.send("rows", now_s, pieces, self._find_stopped(now_s))
        for rank, output in self.outputs.items():
            while data := output.read_new():
                self.channel.send("output", rank, data)
        for answer in answers:
            self.channel.send(*answer)

    def _answers(self, rank: int) -> list[tuple[Any, ...]]:
        """Return the answers of a rank so far, and its death."""
        member, found = self.alive[rank], []
        try:
            while member.jobs.poll():
                found.append(("answer", rank, self._fitting(member.jobs.recv_bytes())))
                self.busy.discard(rank)
            if member.is_alive():
                return found
        except (EOFError, OSError):
            pass  # it has died, or closed its pipe, which is its end too
        del self.alive[rank]
        self.busy.discard(rank)
        return [*found, ("died", rank, member.death())]

    @staticmethod
    def _fitting(answer: bytes) -> bytes:
        """Return an answer, or instead of one that no channel carries why it does not come."""
        from course_lib.ranks.rank_process import RankFailure

        if len(answer) < LONGEST_BYTES - 1024:
            return answer
        most, got = format_bytes(LONGEST_BYTES), format_bytes(len(answer))
        message = (
            f"the result has {got}, and at most {most} can be sent to the notebook. Try to write "
            "it to a file in the shared folder, and to return its path."
        )
        return pickle.dumps(("failed", RankFailure("CannotSendError", message)))

    def _find_stopped(self, now_s: float) -> list[int]:
        if now_s - self._looked_s > STOPPED_EVERY_S:
            self._looked_s = now_s
            self._stopped = [rank for rank, one in self.alive.items() if one.is_stopped()]
        return self._stopped

    def leave(self) -> NoReturn:
        """End the ranks, all that they have started, and this process; from any thread, once."""
        if self._leaving.acquire(blocking=False):
            with suppress(Exception):
                self.channel.close()
            with suppress(Exception):
                self.place.end()
            self.scratch.remove()
            os._exit(0)
        threading.Event().wait()  # another thread leaves
        raise SystemExit


class RankOutput:
    """The file that a rank prints into, as far as it was relayed."""

    def __init__(self, path: str) -> None:
        self.path, self._at = path, 0

    def clear(self) -> None:
        """Forget it: a new job begins."""
        os.truncate(self.path, 0)
        self._at = 0

    def read_new(self) -> bytes:
        """Return what came since, a MiB at most; nothing beyond what a notebook takes."""
        from course_lib.ranks.output import MAX_OUTPUT_BYTES, READ_BYTES

        if self._at > MAX_OUTPUT_BYTES or os.path.getsize(self.path) <= self._at:
            return b""
        with open(self.path, "rb") as file:
            file.seek(self._at)
            data = file.read(READ_BYTES)
        self._at += len(data)
        return data


def main() -> None:
    """Connect to the notebook's door, and serve."""
    text = Path(sys.argv[1]).read_text() if len(sys.argv) > 1 else sys.stdin.readline()
    door = json.loads(text)
    number = door.get("number", int(os.environ.get("SLURM_PROCID", "0")))
    sock = _connect(door["address"], door["port"])
    sock.settimeout(SILENCE_S)
    try:
        channel = greet_notebook(sock, bytes.fromhex(door["token"]))
        channel.send(number, own_facts())
    except ChannelError as problem:
        sys.exit(f"node server: {problem}")
    server = NodeServer(channel)
    signal.signal(signal.SIGTERM, lambda *_: server.inbox.put(("end",)))
    server.serve()


def _connect(address: str, port: int) -> socket.socket:
    give_up_s = time.monotonic() + CONNECT_S
    while True:
        try:
            return socket.create_connection((address, port), 5)
        except OSError as problem:
            if time.monotonic() > give_up_s:
                sys.exit(
                    f"node server: need the notebook at {address}, port {port}; got {problem}. "
                    "It is gone, or a firewall is between."
                )
            time.sleep(0.2)


def _free_port(address: str, number: int) -> int:
    for attempt in range(NUM_PORTS):
        port = FIRST_PORT + (number + attempt) % NUM_PORTS
        with socket.socket() as probe, suppress(OSError):
            probe.bind((address, port))
            return port
    return 0


def _interface_of(address: str) -> str:
    """Return the interface with this address: the one that leads to the notebook."""
    for name, all_of in psutil.net_if_addrs().items():
        if any(one.address == address for one in all_of):
            return name
    return ""


if __name__ == "__main__":
    main()
