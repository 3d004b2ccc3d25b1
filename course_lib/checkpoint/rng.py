"""A rank's random state: what decides its dropout masks and its shuffles.

Each rank has its own, so a checkpoint keeps one for each: `{"rng": {rank: rng_state()}}`.
Notebook 14_checkpoint.
"""

import base64
import random
import sys
from collections.abc import Mapping
from typing import Any

import torch

from course_lib.core.errors import CourseError


def rng_state() -> dict[str, Any]:
    """Return the random states of Python, PyTorch (CPU, and GPUs in use) and NumPy, if imported.

    They are plain values, about 12 KB of text.
    """
    version, numbers, spare = random.getstate()
    state: dict[str, Any] = {
        "python": [version, list(numbers), spare],
        "torch": _text(torch.get_rng_state()),
    }
    if torch.cuda.is_initialized():
        state["cuda"] = [_text(one) for one in torch.cuda.get_rng_state_all()]
    if "numpy" in sys.modules:
        kind, keys, *rest = sys.modules["numpy"].random.get_state()
        state["numpy"] = [kind, keys.tolist(), *rest]
    return state


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Go on with the random numbers that followed when `rng_state` was called.

    Raises:  CourseError for anything else than its result
    """
    try:
        version, numbers, spare = state["python"]
        random.setstate((version, tuple(numbers), spare))
        torch.set_rng_state(_tensor(state["torch"]))
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state_all([_tensor(one) for one in state["cuda"]])
        if "numpy" in state:
            import numpy

            numpy.random.set_state(tuple(state["numpy"]))
    except (KeyError, TypeError, ValueError, RuntimeError) as problem:
        raise CourseError(
            f"set_rng_state: need what rng_state() has returned; got another ({problem!s:.60}). "
            'Try checkpoint.values["rng"][str(rank)].'
        ) from None


def _text(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
