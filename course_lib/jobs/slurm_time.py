"""Times as Slurm writes them, with their trap: `2:00` is two minutes, `2:00:00` two hours."""

import re

from course_lib.core.errors import CourseError

FORMS = (  # days, hours, minutes, seconds; the first form that matches the whole text
    r"(?P<m>\d{1,9})",
    r"(?P<m>\d{1,9}):(?P<s>\d{1,9})",
    r"(?P<h>\d{1,9}):(?P<m>\d{1,9}):(?P<s>\d{1,9})",
    r"(?P<d>\d{1,9})-(?P<h>\d{1,9})",
    r"(?P<d>\d{1,9})-(?P<h>\d{1,9}):(?P<m>\d{1,9})",
    r"(?P<d>\d{1,9})-(?P<h>\d{1,9}):(?P<m>\d{1,9}):(?P<s>\d{1,9})",
)
UNIT_S = {"d": 86400, "h": 3600, "m": 60, "s": 1}


def read_time_s(text: str) -> int:
    """Return the seconds of a Slurm time: minutes, M:S, H:M:S, D-H, D-H:M or D-H:M:S.

    Raises: CourseError for anything else
    """
    for form in FORMS:
        if found := re.fullmatch(form, text.strip(), re.ASCII):
            return sum(UNIT_S[unit] * int(number) for unit, number in found.groupdict().items())
    raise CourseError(
        f"time limit: need hours:minutes:seconds, as in 0:30:00, or days-hours:minutes:seconds; "
        f"got {text!r}. Try 1:00:00 for one hour."
    )


def write_time(seconds: float) -> str:
    """Return the time as H:MM:SS, which cannot be misread; as D-HH:MM:SS from one day on."""
    days, rest = divmod(int(seconds), UNIT_S["d"])
    hours, rest = divmod(rest, UNIT_S["h"])
    clock = f"{rest // 60:02}:{rest % 60:02}"
    return f"{days}-{hours:02}:{clock}" if days else f"{hours}:{clock}"
