"""Which models `course_lib.models` builds: with attention and an MLP or experts in each layer.

All counting takes any `ModelSpec`; what trains has to be refused by name, not built without a
part. Notebook 01_memory.
"""

import math
from dataclasses import replace
from typing import Any

from course_lib.core.errors import CourseError
from course_lib.core.specs import ModelSpec

# the fields with a value that is not built, and the values that are
BUILT: dict[str, tuple[Any, ...]] = {
    "latent": (None,),
    "attention_softcap": (None,),
    "logit_softcap": (None,),
    "sinks": (False,),
    "chunked": (False,),
    "norms_per_layer": (2, 1),
    "positions": ("rope", "learned"),
    "qk_norm": ("head", "none"),
    "extras": ((),),
}
LLAMA3 = ("factor", "high_freq_factor", "low_freq_factor", "original_max_position_embeddings")


def check_built(spec: ModelSpec, where: str = "GPT") -> None:
    """Check that GPT builds all parts of a model. Raises: CourseError, which names the field"""
    for field, values in BUILT.items():
        if (value := getattr(spec, field)) not in values:
            said = repr(value) if len(repr(value)) <= 60 else f"{repr(value)[:60]}..."
            advice = (
                f"Try replace(spec, {field}={values[0]!r}), which is another model, or only count"
            )
            if where.startswith("--"):  # an option: there is no spec to replace a field of
                advice = "Try a model that can be trained (docs/models.md); course memory counts"
            raise CourseError(
                f"{where}: need {field} {' or '.join(map(repr, values))}, as GPT builds no other; "
                f"model {spec.name} has {said}. {advice} this one."
            )
    if spec.rope.scaling and spec.positions == "rope":
        llama3_scaling(spec, where)


def llama3_scaling(spec: ModelSpec, where: str = "GPT") -> tuple[float, float, float, float]:
    """Return factor, high and low frequency factor and original length of Llama 3's scaled rope.

    Raises: CourseError for another rule, and for other numbers than these four
    """
    found = dict(spec.rope.scaling)
    kind = found.pop("rope_type", None)
    numbers = [value for _, value in sorted(found.items())]
    fits = kind == "llama3" and tuple(sorted(found)) == LLAMA3 and all(map(_is_size, numbers))
    if not fits or not numbers[1] > numbers[2]:
        raise CourseError(
            f"{where}: need rope without scaling, or with rope_type 'llama3' and numbers above 0 "
            f"for {', '.join(LLAMA3)}, the high factor above the low one; model {spec.name} has "
            f"{repr(dict(spec.rope.scaling))[:120]}. Try replace(spec, rope="
            f"{replace(spec.rope, scaling=())!r}), which is another model."
        )
    factor, high, low, length = map(float, numbers)
    return factor, high, low, length


def _is_size(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value) and value > 0
