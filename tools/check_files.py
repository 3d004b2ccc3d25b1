"""Links inside the course lead somewhere, and no file in it is too big.

Reads what git tracks. A link to another site is not followed, so that the check works offline.
"""

import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

LIMIT_BYTES = 500_000
LINK = re.compile(r"\]\(\s*<?([^)\s>]+)")
DRAWN = {"slides"}  # pictures there are drawn by `make slides`, which checks them


def tracked_files(root: Path) -> list[Path]:
    """List the files that git tracks, and new ones that it does not ignore."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.check_output(command, cwd=root, text=True).split("\0")
    return [root / name for name in names if name and (root / name).is_file()]


def too_big(files: list[Path]) -> list[str]:
    """Files over the limit, with their size."""
    sizes = [(path, path.stat().st_size) for path in files]
    return [f"{path}: {size} bytes, need at most {LIMIT_BYTES}" for path, size in sizes
            if size > LIMIT_BYTES]  # fmt: skip


def broken_links(files: list[Path]) -> list[str]:
    """Links to a file that is not there, in Markdown and in the notebooks' sources."""
    found = []
    for path in files:
        source = path.parent.name == "source" and path.suffix == ".py"
        if path.parent.name in DRAWN or not (source or path.suffix == ".md"):
            continue
        folder = path.parent.parent if source else path.parent  # a notebook lies one higher
        text = path.read_text(encoding="utf-8")
        prose = "\n".join(re.findall(r"^#.*", text, re.MULTILINE)) if source else text
        for link in LINK.findall(prose):
            target = unquote(link.partition("#")[0])
            if target and "://" not in target and not (folder / target).exists():
                found.append(f"{path}: nothing at {link}")
    return found


def main() -> None:
    """Say what is wrong, one line each; exit with 1 if anything is."""
    files = tracked_files(Path(__file__).resolve().parent.parent)
    problems = [*too_big(files), *broken_links(files)]
    sys.exit("\n".join(problems) if problems else 0)


if __name__ == "__main__":
    main()
