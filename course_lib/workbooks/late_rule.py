"""What an assignment takes off for work that comes late: a share of the points for each day."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from typing import Any

from course_lib.core import CourseError

DAY = timedelta(days=1)


@dataclass(frozen=True, kw_only=True)
class LateRule:
    """Percents of what was reached: `per_day` for each day that has begun, in all at most `most`.

    Who hands in within `grace_minutes` after the due time is not late; after that, days count from
    the due time.

    Raises: CourseError for numbers that cannot be meant
    """

    per_day: float
    grace_minutes: float = 0.0
    most: float = 100.0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            is_percent = name != "grace_minutes"
            if not (math.isfinite(value) and 0 <= value <= (100 if is_percent else math.inf)):
                what = "percents from 0 to 100" if is_percent else "minutes of 0 or more"
                raise CourseError(f"late: need {what} as {name}; got {value:g}.")

    def days(self, due: datetime, handed_in: datetime) -> int:
        """Return how many days late: each that has begun counts."""
        late = handed_in - due
        if late <= timedelta(minutes=self.grace_minutes):
            return 0
        return math.ceil(late / DAY)

    def percent(self, days: float) -> float:
        """Return how much is taken off for so many days, as a percent of what was reached."""
        return min(self.most, self.per_day * days)

    @classmethod
    def from_table(cls, table: Any) -> "LateRule":
        """Read `[late]` of assignment.toml. Raises: CourseError for another table"""
        names = ("per_day", "grace_minutes", "most")
        is_table = isinstance(table, Mapping) and "per_day" in table and table.keys() <= {*names}
        if not is_table or not all(type(value) in (int, float) for value in table.values()):
            raise CourseError(
                f"need numbers under [late]: per_day, and grace_minutes and most if you like; "
                f"got {table!r}."
            )
        return cls(**table)

    def to_toml(self) -> str:
        """Return it as the table [late]."""
        return "\n".join(["[late]", *(f"{name} = {n:g}" for name, n in asdict(self).items())])
