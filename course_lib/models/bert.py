"""A BERT: every token sees all the others, and some that were hidden have to be guessed.

The attention and the MLP are those of `gpt.py`; the norms come after each part instead of before.
There is one kind of segment and no task of next sentences, so a BERT has just the parameters of the
GPT of the same spec. Notebook 10_fsdp.
"""

import torch
from torch import Tensor, nn

from course_lib.core.errors import CourseError, ShapeError
from course_lib.core.specs import ModelSpec
from course_lib.models.data import IGNORED
from course_lib.models.gpt import Block, Dropout, make_norm, start_linear

RATIO, MASKED, RANDOM = 0.15, 0.8, 0.1  # of all tokens; of those: hidden, exchanged


class BERT(nn.Module):
    """Logits of the true token at every place, from the tokens on both sides of it.

    Shapes:  tokens [batch, seq] -> [batch, seq, vocab]
    Raises:  ShapeError for a sequence longer than spec.max_seq; CourseError for a spec with rope
    Source:  Devlin et al. 2019, section 3; the norms as in Vaswani et al. 2017, section 3.1
    """

    def __init__(self, spec: ModelSpec, *, flash: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        if spec.positions != "learned":
            raise CourseError(
                f"BERT: need learned positions; got {spec.positions}. Try ENCODERS['bert-tiny']."
            )
        self.spec = spec
        self.embedding = nn.Embedding(spec.vocab, spec.hidden)
        self.positions = nn.Embedding(spec.max_seq, spec.hidden)
        self.norm = make_norm(spec)
        self.dropout = Dropout(dropout)
        self.blocks = nn.ModuleList(
            EncoderBlock(spec, flash=flash, dropout=dropout, causal=False)
            for _ in range(spec.num_layers)
        )
        self.head = nn.Linear(spec.hidden, spec.vocab, bias=False)
        self.apply(start_linear)
        if spec.tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # [batch, seq, vocab]

    def embed(self, tokens: Tensor) -> Tensor:
        """Shapes: [batch, seq] -> [batch, seq, hidden]."""
        seq = tokens.shape[-1]
        if seq > self.spec.max_seq:
            raise ShapeError(
                f"BERT: need at most max_seq = {self.spec.max_seq} tokens a sequence; got {seq}. "
                "Try tokens[:, :max_seq]."
            )
        x = self.embedding(tokens) + self.positions(torch.arange(seq, device=tokens.device))
        return self.dropout(self.norm(x))


class EncoderBlock(Block):
    """norm(x + attention(x)), then norm(x + mlp(x)): GPT's block with the norms after its parts.

    Shapes:  [batch, seq, hidden] -> the same
    """

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention_norm(x + self.dropout(self.attention(x)))
        return self.mlp_norm(x + self.dropout(self.mlp(x)))


def mask_tokens(
    tokens: Tensor, random: torch.Generator, *, vocab: int, mask: int, num_special: int = 0
) -> tuple[Tensor, Tensor]:
    """Hide tokens: what the model reads, and what it has to guess; `IGNORED` where nothing.

    In each sequence 15 % of the tokens are to be guessed, at least one. Of these, 80 % are replaced
    by `mask`, 10 % by any word, and 10 % stay as they are. The ids below `num_special` are no
    words: they are never chosen, nor put in a word's place.

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
    """How many hidden tokens were guessed, and how many there are: add these up over ranks.

    Shapes:  [batch, seq, vocab] and [batch, seq] -> [2]
    """
    asked = targets != IGNORED
    right = asked & (logits.argmax(dim=-1) == targets)
    return torch.stack([right.sum(), asked.sum()])


def masked_accuracy(logits: Tensor, targets: Tensor) -> float:
    """The part of the hidden tokens whose most likely guess is right; 0 where none is hidden."""
    right, asked = right_and_asked(logits, targets).tolist()
    return right / max(asked, 1)
