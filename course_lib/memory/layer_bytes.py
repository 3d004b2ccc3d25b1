"""Tensors that the forward pass of a transformer saves for backward, one row per tensor.

The rows follow the operations: a matrix product saves its inputs, softmax its output, dropout its
mask, a norm its input. Their sum gives the formulas of the papers; with the few numbers that
kernels save besides (`TORCH_CPU`) it is what autograd holds, byte by byte. Notebook 01_memory.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from course_lib.core.errors import CourseError, ShapeError
from course_lib.core.layers import LayerKind, layers
from course_lib.core.parallelism import Parallelism
from course_lib.core.specs import Experts, LatentAttention, ModelSpec
from course_lib.cost.flops import RECOMPUTE
from course_lib.cost.params import ONE

PARTS = ("attention", "mlp", "experts", "norms", "dropout masks", "embedding", "logits")


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """Properties of kernels that decide what they save beyond what the mathematics needs.

    statistics     norms save one or two numbers per token, fused attention one fp32 number per
                   query, the loss one number, learned positions their indices
    fused_rms      False: an RMSNorm saves two fp32 copies of its input
    loss_bytes     bytes per number of the loss's softmax; 0: as the activations
    """

    statistics: bool = False
    fused_rms: bool = True
    loss_bytes: int = 4


# Korthikanti et al. 2022, section 4: "small" terms are left out, the loss is fp32
PAPER = Kernels()
TORCH_CPU = Kernels(statistics=True, fused_rms=False, loss_bytes=0)


@dataclass(frozen=True, kw_only=True)
class Kept:
    """Row of the list: one tensor that is saved for backward on one rank."""

    name: str
    part: str
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class Pass:
    """Forward pass of one micro-batch on one rank: the sizes from which all rows follow.

    flash     fused attention, without dropout on its weights
    dropout   there are dropout masks, one byte per number

    Raises: ShapeError for sizes that do not divide or are below 1
    """

    spec: ModelSpec
    batch: int
    seq: int
    number_bytes: int = 2
    flash: bool = True
    dropout: bool = False
    kernels: Kernels = PAPER
    parallelism: Parallelism = ONE

    def __post_init__(self) -> None:
        self.parallelism.check(self.spec)
        for name, size in (("batch", self.batch), ("seq", self.seq)):
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ShapeError(
                    f"activations: need {name} as a whole number above 0; got {size!r}."
                )
        if self.seq % self.parallelism.cp:
            raise ShapeError(
                f"activations: need seq divisible by cp; got {self.seq} and {self.parallelism.cp}. "
                f"Try seq={self.seq + self.parallelism.cp - self.seq % self.parallelism.cp}."
            )

    @property
    def tokens(self) -> int:
        """Tokens on this rank: the sequence is split over cp."""
        return self.batch * self.seq // self.parallelism.cp

    @property
    def norm_split(self) -> int:
        """Number of ranks over which norms, masks and the linear layers' inputs are split."""
        return self.parallelism.tp if self.parallelism.sequence_parallel else 1

    def layer(self, kind: LayerKind | None = None) -> list[Kept]:
        """Return what a layer of that kind saves; None: the model's last layer."""
        kind, spec = kind or layers(self.spec)[-1], self.spec
        second = [] if spec.norms_per_layer == 1 else self._norm("second")
        if spec.parallel and second:  # both norms have the same input, which is saved once
            own = second[0].num_bytes - self._input_bytes // self.norm_split
            second = [replace(second[0], num_bytes=own)] * (own > 0) + second[1:]
        parts = [self._norm("first"), self._attention(kind), second]
        parts.append(self._experts(spec.experts) if kind.routed and spec.experts else self._mlp())
        if spec.parallel and spec.norms_per_layer == 1:  # attention has saved the MLP's input
            parts[-1] = parts[-1][1:]
        if spec.norms_per_layer == 4:
            parts += [self._norm("third"), self._norm("fourth")]
        return [row for rows in parts for row in rows] + self._masks("two masks", 2)

    def scores(self, kind: LayerKind | None = None) -> list[Kept]:
        """Return what attention saves between q, k, v and its output; "selective" drops it."""
        s, tp = self.spec, self.parallelism.tp
        queries = self.tokens * s.num_heads
        if self.flash:
            window = (kind or layers(s)[-1]).window or self.seq
            mask = [("mask of the window", self.seq**2 * self._b, 1)] * (window < self.seq)
            rows = _rows("attention", ("log-sum of each query", queries * 4, tp), *mask)
            return rows if self.kernels.statistics else []
        size = queries * self.seq
        capped = _rows("attention", ("capped scores", size * self._b, tp))
        dropped = [("weights' mask", size, tp), ("weights after dropout", size * self._b, tp)]
        rows = _rows("attention", ("softmax", size * self._b, tp), *dropped[: 2 * self.dropout])
        return capped * (s.attention_softcap is not None) + rows

    def kept_layer(self, recompute: str = "none", kind: LayerKind | None = None) -> list[Kept]:
        """Return what one layer keeps until its backward: all, all but the scores, or its input.

        Raises: CourseError for another `recompute`
        """
        if recompute not in RECOMPUTE:
            raise CourseError(f"recompute: need one of {', '.join(RECOMPUTE)}; got {recompute!r}.")
        if recompute == "full":
            return self.layer_input()
        dropped = self.scores(kind) if recompute == "selective" else []
        return [row for row in self.layer(kind) if row not in dropped]

    def layer_input(self) -> list[Kept]:
        """Return the one tensor that a layer keeps under full recompute: its input."""
        return _rows("norms", ("layer's input", self._hidden, self.norm_split))

    def embedding(self) -> list[Kept]:
        """Return what the embedding saves: a mask, and the indices of learned positions."""
        indices = self.seq * 8 * (self.kernels.statistics and self.spec.positions == "learned")
        return [
            *_rows("embedding", ("mask", self._mask, self.norm_split))[: int(self.dropout)],
            *_rows("embedding", ("positions", indices, 1))[: int(indices > 0)],
        ]

    def head(self) -> list[Kept]:
        """Return what the last norm, the output projection and the loss save."""
        loss_bytes = self.kernels.loss_bytes or self.number_bytes
        numbers = self.tokens * self.spec.padded_vocab
        capped = [("capped logits", numbers * self._b, self.parallelism.tp)]
        return [
            *self._norm("last"),
            *_rows("logits", ("input of the head", self._hidden, self.norm_split)),
            *_rows("logits", *capped[: int(self.spec.logit_softcap is not None)]),
            *_rows("logits", ("log-softmax", numbers * loss_bytes, self.parallelism.tp)),
            *_rows("logits", ("the loss's divisor", loss_bytes, 1))[: int(self.kernels.statistics)],
        ]

    def _attention(self, kind: LayerKind) -> list[Kept]:
        s, tp = self.spec, self.parallelism.tp
        rows = _rows("attention", ("input of q, k, v", self._hidden, self.norm_split))
        if s.latent is not None:
            rows += self._latent(s.latent)
        queries, keys = self._numbers(s.q_hidden), self._numbers(s.kv_hidden)
        shared = min(tp, s.kv_heads)  # a head of keys may be on several ranks
        if s.qk_norm != "none":
            rows += self._norm("q", s.q_hidden, tp, s.num_heads)
            rows += self._norm("k", s.kv_hidden, shared, s.kv_heads)
        values = self._numbers(s.kv_heads * s.value_size)
        return [
            *rows,
            *_rows("attention", ("q", queries, tp), ("k and v", keys + values, shared)),
            *self.scores(kind),
            *_rows("attention", ("input of out", self._numbers(s.mixed_hidden), tp)),
        ]

    def _latent(self, latent: LatentAttention) -> list[Kept]:
        """Return what is saved between the input of latent attention and its q, k and v."""
        rows = []
        for name, size in (("q", latent.q_rank), ("k and v", latent.kv_rank)):
            if size is not None:
                rows += self._norm(f"{name}'s latent", size, self.norm_split, rms=True)
                normed = (f"normed latent of {name}", self._numbers(size), self.norm_split)
                rows += _rows("attention", normed)
        return rows

    def _mlp(self) -> list[Kept]:
        inputs = _rows("mlp", ("input of the MLP", self._hidden, self.norm_split))
        return inputs + self._wide("mlp", "", self.tokens, self.spec.ffn_hidden)

    def _wide(self, part: str, before: str, tokens: int, ffn_hidden: int) -> list[Kept]:
        """Return what lies between the matrices of an MLP: of tokens that use one of that width."""
        ranks = self.parallelism.expert_tensor if part == "experts" else self.parallelism.tp
        names = ["input of GELU", "output of GELU"]
        if self.spec.gated:
            names = ["gate", "silu of gate", "up", "their product"]
        if self.spec.mlp_activation == "relu":  # its backward needs only its output
            names = names[1:]
        size = tokens * ffn_hidden * self._b
        return _rows(part, *((before + name, size, ranks) for name in names))

    def _experts(self, experts: Experts) -> list[Kept]:
        """Return what router, experts and shared experts save; tokens are sent evenly.

        A token is copied for each of its experts; its router's weights multiply their outputs,
        which are saved for that. With a capacity every expert computes that many tokens, sent or
        not.
        """
        axes = self.parallelism
        sent = self.tokens * experts.active * axes.expert_tensor // axes.tp
        sent = round(sent * (experts.capacity or 1))
        copies = sent * self.spec.hidden * self._b
        rows = _rows(
            "experts",
            ("input of the router", self._hidden, self.norm_split),
            ("router's softmax", self.tokens * experts.count * 4, self.norm_split),
            ("tokens sent to experts", copies, 1),
        )
        rows += self._wide("experts", "experts' ", sent, experts.ffn_hidden)
        rows += _rows("experts", ("outputs of the experts", copies, 1))
        if experts.shared_hidden:
            rows += self._wide("mlp", "shared ", self.tokens, experts.shared_hidden)
        return rows

    def _norm(
        self,
        name: str,
        width: int | None = None,
        split: int | None = None,
        heads: int = 1,
        *,
        rms: bool = False,
    ) -> list[Kept]:
        """Return what a norm saves: over hidden, or over each of some heads of that width.

        rms   it is an RMSNorm, whatever the others are
        """
        kernels, split = self.kernels, self.norm_split if split is None else split
        rms = rms or self.spec.norm == "rms"
        numbers = self.tokens * (self.spec.hidden if width is None else width)
        size = numbers * 4 * 2  # the input and the normed input, in fp32
        if not rms or kernels.fused_rms:
            size = numbers * self._b
        rows = self.tokens * (heads if self.spec.qk_norm == "head" else 1)
        statistics = rows * (4 if rms else 2 * self._b)  # 1 / rms; mean and 1 / deviation
        return [
            *_rows("norms", (f"input of the {name} norm", size, split)),
            *_rows("norms", ("its statistics", statistics, split))[: int(kernels.statistics)],
        ]

    def _masks(self, name: str, count: int) -> list[Kept]:
        rows = _rows("dropout masks", (name, count * self._mask, self.norm_split))
        return rows[: int(self.dropout)]

    @property
    def _input_bytes(self) -> int:
        """Return what a norm saves of its input itself: all, or nothing but copies in fp32."""
        copied = self.spec.norm == "rms" and not self.kernels.fused_rms
        return 0 if copied and self._b != 4 else self._hidden

    def _numbers(self, width: int) -> int:
        """Return the bytes of `width` numbers for each token."""
        return self.tokens * width * self._b

    @property
    def _b(self) -> int:
        return self.number_bytes

    @property
    def _hidden(self) -> int:
        return self.tokens * self.spec.hidden * self.number_bytes

    @property
    def _mask(self) -> int:
        return self.tokens * self.spec.hidden


def _rows(part: str, *sizes: tuple[str, int, int]) -> list[Kept]:
    return [Kept(name=name, part=part, num_bytes=size // split) for name, size, split in sizes]


def total(rows: Iterable[Kept]) -> int:
    """Return the bytes of all rows."""
    return sum(row.num_bytes for row in rows)
