"""The simulated allocator keeps PyTorch's rules, and its memory never overlaps or disappears."""

import re
from itertools import pairwise
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from course_lib.memory import allocator
from course_lib.memory.allocator import (
    MIB,
    CachingAllocator,
    OutOfMemoryError,
    growing_lists,
    segment_bytes,
)

PLENTY = 2**50
HEADER = Path(torch.__file__).parent / "include/c10/core/AllocatorConfig.h"


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("SMALLEST_BYTES", "kMinBlockSize = "),
        ("SMALL_BYTES", "kSmallSize = "),
        ("SMALL_SEGMENT_BYTES", "kSmallBuffer = "),
        ("LARGE_SEGMENT_BYTES", "large_segment_size_{"),
        ("OWN_SEGMENT_BYTES", "kMinLargeAlloc = "),
        ("ROUND_BYTES", "kRoundLarge = "),
    ],
)
def test_the_sizes_are_those_of_the_installed_pytorch(ours: str, theirs: str):
    found = re.search(re.escape(theirs) + r"(\d+)", HEADER.read_text())
    assert getattr(allocator, ours) == int(found[1])


@pytest.mark.parametrize(
    ("asked", "allocated", "reserved"),
    [
        (1, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (11 * MIB, 12 * MIB, 12 * MIB),  # a rest of at most 1 MiB is not split off
    ],
)
def test_sizes_are_rounded_as_in_pytorch(asked, allocated, reserved):
    gpu = CachingAllocator(limit_bytes=PLENTY)
    gpu.allocate(asked)
    assert (gpu.allocated_bytes, gpu.reserved_bytes) == (allocated, reserved)


def test_what_is_freed_stays_reserved_and_is_used_again():
    gpu = CachingAllocator(limit_bytes=PLENTY)
    first = gpu.allocate(3 * MIB)
    gpu.free(first)
    assert (gpu.allocated_bytes, gpu.reserved_bytes) == (0, 20 * MIB)
    gpu.allocate(2 * MIB)
    assert gpu.reserved_bytes == 20 * MIB
    gpu.empty_cache()
    assert gpu.reserved_bytes == 20 * MIB  # a segment in use stays


def test_free_neighbours_are_joined_and_the_smallest_block_that_fits_is_taken():
    gpu = CachingAllocator(limit_bytes=PLENTY)
    a, b, c = (gpu.allocate(4 * MIB) for _ in range(3))
    gpu.free(a)
    gpu.free(b)
    assert gpu.largest_free_bytes == 8 * MIB
    assert gpu.allocate(3 * MIB) is not c
    assert gpu.largest_free_bytes == 8 * MIB  # of 8 and 8 MiB, one was split


def test_fragmentation_fails_though_enough_is_free():
    gpu = CachingAllocator(limit_bytes=80 * MIB)
    for block in [gpu.allocate(8 * MIB) for _ in range(8)][::2]:
        gpu.free(block)
    with pytest.raises(OutOfMemoryError, match=r"48 MiB are reserved and free, .* block is 8 MiB"):
        gpu.allocate(16 * MIB)


def test_unused_segments_are_given_back_before_an_allocation_fails():
    gpu = CachingAllocator(limit_bytes=30 * MIB)
    gpu.free(gpu.allocate(20 * MIB))
    gpu.allocate(30 * MIB)
    assert gpu.reserved_bytes == 30 * MIB


def test_a_tensor_that_grows_never_fits_what_it_leaves():
    sizes = [12 * k * MIB for k in range(1, 9)]
    seen = growing_lists(CachingAllocator(limit_bytes=PLENTY), sizes)
    assert [allocated for allocated, _ in seen] == sizes
    assert [reserved for _, reserved in seen] == [sum(sizes[: k + 1]) for k in range(8)]


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 40 * MIB)), max_size=40))
def test_blocks_always_fill_their_segments(acts):
    gpu, held = CachingAllocator(limit_bytes=PLENTY), []
    for free_one, num_bytes in acts:
        if free_one and held:
            gpu.free(held.pop(num_bytes % len(held)))
        else:
            held.append(gpu.allocate(num_bytes))
            assert held[-1].num_bytes >= num_bytes
    assert gpu.allocated_bytes == sum(block.num_bytes for block in held)
    for segment in gpu.segments:
        assert segment.num_bytes % (2 * MIB) == 0
        free = [not block.used for block in segment.blocks]
        assert not any(a and b for a, b in pairwise(free))  # all are joined
    assert segment_bytes(1) == 2 * MIB
