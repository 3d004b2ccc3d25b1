"""Predict the activation bytes at the peak of a recomputed step. Notebook 03_recompute."""

from itertools import accumulate

from course_lib.core.layers import LayerKind, layer_kinds, layers
from course_lib.memory.layer_bytes import Pass, total


def predicted_peak_bytes(one: Pass, how: str) -> int:
    """Return the most bytes of activations in a step; `how` is "none", "selective" or "full".

    The peak is at the end of forward, when the head keeps its tensors, too; or while a layer, as a
    rule the last one, is recomputed and its tensors are there again. `one` describes the model and
    its input; where this is a single sequence, attention copies no q, k, v, and "selective" may
    need less.

    Source: Korthikanti et al. 2022 (Reducing Activation Recomputation in Large Transformer Models),
            section 5, for what a strategy keeps; the peak is our own count
    """
    kinds = layers(one.spec)
    kept = {kind: total(one.kept_layer(how, kind)) for kind in layer_kinds(one.spec)}
    again = {kind: _again(one, how, kind) for kind in kept}
    until = list(accumulate(kept[kind] for kind in kinds))
    while_redone = (held + again[kind] for held, kind in zip(until, kinds, strict=True))
    return total(one.embedding()) + max(until[-1] + total(one.head()), *while_redone)


def _again(one: Pass, how: str, kind: LayerKind) -> int:
    """Return the bytes that a layer's recomputation adds to what was kept, as far as they last."""
    rows = one.layer(kind)
    more = total(rows) - total(one.kept_layer(how, kind))
    if how == "selective":  # only attention is redone, with q, k, v twice; later rows are free
        names = [row.name for row in rows]
        more += total(row for row in rows if row.name in ("q", "k and v"))
        more -= total(rows[names.index("input of out") :])
    return more
