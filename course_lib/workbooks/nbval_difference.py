"""Say in two lines in what an output that nbval refused differs from the stored one."""

import itertools

from nbformat import NotebookNode
from nbval.plugin import IPyNbCell

BEFORE, SHOWN = 40, 160  # characters of a line: before the first difference, and in all


def difference(cell: IPyNbCell) -> str:
    """Return the first line that differs, as it is stored and as it came this time."""
    stored, found = _texts(cell, cell.cell.outputs), _texts(cell, cell.test_outputs or [])
    for kind in [*stored, *(kind for kind in found if kind not in stored)]:
        pairs = itertools.zip_longest(stored.get(kind, []), found.get(kind, []))
        for old, new in pairs:
            if old != new:
                return f"{kind}\n    stored: {_around(old, new)}\n    again:  {_around(new, old)}"
    return "its outputs come in another number or order"


def _texts(cell: IPyNbCell, outputs: list[NotebookNode]) -> dict[str, list[str]]:
    """Return the lines that nbval compares, by the kind of output.

    nbval has joined all pieces of a stream in the first one already.
    """
    texts: dict[str, list[str]] = {}
    for output in outputs:
        if output.output_type == "stream":
            found = {} if output.name in texts else {output.name: output.text}
        elif output.output_type == "error":
            found = {"error": f"{output.ename}: {output.evalue}"}
        else:
            kept = (kind for kind in output.data if kind not in cell.parent.skip_compare)
            found = {kind: output.data[kind] for kind in kept}
        for kind, text in found.items():
            texts.setdefault(kind, []).extend(str(cell.sanitize(text)).splitlines())
    return texts


def _around(line: str | None, other: str | None) -> str:
    """Return a line from shortly before its first difference from another one."""
    if line is None:
        return "(nothing)"
    pairs = enumerate(zip(line, other or "", strict=False))
    same = next((at for at, (mine, its) in pairs if mine != its), min(len(line), len(other or "")))
    start = max(0, same - BEFORE) if len(line) > SHOWN else 0
    end = start + SHOWN
    return ("… " if start else "") + line[start:end] + (" …" if end < len(line) else "")
