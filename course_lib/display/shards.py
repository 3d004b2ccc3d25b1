"""Frames of a collective as SVG: one row per rank, one column per shard, one arrow per message.

A cell is striped in the colors of the ranks whose values are in it. Downward messages leave on the
right of their column, upward ones on the left, so that arrows never cross a cell.
"""

import html
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from course_lib.collectives.messages import Message
from course_lib.display.colours import BLACK, QUIET, WHITE, rank_colour
from course_lib.display.frames import Cell, Frame

CELL_W, CELL_H, GAP_X, GAP_Y = 58, 34, 40, 14
LEFT, TOP = 62, 30
_STILL_WIDTH, _CAPTION = 960, 26
_FRESH = f'stroke="{BLACK}" stroke-width="2.5"'
_KEPT = f'stroke="{QUIET}"'
_EMPTY = f'stroke="{QUIET}" stroke-dasharray="3 3"'
_FONT = 'font-family="DejaVu Sans, Verdana, sans-serif"'


def frame_size(frame: Frame) -> tuple[int, int]:
    """Return width and height of a frame's picture, in pixels."""
    ranks, shards = len(frame.cells), len(frame.cells[0])
    return LEFT + shards * (CELL_W + GAP_X), TOP + ranks * (CELL_H + GAP_Y) + 4


def frame_svg(frame: Frame, title: str) -> str:
    """Return one frame as an SVG, with its words as the text for screen readers."""
    width, height = frame_size(frame)
    label = html.escape(f"{title}: {frame.text}")
    return f"{_open(width, height, label)}{frame_shapes(frame)}</svg>"


def all_frames_svg(frames: Sequence[Frame], title: str, width_px: int = _STILL_WIDTH) -> str:
    """Return all frames in one static SVG, as many next to each other as fit its width."""
    full_width, full_height = frame_size(frames[0])
    scale = 1.0 if full_width <= _STILL_WIDTH // 2 else 0.56
    width, height = round(full_width * scale), round(full_height * scale) + _CAPTION
    columns = max(1, min(len(frames), width_px // width))
    rows = -(-len(frames) // columns)
    whole = max(columns * width, 9 * len(title) + 20)
    parts = [_open(whole, rows * height + _CAPTION, html.escape(title))]
    parts.append(_text(10, 18, title, 14, "start", "bold"))
    for index, frame in enumerate(frames):
        x, y = index % columns * width, _CAPTION + index // columns * height
        shapes = frame_shapes(frame, moving=False)
        parts.append(_text(x + 10, y + 17, frame.text.split(":")[0], 12, "start", "bold"))
        parts.append(f'<g transform="translate({x},{y + 22}) scale({scale:g})">{shapes}</g>')
    return "".join(parts) + "</svg>"


def frame_shapes(frame: Frame, *, moving: bool = True) -> str:
    """Return the shapes of a frame: headings, cells, arrows, and the shards that move."""
    ranks, shards = len(frame.cells), len(frame.cells[0])
    parts = [
        _text(_x(shard) + CELL_W // 2, TOP - 9, f"shard {shard}", 11, "middle", colour=QUIET)
        for shard in range(shards)
    ]
    parts += [
        _text(LEFT - 10, _y(rank) + CELL_H // 2 + 4, f"rank {rank}", 12, "end")
        for rank in range(ranks)
    ]
    boxes = [
        _Box(cell, _x(shard), _y(rank))
        for rank, row in enumerate(frame.cells)
        for shard, cell in enumerate(row)
    ]
    moves = [move for move in frame.messages if move.sender != move.receiver]
    parts += [_drawn(boxes, ranks), *map(_arrow, moves)]
    if moving:
        parts += [_traveller(frame.cells[m.sender][m.shard], m, ranks) for m in moves]
    return "".join(parts)


def _x(shard: int) -> int:
    return LEFT + GAP_X // 2 + shard * (CELL_W + GAP_X)


def _y(rank: int) -> int:
    return TOP + rank * (CELL_H + GAP_Y)


@dataclass(frozen=True)
class _Box:
    cell: Cell
    x: int
    y: int


def _drawn(boxes: Sequence[_Box], world_size: int) -> str:
    """Draw stripes, edges and labels of many cells, with one path for all of one style.

    An edge is heavy where the cell just changed and dashed where it is empty.
    """
    stripes: dict[str, str] = {}
    edges: dict[str, str] = {}
    labels = []
    for box in boxes:
        edge = _FRESH if box.cell.highlighted else _KEPT if box.cell.ranks else _EMPTY
        edges[edge] = edges.get(edge, "") + _rectangle(box.x, box.y, CELL_W)
        for x, width, rank in _stripes(box):
            colour = rank_colour(rank, world_size)
            stripes[colour] = stripes.get(colour, "") + _rectangle(x, box.y, width)
        if box.cell.label:
            labels.append(_label(box))
    parts = [f'<path fill="{colour}" d="{path}"/>' for colour, path in stripes.items()]
    parts += [f'<path fill="none" {edge} d="{path}"/>' for edge, path in edges.items()]
    return "".join([*parts, '<g font-size="12" text-anchor="middle">', *labels, "</g>"])


def _stripes(box: _Box) -> list[tuple[int, int, int]]:
    """Return left end, width and rank of each stripe of a cell."""
    count = len(box.cell.ranks)
    ends = [box.x + round(index * CELL_W / count) for index in range(count + 1)] if count else [0]
    return [
        (start, end - start, rank)
        for (start, end), rank in zip(pairwise(ends), box.cell.ranks, strict=True)
    ]


def _rectangle(x: int, y: int, width: int) -> str:
    return f"M{x} {y}h{width}v{CELL_H}h-{width}z"


def _label(box: _Box) -> str:
    look = ' font-weight="bold"' if box.cell.highlighted else ""
    look += ' font-size="9"' if len(box.cell.label) > 7 else ""
    x, y = box.x + CELL_W // 2, box.y + CELL_H // 2 + 4
    return f'<text x="{x}" y="{y}"{look}>{html.escape(box.cell.label)}</text>'


def _arrow(move: Message) -> str:
    """Draw an arrow from one cell to another, through the gap between the columns."""
    down = move.receiver > move.sender
    below = down if move.target_shard == move.shard else move.target_shard > move.shard
    side = 1 if below else -1
    edge = CELL_W if side > 0 else 0
    x1, y1 = _x(move.shard) + edge, _y(move.sender) + CELL_H / 2
    x2, y2 = _x(move.target_shard) + edge, _y(move.receiver) + CELL_H / 2
    if move.target_shard != move.shard:  # into the facing side of another column
        y1, y2 = (y1 + 6, y2 + 6) if down else (y1 - 6, y2 - 6)
        x2 += -side * CELL_W
        bulge_end = -side * 18
    else:
        y1, y2 = (y1 + 6, y2 - 6) if down else (y1 - 6, y2 + 6)
        bulge_end = side * (13 + 3 * min(3, abs(move.receiver - move.sender)))
    bulge = abs(bulge_end) * side
    tip = 6 if bulge_end > 0 else -6
    curve = f"M{x1:g} {y1:g}C{x1 + bulge:g} {y1:g} {x2 + bulge_end:g} {y2:g} {x2 + tip:g} {y2:g}"
    head = f"M{x2:g} {y2:g}l{tip * 1.4:g} -4.5v9z"
    return (
        f'<path class="way" d="{curve}" fill="none" stroke="{BLACK}" stroke-width="1.8"/>'
        f'<path d="{head}" fill="{BLACK}"/>'
    )


def _traveller(cell: Cell, move: Message, world_size: int) -> str:
    """Draw the shard that the animation moves along the arrow of the same index."""
    shapes = _drawn([_Box(Cell(cell.ranks), -CELL_W // 2, -CELL_H // 2)], world_size)
    x, y = _x(move.shard) + CELL_W // 2, _y(move.sender) + CELL_H // 2
    return (
        f'<g class="traveller" visibility="hidden" transform="translate({x},{y})">'
        f'<g transform="scale(0.62)">{shapes}</g></g>'
    )


def _open(width: float, height: float, label: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{label}" {_FONT} '
        f'width="{width:g}" height="{height:g}" viewBox="0 0 {width:g} {height:g}">'
        f'<rect width="100%" height="100%" fill="{WHITE}"/>'
    )


def _text(
    x: float,
    y: float,
    words: str,
    size: int,
    anchor: str,
    weight: str = "normal",
    colour: str = BLACK,
) -> str:
    look = f'font-size="{size}" text-anchor="{anchor}" fill="{colour}"'
    look += ' font-weight="bold"' if weight == "bold" else ""
    return f'<text x="{x:g}" y="{y:g}" {look}>{html.escape(words)}</text>'
