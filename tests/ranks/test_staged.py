"""Messages of CUDA tensors over gloo go through host memory: the same path, tried on the CPU."""

import sys

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from course_lib.ranks import record
from course_lib.ranks.process_group import StagedMessage, TracedGroup

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def around(rank, staged):
    """Send around a ring, asynchronously and not; what arrived, and the recorded messages."""
    before, seen = TracedGroup._passes_host, []
    TracedGroup._passes_host = lambda group, tensor: staged
    try:
        p = dist.get_world_size()
        out, late = torch.arange(3.0) + rank, torch.zeros(2, 3)
        with record() as log:
            works = dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, out, (rank + 1) % p),
                    dist.P2POp(dist.irecv, late[0], (rank - 1) % p),
                ]
            )
            for work in works:
                seen.append(type(work).__name__)
                work.wait()
            if rank % 2:
                dist.recv(late[1], (rank - 1) % p)
            else:
                dist.send(out, (rank + 1) % p)
        return late, [(event.kind, event.num_bytes) for event in log.events if event.kind != "wait"]
    finally:
        TracedGroup._passes_host = before


@pytest.mark.parametrize("p", [2, 4])
def test_a_staged_message_arrives_and_is_recorded_as_any_other(pools, p):
    plain, staged = (pools(p).run(around, how) for how in (False, True))
    for rank, ((one, events), (other, others)) in enumerate(zip(plain, staged, strict=True)):
        assert torch.equal(one, other)
        assert torch.equal(one[0], torch.arange(3.0) + (rank - 1) % p)
        assert events == others


def handles(rank):
    TracedGroup._passes_host, before = lambda group, tensor: True, TracedGroup._passes_host
    try:
        work = dist.isend(torch.ones(1), 1) if rank == 0 else dist.irecv(torch.empty(1), 0)
        work.wait()
        return isinstance(work, StagedMessage)
    finally:
        TracedGroup._passes_host = before


def test_it_is_the_staged_path_that_ran(pools):
    assert pools(2).run(handles) == [True, True]


def on_gloo(rank):
    group = dist.group.WORLD
    return group._passes_host(torch.ones(1)), group.inner._get_backend(torch.device("cpu")).name()


def test_tensors_in_host_memory_are_not_staged(pools):
    assert pools(2).run(on_gloo) == [(False, "gloo")] * 2
