"""Pictures of two compared runs. Each function returns a figure and its alt text."""

from collections import Counter

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from course_lib.debugging.comparing import RunComparison
from course_lib.debugging.value_records import PHASES
from course_lib.display.colours import BLACK, PALE, QUIET, WHITE
from course_lib.display.page import SMALL_PT, TEXT_PT, Margins, page, plain

MOST_STEPS = 12


def where_runs_differ(comparison: RunComparison) -> tuple[Figure, str]:
    """Draw by step and phase how many tensors differ; the first difference has a thick frame."""
    first, counts = comparison.first, comparison.num_compared
    bad = Counter(one.key[:2] for one in comparison.differences)
    from_step = first.key[0] - 1 if first else 0
    steps = [n for n in sorted({key[0] for key in counts}) if n >= from_step][:MOST_STEPS]
    phases = [phase for phase in PHASES if any((step, phase) in counts for step in steps)]
    title = f"First difference: step {first.key[0]}, {first}" if first else str(comparison)
    note = "different tensors of those compared; earlier phases stand above"
    margins = Margins(left=1.5, bottom=0.5)
    figure, (axes,) = page(title, [0.32 * len(phases)], note=note, margins=margins)
    for x, step in enumerate(steps):
        for y, phase in enumerate(phases):
            num = counts.get((step, phase), 0)
            if not num:
                continue
            is_first = first is not None and (step, phase) == first.key[:2]
            fill, edge = PALE if bad[step, phase] else WHITE, BLACK if is_first else QUIET
            width = 2.5 if is_first else 0.7
            box = Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor=fill, edgecolor=edge, lw=width)
            box.set_zorder(2 + is_first)
            axes.add_patch(box)
            text = f"{bad[step, phase]} of {num}"
            axes.text(x, y, text, ha="center", va="center", fontsize=SMALL_PT, zorder=4)
    axes.set_xlim(-0.55, max(len(steps), 1) - 0.45)
    axes.set_ylim(len(phases) - 0.45, -0.55)
    plain(axes, x_label="step", grid="")
    axes.set_xticks(range(len(steps)), [str(step) for step in steps], fontsize=TEXT_PT)
    axes.set_yticks(range(len(phases)), phases, fontsize=TEXT_PT)
    return figure, title
