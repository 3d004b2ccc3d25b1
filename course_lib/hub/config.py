"""Read a `ModelSpec` from a Hugging Face `config.json`.

`course_lib.hub.families` says what each architecture's code does that its config.json does not
say. A field that is neither read there nor known to change no size is refused: ignored, it could
make every count wrong without a word. Notebook 01_memory.
"""

import os
from pathlib import Path
from typing import Any

from course_lib.core.errors import CourseError
from course_lib.core.files import read_json
from course_lib.core.specs import ModelSpec
from course_lib.hub.families import FAMILIES
from course_lib.hub.fields import Config
from course_lib.hub.usual import USUAL

TIED = "tie_word_embeddings"
# models of text and more that have the sizes in text_config; whether their code ties by itself
NESTED = {"gemma3": True, "llama4": False, "mistral3": True}


def read_config(path: str | os.PathLike[str]) -> ModelSpec:
    """Read the spec in a Hugging Face `config.json`: of the model of text, where it has others too.

    Raises: CourseError for a file that cannot be read, an architecture or a field that is not
            known, sizes that do not fit
    """
    path = Path(path)
    found = read_json(path, "a config.json")
    return read_values(path, found if isinstance(found, dict) else {})


def read_values(path: Path, values: dict[str, Any]) -> ModelSpec:
    """Read the spec in the fields of a config.json; `path` is where they are, or would be.

    Raises: CourseError as `read_config`
    """
    kind = values.get("model_type")
    if isinstance(kind, str) and kind in NESTED:
        values = _of_text(path, kind, values)
        kind = values["model_type"]
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise CourseError(
            f"{path}: need model_type {', '.join((*FAMILIES, *NESTED))}; got {repr(kind)[:60]}. "
            "Other families have other parameters. Try one of these, or ModelSpec(...) in Python."
        )
    config = Config(path, values, USUAL[kind])
    try:
        fields = FAMILIES[kind](config)
        config.refuse_others()
        fields["extras"] = (*fields.get("extras", ()), *config.extras())
        return ModelSpec(name=path.stem if path.stem != "config" else kind, **fields)
    except CourseError as error:
        where = "" if str(error).startswith(str(path)) else f"{path}: "
        raise type(error)(f"{where}{error}") from None


def _of_text(path: Path, kind: str, outer: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of the model of text inside a model of text and more."""
    inner = outer.get("text_config")
    if not isinstance(inner, dict):
        raise CourseError(f"{path}: need text_config with the sizes of the model of text.")
    tied = outer.get(TIED, NESTED[kind])
    if inner.get(TIED, tied) != tied:  # the code looks at the outer one
        raise CourseError(
            f"{path}, {TIED}: need the same inside and outside of text_config; got "
            f"{repr(inner[TIED])[:60]} and {repr(tied)[:60]}."
        )
    return {"model_type": f"{kind}_text", **inner, TIED: tied}
