"""Where the course lies on GitHub, so that the site can name it and open a lesson elsewhere."""

import html
import os
import re
import subprocess
from pathlib import Path

PLACEHOLDER = "OWNER/distributed-training-course"  # what docs/ says, for whoever reads the files
ON_GITHUB = re.compile(r"github\.com[:/]([\w.-]+/[\w.-]+?)(?:\.git)?/?$")
TOO_LARGE_FOR_BINDER = ("11_mesh",)  # measured in docs/containers.md


def repository(root: Path) -> str | None:
    """`owner/name` of the course on GitHub: GITHUB_REPOSITORY, or this clone's origin, or None."""
    if named := os.environ.get("GITHUB_REPOSITORY"):
        return named
    command = ["git", "-C", str(root), "remote", "get-url", "origin"]
    try:
        origin = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    except OSError:  # no git here: a downloaded zip
        return None
    found = ON_GITHUB.search(origin)
    return found[1] if found else None


def name_repository(text: str, named: str | None) -> str:
    """Put the repository's name in the place of the placeholder, if it is known.

    The folder that a clone makes and an address inside an address (`OWNER%2F...`) change, too.
    """
    if named is None:
        return text
    quoted = PLACEHOLDER.replace("/", "%2F")
    text = text.replace(quoted, named.replace("/", "%2F")).replace(PLACEHOLDER, named)
    folder = PLACEHOLDER.partition("/")[2]
    return text.replace(f"lab%2Ftree%2F{folder}%2F", f"lab%2Ftree%2F{named.partition('/')[2]}%2F")


def run_links(stem: str, named: str | None) -> list[tuple[str, str]]:
    """Links that open a lesson on a machine of somebody else's, if the repository is known."""
    if named is None:
        return []
    file = f"notebooks/{stem}.ipynb"
    links = [
        ("Open in Colab", f"https://colab.research.google.com/github/{named}/blob/main/{file}")
    ]
    if stem not in TOO_LARGE_FOR_BINDER:
        links.append(
            ("Open in Binder", f"https://mybinder.org/v2/gh/{named}/main?urlpath=lab/tree/{file}")
        )
    return links


def share_card(text: str, page: Path, out: Path, named: str | None) -> str:
    """Meta data with which others show a link to a page: its title, and its first picture.

    They want whole addresses; those of GitHub Pages are known if the repository is.
    """
    title = re.search(r"<title>(.*?)</title>", text, re.DOTALL)
    told = {"og:type": "article", "og:title": title[1].strip() if title else ""}
    picture = re.search(r"<img [^>]+>", text.partition("<article")[2])
    if picture and named:
        found = dict(re.findall(r'(src|alt)="([^"]*)"', picture[0]))
        owner, _, name = named.partition("/")
        place = os.path.normpath(page.relative_to(out).parent / html.unescape(found["src"]))
        told["og:image"] = f"https://{owner.lower()}.github.io/{name}/{place}"
        told["og:description"] = told["og:image:alt"] = found.get("alt", "")
        told["twitter:card"] = "summary_large_image"
    return "\n".join(f'<meta property="{key}" content="{value}" />' for key, value in told.items())
