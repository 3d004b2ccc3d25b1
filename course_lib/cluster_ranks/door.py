"""The door of the notebook: where the servers of the nodes connect back to, and nobody else.

It listens on one address, lets in who proves the token, each node once, and is shut as soon as all
are in. A stranger is closed and noted, and keeps nobody waiting: proofs are checked beside each
other, within seconds, and of a few connections at a time.
"""

import errno
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import psutil

from course_lib.cluster_ranks.channel import Channel, ChannelError, greet_node
from course_lib.core.errors import MachineError

FIRST_PORT, NUM_PORTS = 20000, 12000  # what operators open, for torchrun too
PROOF_S = 3.0  # within which a connection has to prove the token
MOST_UNPROVEN = 16
MOST_NOTED = 100
LOG = logging.getLogger("course.ranks")


class Door:
    """A listening socket with a one-time token; `nodes` holds who is in, by number."""

    def __init__(self, address: str, num_nodes: int) -> None:
        self.token = secrets.token_bytes(32)
        self.num_nodes = num_nodes
        self.nodes: dict[int, tuple[Channel, dict[str, str]]] = {}
        self.strangers: list[str] = []
        self._unproven = 0
        self._changed = threading.Condition()
        self._socket = _listen(address)
        self.address, self.port = self._socket.getsockname()[:2]
        threading.Thread(target=self._accept, daemon=True).start()

    def wait(self, timeout_s: float) -> bool:
        """Wait until all nodes are in; return whether they are."""
        with self._changed:
            return self._changed.wait_for(lambda: len(self.nodes) == self.num_nodes, timeout_s)

    def shut(self) -> None:
        """Let nobody in any more; the token is worth nothing afterwards."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes accept()
        self._socket.close()
        self.token = b""

    def turn_away(self) -> None:
        """Shut the door, and end those who are in: not all came, or not all fit."""
        self.shut()
        for channel, _ in self.nodes.values():
            channel.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, (address, *_) = self._socket.accept()
            except OSError:
                return
            with self._changed:
                full = self._unproven >= MOST_UNPROVEN
                self._unproven += not full
            if full:
                sock.close()
                self._note(address, "there are too many at a time")
            else:
                threading.Thread(target=self._greet, args=(sock, address), daemon=True).start()

    def _greet(self, sock: socket.socket, address: str) -> None:
        shut = threading.Timer(PROOF_S, _cut, args=(sock,))  # also for one that drips bytes
        shut.daemon = True
        shut.start()
        try:
            if not self.token:
                raise ChannelError("channel: the door is shut")
            channel = greet_node(sock, self.token)
            number, facts = channel.receive()
            self._let_in(int(number), channel, facts)
        except Exception as problem:
            sock.close()
            self._note(address, str(problem))
        finally:
            shut.cancel()
            with self._changed:
                self._unproven -= 1

    def _let_in(self, number: int, channel: Channel, facts: dict[str, str]) -> None:
        with self._changed:
            if number in self.nodes or not 0 <= number < self.num_nodes:
                raise ChannelError(f"channel: there is no place for node {number}")
            self.nodes[number] = channel, facts
            self._changed.notify_all()

    def _note(self, address: str, why: str) -> None:
        if len(self.strangers) < MOST_NOTED:
            self.strangers.append(f"{address}: {why}")
            LOG.warning("a connection from %s was closed: %s", address, why)


def _cut(sock: socket.socket) -> None:
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def _listen(address: str) -> socket.socket:
    """Listen on a free port of those that operators open.

    Raises: MachineError where there is none
    """
    start = time.monotonic_ns() // 1000
    problem: OSError | None = None
    for attempt in range(NUM_PORTS):
        sock = socket.socket()
        try:
            sock.bind((address, FIRST_PORT + (start + attempt) % NUM_PORTS))
            sock.listen(64)
            return sock
        except OSError as error:
            sock.close()
            problem = error
            if error.errno != errno.EADDRINUSE:
                break
    raise MachineError(
        f"Ranks: need an address of this machine to listen on; got {address}: {problem}. Try "
        "kernel_address in the profile: an address or an interface that the nodes can reach."
    )


def address_of(wanted: str, route: Callable[[], str] | None = None) -> str:
    """Return the IPv4 address of an interface; an address unchanged; the machine's own if empty.

    Raises: MachineError for a name that is neither
    """
    found = psutil.net_if_addrs()
    own = {
        name: one.address
        for name, all_of in found.items()
        for one in all_of
        if one.family == socket.AF_INET
    }
    if wanted in own:
        return own[wanted]
    if wanted:
        try:
            return socket.gethostbyname(wanted)
        except OSError:
            raise MachineError(
                f"Ranks: need kernel_address to be one of {', '.join(own)}, or an address; got "
                f"{wanted!r}. Try `ip addr` on the notebook's machine."
            ) from None
    return (route() if route else "") or _default_address() or "127.0.0.1"


def _default_address() -> str:
    """Return the address from which this machine would reach others; nothing is sent."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("10.255.255.255", 1))
        return str(probe.getsockname()[0])
    return ""
