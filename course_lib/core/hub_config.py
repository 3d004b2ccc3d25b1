"""Read a `ModelSpec` from a Hugging Face `config.json`.

`course_lib.core.hub_families` says what each architecture's code does that its config.json does not
say. A field that is neither read there nor known to change no size is refused: ignored, it could
make every count wrong without a word. Notebook 01_memory.
"""

import os
from pathlib import Path

from course_lib.core.errors import CourseError
from course_lib.core.files import read_json
from course_lib.core.hub_families import FAMILIES
from course_lib.core.hub_fields import EXTRAS, Config
from course_lib.core.specs import ModelSpec


def read_config(path: str | os.PathLike[str]) -> ModelSpec:
    """Read the spec in a Hugging Face `config.json`: of the model of text, where it has others too.

    Raises: CourseError for a file that cannot be read, an architecture or a field that is not known
    """
    path = Path(path)
    found = read_json(path, "a config.json")
    values = found if isinstance(found, dict) else {}
    kind = values.get("model_type")
    if isinstance(inner := values.get("text_config"), dict):
        outer = {k: v for k, v in values.items() if k in ("tie_word_embeddings",)}
        kind = inner.get("model_type") or kind
        values = {**outer, **inner}
    kind = kind.removesuffix("_text") if isinstance(kind, str) else kind
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise CourseError(
            f"{path}: need model_type {', '.join(FAMILIES)}; got {repr(kind)[:60]}. "
            "Try ModelSpec(...) with the sizes yourself."
        )
    config = Config(path, values)
    fields = FAMILIES[kind](config)
    fields["extras"] = (*fields.get("extras", ()), *_extras(config))
    config.refuse_unread()
    return ModelSpec(name=path.stem if path.stem != "config" else kind, **fields)


def _extras(config: Config) -> list[str]:
    """Return the fields of EXTRAS that are on."""
    given = {key: config.values.get(key) for key in EXTRAS}
    config.read.update(EXTRAS)
    return [key for key, value in given.items() if value is not None and value != EXTRAS[key]]
