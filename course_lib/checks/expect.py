"""Sentences on how a value differs from the right one and on what happened on the ranks."""

from typing import Any

import torch

from course_lib.checks.exercise import Cause

SHAPE = Cause("Compare the shapes before the numbers: print .shape of what you return.")
DTYPE = Cause("Keep the dtype of what you were given: nothing else is wrong yet.")
KEEPS = Cause(
    "The first call was right; keep nothing for the next one, no numbers and no buffer: every call "
    "returns new tensors."
)
SYMPTOMS = {
    "raised": "your code raised an error.",
    "hang": "your ranks wait for each other.",
    "mismatch": "your ranks do not make the same calls in the same order.",
    "died": "the process of a rank ended.",
    "endless": "your code does not return.",
}


def on_ranks(world_size: int) -> str:
    """Format `on 1 rank`, `on 2 ranks`."""
    return f"on {world_size} rank{'s' if world_size > 1 else ''}"


SHOWN = 1e-5  # numbers closer than this may print alike


def difference(got: Any, expected: Any, rtol: float = 0.0) -> tuple[str, str]:
    """Return the kind and the words of the first difference; two empty texts where there is none.

    The kinds, in the order in which they are judged: `none`, `type`, `shape`, `dtype`, `device`,
    `numbers`, `digits` (equal to the eye, but not within the relative difference `rtol`).
    """
    if got is None and expected is not None:
        return "none", f"need {_short(expected)}; got None"
    if not isinstance(expected, torch.Tensor):
        same = type(got) is type(expected) and got == expected
        return ("", "") if same else ("type", f"need {_short(expected)}; got {_short(got)}")
    if not isinstance(got, torch.Tensor):
        return "type", f"need a tensor; got {_short(got)}"
    for what in ("shape", "dtype", "device"):
        need, is_now = getattr(expected, what), getattr(got, what)
        if need != is_now:
            return what, f"need {what} {_plain(need)}; got {_plain(is_now)}"
    return _unequal(got.detach(), expected, rtol)


def _unequal(got: torch.Tensor, expected: torch.Tensor, rtol: float) -> tuple[str, str]:
    apart = ~torch.isclose(got, expected, rtol=rtol, atol=0, equal_nan=True)
    wrong = apart.flatten().nonzero().flatten().tolist()
    if not wrong:
        return "", ""
    if got.is_floating_point() and torch.allclose(got, expected, rtol=SHOWN, atol=0):
        off = (got - expected).abs().max().item()
        return "digits", f"right but for the last digits of {_plain(got.dtype)} (off by {off:.1g})"
    if expected.numel() <= 8:
        return "numbers", f"need {_short(expected)}; got {_short(got)}"
    need, is_now = (_short(tensor.flatten()[wrong[0]]) for tensor in (expected, got))
    return "numbers", (
        f"need {need} at index {wrong[0]}; got {is_now} "
        f"({len(wrong)} of {expected.numel()} numbers are wrong)"
    )


def _short(value: Any) -> str:
    """Format a value for a reader: `[1, 10.5]` for a tensor."""
    if not isinstance(value, torch.Tensor):
        return repr(value)
    if value.numel() > 8:
        return f"a tensor of shape {_plain(value.shape)}"
    numbers = [f"{n:g}" if isinstance(n, float) else f"{n}" for n in value.flatten().tolist()]
    return f"[{', '.join(numbers)}]" if value.dim() else numbers[0]


def _plain(value: Any) -> str:
    return str(list(value)) if isinstance(value, torch.Size) else str(value).removeprefix("torch.")
