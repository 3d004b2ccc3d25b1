"""A BERT: every token attends to all others, and masked tokens are predicted.

The attention and the MLP are those of `gpt.py`; the norms come after each of them instead of
before. There is one kind of segment and no next-sentence task, so a BERT has exactly the parameters
of the GPT of the same spec. Notebook 10_fsdp.
"""

import torch
from torch import Tensor, nn

from course_lib.core.built import check_built
from course_lib.core.errors import CourseError, ShapeError
from course_lib.core.specs import ModelSpec
from course_lib.models.data import IGNORED
from course_lib.models.gpt import GPT, Block, Dropout, make_norm, start_linear

RATIO, MASKED, RANDOM = 0.15, 0.8, 0.1  # of all tokens; of those: masked, replaced


class BERT(nn.Module):
    """Encoder that returns the logits of the true token at every position, from both sides of it.

    Shapes:  tokens [batch, seq] -> [batch, seq, spec.padded_vocab]
    Raises:  ShapeError for a sequence longer than spec.max_seq; CourseError for a spec with rope, a
             window or parallel layers
    Source:  Devlin et al. 2019, section 3; the norms as in Vaswani et al. 2017, section 3.1
    """

    def __init__(self, spec: ModelSpec, *, flash: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        check_built(spec, "BERT")
        if spec.experts is not None:
            raise CourseError(f"BERT: need a dense model; got {spec.name}, which has experts.")
        if spec.positions != "learned" or spec.window is not None or spec.parallel:
            got = spec.positions if spec.positions != "learned" else "a window or parallel layers"
            raise CourseError(
                f"BERT: need learned positions; got {got}. Try ENCODERS['bert-tiny']."
            )
        self.spec = spec
        self.embedding = nn.Embedding(spec.padded_vocab, spec.hidden)
        self.positions = nn.Embedding(spec.max_seq, spec.hidden)
        self.norm = make_norm(spec)
        self.dropout = Dropout(dropout)
        self.blocks = nn.ModuleList(
            EncoderBlock(spec, flash=flash, dropout=dropout, causal=False)
            for _ in range(spec.num_layers)
        )
        self.head = nn.Linear(spec.hidden, spec.padded_vocab, bias=False)
        self.apply(start_linear)
        if spec.tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.run_blocks(self.blocks, self.embed(tokens))
        return self.head(x)  # [batch, seq, padded_vocab]

    run_blocks = staticmethod(GPT.run_blocks)  # recomputation replaces it, too

    def embed(self, tokens: Tensor) -> Tensor:
        """Add token and position embeddings.

        Shapes:  [batch, seq] -> [batch, seq, hidden]
        Raises:  ShapeError for a sequence longer than spec.max_seq
        """
        seq = tokens.shape[-1]
        if seq > self.spec.max_seq:
            raise ShapeError(
                f"BERT: need at most max_seq = {self.spec.max_seq} tokens a sequence; got {seq}. "
                "Try tokens[:, :max_seq]."
            )
        x = self.embedding(tokens) + self.positions(torch.arange(seq, device=tokens.device))
        return self.dropout(self.norm(x))


class EncoderBlock(Block):
    """Post-norm block: norm(x + attention(x)), then norm(x + mlp(x)).

    Shapes:  [batch, seq, hidden] -> the same
    """

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention_norm(x + self.dropout(self.attention(x)))
        return self.mlp_norm(x + self.dropout(self.mlp(x)))


def mask_tokens(
    tokens: Tensor, random: torch.Generator, *, vocab: int, mask: int, num_special: int = 0
) -> tuple[Tensor, Tensor]:
    """Mask tokens; return the inputs, and the targets: the true token, or `IGNORED`.

    In each sequence 15 % of the tokens are to be predicted, at least one. Of these, 80 % are
    replaced by `mask`, 10 % by a random word, and 10 % stay as they are. The ids below
    `num_special` are not words: they are never chosen, nor used as a replacement.

    Shapes:  [batch, seq] -> inputs and targets, both [batch, seq]
    Raises:  ShapeError for a vocabulary without words, or tokens that are no [batch, seq]
    Source:  Devlin et al. 2019, section 3.1, Task #1, and appendix A.1
    """
    if tokens.dim() != 2 or not tokens.shape[1] or not 0 <= num_special < vocab:
        raise ShapeError(
            f"mask_tokens: need tokens [batch, seq] and num_special below vocab; got "
            f"{list(tokens.shape)}, {num_special} and {vocab}. Try tokens[None] for one sequence."
        )
    num_chosen = max(1, round(RATIO * tokens.shape[1]))
    draw = torch.rand(tokens.shape, generator=random).masked_fill(tokens < num_special, -1)
    chosen = torch.zeros_like(tokens, dtype=torch.bool)
    chosen.scatter_(1, draw.topk(num_chosen, dim=1).indices, True)
    chosen &= tokens >= num_special
    what = torch.rand(tokens.shape, generator=random)
    words = torch.randint(num_special, vocab, tokens.shape, generator=random)
    inputs = torch.where(chosen & (what < MASKED), mask, tokens)
    inputs = torch.where(chosen & (what >= 1 - RANDOM), words, inputs)
    return inputs, tokens.masked_fill(~chosen, IGNORED)


def right_and_asked(logits: Tensor, targets: Tensor) -> Tensor:
    """Return [correctly predicted, all] masked tokens; add them up over the ranks.

    Shapes:  [batch, seq, vocab] and [batch, seq] -> [2]
    """
    asked = targets != IGNORED
    right = asked & (logits.argmax(dim=-1) == targets)
    return torch.stack([right.sum(), asked.sum()])


def masked_accuracy(logits: Tensor, targets: Tensor) -> float:
    """Return the accuracy on the masked tokens, from 0 to 1; 0 where none is masked."""
    right, asked = right_and_asked(logits, targets).tolist()
    return right / max(asked, 1)
