"""What a package refuses, as one table: what every rank is told, and what is told so."""

from collections.abc import Callable, Sequence

import pytest

from course_lib.core import CourseError
from course_lib.ranks import Ranks, record

Table = Sequence[tuple[str, Callable[[int], object]]]


def assert_refused(ranks: Ranks, table: Table, *, silent: bool = False) -> None:
    """Every rank is told these words by the function beside them.

    table    words such as "MeshError: rank {rank}, DDP: need ... Try", with gaps, and a function of
             a rank that raises that CourseError
    silent   and no message has left
    """

    def told(rank: int) -> list[tuple[str, int]]:
        found = []
        for _, broken in table:
            with record() as log, pytest.raises(CourseError) as caught:
                broken(rank)
            num_sent = sum(event.kind == "send" for event in log.events)
            found.append((f"{caught.typename}: {caught.value}", num_sent))
        return found

    for rank, found in enumerate(ranks.run(told)):
        for (words, _), (sentence, num_sent) in zip(table, found, strict=True):
            for part in words.replace("{rank}", str(rank)).split(" ... "):
                assert part in sentence, f"need {part!r}; got {sentence!r}"
            assert not (silent and num_sent), words
