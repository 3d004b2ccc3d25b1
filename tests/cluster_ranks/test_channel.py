"""Who does not know the token gets nothing, and nothing of theirs is unpickled."""

import os
import pickle
import socket
import struct
import threading
import time

import pytest

from course_lib.cluster_ranks import channel as module
from course_lib.cluster_ranks.channel import Channel, ChannelError, greet_node, greet_notebook
from course_lib.cluster_ranks.door import MOST_UNPROVEN, Door

TOKEN = os.urandom(32)
KEYS = b"k" * 32, b"n" * 32


class Bomb:
    """Unpickling it would leave a file behind."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.fixture
def ends():
    """The two channels of a pair of sockets."""
    here, there = socket.socketpair()
    here.settimeout(5)
    there.settimeout(5)
    yield Channel(here, *KEYS), Channel(there, *reversed(KEYS))
    here.close()
    there.close()


@pytest.fixture
def door():
    one = Door("127.0.0.1", 2)
    yield one
    one.shut()
    for channel, _ in one.nodes.values():
        channel.close()


def knock(door):
    sock = socket.create_connection((door.address, door.port), 5)
    sock.settimeout(5)
    return sock


def is_closed(sock):
    try:
        return sock.recv(1) == b""
    except ConnectionError:
        return True


def frame(key, number, content, is_last=1):
    tag = module._tag(key, module.COUNT.pack(number, is_last), content)
    return module.HEAD.pack(len(content), is_last) + tag + content


def test_what_is_sent_comes_whole(ends, monkeypatch):
    monkeypatch.setattr(module, "FRAME_BYTES", 1000)
    here, there = ends
    here.send("job", b"x" * 5000)
    there.send("answer", 3)
    assert there.receive() == ("job", b"x" * 5000)
    assert here.receive() == ("answer", 3)


@pytest.mark.parametrize("forged", ["another key", "replayed", "other direction", "other content"])
def test_a_forged_frame_is_never_unpickled(ends, tmp_path, forged):
    here, there = ends
    bomb = pickle.dumps(Bomb(tmp_path / "bomb"))
    good = frame(KEYS[0], 0, pickle.dumps(("good",)))
    here.sock.sendall(good)
    assert there.receive() == ("good",)
    other = frame(KEYS[0], 1, pickle.dumps(("good",)))[:-1] + b"!"
    here.sock.sendall(
        {
            "another key": frame(b"guess" * 6, 1, bomb),
            "replayed": good,
            "other direction": frame(KEYS[1], 1, bomb),
            "other content": other,
        }[forged]
    )
    with pytest.raises(ChannelError, match="wrong tag"):
        there.receive()
    assert not (tmp_path / "bomb").exists()


def test_a_frame_that_is_too_long_is_not_read(ends):
    here, there = ends
    here.sock.sendall(struct.pack(">IB", 2**32 - 1, 1))
    with pytest.raises(ChannelError, match="too long"):
        there.receive()


def test_both_ends_have_to_know_the_token():
    here, there = socket.socketpair()
    with here, there:
        here.settimeout(5)
        there.settimeout(5)
        failed = []

        def node():
            try:
                greet_notebook(there, b"a guess" * 5)
            except ChannelError as problem:
                failed.append(str(problem))

        thread = threading.Thread(target=node)
        thread.start()
        with pytest.raises(ChannelError, match="does not know the token"):
            greet_node(here, TOKEN)
        here.close()  # nothing of the notebook's proof was sent
        thread.join()
        assert "gone" in "".join(failed)


def test_a_node_comes_in_once_and_what_it_said_is_of_no_use_to_another(door):
    spoken = []

    class Tapped(socket.socket):
        def sendall(self, data, *args):
            spoken.append(bytes(data))
            return super().sendall(data, *args)

    sock = Tapped()
    sock.settimeout(5)
    sock.connect((door.address, door.port))
    greet_notebook(sock, door.token).send(0, {"node": "a"})
    assert not door.wait(0.2)  # of two
    with knock(door) as replay:
        replay.sendall(b"".join(spoken))
        replay.recv(module.NONCE_BYTES)
        assert is_closed(replay)
    with knock(door) as again:
        greet_notebook(again, door.token).send(0, {"node": "a"})
        assert is_closed(again)
    with knock(door) as second:
        greet_notebook(second, door.token).send(1, {"node": "b"})
        assert door.wait(5)
    assert {facts["node"] for _, facts in door.nodes.values()} == {"a", "b"}
    assert len(door.strangers) == 2
    sock.close()


def test_those_who_say_nothing_keep_nobody_out(door, monkeypatch):
    monkeypatch.setattr("course_lib.cluster_ranks.door.PROOF_S", 0.5)
    silent = [knock(door) for _ in range(MOST_UNPROVEN + 4)]
    give_up_s = time.monotonic() + 20
    while not door.nodes and time.monotonic() < give_up_s:
        try:
            with knock(door) as sock:
                greet_notebook(sock, door.token).send(1, {"node": "b"})
                door.wait(0.1)
        except ChannelError:
            time.sleep(0.1)
    assert 1 in door.nodes
    assert door.strangers
    for sock in silent:
        sock.close()


def test_the_door_is_shut(door):
    door.shut()
    with pytest.raises(ConnectionError):
        knock(door)
