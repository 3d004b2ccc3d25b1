"""Claims: sentences about measurements, each beside the condition under which it is true.

A bold sentence, or a number in a title, that depends on the machine has its `claim` in the cell
that measures. So the text and the stored measurement of a solved notebook cannot disagree.
"""

import os

from course_lib.core.default_place import default_place
from course_lib.core.errors import CourseError
from course_lib.display.show import put

VARIES = (
    "Measured times vary, most of all on machines with few or busy cores. Close other programs and "
    "run it again."
)
STRICT = "COURSE_CLAIMS"  # the environment variable; `strict` where solved notebooks are built


def claim(sentence: str, holds: object) -> None:
    """Print nothing if the sentence holds in this run, and otherwise a remark that it does not.

    A learner's notebook never fails on it. With COURSE_CLAIMS=strict, as where the solved notebooks
    are built, a sentence that does not hold is an error.

    Raises: CourseError for a sentence that does not hold, with COURSE_CLAIMS=strict
    """
    if bool(holds):
        return
    if os.environ.get(STRICT) == "strict":
        raise CourseError(
            f"claim: expected “{sentence}”; this run measured otherwise. Try an idle machine, "
            "measure something that shows it more clearly, or change the sentence."
        )
    place = default_place()
    where, why = "On this machine", VARIES
    if place.is_cluster:
        where, why = f"On {place.name}", "No link is emulated here: is it one about such a link?"
    put({"text/plain": f"{where}, this time: not so: “{sentence}”. {why}"})
