"""One test for a whole table: it goes through all rows, and its failure names those that miss."""

from collections.abc import Callable, Iterable
from typing import Any


def every(rows: Iterable[Any], name: Callable[[Any], object] = str) -> Callable[..., Callable]:
    """Decorate a test of one row so that it tries every row."""

    def decorate(test: Callable[[Any], None]) -> Callable[[], None]:
        def whole_table() -> None:
            tried, misses = 0, []
            for tried, row in enumerate(rows, 1):  # noqa: B007 - counted
                try:
                    test(row)
                except AssertionError as miss:
                    misses.append(f"{name(row)}: {miss}")
            assert not misses, f"{len(misses)} of {tried} rows miss:\n" + "\n".join(misses)
            assert tried

        whole_table.__name__, whole_table.__doc__ = test.__name__, test.__doc__
        whole_table.__module__ = test.__module__
        return whole_table

    return decorate
