"""Draw what bf16 does to losses, and to a sum over many ranks. Notebook 10_fsdp."""

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from course_lib.display.compare import Voices, compare
from course_lib.fsdp.lab import ring_sum_error_percent

_RANKS = [4, 16, 64, 256, 1024]


def losses_beside_fp32(losses: Mapping[str, Sequence[float]]) -> tuple[Figure, str]:
    """Draw losses minus those of the first run, which is in fp32, and say how far they differ."""
    (_, exact), *others = losses.items()
    apart = {
        name: [one - other for one, other in zip(values, exact, strict=True)]
        for name, values in others
    }
    most = max(abs(value) for values in apart.values() for value in values)
    title = f"In {len(exact)} steps the loss stays within {most:.2g} of fp32's"
    curves = {name: Voices(measurement=values) for name, values in apart.items()}
    figure = compare(
        range(1, len(exact) + 1),
        curves,
        title,
        x_label="step",
        y_label="loss minus fp32's (rank 0)",
    )
    return figure, f"{title}, from {exact[0]:.2f} to {exact[-1]:.2f}"


def ring_sums() -> tuple[Figure, str]:
    """Draw the error of a sum in bf16 over the number of ranks in it, and say what it shows."""
    off = [ring_sum_error_percent(p) for p in _RANKS]
    title = f"A ring sum in bf16 is off by {off[0]:.1f} % on 4 ranks, by {off[-1]:.1f} % on 1,024"
    figure = compare(
        _RANKS,
        {"bf16": Voices(simulation=off)},
        title,
        x_label="ranks in the sum",
        y_label="error of the sum (%)",
        log_x=True,
    )
    return figure, f"{title}: 16 times as many ranks, 4 times the error"
