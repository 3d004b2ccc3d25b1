"""A simulation of PyTorch's caching allocator on a GPU: reserved, allocated, and fragmentation.

The allocator asks the driver for *segments*, hands out *blocks* of them, and keeps what is freed
for the next request: reserved memory is the sum of the segments, allocated memory that of the
blocks in use. A block can be joined with a free neighbour of its segment, and with no other, so
enough memory can be free in total and no piece be large enough. Notebook 01_memory.

Source:  PyTorch 2.13, c10/core/AllocatorConfig.h: kMinBlockSize, kSmallSize, kSmallBuffer,
         kMinLargeAlloc, large_segment_size, kRoundLarge; CUDACachingAllocator.cpp: should_split
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from course_lib.core.errors import CourseError
from course_lib.core.units import format_bytes

MIB = 2**20
SMALLEST_BYTES = 512  # blocks are multiples of it
SMALL_BYTES = MIB  # requests up to it come from small segments
SMALL_SEGMENT_BYTES, LARGE_SEGMENT_BYTES = 2 * MIB, 20 * MIB
OWN_SEGMENT_BYTES = 10 * MIB  # requests from it on get a segment of their own size
ROUND_BYTES = 2 * MIB  # the sizes of those are multiples of it


class OutOfMemoryError(CourseError):
    """No segment has a free block of the size, and the limit leaves no room for a new segment."""


@dataclass
class _Block:
    num_bytes: int
    used: bool = False


@dataclass
class _Segment:
    small: bool
    blocks: list[_Block]

    @property
    def num_bytes(self) -> int:
        return sum(block.num_bytes for block in self.blocks)


def round_up(num_bytes: int, unit: int) -> int:
    """Return the smallest multiple of `unit` that is not smaller than `num_bytes`."""
    return -(-num_bytes // unit) * unit


def segment_bytes(block_bytes: int) -> int:
    """Return the size of the new segment for a block."""
    if block_bytes <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if block_bytes < OWN_SEGMENT_BYTES:
        return LARGE_SEGMENT_BYTES
    return round_up(block_bytes, ROUND_BYTES)


@dataclass
class CachingAllocator:
    """The allocator of one GPU and one stream, as a simulation.

        gpu = CachingAllocator(limit_bytes=64 * MIB)
        x = gpu.allocate(3 * MIB)
        gpu.free(x)                    # allocated 0, reserved still 20 MiB

    Raises: OutOfMemoryError from allocate()
    """

    limit_bytes: int
    segments: list[_Segment] = field(default_factory=list)

    @property
    def reserved_bytes(self) -> int:
        """The bytes taken from the driver, as torch.cuda.memory_reserved()."""
        return sum(segment.num_bytes for segment in self.segments)

    @property
    def allocated_bytes(self) -> int:
        """The bytes of blocks in use, as torch.cuda.memory_allocated()."""
        blocks = (block for segment in self.segments for block in segment.blocks)
        return sum(block.num_bytes for block in blocks if block.used)

    @property
    def largest_free_bytes(self) -> int:
        """The bytes of the largest free block."""
        blocks = (block for segment in self.segments for block in segment.blocks)
        return max((block.num_bytes for block in blocks if not block.used), default=0)

    def allocate(self, num_bytes: int) -> _Block:
        """Hand out a block: of the free ones that fit the smallest, else of a new segment."""
        size = round_up(max(num_bytes, 1), SMALLEST_BYTES)
        small = size <= SMALL_BYTES
        fitting = [
            (block.num_bytes, at, i)
            for at, segment in enumerate(self.segments)
            for i, block in enumerate(segment.blocks)
            if segment.small == small and not block.used and block.num_bytes >= size
        ]
        if fitting:
            _, at, i = min(fitting)
        else:
            at, i = self._new_segment(size, small), 0
        segment = self.segments[at]
        block, left = segment.blocks[i], segment.blocks[i].num_bytes - size
        if left >= SMALLEST_BYTES if small else left > SMALL_BYTES:
            block.num_bytes = size
            segment.blocks.insert(i + 1, _Block(left))
        block.used = True
        return block

    def free(self, block: _Block) -> None:
        """Take a block back, joined with its free neighbours; the segment stays reserved."""
        segment = next(s for s in self.segments if any(b is block for b in s.blocks))
        block.used = False
        joined: list[_Block] = []
        for one in segment.blocks:
            if joined and not joined[-1].used and not one.used:
                joined[-1].num_bytes += one.num_bytes
            else:
                joined.append(one)
        segment.blocks = joined

    def empty_cache(self) -> None:
        """Give back the segments without a used block, as torch.cuda.empty_cache()."""
        self.segments = [s for s in self.segments if any(block.used for block in s.blocks)]

    def _new_segment(self, block_bytes: int, small: bool) -> int:
        """Take a segment from the driver; where none is left, give unused ones back first."""
        wanted = segment_bytes(block_bytes)
        if self.reserved_bytes + wanted > self.limit_bytes:
            self.empty_cache()
        if self.reserved_bytes + wanted > self.limit_bytes:
            free = self.reserved_bytes - self.allocated_bytes
            raise OutOfMemoryError(
                f"Tried to allocate {format_bytes(block_bytes)}. {format_bytes(free)} are reserved "
                f"and free, but the largest block is {format_bytes(self.largest_free_bytes)}, and "
                f"{format_bytes(self.limit_bytes - self.reserved_bytes)} are unreserved."
            )
        self.segments.append(_Segment(small, [_Block(wanted)]))
        return len(self.segments) - 1


def growing_lists(gpu: CachingAllocator, lengths: Iterable[int]) -> list[tuple[int, int]]:
    """Allocate one larger tensor after the other, each while the one before is still there.

    That is what a cache of keys and values does that grows by torch.cat: no freed block is large
    enough for a later one. Return (allocated, reserved) bytes after each.
    """
    held, seen = None, []
    for num_bytes in lengths:
        longer = gpu.allocate(num_bytes)
        if held is not None:
            gpu.free(held)
        held = longer
        seen.append((gpu.allocated_bytes, gpu.reserved_bytes))
    return seen
