"""Texts that a submission may hold, and what the reports may make of them at most."""

from html.parser import HTMLParser

HOSTILE = (
    '=HYPERLINK("http://x.example","click")',
    "+1+1",
    "-2+3",
    "@SUM(A1)",
    "\t=1",
    "\r=1",
    "\n=1",
    "\x1b[0m=1",
    "a;=1+1",
    'a",=1,"',
    "a\r\n=1,2,3",
    "\x1b]0;title\x07\x1b[2J",
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "</style><script>",
    "]]></failure>&amp;&#0;<![CDATA[",
    "javascript:alert(1)",
    "a\0b",
    "\u202egnp.exe\u2066",
    "\ud800 half",
    "\ufffe\uffff",
    "\u2028next\x85line\x0b",
    "../../x",
    "/etc/passwd",
    "con",
    "CON.txt",
    ".",
    "..",
    "",
    " ",
    "\N{GRINNING FACE}" * 3,
    "e\u0301" * 200,
    "x" * 300,
    "y" * 1_000_000,
    "[" * 200_000,
)
FORMULA = tuple("=+-@\t\r")
TAGS = {
    *("html", "head", "meta", "title", "style", "body", "main", "h1", "h2", "h3", "p", "strong"),
    *("span", "bdi", "a", "ul", "ol", "li", "section", "div", "details", "summary", "pre", "mark"),
    *("table", "caption", "thead", "tbody", "tr", "th", "td", "meter"),
}
ATTRIBUTES = {
    *("lang", "charset", "http-equiv", "content", "name", "class", "href", "scope", "min", "max"),
    *("value", "id", "tabindex"),
}


class Page(HTMLParser):
    """What stands in a page; raises AssertionError for a tag that is not closed or not ours."""

    def __init__(self, content: str) -> None:
        super().__init__()
        self.text = ""
        self.links: list[str] = []
        self.policy = ""
        self.open: list[str] = []
        self.tags: list[str] = []
        self.feed(content)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in TAGS, tag
        assert {name for name, _ in attrs} <= ATTRIBUTES, attrs
        found = dict(attrs)
        self.tags.append(tag)
        self.links += [found["href"] or ""] if "href" in found else []
        if found.get("http-equiv") == "Content-Security-Policy":
            self.policy = found["content"] or ""
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text += data

    def handle_comment(self, data: str) -> None:
        raise AssertionError(data)

    def unknown_decl(self, data: str) -> None:
        raise AssertionError(data)


def is_plain(text: str) -> bool:
    """Whether a text has nothing that controls a terminal or the direction of writing."""
    return all(letter.isprintable() or letter in "\n\t" for letter in text)
