"""An authenticated channel between the notebook and the server of a node.

Both ends know a one-time token. Each proves it with a random number of the other's choice, so that
no recorded answer can be used again; then each message carries a tag over its number and content,
with a key for each direction. Nothing is unpickled before its tag has been checked. Messages are
authenticated, not encrypted: who listens on the site's network can read them, and change nothing.

    node            notebook
         <- nonce_k
    nonce_n, HMAC(token, "node" nonce_k nonce_n) ->
         <- HMAC(token, "notebook" nonce_k nonce_n)
    frames: length, last?, HMAC(key, number, last?, content), content

Source:  RFC 2104 (HMAC); the keys follow from token and nonces as in RFC 5869, with one HMAC each
"""

import hmac
import os
import pickle
import socket
import struct
import threading
from contextlib import suppress
from typing import Any

from course_lib.core.errors import CourseError
from course_lib.core.units import MIB, format_bytes

NONCE_BYTES = TAG_BYTES = 32
FRAME_BYTES = 4 * MIB  # the longest content of a frame; a longer message is several
LONGEST_BYTES = 1024 * MIB  # of a message
HEAD = struct.Struct(">IB")
COUNT = struct.Struct(">QB")


class ChannelError(CourseError):
    """The other end is gone, or is not who it should be."""


class TooLongError(CourseError):
    """A message is longer than a channel carries."""


class Channel:
    """A socket that carries tagged messages; several threads may send, one receives."""

    def __init__(self, sock: socket.socket, key_out: bytes, key_in: bytes) -> None:
        self.sock = sock
        self._key_out, self._key_in = key_out, key_in
        self._num_out = self._num_in = 0
        self._sending = threading.Lock()
        if sock.family == socket.AF_INET:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, *message: Any) -> None:
        """Send a message of plain, picklable values.

        Raises: TooLongError from 1 GiB on; ChannelError where the other end is gone
        """
        content = memoryview(pickle.dumps(message, protocol=4))
        if len(content) > LONGEST_BYTES:
            raise TooLongError(
                f"Ranks: need at most {format_bytes(LONGEST_BYTES)} to send between the notebook "
                f"and a node; got {format_bytes(len(content))}. Try a file in the shared folder, "
                "and send its path."
            )
        with self._sending:
            for start in range(0, len(content), FRAME_BYTES):
                piece = content[start : start + FRAME_BYTES]
                self._send_frame(piece, start + FRAME_BYTES >= len(content))

    def _send_frame(self, piece: memoryview, is_last: bool) -> None:
        tag = _tag(self._key_out, COUNT.pack(self._num_out, is_last), piece)
        self._num_out += 1
        try:
            self.sock.sendall(HEAD.pack(len(piece), is_last) + tag)
            self.sock.sendall(piece)
        except OSError as error:
            raise ChannelError(f"channel: the other end is gone ({error})") from error

    def receive(self) -> tuple[Any, ...]:
        """Wait for the next message.

        Raises: ChannelError where the other end is gone or silent for longer than the socket's
            timeout, or a frame is not the next one of this channel
        """
        pieces, is_last = bytearray(), False
        while not is_last:
            length, last = HEAD.unpack(receive_exactly(self.sock, HEAD.size))
            if length > FRAME_BYTES or len(pieces) + length > LONGEST_BYTES:
                raise ChannelError(f"channel: a frame of {length} bytes is too long")
            tag = receive_exactly(self.sock, TAG_BYTES)
            piece = receive_exactly(self.sock, length)
            if not hmac.compare_digest(
                tag, _tag(self._key_in, COUNT.pack(self._num_in, last), piece)
            ):
                raise ChannelError("channel: a frame has a wrong tag, or is not the next one")
            self._num_in += 1
            pieces += piece
            is_last = bool(last)
        message: tuple[Any, ...] = pickle.loads(pieces)
        return message

    def close(self) -> None:
        """Close the socket; whoever waits in `receive` is woken."""
        with suppress(OSError):  # the other end has closed it
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()


def greet_node(sock: socket.socket, token: bytes) -> Channel:
    """Prove the token to a node that has connected, and let it prove it; return the channel.

    Raises: ChannelError where the other end does not know the token; then it has learned nothing
    """
    ours = os.urandom(NONCE_BYTES)
    _send(sock, ours)
    theirs, proof = receive_exactly(sock, NONCE_BYTES), receive_exactly(sock, TAG_BYTES)
    if not hmac.compare_digest(proof, _tag(token, b"node", ours, theirs)):
        raise ChannelError("channel: the other end does not know the token")
    _send(sock, _tag(token, b"notebook", ours, theirs))
    down, up = (_tag(token, way, ours, theirs) for way in (b"down", b"up"))
    return Channel(sock, down, up)


def greet_notebook(sock: socket.socket, token: bytes) -> Channel:
    """Do the same at the node's end."""
    theirs, ours = receive_exactly(sock, NONCE_BYTES), os.urandom(NONCE_BYTES)
    _send(sock, ours + _tag(token, b"node", theirs, ours))
    proof = receive_exactly(sock, TAG_BYTES)
    if not hmac.compare_digest(proof, _tag(token, b"notebook", theirs, ours)):
        raise ChannelError("channel: the notebook does not know the token")
    down, up = (_tag(token, way, theirs, ours) for way in (b"down", b"up"))
    return Channel(sock, up, down)


def receive_exactly(sock: socket.socket, num_bytes: int) -> bytes:
    """Return the next bytes of a socket.

    Raises: ChannelError where it ends, fails, or is silent for longer than its timeout
    """
    found = bytearray(num_bytes)
    view, at = memoryview(found), 0
    try:
        while at < num_bytes:
            count = sock.recv_into(view[at:])
            if not count:
                raise ChannelError("channel: the other end is gone")
            at += count
    except OSError as error:
        raise ChannelError(f"channel: the other end is gone ({error})") from error
    return bytes(found)


def _send(sock: socket.socket, data: bytes) -> None:
    try:
        sock.sendall(data)
    except OSError as error:
        raise ChannelError(f"channel: the other end is gone ({error})") from error


def _tag(key: bytes, *parts: bytes | memoryview) -> bytes:
    made = hmac.new(key, digestmod="sha256")
    for part in parts:
        made.update(part)
    return made.digest()
