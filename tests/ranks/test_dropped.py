"""A message whose handle is not kept is lost in gloo: the hang that follows is found and named."""

import time

import pytest
import torch
import torch.distributed as dist

from course_lib.core import Link
from course_lib.ranks import RankError, Ranks


def send_and_forget(rank, num_messages=1):
    world_size = dist.get_world_size()
    for _ in range(num_messages):
        dist.isend(torch.full((1,), 10.0**rank), (rank + 1) % world_size)
    received = torch.empty(1)
    dist.recv(received, (rank - 1) % world_size)
    return received.item()


def send_slowly_and_forget(rank, listens):
    """The handle is dropped when the message has left, and long before the link delivers it."""
    message = torch.ones(1)
    if rank == 1:
        work = dist.irecv(message, 0)
        listens.touch()
        work.wait()
    else:
        handle = dist.isend(message, 1)
        while not listens.exists():
            time.sleep(0.01)
        time.sleep(0.3)
        del handle
    return message.item()


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_dropped_handle_is_named_as_the_cause_of_the_hang(world_size):
    with Ranks(world_size) as ranks, pytest.raises(RankError) as caught:
        ranks.run(send_and_forget)
    assert caught.value.kind == "hang"
    assert "did not keep the handle of its send" in str(caught.value)
    assert "dist.isend(torch.full((1,), 10.0**rank)" in str(caught.value)


def test_a_dropped_message_that_is_still_on_a_slow_link_is_no_hang(tmp_path):
    with Ranks(2, link=Link(latency_s=1.5, bytes_per_s=1e9)) as ranks:
        assert ranks.run(send_slowly_and_forget, tmp_path / "listens") == [1.0, 1.0]


def test_a_message_nobody_received_is_told_and_does_not_reach_the_next_job(capsys):
    def send_into_the_void(rank):
        if rank == 0:
            dist.isend(torch.ones(1), 1)

    def pass_on(rank):
        message = torch.full((1,), 7.0)
        dist.send(message, 1) if rank == 0 else dist.recv(message.zero_(), 0)
        return message.item()

    with Ranks(2) as ranks:
        ranks.run(send_into_the_void)
        said = capsys.readouterr().out
        assert "orphan: rank 0 calls send float32 [1] 0->1, and the other end never came" in said
        assert "dist.isend(torch.ones(1), 1)" in said
        assert ranks.run(pass_on) == [7.0, 7.0]


def test_a_bad_peer_is_told_with_the_learners_line():
    with Ranks(2) as ranks, pytest.raises(RankError) as caught:
        ranks.run(lambda rank: dist.send(torch.ones(1), 5))
    assert "test_dropped.py line" in str(caught.value)


def test_a_message_to_oneself_is_told():
    with Ranks(1) as ranks, pytest.raises(RankError, match="rank 0, send: need another rank"):
        ranks.run(lambda rank: dist.isend(torch.ones(1), 0).wait())
