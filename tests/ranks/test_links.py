"""Emulated links: wall time is alpha + bytes / beta, and the CPU is free meanwhile."""

import time
from functools import partial

import pytest
import torch
import torch.distributed as dist

from course_lib.core import CourseError, Link, TwoLevelLink
from course_lib.cost.network import collective_s
from course_lib.ranks import Ranks, span
from course_lib.ranks.call_board import CallBoard, Post
from course_lib.ranks.source_lines import Line

SLOW = Link(latency_s=0.02, bytes_per_s=20e6)
NUM_ELEMENTS = (0, 100_000, 300_000)


@pytest.fixture(scope="module")
def linked():
    with Ranks(2, link=SLOW) as two:
        yield two


def messages(rank, num_elements, repeats=5):
    """Some messages from rank 0 to rank 1."""
    tensor = torch.ones(num_elements)
    for _ in range(repeats):
        dist.barrier()
        if rank == 0:
            dist.send(tensor, 1)
        elif rank == 1:
            dist.recv(tensor, 0)


def all_reduces(rank, num_elements, asynchronous, repeats=5):
    """Some all-reduces."""
    tensor = torch.ones(num_elements)
    for _ in range(repeats):
        dist.barrier()
        work = dist.all_reduce(tensor, async_op=asynchronous)
        if asynchronous:
            work.wait()


def least_disturbed_s(events, begins, ends):
    """Seconds from the last rank's `begins` to the first rank's `ends`, of the quickest call."""
    starts = [sorted(e.start_s for e in events if e.rank == r and e.kind == begins) for r in (0, 1)]
    stops = [sorted(e.end_s for e in events if e.rank == r and e.kind == ends) for r in (0, 1)]
    started = [max(both) for both in zip(*filter(None, starts), strict=True)]
    ended = [min(both) for both in zip(*filter(None, stops), strict=True)]
    return min(end - start for start, end in zip(started, ended, strict=True))


@pytest.mark.parametrize("num_elements", NUM_ELEMENTS)
def test_a_message_takes_alpha_plus_bytes_over_beta(linked, undisturbed, num_elements):
    def measure():
        linked.run(messages, num_elements)
        return least_disturbed_s(linked.events, "send", "recv")

    expected_s = SLOW.time_s(4 * num_elements)
    assert undisturbed(measure, expected_s) == pytest.approx(expected_s, rel=0.1)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("num_elements", NUM_ELEMENTS[1:])
def test_a_collective_takes_what_the_model_says(linked, undisturbed, num_elements, asynchronous):
    def measure():
        linked.run(all_reduces, num_elements, asynchronous)
        return least_disturbed_s(linked.events, "all_reduce", "all_reduce")

    predicted_s = collective_s("all_reduce", 4 * num_elements, (0, 1), SLOW)
    assert undisturbed(measure, predicted_s) == pytest.approx(predicted_s, rel=0.1)


def test_computing_overlaps_with_a_message_on_its_way(linked, undisturbed):
    def overlap(rank):
        tensor = torch.ones(400_000)
        dist.barrier()
        start_s, cpu_s = time.perf_counter(), time.process_time()
        work = dist.all_reduce(tensor, async_op=True)
        with span("compute"):
            time.sleep(0.08)
        work.wait()
        return time.perf_counter() - start_s, time.process_time() - cpu_s

    on_wire_s = collective_s("all_reduce", 1_600_000, (0, 1), SLOW)
    cpu_s = []

    def measure():
        total_s, used_s = min(linked.run(overlap))
        cpu_s.append(used_s)
        return total_s

    assert undisturbed(measure, on_wire_s) == pytest.approx(on_wire_s, rel=0.1)
    assert min(cpu_s) < 0.5 * on_wire_s
    events = {event.kind: event for event in linked.events if event.rank == 0}
    assert events["all_reduce"].start_s <= events["compute"].start_s
    assert events["all_reduce"].end_s > events["compute"].end_s
    assert events["all_reduce"].duration_s >= 0.99 * on_wire_s


def test_one_port_sends_one_message_after_the_other(undisturbed):
    def two_messages(rank):
        parts = [torch.ones(100_000), torch.ones(100_000)]
        dist.barrier()
        if rank == 0:
            works = [dist.isend(part, peer) for peer, part in enumerate(parts, start=1)]
        else:
            works = [dist.irecv(parts[0], 0)]
        for work in works:
            work.wait()

    def arrival(rank):
        three.run(two_messages)
        sent_s = min(e.start_s for e in three.events if e.kind == "send")
        return next(e.end_s for e in three.events if (e.kind, e.rank) == ("recv", rank)) - sent_s

    one_s = SLOW.time_s(400_000)
    second_s = one_s + 400_000 / SLOW.bytes_per_s
    with Ranks(3, link=SLOW) as three:
        for rank, expected_s in ((1, one_s), (2, second_s)):
            measured_s = undisturbed(partial(arrival, rank), expected_s)
            assert measured_s == pytest.approx(expected_s, rel=0.1)


def test_two_levels_are_fast_inside_a_node_and_slow_between_nodes(undisturbed):
    fast = Link(latency_s=0.02, bytes_per_s=1e9)
    two_level = TwoLevelLink(inside=fast, outside=SLOW, ranks_per_node=2)

    def neighbours(rank, sender, receiver):
        tensor = torch.ones(100_000)
        dist.barrier()
        if rank == sender:
            dist.send(tensor, receiver)
        elif rank == receiver:
            dist.recv(tensor, sender)

    def travel_s(pair):
        three.run(neighbours, *pair)
        send, recv = (next(e for e in three.events if e.kind == k) for k in ("send", "recv"))
        return recv.end_s - send.start_s

    with Ranks(3, link=two_level) as three:
        for pair, link in (((0, 1), fast), ((1, 2), SLOW)):
            expected_s = link.time_s(400_000)
            measured_s = undisturbed(partial(travel_s, pair), expected_s)
            assert measured_s == pytest.approx(expected_s, rel=0.1)


def test_ddp_runs_over_a_link_with_equal_gradients(linked):
    def train(rank):
        torch.manual_seed(0)
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1, bias=False))
        model(torch.full((1, 3), 10.0**rank)).sum().backward()
        return model.module.weight.grad.tolist()

    assert linked.run(train) == [[[5.5] * 3]] * 2


def test_a_link_is_checked_when_it_is_made():
    with pytest.raises(CourseError, match="Link: need latency_s >= 0 and bytes_per_s > 0"):
        Link(latency_s=0.1, bytes_per_s=0)
    with pytest.raises(CourseError, match="TwoLevelLink: need ranks_per_node >= 1"):
        TwoLevelLink(inside=SLOW, outside=SLOW, ranks_per_node=0)


def test_calls_of_two_channels_do_not_wipe_each_other_out(tmp_path):
    board, calls = CallBoard(str(tmp_path / "board"), 1), 60
    posts = [
        Post(n * 7 + channel, 500 + 10 * channel, n, "send", (0,), "", Line(), post_s=1.0 * n)
        for n in range(calls)
        for channel in range(1, 7)  # six channels whose first slots lie side by side
    ]
    for post in posts:
        board.post(0, post)
    for post in posts:
        assert board.find(0, post.channel, post.seq) == post
        assert board.arrival_s(0, post.channel, post.seq) == post.post_s
