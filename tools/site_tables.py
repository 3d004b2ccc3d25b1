"""Pages of the published measurements: each table as it stands in its file, with its sources."""

import csv
import html
import re
import shutil
from pathlib import Path

ARXIV = re.compile(r"arXiv:(\d{4}\.\d{4,5}(?:v\d+)?)")
GITHUB = re.compile(r"\b(github |)([A-Za-z0-9-]+/[A-Za-z0-9_.-]+)@([0-9a-f]{7,40})\b")
INTRO = """# Published measurements

What a laptop can only emulate has been measured by others. The lessons compare with the tables
below; every row names its source. `course_lib.cost.published.rows("{name}")` reads one.

"""


def write_pages(folder: Path, source: Path) -> None:
    """Write a page for each table of a folder, and the page that lists them."""
    pages, files = source / "published", source / "extra" / "files" / "published"
    pages.mkdir()
    files.mkdir(parents=True)
    tables = sorted(folder.glob("*.csv"))
    lines = ["| table | rows | columns | sources |", "|---|---|---|---|"]
    for table in tables:
        shutil.copy(table, files)
        with table.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
        sources = sorted({row["source"] for row in rows})
        (pages / f"{table.stem}.md").write_text(page(table, rows, sources), encoding="utf-8")
        counts = f"{len(rows)} | {len(rows[0])} | {len(sources)}"
        lines.append(f"| [{table.stem}]({table.stem}.md) | {counts} |")
    tree = ["", "```{toctree}", ":hidden:", "", *(table.stem for table in tables), "```", ""]
    text = INTRO.replace("{name}", tables[0].stem) + "\n".join([*lines, *tree])
    (pages / "index.md").write_text(text, encoding="utf-8")


def page(table: Path, rows: list[dict[str, str]], sources: list[str]) -> str:
    """One table as a page: its sources with numbers, then its rows."""
    listed = [
        f'<li id="source-{number}">{linked(source)}</li>'
        for number, source in enumerate(sources, 1)
    ]
    columns = [name for name in rows[0] if name != "source"]
    head = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in [*columns, "source"])
    body = [
        "<tr>"
        + "".join(f"<td>{html.escape(row[name] or '')}</td>" for name in columns)
        + f'<td><a href="#source-{(at := sources.index(row["source"]) + 1)}">[{at}]</a></td></tr>'
        for row in rows
    ]
    return "\n".join(
        [
            f"# {table.stem}",
            "",
            f"{len(rows)} rows, as they were printed; an empty cell was not reported.",
            f'<a href="../files/published/{table.name}" download>Download {table.name}</a>',
            "",
            "## Sources",
            "",
            "```{raw} html",
            f'<ol class="sources">{"".join(listed)}</ol>',
            "```",
            "",
            "## Rows",
            "",
            "```{raw} html",
            '<div class="table-wrapper"><table class="published">',
            f"<thead><tr>{head}</tr></thead>",
            f"<tbody>{''.join(body)}</tbody></table></div>",
            "```",
            "",
        ]
    )


def linked(source: str) -> str:
    """A source with links to the paper or the repository that it names."""
    text = html.escape(source, quote=False)
    text = ARXIV.sub(r'<a href="https://arxiv.org/abs/\1">arXiv:\1</a>', text)
    return GITHUB.sub(r'\1<a href="https://github.com/\2/tree/\3">\2@\3</a>', text)
