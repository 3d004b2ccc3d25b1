"""Pipelining inside one sequence: its tokens are cut into pieces that follow one another.

A causal model may compute the first tokens of a sequence without the later ones. So the pieces of
a single sequence can fill a pipeline. A later piece attends to more, and takes longer: the cut that
makes all pieces equally long has ever shorter ones. Notebook 08_pipeline.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from course_lib.core.errors import CourseError
from course_lib.core.links import Link, TwoLevelLink
from course_lib.pipeline.actions import Schedule
from course_lib.pipeline.balance import balanced_cuts
from course_lib.pipeline.schedules import gpipe
from course_lib.pipeline.simulation import INSTANT, PipelineTimes


@dataclass(frozen=True, kw_only=True)
class TokenCost:
    """Seconds of a forward on one stage: for each piece, each token, each pair that attends."""

    piece_s: float = 0.0
    token_s: float = 1.0
    pair_s: float = 0.0

    def of(self, first: int, num_tokens: int) -> float:
        """A piece that begins with token `first`; each token attends to itself and all before."""
        num_pairs = num_tokens * first + num_tokens * (num_tokens + 1) / 2
        return self.piece_s + self.token_s * num_tokens + self.pair_s * num_pairs


def even_cut(num_tokens: int, num_pieces: int) -> list[int]:
    """Pieces of equally many tokens; the first ones take one more where it does not come out."""
    if not 1 <= num_pieces <= num_tokens:
        raise CourseError(f"even_cut: need 1 to {num_tokens} pieces; got {num_pieces}. Try 4.")
    fewest, over = divmod(num_tokens, num_pieces)
    return [fewest + (piece < over) for piece in range(num_pieces)]


def balanced_cut(num_tokens: int, num_pieces: int, cost: TokenCost) -> list[int]:
    """Pieces whose longest is as short as it can be; later pieces have fewer tokens."""
    return balanced_cuts(_token_times(num_tokens, cost), num_pieces)[-1]


def best_cut(num_tokens: int, num_stages: int, cost: TokenCost, most: int = 64) -> list[int]:
    """The cut with the shortest forward, of up to `most` pieces.

    All cuts into n pieces compute equally long in all, so the balanced one is the best of them;
    only n has to be tried.
    """
    cuts = balanced_cuts(_token_times(num_tokens, cost), min(most, num_tokens))
    return min(cuts, key=lambda cut: token_forward_s(cut, num_stages, cost))


def _token_times(num_tokens: int, cost: TokenCost) -> list[float]:
    return [cost.token_s + cost.pair_s * (position + 1) for position in range(num_tokens)]


def piece_times(cut: Sequence[int], cost: TokenCost) -> list[float]:
    """Seconds of each piece's forward on one stage."""
    ends = accumulate(cut, initial=0)
    return [cost.of(first, end - first) for first, end in pairwise(ends)]


def token_forward_s(cut: Sequence[int], num_stages: int, cost: TokenCost) -> float:
    """Seconds of the whole forward: all pieces, and p - 1 times the longest of them.

    Source: Li et al. 2021 (TeraPipe), section 3.3, equation 5
    """
    times = piece_times(cut, cost)
    return sum(times) + (num_stages - 1) * max(times)


def token_schedule(num_stages: int, num_pieces: int) -> Schedule:
    """Forwards in the order of the tokens; backwards from the last piece to the first.

    The keys and values of a piece get gradients from all later pieces, so these come before it.
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
    """Times to play `token_schedule` with: a backward takes twice as long as its forward."""
    return PipelineTimes(
        link=link,
        message_bytes=[bytes_per_token * num_tokens for num_tokens in cut],
        micro_batch_scale=piece_times(cut, cost),
    )
