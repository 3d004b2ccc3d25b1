"""Where activations of two meshes part is told; right runs, however divided, do not part."""

from dataclasses import replace

import pytest

from course_lib.debugging.activations import ALL_RIGHT, where_activations_part
from course_lib.debugging.value_records import RankValues, Value


def ran(sizes, *outputs, step=0):
    """Return a rank's record: phase, module, shape, and the mean square of its elements."""
    values = {}
    for number, (phase, name, shape, square) in enumerate(outputs):
        count = 1
        for size in shape:
            count *= size
        one = Value(
            step=step,
            phase=phase,
            name=name,
            call=number,
            shape=shape,
            boxes=(),
            bits="",
            sketch=(),
            norm=(square * count) ** 0.5,
            dtype="float64",
        )
        values[one.key] = one
    return RankValues(0, 1, sizes, values)


ONE = [
    ran(
        {},
        ("input", "model", (4, 8), 3.0),
        ("forward", "positions", (8, 2), 1.0),
        ("forward", "up", (4, 8, 6), 2.0),
        ("backward", "up", (4, 8, 6), 0.5),
        ("backward", "positions", (8, 2), 7.0),
    )
]
AXES = {"dp": (0, 2), "tp": (0, 2)}
PART = (
    ("input", "model", (2, 8), 3.0),
    ("forward", "chunks.0.positions", (8, 2), 1.0),
    ("forward", "chunks.0.up", (2, 8, 3), 2.0),
    ("backward", "chunks.0.up", (2, 8, 3), 0.5 * 4),  # dp times: averaged later
    ("backward", "chunks.0.positions", (8, 2), 1.2),
)


def changed(phase, name, square):
    rows = [(p, n, s, square if (p, n) == (phase, name) else q) for p, n, s, q in PART]
    return [ran(AXES, *PART)] * 3 + [ran(AXES, *rows)]


@pytest.mark.parametrize(
    ("phase", "name", "square", "told"),
    [
        ("input", "model", 3.1, "all ranks together read other data than the reference"),
        ("forward", "chunks.0.positions", 1.01, "the output of positions is another one"),
        ("forward", "chunks.0.up", 2.001, "the output of up is another one"),
        ("backward", "chunks.0.up", 2.1, "the gradient of the output of up is another one"),
        ("backward", "chunks.0.positions", 9.0, ALL_RIGHT),
    ],
)
def test_what_parts_first_is_told(phase, name, square, told):
    assert where_activations_part(changed(phase, name, square), ONE, 0).startswith(told)


def test_nothing_in_common_is_nothing_to_tell():
    assert where_activations_part([ran(AXES, *PART)] * 4, ONE, 0) == ALL_RIGHT
    assert where_activations_part([replace(ran(AXES))] * 4, ONE, 0) == ""
    assert where_activations_part([ran(AXES, *PART)] * 4, ONE, 1) == ""
