"""FLOP and bytes of common operations of training, from which their place on a roofline follows.

Each tensor is read or written once, in bf16. A real kernel may move more. Notebook 01b_speed.
"""

from dataclasses import dataclass

HIDDEN, SEQ, HEAD = 4096, 4096, 128  # of llama-8b; one head of 128 numbers per token
BF16_BYTES = 2


@dataclass(frozen=True, kw_only=True)
class Counted:
    """An operation: its FLOP, and the bytes that it reads from memory or writes to it."""

    name: str
    flop: int
    num_bytes: int

    @property
    def intensity(self) -> float:
        """FLOP per byte."""
        return self.flop / self.num_bytes


def add() -> Counted:
    """Return the sum of two tensors, per number: two are read, and one is written."""
    return Counted(name="add", flop=1, num_bytes=3 * BF16_BYTES)


def adamw_step() -> Counted:
    """Return AdamW's step, per parameter of the usual recipe.

    3 FLOP for the first moment, 4 for the second, 6 for the update, 1 for the weight decay. The
    gradient is read; master copy and moments are read and written; the 16-bit weight is written.
    """
    return Counted(name="AdamW step", flop=3 + 4 + 6 + 1, num_bytes=2 + 2 * 3 * 4 + 2)


def layer_norm() -> Counted:
    """Return a LayerNorm, per number: 4 FLOP for mean and variance, 3 to scale and shift."""
    return Counted(name="LayerNorm", flop=4 + 3, num_bytes=2 * BF16_BYTES)


def product(tokens: int) -> Counted:
    """Return the product of that many tokens with a square weight matrix."""
    moved = 2 * tokens * HIDDEN + HIDDEN * HIDDEN
    flop = 2 * tokens * HIDDEN * HIDDEN
    name = f"product, {tokens:,} token" + "s" * (tokens > 1)
    return Counted(name=name, flop=flop, num_bytes=BF16_BYTES * moved)


def scores() -> Counted:
    """Return the scores of one head, written to memory: q and k are read."""
    moved = 2 * SEQ * HEAD + SEQ * SEQ
    name = "scores, unfused"
    return Counted(name=name, flop=2 * SEQ * SEQ * HEAD, num_bytes=BF16_BYTES * moved)


def flash_attention() -> Counted:
    """Return flash attention of one head: q, k and v are read, and only the output is written."""
    moved = 4 * SEQ * HEAD
    return Counted(name="flash attention", flop=4 * SEQ * SEQ * HEAD, num_bytes=BF16_BYTES * moved)


OPERATIONS = (
    *(add(), adamw_step(), product(1), layer_norm(), product(32)),
    *(scores(), product(512), flash_attention()),
)
