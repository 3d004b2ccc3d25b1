"""Text from elsewhere, made harmless: for a terminal, an XML file, a row of a spreadsheet.

File names, exercise keys, messages and printed output come from notebooks that somebody else wrote.
"""

import re

STRANGE = "\N{REPLACEMENT CHARACTER}"
FORMULA = "=+-@\t\r"  # a spreadsheet computes what begins with one of these
INNER_FORMULA = re.compile(r"(;\s*)(?=[=+\-@])")  # where `;` separates, a cell would begin here
LONGEST = 2000  # characters of one field; a spreadsheet's cell takes 32,767
COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


def printable(text: str) -> str:
    """Return the text without colors, and with a mark for each character that is not printable.

    Line feeds and tabs stay. What is left cannot control a terminal, and is allowed in XML 1.0.
    """
    letters = COLOUR.sub("", text).replace("\r\n", "\n")
    if letters.isprintable():
        return letters
    return "".join(c if c.isprintable() or c in "\n\t" else STRANGE for c in letters)


def cut(text: str) -> str:
    """Return the beginning of a text that is longer than a field may be."""
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} (cut)"


def one_line(text: str) -> str:
    """Return the printable text on one line, for a name or a sentence."""
    return " ".join(printable(text).split())


def csv_field(text: str) -> str:
    """Return the printable text; an apostrophe before what a spreadsheet would compute."""
    plain = printable(text)
    first = text[:1] + plain[:1]
    begun = f"'{plain}" if first.strip(FORMULA) != first else plain
    return INNER_FORMULA.sub(r"\1'", begun)
