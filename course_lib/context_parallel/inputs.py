"""What all forms of context-parallel attention are given: checked, and which tokens are where.

Every rank knows the layout and the length of the sequence, so it knows without a message which
tokens all the others hold. Notebook 15_context_parallel.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from course_lib.collectives.group import Group, GroupMember, describe, member_of
from course_lib.context_parallel.layouts import positions
from course_lib.context_parallel.masks import HeldTokens
from course_lib.core.errors import CourseError, ShapeError


@dataclass(frozen=True)
class Placement:
    """The ranks of a group, the tokens of each, and whether the mask is causal."""

    member: GroupMember
    held: tuple[HeldTokens, ...]
    causal: bool

    @property
    def own(self) -> HeldTokens:
        """The tokens of this rank."""
        return self.held[self.member.rank]

    @property
    def lengths(self) -> list[int]:
        """The number of tokens of each rank."""
        return [len(tokens.positions) for tokens in self.held]


def placement_of(
    where: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: Group,
    causal: bool,
    layout: str,
    seq: int | None,
    documents: Tensor | None,
) -> Placement:
    """Check what `where` is given, and return which tokens are on which rank. Sends nothing.

    Raises: ShapeError, MeshError, CourseError
    """
    member = member_of(group, where)
    where = f"rank {member.global_rank(member.rank)}, {where}"
    _check_tensors(where, q, k, v)
    rank, p, own = member.rank, member.size, q.shape[2]
    if documents is not None:
        seq = _checked_seq(where, documents, len(q), seq)
        documents = documents.to(q.device)
    elif seq is None:
        seq = own * p
    elif isinstance(seq, bool) or not isinstance(seq, int):
        raise ShapeError(f"{where}: need seq as a whole number of tokens; got {repr(seq)[:60]}.")
    held = [positions(one, p, seq, layout) for one in range(p)]
    if len(held[rank]) != own:
        raise ShapeError(
            f"{where}: need {len(held[rank])} tokens, those of rank {rank} of {p} of a {layout} "
            f"sequence of {seq}; got {own}. Try shard(x, rank, p, layout, dim=2), and seq= where "
            "p does not divide the sequence."
        )
    device = "cpu" if q.is_meta else q.device  # masks have numbers in a dry world, too
    tokens = [
        HeldTokens(
            torch.tensor(one, device=device), None if documents is None else documents[:, one]
        )
        for one in held
    ]
    return Placement(member, tuple(tokens), causal)


def _checked_seq(where: str, documents: Tensor, batch: int, seq: int | None) -> int:
    """Return the tokens of a sequence, each with its document. Raises: ShapeError"""
    whole = isinstance(documents, Tensor) and not documents.is_floating_point()
    shape = list(documents.shape) if whole else []
    needed = [batch, shape[-1] if seq is None and shape else seq]
    if shape != needed:
        raise ShapeError(
            f"{where}: need documents, the whole number of that of every token of all ranks, as "
            f"{needed}; got {describe(documents)}. Try ids of the whole sequences."
        )
    return shape[1]


def _check_tensors(where: str, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Check shapes and dtypes. Raises: ShapeError, CourseError"""
    told = ", ".join(describe(x) for x in (q, k, v))
    if not all(isinstance(x, Tensor) and x.is_floating_point() for x in (q, k, v)):
        raise CourseError(f"{where}: need q, k and v as floating tensors; got {told}.")
    if len({(x.dtype, x.device) for x in (q, k, v)}) > 1:
        raise CourseError(f"{where}: need q, k and v of one dtype, on one device; got {told}.")
    batch, heads, n, head_dim = q.shape if q.dim() == 4 else (0, 0, 0, 0)
    kv_heads = k.shape[1] if k.dim() == 4 else 0
    if k.shape != (batch, kv_heads, n, head_dim) or v.shape != k.shape or 0 in (heads, kv_heads):
        raise ShapeError(
            f"{where}: need q [batch, heads, seq/p, head_dim], and k and v alike but for their "
            f"number of heads; got {told}. Try x.transpose(1, 2) if tokens stand before heads."
        )
    if heads % kv_heads:
        raise ShapeError(
            f"{where}: need heads of q divisible by those of k and v; got {heads} and {kv_heads}."
        )
