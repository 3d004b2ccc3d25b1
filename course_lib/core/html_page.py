"""One self-contained HTML page: no scripts, nothing from elsewhere, every text escaped.

The policy in its head lets a browser apply this one style and load nothing, so that even a text
that was left unescaped by mistake could run and fetch nothing. Pictures stand in the page itself.
"""

import base64
import hashlib
import html
from collections.abc import Iterable, Sequence

from course_lib.core.plain_text import cut, one_line, printable

STYLE = """
:root { color-scheme: light dark; --text: #1f2328; --quiet: #59636e; --page: #ffffff;
  --box: #f6f8fa; --line: #d1d9e0; --right: #0a6b2f; --wrong: #a62310; --open: #7a4d00;
  --link: #0b57a4; --same: #fff3bf; }
@media (prefers-color-scheme: dark) { :root { --text: #e6edf3; --quiet: #9aa5b1; --page: #0f1419;
  --box: #181f27; --line: #36404b; --right: #6fd08c; --wrong: #ff9b85; --open: #e8b75a;
  --link: #7db8f5; --same: #4a3f10; } }
* { box-sizing: border-box; }
body { font: 16px/1.55 system-ui, sans-serif; color: var(--text); background: var(--page);
  max-width: 52rem; margin: 0 auto; padding: 2rem 1.25rem 4rem; overflow-wrap: anywhere; }
body.wide { max-width: 88rem; }
h1 { font-size: 1.7rem; line-height: 1.25; margin: 0 0 .25rem; }
h2 { font-size: 1.25rem; margin: 2.25rem 0 .5rem; }
h3 { font-size: 1.05rem; margin: 0 0 .4rem; }
.box > h2 { margin-top: 0; }
p, ul, ol { margin: .4rem 0; }
a { color: var(--link); }
.quiet, caption { color: var(--quiet); }
.score { font-size: 1.35rem; font-weight: 600; margin: .75rem 0; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
caption { text-align: left; padding-bottom: .4rem; }
th, td { text-align: left; padding: .4rem .7rem .4rem 0; border-bottom: 1px solid var(--line);
  vertical-align: top; }
thead th { font-size: .9rem; color: var(--quiet); vertical-align: bottom; }
th.number, td.number { text-align: right; white-space: nowrap; padding-right: 1.6rem; }
.scroll { overflow-x: auto; }
.scroll td, .scroll th { overflow-wrap: normal; }
.box { background: var(--box); border: 1px solid var(--line); border-radius: 6px;
  padding: .8rem 1rem; margin: .8rem 0; }
.said { white-space: pre-wrap; border-left: 3px solid var(--line); padding-left: .8rem; }
.status { font-weight: 600; white-space: nowrap; color: var(--open); }
.status.right { color: var(--right); }
.status.wrong { color: var(--wrong); }
meter { width: 9rem; height: 1rem; vertical-align: middle; }
.sides { display: grid; grid-template-columns: 1fr 1fr; gap: 1rem; }
.sides > div { min-width: 0; }
pre { font: 13px/1.5 ui-monospace, monospace; margin: 0; padding: .6rem 0; overflow-x: auto;
  background: var(--page); border: 1px solid var(--line); border-radius: 4px; }
pre span, pre mark { display: block; padding: 0 .7rem; border-left: 4px solid transparent;
  color: inherit; min-height: 1.5em; }
pre mark { background: var(--same); border-left-color: var(--open); }
figure { margin: 1.5rem 0; overflow-x: auto; }
figure img { background: #ffffff; }
@media (max-width: 40rem) { .sides { grid-template-columns: 1fr; } }
@media print { body { max-width: none; padding: 0; } .box { break-inside: avoid; } }
"""
NUMBER = ' class="number"'
HASH = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
POLICY = (
    f"default-src 'none'; style-src 'sha256-{HASH}'; img-src data:; base-uri 'none'; "
    "form-action 'none'"
)


def html_page(title: str, body: Iterable[str], *, wide: bool = False) -> str:
    """Return a page; `title` is text, `body` pieces of HTML."""
    pieces = (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="referrer" content="no-referrer">',
        f"<title>{line(title)}</title>",
        f"<style>{STYLE}</style>\n</head>",
        '<body class="wide"><main>' if wide else "<body><main>",
        *body,
        "</main></body>\n</html>\n",
    )
    return "\n".join(pieces)


def line(text: str) -> str:
    """Return a text as HTML on one line."""
    return html.escape(one_line(cut(text)))


def block(text: str) -> str:
    """Return a text as HTML that keeps its lines."""
    return html.escape(printable(cut(text)).strip("\n"))


def table(
    caption: str, headers: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[int] = ()
) -> str:
    """Return a table; headers and cells are HTML, the columns `numbers` stand at the right."""

    def cell(tag: str, column: int, content: str, scope: str = "") -> str:
        return f"<{tag}{scope}{NUMBER if column in numbers else ''}>{content}</{tag}>"

    head = "".join(cell("th", i, name, ' scope="col"') for i, name in enumerate(headers))
    body = "\n".join(
        "<tr>"
        + cell("th", 0, row[0], ' scope="row"')
        + "".join(cell("td", i, content) for i, content in enumerate(row[1:], start=1))
        + "</tr>"
        for row in rows
    )
    return (
        f'<div class="scroll"><table><caption>{caption}</caption>\n<thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{body}\n</tbody></table></div>"
    )
