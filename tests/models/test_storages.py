"""Bytes of storages: views count once, None and numbers count 0, of a DTensor the local shard."""

import sys

import cloudpickle
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from course_lib.memory.saved_tensors import fake_tensors
from course_lib.models.storages import storage_bytes, storage_key

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def test_each_storage_counts_once_and_whole():
    whole, other = torch.zeros(10), torch.zeros(3, dtype=torch.int64)
    assert storage_bytes([whole[2:4], whole, whole.view(2, 5), other]) == 10 * 4 + 3 * 8
    assert storage_key(whole[2:4]) == storage_key(whole) != storage_key(other)


def test_none_and_numbers_count_nothing():
    assert storage_bytes([None, 7, "name", torch.zeros(2), None]) == 8


def test_what_an_earlier_call_has_counted_is_left_out():
    params, grads, counted = torch.zeros(5), torch.zeros(6), set()
    assert storage_bytes([params], counted) == 20
    assert storage_bytes([grads, params[1:]], counted) == 24
    assert storage_bytes([params, grads], counted) == 0


def test_fake_tensors_have_the_bytes_of_real_ones():
    with fake_tensors():
        one, other = torch.zeros(4, 5), torch.zeros(4, 5)
        assert storage_bytes([one, other, one.t()]) == 2 * 80


def test_of_a_sharded_tensor_the_local_shard_counts(pools):
    def local_bytes(rank):
        mesh = init_device_mesh("cpu", (2,))
        return storage_bytes([distribute_tensor(torch.zeros(8, 3), mesh, [Shard(0)])])

    assert pools(2).run(local_bytes) == [4 * 3 * 4] * 2
