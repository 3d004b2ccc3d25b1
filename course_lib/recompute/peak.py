"""Predict the activation bytes at the peak of a recomputed step. Notebook 03_recompute."""

from course_lib.memory.layer_bytes import Pass, total


def predicted_peak_bytes(one: Pass, how: str) -> int:
    """Return the most bytes of activations in a step; `how` is "none", "selective" or "full".

    The peak is at the end of forward, when the head keeps its tensors, too; or while the last layer
    is recomputed and its tensors are there again. `one` describes a layer and its input; where this
    is a single sequence, attention copies no q, k, v, and "selective" may need less.

    Source: Korthikanti et al. 2022 (Reducing Activation Recomputation in Large Transformer Models),
            section 5, for what a strategy keeps; the peak is our own count
    """
    rows, kept = one.layer(), total(one.kept_layer(how))
    again = total(rows) - kept
    if how == "selective":  # only attention is redone, with q, k, v twice; later rows are free
        again += total(rows[3:5]) - total(rows[8:])
    return kept * one.spec.num_layers + total(one.embedding()) + max(total(one.head()), again)
