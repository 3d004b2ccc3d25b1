"""A GPT over the ranks of a group, each of which has its part of every sequence.

Only attention looks at other tokens: everything else works on a shard as on a sequence, if rotary
and learned positions are the global ones. All ranks hold the same parameters, and each has the
gradient of its own tokens' loss: they are summed as in data parallelism, every token with the same
weight. Notebook 15_context_parallel.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from course_lib.collectives.group import Group, GroupMember, member_of
from course_lib.context_parallel.layouts import positions
from course_lib.context_parallel.ring import ring_attention
from course_lib.core.errors import CourseError, ShapeError
from course_lib.data_parallel.naive_ddp import weighted_loss
from course_lib.models.data import IGNORED
from course_lib.models.gpt import GPT, Attention, Rotary, token_loss


@dataclass(frozen=True)
class ShardPositions:
    """Global positions of this rank's tokens, given their number; `seq` None: p times as many."""

    member: GroupMember
    max_seq: int
    layout: str
    seq: int | None

    def __call__(self, length: int) -> list[int]:
        """Return the positions. Raises: ShapeError for another number of tokens, or too many"""
        where = f"rank {self.member.global_rank(self.member.rank)}, parallelize_context"
        whole = self.seq or length * self.member.size
        if whole > self.max_seq:
            raise ShapeError(
                f"{where}: need at most max_seq = {self.max_seq} tokens on all ranks together; got "
                f"{whole}. Try a spec with a larger max_seq."
            )
        held = positions(self.member.rank, self.member.size, whole, self.layout)
        if len(held) != length:
            raise ShapeError(
                f"{where}: need this rank's {len(held)} of {whole} tokens; got {length}. Try "
                "shard_batch(tokens, targets, rank, p, layout)."
            )
        return held


class ContextAttention(Attention):
    """Attention of this rank's queries to the tokens of all ranks of a group.

    documents   that of every token of the whole sequences, see `set_documents`; None: one each
    """

    attend_over: Callable[..., Tensor]
    documents: Tensor | None

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Mix the values of all ranks' tokens.

        Shapes:  q [batch, heads, seq/p, head_dim], k and v [batch, kv_heads, ...] -> q's
        """
        return self.attend_over(q, k, v, documents=self.documents)


class ShardRotary(nn.Module):
    """Rotary positions of a shard: the rows of the global positions, instead of the first ones.

    Shapes:  [batch, heads, seq/p, head_dim] -> the same
    """

    def __init__(self, rotary: Rotary, positions_of: ShardPositions) -> None:
        super().__init__()
        self.rotary, self.positions_of = rotary, positions_of

    def forward(self, x: Tensor) -> Tensor:
        """Rotate the numbers of every token by its position in the whole sequence."""
        at = self.positions_of(x.shape[-2])
        first, second, rest = x.split(self.rotary.halves, dim=-1)
        turned = torch.cat([-second, first, rest], dim=-1)
        return (x * self.rotary.cos[at] + turned * self.rotary.sin[at]).to(x.dtype)


def parallelize_context(
    model: GPT,
    group: Group = None,
    form: Callable[..., Tensor] = ring_attention,
    layout: str = "contiguous",
    seq: int | None = None,
) -> GPT:
    """Let a GPT attend over the tokens of all ranks of a group, in place; each is given its shard.

    tokens, targets = shard_batch(*next_tokens(batch), rank, p, layout)
    model = DDP(parallelize_context(model, group, layout=layout), group=group)
    context_loss(model(tokens), targets, group).backward()
    model.finish()

    form   ring_attention, all_gather_attention or ulysses_attention
    seq    tokens of a whole sequence; None: p times those of this rank

    Shapes:  tokens [batch, seq/p] -> [batch, seq/p, vocab]
    Cost:    the form's, in every layer
    Raises:  CourseError for anything but a GPT, for one that is context-parallel already, for
             dropout of attention weights, and for a window; in forward ShapeError for more than
             max_seq tokens
    Source:  Grattafiori et al. 2024 (Llama 3), section 3.3.2
    """
    member = member_of(group, "parallelize_context")
    _check(model, seq)
    positions(member.rank, member.size, seq or model.spec.max_seq, layout)  # known, and not empty
    positions_of = ShardPositions(member, model.spec.max_seq, layout, seq)
    for module in list(model.modules()):
        if isinstance(module, Attention):
            module.__class__ = ContextAttention  # as `fully_shard` does: hooks and names stay
            over = {"group": group, "causal": module.causal, "layout": layout, "seq": seq}
            vars(module).update(attend_over=partial(form, **over), documents=None)
            if isinstance(module.turn, Rotary):
                module.add_module("turn", ShardRotary(module.turn, positions_of))
    if model.positions is not None:
        model.positions.register_forward_pre_hook(partial(_at_global_positions, positions_of))
    return model


def set_documents(model: nn.Module, documents: Tensor | None) -> None:
    """Say for the forward passes from here on which document each token belongs to.

    Several documents in a row are one packed sequence, in which a token attends to its own document
    only. Rotary positions go on from one document to the next: what they give is a function of
    distances alone, so it is that of a document by itself. Learned positions go on, too, and a
    document that does not begin the sequence gets others than by itself. The target of a document's
    last token is the caller's to choose: an end token, or `IGNORED`.

    model       one that `parallelize_context` has changed, wrapped or not
    documents   ids [batch, seq] of the whole sequences, the same on all ranks; None: one document.
                They stay until the next call, as recomputation in backward needs them, too

    Raises:  CourseError for a model without context parallelism; in forward ShapeError for ids that
             are not those of every token
    """
    found = [module for module in model.modules() if isinstance(module, ContextAttention)]
    if not found:
        raise CourseError(
            f"set_documents: need a context-parallel GPT; got {type(model).__name__}. Try "
            "parallelize_context(model, group) before."
        )
    for module in found:
        vars(module)["documents"] = documents


def context_loss(logits: Tensor, targets: Tensor, group: Group = None) -> Tensor:
    """Return this rank's share of the mean loss over all ranks' tokens, times p.

    The mean over ranks of its gradients, as DDP takes it, is then the gradient of the mean over
    tokens; a mean of the ranks' means would count a token of a rank with few targets for more.

    group   all ranks that have parts of the batch: with replicas, those of dp and cp together

    Shapes:  [batch, seq/p, vocab] and [batch, seq/p] -> []
    Cost:    one all_reduce of one number
    """
    num_tokens = int((targets != IGNORED).sum())
    return weighted_loss(token_loss(logits, targets), num_tokens, group)


def _at_global_positions(
    positions_of: ShardPositions, embedding: nn.Module, args: tuple[Tensor]
) -> tuple[Tensor]:
    """Replace the places 0, 1, 2, ... in a shard by those in the whole sequence."""
    (local,) = args
    return (torch.tensor(positions_of(len(local)), device=local.device),)


def _check(model: Any, seq: int | None) -> None:
    if not isinstance(model, GPT):
        raise CourseError(
            f"parallelize_context: need a GPT; got {type(model).__name__}. Try it before DDP(...)."
        )
    for module in model.modules():
        if isinstance(module, ContextAttention) or "attend" in vars(module):
            raise CourseError(
                "parallelize_context: need attention as GPT has it; got one that is replaced "
                "already. Try it once, and before recompute_selective."
            )
        if isinstance(module, Attention) and not module.flash and module.dropout.p:
            raise CourseError(
                "parallelize_context: need attention weights without dropout; got "
                f"{module.dropout.p}. Try GPT(spec, flash=True, dropout=...)."
            )
        window = isinstance(module, Attention) and module.window
        if window and (seq or model.spec.max_seq) > window:
            raise CourseError(
                "parallelize_context: need attention to all tokens before; got a window of "
                f"{window}. Try a model without windows, or seq={window} or less."
            )
