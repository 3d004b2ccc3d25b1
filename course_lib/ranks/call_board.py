"""The call board: a log of all ranks' calls in a small shared file, like a flight recorder's.

Each rank posts every collective, send and recv *before* it starts, with the learner's line. So a
rank can compare its call with those that others have posted, an emulated link knows when a message
left, and the notebook can see which rank waits for which without asking any of them.

A slot is found by (channel, seq): the channel is the process group (or the pair and tag of a send),
seq counts the calls on it, so matching calls of all ranks have the same pair of numbers. A call may
be in one of 8 slots and overwrites the oldest call in them, so that two channels with many calls
under way do not overwrite each other's.
"""

import mmap
import os
import struct
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import IntFlag
from itertools import permutations

from course_lib.core.records import KINDS
from course_lib.ranks.scratch import no_room
from course_lib.ranks.source_lines import Line

NUM_SLOTS = 1024
NUM_CHOICES = 8  # slots in which one call may be
SLOT = struct.Struct("<Q II ddd QQ hBB I 80s 40s 160s Q")
NUMBER = struct.Struct("<Q")  # the first field of a slot
DROP_AT, FLAGS_AT = struct.calcsize("<Q II dd"), struct.calcsize("<Q II ddd QQ hB")
POST_S_AT = struct.calcsize("<Q II")
GIST = struct.Struct(f"<Q8xd{FLAGS_AT - 24}xB{SLOT.size - FLAGS_AT - 1}x")  # number, time, flags
SIGNATURE_AT, SIGNATURE_BYTES = struct.calcsize("<Q II ddd QQ hBB I"), 80
STATE = struct.Struct("<Q II d I 160s 40s II")
POST_KINDS = (*KINDS, "new_group")
MAX_RANKS = 64
NUM_SPLITS = 64  # calls of all_to_all whose sizes are kept
SPLITS = struct.Struct(f"<II {2 * MAX_RANKS}Q")
SPLITS_AT = 512 + NUM_SLOTS * SLOT.size
RANK_BYTES = SPLITS_AT + NUM_SPLITS * SPLITS.size
ROOM_BYTES = 2**20  # for what else is written into the folder


class Flag(IntFlag):
    """Flags of a posted call."""

    DONE = 1
    REFUSED = 2
    DROPPED = 4  # its handle was garbage-collected: gloo forgets a send, the tracer keeps a receive
    ARRIVED = 8  # its bytes are here; an emulated link still holds them back


NO_FLAGS = Flag(0)


@dataclass(frozen=True)
class Post:
    """One call as a rank announced it.

    `post_s` is when, `arrive_s` when an emulated link delivers the message, and `drop_s` when its
    handle was garbage-collected before the call completed: all in seconds of `time.perf_counter()`.
    `members` are the ranks that take part, by global rank. `sends` and `expects` are the elements
    that an all_to_all sends to each of them, and expects from each.
    """

    number: int
    channel: int
    seq: int
    kind: str
    members: tuple[int, ...]
    signature: str
    line: Line
    post_s: float
    arrive_s: float = 0.0
    drop_s: float = 0.0
    num_bytes: int = 0
    peer: int = -1
    flags: Flag = NO_FLAGS
    sends: tuple[int, ...] = ()
    expects: tuple[int, ...] = ()

    @property
    def call(self) -> str:
        """Description of the call: `all_reduce(sum) float32 [4]`, `send float32 [4] 0->1`."""
        return f"{self.kind} {self.signature}" if self.kind in ("send", "recv") else self.signature

    @property
    def sizes(self) -> str:
        """Description of the elements of an all_to_all by rank; empty for other calls."""
        sends, expects = (", ".join(map(str, sizes)) for sizes in (self.sends, self.expects))
        return f" that sends [{sends}] and expects [{expects}] elements" if self.sends else ""


@dataclass(frozen=True)
class RankState:
    """Present state of a rank, as its heartbeat last wrote it.

    `blocked` is the (channel, seq) that its main thread waits on, `oldest` its oldest call that has
    not completed, `idle_s` the seconds for which it has used no CPU while inside PyTorch.
    """

    num_posts: int
    blocked: tuple[int, int] | None
    idle_s: float
    line: Line
    oldest: tuple[int, int] | None


def channel_of(*parts: object) -> int:
    """Return a number that all ranks compute alike for the same group, or the same pair and tag."""
    return zlib.crc32("|".join(map(str, parts)).encode()) or 1


class CallBoard:
    """The shared file, memory-mapped: each rank writes only its own part and reads all parts."""

    def __init__(self, path: str, world_size: int) -> None:
        size = world_size * RANK_BYTES
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                if os.fstat(handle).st_size < size:
                    _reserve(handle, size)
                self._map = mmap.mmap(handle, size)
            finally:
                os.close(handle)
        except OSError as error:
            raise no_room(os.path.dirname(path), size + ROOM_BYTES, error) from error
        self.world_size = world_size

    # -- written by the rank itself ---------------------------------------------------------

    def post(self, rank: int, post: Post) -> None:
        """Write a call of this rank into its slot."""
        if post.sends:
            self._write_splits(rank, post)  # first: whoever sees the call sees its sizes
        SLOT.pack_into(
            self._map,
            self._slot_to_write(rank, post.channel, post.seq),
            post.number,
            post.channel,
            post.seq,
            post.post_s,
            post.arrive_s,
            post.drop_s,
            post.num_bytes,
            sum(1 << member for member in post.members),
            post.peer,
            POST_KINDS.index(post.kind),
            post.flags,
            post.line.number,
            post.signature.encode()[:SIGNATURE_BYTES],
            post.line.function.encode()[:40],
            post.line.file.encode()[:160],
            post.number,
        )
        self._write(rank, 0, "<Q", post.number)

    def mark(self, rank: int, post: Post, flags: Flag) -> None:
        """Set the flags of a call that is still on the call board."""
        at = self._slot(rank, post.channel, post.seq)
        if at is not None:
            struct.pack_into("<B", self._map, at + FLAGS_AT, flags)

    def drop(self, rank: int, post: Post, drop_s: float) -> None:
        """Note that the handle of a call was garbage-collected before the call completed."""
        at = self._slot(rank, post.channel, post.seq)
        if at is not None:
            struct.pack_into("<d", self._map, at + DROP_AT, drop_s)
        self.mark(rank, post, Flag.DROPPED)

    def block(self, rank: int, channel: int, seq: int) -> None:
        """Note the call that the rank's main thread waits on; (0, 0) when it no longer waits."""
        self._write(rank, 8, "<II", channel, seq)

    def beat(self, rank: int, idle_s: float, line: Line, oldest: tuple[int, int]) -> None:
        """Note the rank's present line, seconds of idling, and oldest incomplete call."""
        file, function = line.file.encode()[:160], line.function.encode()[:40]
        self._write(rank, 16, "<d I 160s 40s II", idle_s, line.number, file, function, *oldest)

    def _write_splits(self, rank: int, post: Post) -> None:
        padding = (0,) * (MAX_RANKS - len(post.members))
        sizes = (*post.sends, *padding, *post.expects, *padding)
        SPLITS.pack_into(
            self._map, self._splits_at(rank, post.channel, post.seq), post.channel, post.seq, *sizes
        )

    def _write(self, rank: int, offset: int, layout: str, *values: object) -> None:
        struct.pack_into(layout, self._map, rank * RANK_BYTES + offset, *values)

    # -- carried between nodes --------------------------------------------------------------

    def read_row(self, rank: int) -> bytes:
        """Return all bytes of a rank's part."""
        return self._map[rank * RANK_BYTES : (rank + 1) * RANK_BYTES]

    def write_pieces(self, pieces: Iterable[tuple[int, bytes]]) -> None:
        """Write (position, bytes) that were read from the call board of another node."""
        for at, data in pieces:
            self._map[at : at + len(data)] = data

    # -- read by everyone -------------------------------------------------------------------

    def state(self, rank: int) -> RankState:
        """Return the present state of a rank."""
        posts, channel, seq, idle_s, number, file, function, old, old_seq = STATE.unpack_from(
            self._map, rank * RANK_BYTES
        )
        return RankState(
            num_posts=posts,
            blocked=(channel, seq) if channel else None,
            idle_s=idle_s,
            line=Line(_text(file), number, _text(function)),
            oldest=(old, old_seq) if old else None,
        )

    def find(self, rank: int, channel: int, seq: int) -> Post | None:
        """Return a rank's call with this channel and number, or None if it was not made."""
        at = self._slot(rank, channel, seq)
        post = None if at is None else self._read(at)
        if post is None or (post.channel, post.seq) != (channel, seq):
            return None
        return self._with_splits(rank, post) if post.kind == "all_to_all" else post

    def arrival_s(self, rank: int, channel: int, seq: int) -> float | None:
        """Return when a message arrives (sends) or a call was posted (collectives), in seconds.

        None if the rank has not made the call so far.
        """
        at = self._slot(rank, channel, seq)
        if at is None:
            return None
        (stamp,) = struct.unpack_from("<Q", self._map, at + SLOT.size - 8)
        number, found, found_seq, post_s, arrive_s = struct.unpack_from("<Q II dd", self._map, at)
        if not stamp or number != stamp or (found, found_seq) != (channel, seq):
            return None
        return arrive_s or post_s

    def history(self, rank: int, having: Flag = NO_FLAGS, since_s: float = 0.0) -> list[Post]:
        """Return a rank's calls that are still on the call board and have these flags, in order."""
        start, end = rank * RANK_BYTES + 512, rank * RANK_BYTES + SPLITS_AT
        slots = enumerate(GIST.iter_unpack(self._map[start:end]))
        wanted = (
            i
            for i, (number, post_s, flags) in slots
            if number and post_s >= since_s and flags & having == having
        )
        found = (self._read(start + i * SLOT.size) for i in wanted)
        return sorted((post for post in found if post), key=lambda post: post.number)

    def agrees(self, rank: int, post: Post) -> bool:
        """Return whether a rank announced a call with the same signature, or none so far."""
        at = self._slot(rank, post.channel, post.seq)
        if at is None:
            return True
        words = self._map[at + SIGNATURE_AT : at + SIGNATURE_AT + SIGNATURE_BYTES]
        return words.rstrip(b"\0") == post.signature.encode()[:SIGNATURE_BYTES]

    def matching(self, post: Post) -> Iterator[tuple[int, Post]]:
        """Yield (rank, call) for each member that has announced the same call."""
        for member in post.members:
            other = self.find(member, post.channel, post.seq)
            if other is not None:
                yield member, other

    def _splits_at(self, rank: int, channel: int, seq: int) -> int:
        return rank * RANK_BYTES + SPLITS_AT + (channel + seq) % NUM_SPLITS * SPLITS.size

    def _with_splits(self, rank: int, post: Post) -> Post:
        """Return the call with its sizes, unless those of a later call have overwritten them."""
        at = self._splits_at(rank, post.channel, post.seq)
        channel, seq, *sizes = SPLITS.unpack_from(self._map, at)
        if (channel, seq) != (post.channel, post.seq):
            return post
        sends, expects = sizes[: len(post.members)], sizes[MAX_RANKS:][: len(post.members)]
        return replace(post, sends=tuple(sends), expects=tuple(expects))

    def _choices(self, rank: int, channel: int, seq: int) -> list[int]:
        apart = NUM_SLOTS // NUM_CHOICES
        first = rank * RANK_BYTES + 512 + (channel + seq) % apart * SLOT.size
        return [first + choice * apart * SLOT.size for choice in range(NUM_CHOICES)]

    def _slot(self, rank: int, channel: int, seq: int) -> int | None:
        """Return the offset of a call's slot, or None if it was not made or is overwritten."""
        for at in self._choices(rank, channel, seq):
            if struct.unpack_from("<II", self._map, at + 8) == (channel, seq):
                return at
        return None

    def _slot_to_write(self, rank: int, channel: int, seq: int) -> int:
        """Return the offset at which to write a call: its own slot, or that of the oldest call."""
        at = self._slot(rank, channel, seq)
        if at is not None:
            return at
        choices = self._choices(rank, channel, seq)
        return min(choices, key=lambda at: NUMBER.unpack_from(self._map, at))

    def _read(self, at: int) -> Post | None:
        """Read a slot while others may write it: last field, whole slot, first field again."""
        (stamp,) = struct.unpack_from("<Q", self._map, at + SLOT.size - 8)
        _, channel, seq, *times, size, bits, peer, kind, flags, line, call, function, file, _ = (
            SLOT.unpack_from(self._map, at)
        )
        (number,) = struct.unpack_from("<Q", self._map, at)
        if number == 0 or number != stamp:
            return None
        post_s, arrive_s, drop_s = times
        return Post(
            number=number,
            channel=channel,
            seq=seq,
            kind=POST_KINDS[kind],
            members=tuple(rank for rank in range(MAX_RANKS) if bits >> rank & 1),
            signature=_text(call),
            line=Line(_text(file), line, _text(function)),
            post_s=post_s,
            arrive_s=arrive_s,
            drop_s=drop_s,
            num_bytes=size,
            peer=peer,
            flags=Flag(flags),
        )


def unfit_split(calls: Iterable[tuple[int, Post]]) -> str:
    """Return the sentence for a size in an all_to_all that its two ranks see differently, or ''."""
    made = [(rank, post) for rank, post in calls if post.sends]
    for (rank, post), (peer, other) in permutations(made, 2):
        sent, expected = (
            post.sends[post.members.index(peer)],
            other.expects[post.members.index(rank)],
        )
        if sent != expected:
            return f"rank {rank} sends {sent} elements to rank {peer}, which expects {expected}"
    return ""


def _reserve(handle: int, size: int) -> None:
    """Give a file its blocks on disk now: with a full disk, writing to its memory map kills."""
    if hasattr(os, "posix_fallocate"):  # not on macOS
        os.posix_fallocate(handle, 0, size + ROOM_BYTES)
    os.truncate(handle, size)


def _text(raw: bytes) -> str:
    return raw.rstrip(b"\0").decode(errors="replace")
