"""What comes from a notebook controls no terminal, no XML file and no spreadsheet."""

import csv
import io
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from course_lib.core.plain_text import STRANGE, csv_field, one_line, printable


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("größer\n\tTabs €", "größer\n\tTabs €"),
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b]0;title\x07", f"{STRANGE}]0;title{STRANGE}"),
        ("a\r\nb\rc", f"a\nb{STRANGE}c"),
        ("\x00\ufffe\ud800\u202e", STRANGE * 4),
    ],
)
def test_what_is_not_printable_becomes_a_mark(text, said):
    assert printable(text) == said


def test_a_name_stays_on_its_line():
    assert one_line("class/a\nnot judged:\tb\x1b[2J ") == "class/a not judged: b"


@pytest.mark.parametrize("text", ["=1+1", "+1", "-1", "@SUM(A1)", "\tx", "\rx", "\x1b[0m=1"])
def test_a_spreadsheet_computes_nothing(text):
    assert csv_field(text) == f"'{printable(text)}"


@pytest.mark.parametrize("text", ["", "toy-1", "1 = 1", "'quoted'", " =1"])
def test_other_fields_stay_as_they_are(text):
    assert csv_field(text) == text


@given(text=st.text(st.characters() | st.characters(categories=["Cc", "Cs", "Cn"])))
def test_any_text_fits_into_xml_and_csv(text):
    element = ElementTree.Element("failure", message=printable(text))
    read = ElementTree.fromstring(ElementTree.tostring(element, "unicode"))
    assert read.get("message").split() == printable(text).split()
    file = io.StringIO(newline="")
    csv.writer(file).writerow([csv_field(text), "end"])
    (row,) = csv.reader(io.StringIO(file.getvalue(), newline=""))
    assert row == [csv_field(text), "end"]
    assert row[0][:1] not in set("=+-@\t\r")
    row[0].encode()
