"""A GPT from a ModelSpec, written so that the tensors autograd saves can be counted by hand.

Queries, keys and values have a linear layer each, a dropout mask takes one byte per element, and
the causal mask is added rather than filled in: no operation saves more than it needs, so the
formulas of notebook 01_memory hold to the byte. Attention is fused (flash) or written out. The two
methods that `course_lib.recompute` replaces are `GPT.run_blocks` and `Attention.attend`. The logits
of GPT-2, Llama, Mixtral, Qwen3 and others are those of transformers, with the same weights.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from course_lib.core.built import check_built, llama3_scaling
from course_lib.core.errors import CourseError, ShapeError
from course_lib.core.layers import LayerKind, layers
from course_lib.core.specs import ModelSpec
from course_lib.models.mlp import MLP
from course_lib.models.moe import MoE


class GPT(nn.Module):
    """Decoder described by a `ModelSpec`; returns the logits of the next token for every token.

    Shapes:  tokens [batch, seq] -> [batch, seq, spec.padded_vocab]
    Saves:   tokens, one mask if dropout, the blocks, then the input of the norm and of the head

    flash     fused attention, which saves q, k, v, its output and one number per query; it has no
              dropout on the attention weights. False: scores, softmax and dropout written out
    dropout   after the embedding, attention and MLP, and on unfused attention weights

    Raises: ShapeError for a sequence that is longer than spec.max_seq; CourseError for a spec with
            a part that is not built here, such as latent attention
    """

    def __init__(self, spec: ModelSpec, *, flash: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        check_built(spec)
        self.spec = spec
        self.embedding = nn.Embedding(spec.padded_vocab, spec.hidden)
        learned = spec.positions == "learned"
        self.positions = nn.Embedding(spec.max_seq, spec.hidden) if learned else None
        self.dropout = Dropout(dropout)
        self.blocks = nn.ModuleList(
            Block(spec, layer, flash=flash, dropout=dropout) for layer in layers(spec)
        )
        self.norm = make_norm(spec)
        self.head = nn.Linear(spec.hidden, spec.padded_vocab, bias=False)
        self.apply(self._init)
        if spec.tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.run_blocks(self.blocks, self.embed(tokens))
        return self.head(self.norm(x))  # [batch, seq, padded_vocab]

    def embed(self, tokens: Tensor) -> Tensor:
        """Embed tokens; add learned positions if the spec has them.

        Shapes:  [batch, seq] -> [batch, seq, hidden]
        Raises:  ShapeError for a sequence longer than spec.max_seq
        """
        seq = tokens.shape[-1]
        if seq > self.spec.max_seq:
            raise ShapeError(
                f"GPT: need at most max_seq = {self.spec.max_seq} tokens a sequence; got {seq}. "
                "Try tokens[:, :max_seq]."
            )
        x = self.embedding(tokens)
        if self.positions is not None:
            x = x + self.positions(torch.arange(seq, device=tokens.device))
        return self.dropout(x)

    @staticmethod
    def run_blocks(blocks: nn.ModuleList, x: Tensor) -> Tensor:
        """Apply all blocks in order; `recompute_segments` replaces this method."""
        for block in blocks:
            x = block(x)
        return x

    def _init(self, module: nn.Module) -> None:
        """Initialize as GPT-2: normal, std 0.02; layers that add to the residual stream smaller."""
        start_linear(module)
        if isinstance(module, Attention | MLP):
            nn.init.normal_(module.out.weight, std=0.02 / math.sqrt(2 * self.spec.num_layers))


class Block(nn.Module):
    """Pre-norm block: x + attention(norm(x)), then x + mlp(norm(x)); the mlp may be a `MoE`.

    With spec.parallel both get the same x: x + attention(norm(x)) + mlp(norm(x)), with a norm for
    each or, with norms_per_layer 1, one for both.

    Shapes:  [batch, seq, hidden] -> the same
    Saves:   per norm its input, its output and a few numbers per token; what attention and MLP save
    """

    def __init__(
        self,
        spec: ModelSpec,
        layer: LayerKind | None = None,
        *,
        flash: bool = True,
        dropout: float = 0.0,
        causal: bool = True,
    ) -> None:
        super().__init__()
        layer = layers(spec)[0] if layer is None else layer
        self.parallel, self.one_norm = spec.parallel, spec.norms_per_layer == 1
        self.attention_norm = make_norm(spec)
        self.attention = Attention(spec, layer, flash=flash, dropout=dropout, causal=causal)
        self.mlp_norm = nn.Identity() if self.one_norm else make_norm(spec)
        self.mlp = MoE(spec) if layer.routed else MLP(spec)
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        if self.parallel:
            first = self.attention_norm(x)
            second = first if self.one_norm else self.mlp_norm(x)
            return x + self.dropout(self.attention(first)) + self.dropout(self.mlp(second))
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class Attention(nn.Module):
    """Multi-head attention; grouped-query attention with fewer heads for keys and values.

    layer    its window, and whether it has rotary positions; None: as the spec's first layer
    causal   a token attends to itself and those before it; False: to all, as in BERT

    Shapes:  [batch, seq, hidden] -> the same
    Saves:   x, q, k, v, the input of `out`; in between, what `attend` saves
    """

    def __init__(
        self,
        spec: ModelSpec,
        layer: LayerKind | None = None,
        *,
        flash: bool = True,
        dropout: float = 0.0,
        causal: bool = True,
    ) -> None:
        super().__init__()
        layer = layers(spec)[0] if layer is None else layer
        self.spec, self.flash, self.causal, self.window = spec, flash, causal, layer.window
        self.q = nn.Linear(spec.hidden, spec.q_hidden, bias=spec.has_bias("qkv"))
        self.k = nn.Linear(spec.hidden, spec.kv_hidden, bias=spec.has_bias("qkv"))
        self.v = nn.Linear(spec.hidden, spec.kv_hidden, bias=spec.has_bias("qkv"))
        self.out = nn.Linear(spec.q_hidden, spec.hidden, bias=spec.has_bias("out"))
        self.dropout = Dropout(dropout)
        self.q_norm, self.k_norm = _head_norm(spec), _head_norm(spec)
        self.turn = Rotary(spec) if layer.rotary else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self._heads(linear(x)) for linear in (self.q, self.k, self.v))
        q, k = self.q_norm(q), self.k_norm(k)  # [batch, seq, heads, head_dim]
        q, k, v = (one.transpose(1, 2) for one in (q, k, v))
        mixed = self.attend(self.turn(q), self.turn(k), v)  # [batch, heads, seq, head_dim]
        return self.out(mixed.transpose(1, 2).flatten(2))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Mix the values by the attention weights; `recompute_selective` replaces this method.

        Shapes:  q [batch, heads, seq, head_dim], k and v [batch, kv_heads, ...] -> q's
        """
        if not self.flash:
            return self._written_out(q, k, v)
        shared = self.spec.kv_heads < self.spec.num_heads
        if self.window is None or q.shape[-2] <= self.window:
            return fused(q, k, v, is_causal=self.causal, enable_gqa=shared)
        mask = self._blocked(q, q.shape[-2])
        return fused(q, k, v, attn_mask=mask, enable_gqa=shared)

    def _written_out(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Compute attention step by step.

        Saves:   q, k, v, softmax's output; with dropout also its mask and its output
        """
        batch, heads, seq, head_dim = q.shape
        grouped = q.reshape(batch, k.shape[1], -1, head_dim)  # the queries that share a key
        scores = grouped @ k.transpose(-2, -1) / math.sqrt(head_dim)
        scores = scores.view(batch, heads, seq, seq)
        if self.causal:
            scores = scores + self._blocked(scores, seq)
        weights = self.dropout(scores.softmax(dim=-1))
        return (weights.view(batch, k.shape[1], -1, seq) @ v).view(q.shape)

    def _blocked(self, like: Tensor, seq: int) -> Tensor:
        """Return what is added to scores: -inf for what follows a token, or is before its window.

        Shapes:  [seq, seq], query by key
        """
        never = like.new_full((seq, seq), -math.inf)
        return never.triu(1) if self.window is None else never.triu(1) + never.tril(-self.window)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.spec.head_size))


class Dropout(nn.Module):
    """Dropout with probability p; its mask takes one byte per element.

    Raises: CourseError for a probability below 0 or not below 1
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        if not 0 <= p < 1:
            raise CourseError(f"Dropout: need a probability from 0 to below 1; got {p}.")
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        keep = torch.empty(x.shape, dtype=torch.bool, device=x.device).bernoulli_(1 - self.p)
        return x * keep / (1 - self.p)


class Rotary(nn.Module):
    """Rotary positions: rotate pair (i, i + size / 2) of a head by position * theta**(-2i/size).

    size is the share of head_dim that turns; the numbers behind it keep their place: cos is 1 and
    sin 0. Angles keep their own precision; the result is rounded once, to that of x.

    Shapes:  [batch, heads, seq, head_dim] -> the same
    Raises:  ShapeError for an odd size
    Source:  Su et al. 2021 (RoFormer), section 3.2.2, with the pairs of Llama's own code
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        size = int(spec.head_size * spec.rope.share)
        if size % 2 or not size:
            what = "head_dim" if spec.rope.share == 1 else "share of head_dim, 2 or more"
            raise ShapeError(f"Rotary: need an even {what}; got {size}.")
        speed = spec.rope.theta ** -(torch.arange(0, size, 2) / size)
        if spec.rope.scaling:
            speed = slowed(speed, *llama3_scaling(spec))
        angle = torch.outer(torch.arange(spec.max_seq), speed)  # [max_seq, size / 2]
        still = torch.zeros(spec.max_seq, spec.head_size - size)
        angle = torch.cat([angle, angle, still], dim=1)  # [max_seq, head_dim]
        self.halves = [size // 2, size // 2, spec.head_size - size]
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        seq = x.shape[-2]
        first, second, rest = x.split(self.halves, dim=-1)
        turned = torch.cat([-second, first, rest], dim=-1)
        return (x * self.cos[:seq] + turned * self.sin[:seq]).to(x.dtype)


def fused(q: Tensor, k: Tensor, v: Tensor, *, enable_gqa: bool, **options: Any) -> Tensor:
    """Return PyTorch's fused attention; on the meta device the CPU's, which saves as much there.

    By itself PyTorch would write attention out on the meta device, and save all scores.
    """
    if q.is_meta:
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        if "attn_mask" in options:  # where True means seen, PyTorch makes numbers of it
            options["attn_mask"] = options["attn_mask"].to(q.dtype)
        return flash(q, k, v, **options)[0]
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=enable_gqa, **options)


def slowed(speed: Tensor, factor: float, high: float, low: float, length: float) -> Tensor:
    """Return the speeds of Llama 3's scaled rope: slow pairs turn `factor` times slower.

    A pair that turns less than `low` times in the original `length` is slowed, one that turns more
    than `high` times is not, and those in between are so in part.

    Shapes:  [size / 2] -> the same
    Source:  Llama 3.1's reference code, llama/model.py, apply_scaling
    """
    turns = length * speed / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return speed * (kept + (1 - kept) / factor)


def start_linear(module: nn.Module) -> None:
    """Initialize linear layers and embeddings: normal, std 0.02; biases zero."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def make_norm(spec: ModelSpec) -> nn.Module:
    """Return the norm of the spec, over the last dim."""
    return _norm(spec, spec.hidden, spec.has_bias("norm"))


def _head_norm(spec: ModelSpec) -> nn.Module:
    """Return the norm of each head's query or key, without bias."""
    return _norm(spec, spec.head_size, False) if spec.qk_norm == "head" else nn.Identity()


def _norm(spec: ModelSpec, size: int, bias: bool) -> nn.Module:
    if spec.norm == "rms":
        return nn.RMSNorm(size, eps=spec.norm_eps)
    return nn.LayerNorm(size, eps=spec.norm_eps, bias=bias)


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy over all targets that are not `IGNORED` (-100).

    Shapes:  [batch, seq, vocab] and [batch, seq] -> []
    """
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())
