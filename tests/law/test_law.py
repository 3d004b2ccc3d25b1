"""The kit notices what it is there to notice."""

import pytest

from tests.law.law import Alone, Law, Replicas, alone, assert_laws

REFUSED = "parallelize: need an unsplit GPT; got Linear."


def law_holds(found, method=Replicas, law=Law("one layer")):
    """Do ranks that report these have the numbers of one process?"""
    assert_laws(lambda *_: [[one] for one in found], method, [law])


class Splits(Alone):
    name = "tensor parallel"


@pytest.mark.parametrize("other", ["another error", alone(Law("one layer"))])
def test_every_rank_refuses(other):
    law_holds([REFUSED, REFUSED], Splits)
    with pytest.raises(AssertionError, match="one layer: need Refused"):
        law_holds([REFUSED, other], Splits)
