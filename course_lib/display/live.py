"""Is there somebody at the other end who can move a slider?"""

import os
from typing import Any

from IPython.core.getipython import get_ipython
from IPython.display import display


def has_widgets() -> bool:
    """True in a notebook's kernel, unless COURSE_NO_WIDGETS=1 asks for text and still pictures."""
    shell = get_ipython()
    wanted = os.environ.get("COURSE_NO_WIDGETS", "0") in ("", "0")
    return wanted and hasattr(shell, "kernel")


def put(data: dict[str, Any], metadata: dict[str, Any] | None = None) -> None:
    """Display data by mime type; outside IPython print its text."""
    if get_ipython() is None:
        print(data["text/plain"])
    else:
        display(data, metadata=metadata or {}, raw=True)


def widget_data(widget: Any) -> dict[str, Any]:
    """What a widget displays as, by mime type, without its technical text."""
    bundle = widget._repr_mimebundle_()
    data = dict(bundle[0] if isinstance(bundle, tuple) else bundle or {})
    data.pop("text/plain", None)
    return data
