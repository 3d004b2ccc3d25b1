"""Token-level pipelining (TeraPipe): the pieces of one sequence fill the pipeline.

A causal model can compute the first tokens of a sequence without the later ones, so pieces of a
single sequence can follow one another through the stages. A later piece attends to more tokens and
takes longer: a cut into pieces of equal time has fewer and fewer tokens per piece.
Notebook 08_pipeline.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from course_lib.core.errors import CourseError
from course_lib.core.links import Link, TwoLevelLink
from course_lib.pipeline.actions import Schedule
from course_lib.pipeline.balance import balanced_cuts
from course_lib.pipeline.schedules import gpipe
from course_lib.pipeline.times import INSTANT, PipelineTimes


@dataclass(frozen=True, kw_only=True)
class TokenCost:
    """Seconds of a forward on one stage: per piece, per token, per pair of attending tokens."""

    piece_s: float = 0.0
    token_s: float = 1.0
    pair_s: float = 0.0

    def of(self, first: int, num_tokens: int) -> float:
        """Return the seconds of a piece; each token attends to itself and all before it.

        first   index of the piece's first token in the sequence
        """
        num_pairs = num_tokens * first + num_tokens * (num_tokens + 1) / 2
        return self.piece_s + self.token_s * num_tokens + self.pair_s * num_pairs


def even_cut(num_tokens: int, num_pieces: int) -> list[int]:
    """Return pieces of equally many tokens; the first ones have one more if they do not divide.

    Raises: CourseError unless num_pieces is 1 to num_tokens
    """
    if not 1 <= num_pieces <= num_tokens:
        raise CourseError(f"even_cut: need 1 to {num_tokens} pieces; got {num_pieces}. Try 4.")
    fewest, over = divmod(num_tokens, num_pieces)
    return [fewest + (piece < over) for piece in range(num_pieces)]


def balanced_cut(num_tokens: int, num_pieces: int, cost: TokenCost) -> list[int]:
    """Return the pieces whose slowest is as fast as possible; later pieces have fewer tokens."""
    return balanced_cuts(_token_times(num_tokens, cost), num_pieces)[-1]


def _token_times(num_tokens: int, cost: TokenCost) -> list[float]:
    return [cost.token_s + cost.pair_s * (position + 1) for position in range(num_tokens)]


def piece_times(cut: Sequence[int], cost: TokenCost) -> list[float]:
    """Return the seconds of each piece's forward on one stage."""
    ends = accumulate(cut, initial=0)
    return [cost.of(first, end - first) for first, end in pairwise(ends)]


def token_forward_s(cut: Sequence[int], num_stages: int, cost: TokenCost) -> float:
    """Return the seconds of the whole forward: all pieces, and p - 1 times the slowest of them.

    Source: Li et al. 2021 (TeraPipe), section 3.3, equation 5
    """
    times = piece_times(cut, cost)
    return sum(times) + (num_stages - 1) * max(times)


def token_schedule(num_stages: int, num_pieces: int) -> Schedule:
    """Return a schedule: forwards in the order of the tokens, backwards from the last piece on.

    The keys and values of a piece receive gradients from all later pieces, so those go first.
    """
    return [
        actions[:num_pieces] + actions[num_pieces:][::-1]
        for actions in gpipe(num_stages, num_pieces)
    ]


def token_times(
    cut: Sequence[int],
    cost: TokenCost,
    *,
    link: Link | TwoLevelLink = INSTANT,
    bytes_per_token: float = 0.0,
) -> PipelineTimes:
    """Return times to simulate `token_schedule` with; a backward takes twice its forward's time."""
    return PipelineTimes(
        link=link,
        message_bytes=[bytes_per_token * num_tokens for num_tokens in cut],
        micro_batch_scale=piece_times(cut, cost),
    )
