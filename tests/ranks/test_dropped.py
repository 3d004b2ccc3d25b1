"""A handle that is not kept: a send may be lost, a receive stays under way; both are named."""

import os
import textwrap
import time

import psutil
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


def receive_with_one_name(rank, anyone=False):
    """Rank 1 overwrites the handle of each receive; it waits for the last one only."""
    received = [torch.zeros(1) for _ in range(3)]
    if rank == 0:
        for i in range(3):
            dist.send(torch.full((1,), 10.0**i), 1)
    else:
        for x in received:
            work = dist.irecv(x, None if anyone else 0)
        work.wait()
    return [x.item() for x in received]


def receive_and_forget(rank, num_sends):
    """Rank 1 returns at once; the messages are sent later."""
    if rank == 1:
        for _ in range(3):
            dist.irecv(torch.zeros(1), 0)
        return
    time.sleep(0.3)
    for _ in range(num_sends):
        dist.send(torch.ones(1), 1)


def receive_what_was_taken(rank):
    """The message goes to the receive that nobody waits for, so that the other one waits."""
    if rank == 0:
        dist.send(torch.ones(1), 1)
    else:
        dist.irecv(torch.zeros(1), 0)
        dist.recv(torch.zeros(1), 0)


def keep_neither_handle(rank, then_meet=True):
    """Nobody receives yet when the handle of the send is dropped: gloo looks for it for ever."""
    if rank == 0:
        dist.isend(torch.ones(1), 1)
    dist.barrier()
    if rank == 1:
        dist.irecv(torch.zeros(1), 0)
    if then_meet:
        dist.barrier()


def pass_on(rank):
    message = torch.full((1,), 7.0)
    dist.send(message, 1) if rank == 0 else dist.recv(message.zero_(), 0)
    return message.item()


def load(_rank):
    start_s = time.process_time()
    time.sleep(0.5)
    return (time.process_time() - start_s) / 0.5


def count(events, kind):
    return sum(event.kind == kind for event in events)


UNKEPT = "not waited for: rank 1 did not keep the handle of its recv, so nothing can wait for it"


@pytest.mark.parametrize("anyone", [False, True])
def test_receives_whose_handles_are_overwritten_arrive_in_order_and_are_told(capsys, anyone):
    with Ranks(2) as ranks:
        assert ranks.run(receive_with_one_name, anyone)[1] == [1.0, 10.0, 100.0]
        said = capsys.readouterr().out
        assert said.count(UNKEPT) == 1
        assert "else 0)" in said
        assert "orphan" not in said
        assert count(ranks.events, "recv") == 3
        assert ranks.run(pass_on) == [7.0, 7.0]
        assert max(ranks.run(load)) < 0.3


def test_a_kept_receive_is_not_told(capsys):
    with Ranks(2) as ranks:
        ranks.run(pass_on)
    assert capsys.readouterr().out == ""


def test_a_cell_may_overwrite_the_handle_of_the_cell_before(capsys):
    first = "x, y = torch.zeros(2, 1)\nwork = dist.irecv(x, 0) if rank == 1 else None"
    second = """
        if rank == 0:
            dist.send(torch.full((1,), 5.0), 1)
            dist.send(torch.full((1,), 6.0), 1)
        else:
            work = dist.irecv(y, 0)
            work.wait()
        print(x.item(), y.item())
    """
    with Ranks(2) as ranks:
        ranks.cell(first, "<first>")
        assert capsys.readouterr().out == ""
        ranks.cell(textwrap.dedent(second), "<second>")
        assert ranks.output(1) == "5.0 6.0\n"
        assert UNKEPT in capsys.readouterr().out


def test_each_receive_ends_when_the_link_delivers_its_message():
    with Ranks(2, link=Link(latency_s=0.1, bytes_per_s=40)) as ranks:  # a message takes 0.1 s
        ranks.run(receive_with_one_name)
        events = sorted(ranks.events, key=lambda event: event.end_s)
    sends, received = ([e for e in events if e.kind == kind] for kind in ("send", "recv"))
    assert [(e.rank, e.peer, e.num_bytes) for e in received] == [(1, 0, 4)] * 3
    assert [e.end_s for e in received] == pytest.approx([e.end_s for e in sends])


def test_receives_nobody_waits_for_are_told_also_when_the_messages_come_later(capsys):
    with Ranks(2) as ranks:
        ranks.run(receive_and_forget, 3)
        said = capsys.readouterr().out
        assert said.count(UNKEPT) == 1
        assert "dist.irecv(torch.zeros(1), 0)" in said
        assert max(ranks.run(load)) < 0.3
        assert ranks.run(pass_on) == [7.0, 7.0]
        assert capsys.readouterr().out == ""


@pytest.mark.parametrize("num_sends", [0, 2])
def test_a_receive_nobody_sends_to_is_told_and_takes_no_message_of_the_next_job(capsys, num_sends):
    with Ranks(2) as ranks:
        ranks.run(receive_and_forget, num_sends)
        said = capsys.readouterr().out
        assert said.count("orphan: rank 1 calls recv float32 [1] 0->1, and the other end") == 1
        assert said.count(UNKEPT) == bool(num_sends)
        assert "dist.irecv(torch.zeros(1), 0)" in said
        assert ranks.run(pass_on) == [7.0, 7.0]


def test_a_receive_nobody_sends_to_is_told_when_a_later_cell_overwrites_it(capsys):
    with Ranks(2) as ranks:
        ranks.cell("work = dist.irecv(torch.zeros(1), 0) if rank == 1 else None", "<first>")
        assert capsys.readouterr().out == ""
        ranks.cell("work = None", "<second>")
        said = capsys.readouterr().out
        assert "orphan: rank 1 calls recv float32 [1] 0->1" in said
        assert ranks.run(pass_on) == [7.0, 7.0]


def test_a_receive_that_took_the_message_of_another_is_named_with_the_hang():
    with Ranks(2) as ranks:
        processes = [psutil.Process(pid) for pid in ranks.run(lambda rank: os.getpid())]
        with pytest.raises(RankError) as caught:
            ranks.run(receive_what_was_taken)
        assert not any(process.is_running() for process in processes)
        assert ranks.run(pass_on) == [7.0, 7.0]
    assert caught.value.kind == "hang"
    assert [(wait.rank, wait.kind) for wait in caught.value.waits] == [(1, "recv")]
    assert UNKEPT in str(caught.value)
    assert "dist.irecv(torch.zeros(1), 0)" in str(caught.value)


def test_a_lost_send_to_a_receive_that_nobody_waits_for_stops_what_follows():
    with Ranks(2) as ranks:
        with pytest.raises(RankError) as caught:
            ranks.run(keep_neither_handle)
        assert max(ranks.run(load)) < 0.3
    assert caught.value.kind == "hang"
    assert [(wait.rank, wait.kind) for wait in caught.value.waits] == [
        (0, "barrier"),
        (1, "barrier"),
    ]
    assert "lost: rank 0 did not keep the handle of its send" in str(caught.value)
    assert "dist.isend(torch.ones(1), 1)" in str(caught.value)
    assert UNKEPT in str(caught.value)


def test_a_send_that_may_be_lost_is_told_and_leaves_no_rank_at_full_load(capsys):
    with Ranks(2) as ranks:
        ranks.run(keep_neither_handle, then_meet=False)
        said = capsys.readouterr().out
        assert "lost: rank 0 did not keep the handle of its send" in said
        assert UNKEPT in said
        assert max(ranks.run(load)) < 0.3
        assert ranks.run(pass_on) == [7.0, 7.0]


def test_a_rank_that_dies_is_not_blamed_for_its_handles():
    def die(rank):
        os._exit(3) if rank == 0 else dist.recv(torch.zeros(1), 0)

    with Ranks(2) as ranks, pytest.raises(RankError) as caught:
        ranks.run(die)
    assert caught.value.kind == "died"
    assert "did not keep" not in str(caught.value)


def test_a_handle_can_be_waited_for_again():
    def waits_twice(rank):
        x = torch.full((2,), float(rank))
        work = dist.isend(x, 1) if rank == 0 else dist.irecv(x, 0)
        return [work.wait() and work.wait(), x.tolist()]

    with Ranks(2) as ranks:
        assert ranks.run(waits_twice) == [[True, [0.0, 0.0]]] * 2
