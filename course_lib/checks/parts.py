"""What of an answer holds, by parts of an exercise: its values, its traffic, its memory, its edges.

A check says which of its expectations hold; each of them belongs to one part. An assignment may
give each part its points (`parts` in assignment.toml).
"""

import re
from collections.abc import Iterable

VALUE, TRAFFIC, MEMORY, EDGES = "value", "traffic", "memory", "edges"
KINDS = (
    (
        TRAFFIC,
        r"^(order|budget|calls|other calls|messages|rounds|sends|actions|runs of|synchronizes)"
        r"|bytes sent",
    ),
    (MEMORY, r"memory|alive|\bkeep|\bkept\b|\bheld\b|^bytes (too many|that|of)|leaves in"),
)


def part_of(label: str) -> str:
    """Return the part that what a check calls `label` belongs to: `value` where it is no other."""
    return next((part for part, pattern in KINDS if re.search(pattern, label)), VALUE)


def whole_parts(found: Iterable[tuple[str, bool]], *, shows_work: bool = False) -> dict[str, float]:
    """Return 1.0 for each part all of whose expectations hold, else 0.0.

    Who does nothing is within every budget, too, and right on a single rank. So the other parts
    count only beside the whole value; or beside the whole traffic, where that `shows_work`: it
    names calls, in place of a limit.
    """
    parts: dict[str, float] = {}
    for part, holds in found:
        parts[part] = min(parts.get(part, 1.0), float(holds))
    has_worked = parts.get(VALUE) or (shows_work and parts.get(TRAFFIC))
    return parts if has_worked else dict.fromkeys(parts, 0.0)
