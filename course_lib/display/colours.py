"""The colors of the course, each with one meaning in every picture.

KIND colors denote what is done or held (forward and the activations it saves share one color),
RANK colors denote the rank; one picture uses one set, never both. Every KIND keeps a CIEDE2000
distance of 10.8 or more from every other under simulated color blindness; a test computes it. Color
never stands alone: boxes have letters, waiting and communication have hatches, ranks their number.
"""

from dataclasses import dataclass

from course_lib.core.records import COMMUNICATION_KINDS

BLACK, WHITE = "#000000", "#FFFFFF"
GRID, QUIET = "#E4E4E4", "#595959"


@dataclass(frozen=True, kw_only=True)
class Ink:
    """Drawing style of one meaning: `fill`, color of `text` on it, `line` for edges and hatch."""

    name: str
    fill: str
    text: str = BLACK
    hatch: str = ""
    line: str = WHITE
    letter: str = ""


FORWARD = Ink(name="forward", fill="#0072B2", text=WHITE, letter="F")
RECOMPUTE = Ink(name="recompute", fill="#56B4E9", letter="R")
BACKWARD = Ink(name="backward", fill="#D55E00", letter="B")
BACKWARD_INPUT = Ink(name="backward_input", fill="#E69F00", letter="I")
BACKWARD_WEIGHT = Ink(name="backward_weight", fill="#F0E442", letter="W")
COMMUNICATION = Ink(name="communication", fill="#009E73", hatch="//", line="#2BB08A")
OPTIMIZER = Ink(name="optimizer", fill="#CC79A7", letter="O")
PARAMS = Ink(name="params", fill="#333333", text=WHITE)
STORAGE = Ink(name="write to storage", fill="#6B4226", text=WHITE)
WAIT = Ink(name="waiting", fill="#DDDDDD", hatch="..", line="#A6A6A6")
OTHER = Ink(name="compute", fill="#666666", text=WHITE)

KIND: dict[str, Ink] = {
    "compute": OTHER,
    "forward": FORWARD,
    "recompute": RECOMPUTE,
    "backward": BACKWARD,
    "backward_input": BACKWARD_INPUT,
    "backward_weight": BACKWARD_WEIGHT,
    "optimizer": OPTIMIZER,
    **dict.fromkeys(COMMUNICATION_KINDS, COMMUNICATION),
    "write": STORAGE,
    "wait": WAIT,
    "params": PARAMS,
    "grads": BACKWARD,
    "optim_state": OPTIMIZER,
    "activations": FORWARD,
    "buffers": OTHER,
}

RANK = ("#77AADD", "#EEDD88", "#FFAABB", "#AAAA00", "#99DDFF", "#EE8866", "#44BB99", "#BBCC33")
RANK_GREY = "#D9D9D9"

# Curves that are neither a kind nor a rank, such as two algorithms side by side.
SERIES = ("#222222", "#A81818", "#6000A8", "#607878")
PALE = "#FFE08A"  # inside the stars of published values, whose edge has the curve's color


def rank_colour(rank: int, world_size: int) -> str:
    """Return the pale color of a rank; gray for all ranks of a world of more than 8."""
    return RANK[rank] if world_size <= len(RANK) else RANK_GREY
